"""The main job for about a minute; a worker is killed in the middle, and the event log tells what happened.

    python examples/demo.py

It needs elaunch and torch, and starts nothing that it does not end.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parent / "train_gpt.py"
START_S = 180.0  # importing torch in all workers on a busy machine
END_S = 15.0
PHASES = (
    ("detect", "the agent sees the death, a new generation reaches the survivors"),
    ("connect", "links that the new list of members needs"),
    ("agree", "they settle whether the step in flight is committed"),
    ("plan", "its micro-batches are shared out anew"),
    ("transfer", "state for those that have none (nobody, here), and a barrier"),
    ("resume", "the step itself, to its commit"),
)
# In a process of its own, because it needs torch: what an undisturbed run uses depends on the seed alone.
DIGESTS = """
import sys
sys.path.insert(0, sys.argv[1])
import train_gpt
from elaunch.workers.data.order import SampleOrder, digest
args = train_gpt.parse([])
order = SampleOrder(len(train_gpt.Sources(args.corpus_bytes, args.context)), args.seed)
for step in range(int(sys.argv[2])):
    print(digest(order.ids(step * args.global_batch_size, args.global_batch_size)))
"""

Event = dict[str, Any]


class Failed(Exception):
    """The job did not do what was waited for."""


@dataclass(frozen=True)
class Kill:
    """A worker that was killed at Unix time `t`, the pids of all workers before, and the step it worked on."""

    worker: str
    t: float
    pids: dict[str, int]
    step: int


class Log:
    """What an event log gained since this object was made."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_bytes = path.stat().st_size if path.exists() else 0
        self.events: list[Event] = []

    def read(self) -> None:
        """Take in whole new lines."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                fresh = file.read()
            whole = fresh[: fresh.rfind(b"\n") + 1]
            self._read_bytes += len(whole)
            self.events += [json.loads(line) for line in whole.splitlines()]

    def of(self, kind: str) -> list[Event]:
        """The events of one kind, in order."""
        return [event for event in self.events if event["kind"] == kind]

    def pids(self) -> dict[str, int]:
        """Worker -> pid of those that run."""
        running = {event["worker"]: event["pid"] for event in self.of("worker_started")}
        for event in self.of("worker_exited"):
            running.pop(event["worker"], None)
        return running

    def steps(self) -> dict[int, Event]:
        """The commits by step."""
        return {event["step"]: event for event in self.of("step")}


@contextlib.contextmanager
def started(command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process in a session of its own; it is ended with the context: SIGINT, and SIGKILL after a while."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            finally:
                process.kill()  # the end of the agent is the end of its workers and its etcd
                process.wait()


def wait_for(job: subprocess.Popen[bytes], log: Log, condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Return as soon as the log shows it.

    Raises:
        Failed: it does not within `limit_s` seconds, or the job ends before.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        ended = job.poll() is not None
        log.read()
        if condition():
            return
        if ended:
            raise Failed(f"the job ended with {job.returncode} before {what}")
        if time.monotonic() > deadline_s:
            raise Failed(f"no {what} within {limit_s:g} s")
        time.sleep(0.01)


def kill_first_member(log: Log) -> Kill:
    """SIGKILL to the first worker of the list, in the middle of a step."""
    last = log.of("step")[-1]
    victim = next(e for e in reversed(log.of("generation")) if e["stage"] == "train")["workers"][0]
    time.sleep(last["seconds"] / 2)
    log.read()
    pids = log.pids()
    os.kill(pids[victim], signal.SIGKILL)
    return Kill(victim, time.time(), pids, max(log.steps()) + 1)


# -- the account --------------------------------------------------------------------------------------------------


def account(log: Log, kill: Kill, workers: int) -> Iterator[str]:
    """What the event log says of the kill, in lines."""
    death = next(event for event in log.of("worker_exited") if event["worker"] == kill.worker)
    steps = log.steps()
    slot = kill.worker.partition("#")[0]
    yield f"{kill.worker} (pid {death['pid']}) died by {signal.Signals(death['signal']).name} at {clock(death['t'])}."
    yield ""

    without = change(log, death["t"], lambda members: kill.worker not in members)
    recovery = transition(log, without)
    redone = first_step(steps, without)
    total_ms = 1e3 * recovery["total_s"]
    peers = len(without["workers"])
    yield f"{total_ms:.0f} ms later its {peers} peer{'s' * (peers > 1)} had committed step {redone['step']}:"
    yield from phases(recovery)
    yield f"    Usual steps: {usual(steps, workers)} with {workers} members, {usual(steps, workers - 1)} with one less."
    yield ""

    replaced = change(log, death["t"], lambda members: any(peer.startswith(f"{slot}#") for peer in members))
    joined = first_step(steps, replaced) if replaced else {}
    if joined:
        new = next(peer for peer in replaced["workers"] if peer.startswith(f"{slot}#"))
        begun = next(event for event in log.of("worker_started") if event["worker"] == new)
        move = transition(log, replaced)
        late_ms = 1e3 * joined["seconds"] - milliseconds(steps, workers)
        yield (
            f"Its replacement {new} (pid {begun['pid']}) was started {1e3 * (begun['t'] - death['t']):.0f} ms after "
            f"the death and became a member {replaced['t'] - death['t']:.1f} s after it, at step {joined['step']}."
        )
        yield (
            f"It received {move['bytes_moved'] / 1e6:.1f} MB of state from its peers' memory in "
            f"{1e3 * move['phases']['transfer_s']:.0f} ms. "
            + (f"Step {joined['step']} took {late_ms:.0f} ms longer" if late_ms > 0 else "No step took longer")
            + " than usual."
        )
    else:
        yield f"Its replacement had not joined when the job ended after step {max(steps)}."
    yield ""
    yield "The survivors:"
    for worker, pid in kill.pids.items():
        if worker != kill.worker:
            end = next(event for event in log.of("worker_exited") if event["worker"] == worker)
            how = "done, exit code 0" if end.get("exitcode") == 0 else f"ended: {end}"
            yield f"    {worker}  pid {pid} before, {end['pid']} at the end  {how}"
    yield ""
    yield from around(steps, redone["step"], joined.get("step"))


def change(log: Log, since_t: float, holds: Callable[[list[str]], bool]) -> Event:
    """The first training generation after a moment whose members satisfy a condition; empty if there is none."""
    found = (e for e in log.of("generation") if e["t"] >= since_t and e["stage"] == "train" and holds(e["workers"]))
    return next(found, {})


def transition(log: Log, generation: Event) -> Event:
    """How the workers came to a generation, or to a newer one that followed at once."""
    return next(event for event in log.of("transition") if event["generation"] >= generation["generation"])


def first_step(steps: dict[int, Event], generation: Event) -> Event:
    """The first step that committed in a generation or a newer one; empty if none did."""
    return next((steps[step] for step in sorted(steps) if steps[step]["generation"] >= generation["generation"]), {})


def phases(event: Event) -> Iterator[str]:
    """A line for each phase of a transition."""
    for name, meaning in PHASES:
        yield f"    {name:9}{1e3 * event['phases'][name + '_s']:7.1f} ms  {meaning}"


def milliseconds(steps: dict[int, Event], members: int) -> float:
    """Median duration of a step with so many members, without those that followed a change."""
    kept = [
        e["seconds"]
        for n, e in steps.items()
        if e["members"] == members and n and e["generation"] == generation(steps, n - 1)
    ]
    return 1e3 * statistics.median(kept) if kept else float("nan")


def generation(steps: dict[int, Event], step: int) -> int:
    """The generation in which a step committed; 0 if the log lacks it."""
    return int(steps[step]["generation"]) if step in steps else 0


def usual(steps: dict[int, Event], members: int) -> str:
    """The median step in words."""
    found = milliseconds(steps, members)
    return f"{found:.0f} ms" if found == found else "none"


def around(steps: dict[int, Event], redone: int, joined: int | None) -> Iterator[str]:
    """The steps about the death and about the join."""
    shown = {step for step in range(redone - 3, redone + 3) if step in steps}
    notes = {redone: "the first without the dead worker"}
    if joined is not None:
        shown |= {step for step in range(joined - 2, joined + 3) if step in steps}
        notes[joined] = "with the replacement"
    yield "    step    loss  members  samples  digest of their ids       ms"
    last = None
    for step in sorted(shown):
        if last is not None and step > last + 1:
            yield "     ..."
        last, event = step, steps[step]
        line = f"{step:8}{event['loss']:8.4f}{event['members']:9}{event['samples']:9}  {event['digest'][:16]}"
        yield f"{line}{1e3 * event['seconds']:12.0f}  {notes.get(step, '')}".rstrip()


def samples(log: Log, count: int) -> tuple[bool, str]:
    """Whether each step followed the one before and used the samples of an undisturbed run; and that in words."""
    command = [sys.executable, "-c", DIGESTS, str(SCRIPT.parent), str(count)]
    expected = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.split()
    commits = log.of("step")
    order = [-1, *(event["step"] for event in commits), count - 1]
    # The step before a death is reported again where the one who reported it may have died too early.
    jumps = [(before, after) for before, after in itertools.pairwise(order) if after - before not in (0, 1)]
    other = [event["step"] for event in commits if event["digest"] != expected[event["step"]]]
    if jumps or other:
        return False, f"steps that do not follow each other: {jumps}; with other samples: {other}"
    total = sum(event["samples"] for event in log.steps().values())
    return True, (
        f"Each of the {count} steps committed once, {total} samples in all. The samples of every step are those\n"
        "of an undisturbed run: the digests are the ones that the seed alone gives."
    )


def clock(t: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(t)) + f".{int(t % 1 * 1e3):03}"


# -- the run ------------------------------------------------------------------------------------------------------


def say(text: str = "") -> None:
    print(text, flush=True)


def run(steps: int, workers: int, path: Path) -> int:
    """Run the job, hurt it, tell what happened; returns the exit code."""
    command = [sys.executable, "-m", "elaunch", "--standalone", f"--nproc-per-node={workers}", f"--events={path}"]
    command += [os.path.relpath(SCRIPT), f"--steps={steps}"]
    say(f"$ elaunch {' '.join(command[3:])}")
    log = Log(path)
    with started(command) as job:
        at = max(2, int(0.4 * steps))
        wait_for(job, log, lambda: bool(log.steps()), START_S, "the first step")
        wait_for(job, log, lambda: max(log.steps()) >= at - 1, 3600, f"step {at - 1}")
        kill = kill_first_member(log)
        pid = kill.pids[kill.worker]
        say(f"[demo] {clock(kill.t)}  kill -9 {pid}: {kill.worker}, in the middle of step {kill.step}")
        code = job.wait()
    log.read()
    if code:
        raise Failed(f"the job ended with {code}")
    say()
    say("What happened, from the event log")
    say("---------------------------------")
    for line in account(log, kill, workers):
        say(line)
    say()
    right, text = samples(log, steps)
    say(text)
    return 0 if right else 1


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description="Train, kill a worker in the middle, and show what happened.")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--events", type=Path, help="keep the event log here; default: it is deleted")
    args = parser.parse_args()
    if args.steps < 10 or args.workers < 2:
        parser.error("at least 10 steps and 2 workers are needed")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="elaunch-demo-") as folder:
        try:
            return run(args.steps, args.workers, args.events or Path(folder) / "events.jsonl")
        except Failed as error:
            print(f"[demo] {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("[demo] interrupted; the job was ended", file=sys.stderr)
            return 130


if __name__ == "__main__":
    sys.exit(main())
