"""A script of one's own that survives: elaunch's re-entry beside torchft, NVRx's in-process restart, and torchrun.

    python benchmarks/frameworks.py --quick
    python benchmarks/frameworks.py --torchft-python VENV/bin/python --nvrx-python VENV/bin/python --json figures.json
    python benchmarks/frameworks.py --device gpu --kind fsdp --only kills --kills 5 --limit-s 150

The script is a GPT, with DistributedDataParallel or with FSDP2, on 4 workers (`peers/gpt_*.py`); on a GPU they share
one device, over NCCL. Each kill is a SIGKILL of a random worker at a random moment of a step. A peer is skipped where
its interpreter cannot import it.
"""

from __future__ import annotations

import argparse
import bisect
import contextlib
import difflib
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import itertools

from benchmarks.jobs import ELAUNCH, HERE, TORCHRUN, JobFailed, Processes, TimeLimit, add_device, limit_time, on_gpu
from benchmarks.report import Report, add_arguments, median_interval, spread

WORKERS = 4
PEERS = HERE / "peers"
NAMES = {"elaunch": "gpt_elastic.py", "torchrun": "gpt_torchrun.py", "torchft": "gpt_torchft.py", "nvrx": "gpt_nvrx.py"}
FOREVER = 10**9
SETTLED_STEPS = 5
STACKS_S = 1.0  # for workers to write where their threads are, which takes so many lines
STACK_LINES = 400
Line = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where the workers compute, and what.

    Attributes:
        name: of the device.
        text: for the title.
        flags: of the scripts.
        environment: of all processes.
        settle_s: from the first step on, before steps without faults count: until then elaunch imports torch for
            replacements, on cores that workers use where there are few.
        window: steps without faults that are timed together; a device is waited for at their end only.
        first_step_ms: less than this is asked from a kill to the first step, without the script's own set-up.
        bounds_cpu: whether the processor time of a step has a bound: on a device, who waits uses some.
    """

    name: str
    text: str
    flags: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    settle_s: float
    window: int
    first_step_ms: float
    bounds_cpu: bool


ON_CPU = Place(
    "cpu",
    f"a GPT of 0.8 M parameters, {WORKERS} workers on Gloo",
    (),
    (("CUDA_VISIBLE_DEVICES", ""),),
    settle_s=20.0,
    window=1,
    first_step_ms=1000.0,
    bounds_cpu=True,
)
ON_GPU = Place(
    "gpu",
    f"a GPT of 85.6 M parameters in bfloat16, {WORKERS} workers on NCCL that share one GPU",
    (
        *("--layers=12", "--width=768", "--heads=12", "--context=512", "--dtype=bfloat16", "--batch-size=8"),
        "--checkpoint-every=5",
    ),
    (),
    settle_s=8.0,
    window=10,
    first_step_ms=3000.0,
    bounds_cpu=False,
)


@dataclass(frozen=True)
class Way:
    """A launcher, or a peer, and the settings it runs with.

    Attributes:
        name: for the table.
        kind: key of NAMES.
        python: that starts its workers.
        keeps_size: whether whoever died is replaced.
        first_victim: the lowest rank that may be killed.
        environment: of its processes.
    """

    name: str
    kind: str
    python: Path
    keeps_size: bool = True
    first_victim: int = 0
    environment: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Kill:
    """What one kill cost, in seconds, each for the slowest of those that went on; NaN: the way has no such phase.

    `cpu_s` is processor time, from the last line of a process before the kill, or its start, to the first step.
    """

    left_s: float
    set_up_s: float
    restored_s: float
    step_s: float
    total_s: float
    cpu_s: float


def kill_of(lines: Sequence[Line], killed_t: float, dead: int, committed: Sequence[float] | None = None) -> Kill | None:
    """Returns what the kill of process `dead` cost; None while nobody has done another step.

    `committed` are the times of steps in elaunch's event log: where others join right after a step, its commit does not
    return to the function, which writes no line then. Those that go on are the survivors, where they have entered the
    function again or done a step with other members, else the processes that were started afterwards.
    """
    survivors = {line["pid"] for line in lines if line["t"] <= killed_t} - {dead}
    later = [line for line in lines if line["t"] > killed_t]
    again = {line["pid"] for line in later if line["kind"] == "entered"}
    crew = survivors & again or again
    moved = [line for line in later if line["kind"] == "step" and "quorum" in line]
    if moved:  # torchft does not leave its loop; the number of the quorum tells a step that was through already
        before = max(line["quorum"] for line in lines if line["t"] <= killed_t and "quorum" in line)
        first = next((line for line in moved if line["quorum"] > before and line["pid"] in survivors), None)
        nan = float("nan")
        return Kill(nan, nan, nan, nan, first["t"] - killed_t, _cpu_since(lines, killed_t, first)) if first else None
    ends = [killed_t]
    for kind in ("entered", "built", "restored", "step" if committed is None else "updated"):
        reached: list[Line] = []
        for pid in crew:
            entered = [line["t"] for line in later if line["pid"] == pid and line["kind"] == "entered"]
            own = [line for line in later if line["pid"] == pid and line["kind"] == kind]
            reached += [line for line in own if line["t"] >= min(entered)][:1]
        if not crew or len(reached) < len(crew):
            return None
        ends.append(max(line["t"] for line in reached))
    if committed is not None:
        done = [t for t in committed if t > ends[-1]]
        if not done:
            return None
        ends[-1] = done[0]
    parts = [after - before for before, after in itertools.pairwise(ends)]
    cpu_s = max(_cpu_since(lines, killed_t, line) for line in reached)
    return Kill(parts[0], parts[1], parts[2], parts[3], ends[-1] - killed_t, cpu_s)


def _cpu_since(lines: Sequence[Line], killed_t: float, last: Line) -> float:
    """Returns the processor seconds of a process between its last line before the kill, or its start, and a line."""
    before = [line["cpu_s"] for line in lines if line["pid"] == last["pid"] and line["t"] <= killed_t]
    return float(last["cpu_s"] - (before[-1] if before else 0.0))


def changed_lines(plain: str, other: str) -> tuple[int, int]:
    """Returns the lines of code that were added and taken away, without those of the trace, comments and blanks."""
    code = [
        [
            line
            for line in text.partition('"""\n\n')[2].splitlines()
            if line.strip() and "trace." not in line and not line.strip().startswith("#")
        ]
        for text in (plain, other)
    ]
    marks = [
        line[0] for line in difflib.unified_diff(code[0], code[1], lineterm="", n=0) if line[:3] not in ("---", "+++")
    ]
    return marks.count("+"), marks.count("-")


@dataclass(frozen=True)
class QuietRun:
    """Steps without faults.

    Attributes:
        steps_s: seconds of a step, in each window.
        cpu_s: processor seconds of a worker in a step.
        in_commit_s: seconds of the first worker in each commit; empty where there are none.
    """

    steps_s: list[float]
    cpu_s: float
    in_commit_s: list[float]

    @property
    def step_s(self) -> float:
        """Returns the median step."""
        return statistics.median(self.steps_s)


class Run:
    """A job of the GPT under one way."""

    def __init__(self, way: Way, kind: str, folder: Path, place: Place, plain: bool = False, window: int = 1) -> None:
        self.way, self.name = way, f"{way.name}, {kind}"
        self.trace = folder / f"trace-{random.getrandbits(40):x}.jsonl"
        self.events = folder / f"events-{random.getrandbits(40):x}.jsonl" if way.kind == "elaunch" else None
        checkpoint = folder / f"checkpoint-{random.getrandbits(40):x}"
        checkpoint.mkdir()
        self.processes = Processes(folder)
        self.script = PEERS / ("gpt_plain.py" if plain else NAMES[way.kind])
        self.flags = [f"--trace={self.trace}", f"--kind={kind}", f"--steps={FOREVER}", f"--checkpoint={checkpoint}"]
        self.flags += [*place.flags, f"--window={window}"]
        self.launcher: subprocess.Popen[bytes] | None = None
        self.replicas: list[subprocess.Popen[bytes]] = []
        self.more: dict[str, str] = dict(place.environment + way.environment)

    def __enter__(self) -> Run:
        self.processes.__enter__()
        launcher = {"elaunch": ELAUNCH, "torchrun": TORCHRUN}.get(self.way.kind)
        if launcher is not None:
            flags = ["--standalone", f"--nproc-per-node={WORKERS}", "--max-restarts=1000000"]
            if self.events is not None:
                flags.append(f"--events={self.events}")
            self.launcher = self.processes.start([*launcher, *flags, self.script, *self.flags], **self.more)
            return self
        if self.way.kind == "torchft":
            port = _free_ports(1)[0]
            flags = ["--min_replicas", "1", "--quorum_tick_ms", "10", "--join_timeout_ms", "500"]
            lighthouse = self.way.python.parent / "torchft_lighthouse"
            self.processes.start([lighthouse, "--bind", f"[::]:{port}", *flags, "--heartbeat_timeout_ms", "300"])
            self.more["TORCHFT_LIGHTHOUSE"] = f"http://127.0.0.1:{port}"
        self.more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_ports(2)[0])}
        self.replicas = [self._start(rank) for rank in range(WORKERS)]
        return self

    def __exit__(self, *error: Any) -> None:
        self.processes.__exit__(*error)

    def _start(self, rank: int) -> subprocess.Popen[bytes]:
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORKERS)}
        return self.processes.start([self.way.python, self.script, *self.flags], **ranks, **self.more)

    def lines(self) -> list[Line]:
        return _lines_of(self.trace)

    def committed(self) -> list[float] | None:
        """Returns when steps were committed, as elaunch's event log has it; None under another launcher."""
        if self.events is None:
            return None
        return [event["t"] for event in _lines_of(self.events) if event["kind"] == "step"]

    def wait(self, done: Callable[[list[Line]], bool], what: str, limit_s: float = 90.0) -> list[Line]:
        deadline = time.monotonic() + limit_s
        while not done(lines := self.lines()):
            if time.monotonic() > deadline:
                failed = JobFailed(f"{self.name}: no {what} within {limit_s:g} s:\n{self.processes.tail()}")
                self._tell_stacks(lines)
                raise failed
            if self.launcher is not None and self.launcher.poll() is not None:
                raise JobFailed(f"{self.name} ended while waiting for {what}:\n{self.processes.tail()}")
            if self.way.kind == "torchft":
                for rank, replica in enumerate(self.replicas):
                    if replica.poll() not in (None, 0):
                        self.replicas[rank] = self._start(rank)
            time.sleep(0.1)
        return lines

    def _tell_stacks(self, lines: Sequence[Line]) -> None:
        """Shows what all processes wrote last, and where the threads of the workers are."""
        for pid in {line["pid"] for line in lines}:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR2)
        time.sleep(STACKS_S)
        say(self.processes.tail(STACK_LINES))

    def settled(self, since_t: float, members: int) -> list[Line]:
        """Waits until as many members have done some steps together."""

        def done(lines: list[Line]) -> bool:
            steps = [line for line in lines if line["kind"] == "step" and line["t"] > since_t]
            last = steps[-members * SETTLED_STEPS :]
            pids = {line["pid"] for line in last}
            return len(last) == members * SETTLED_STEPS and len(pids) == members and last[0]["members"] == members

        return self.wait(done, f"{SETTLED_STEPS} steps of {members} members")


class Bench:
    """One run of this program."""

    def __init__(
        self, args: argparse.Namespace, folder: Path, report: Report, ways: Sequence[Way], place: Place
    ) -> None:
        self.args, self.folder, self.report, self.ways, self.place = args, folder, report, ways, place
        self.random = random.Random(args.seed)
        self.failed = False

    def lines_changed(self) -> None:
        plain = (PEERS / "gpt_plain.py").read_text()
        for way in {way.kind: way for way in self.ways}.values():
            added, taken = changed_lines(plain, (PEERS / NAMES[way.kind]).read_text())
            name = NAMES[way.kind].removeprefix("gpt_").removesuffix(".py")
            self.report.row({"lines changed": way.kind, "script": name, "added": added, "taken_away": taken})

    def kills(self, kind: str) -> None:
        for way in self.ways:
            if kind == "fsdp" and way.kind == "torchft":
                continue  # its unit of failure is a replica of the whole model
            found: list[Kill] = []
            try:
                self._kill(way, kind, found)
            except JobFailed as error:
                self.failed = True
                self.report.notes.append(f"{way.name}, {kind}: FAILED after {len(found)} kills: {error}")
            finally:  # also where the time is up
                self._report_kills(way, kind, found)

    def _report_kills(self, way: Way, kind: str, found: Sequence[Kill]) -> None:
        total = spread(1e3 * kill.total_s for kill in found)
        without = spread(1e3 * (kill.total_s - _number(kill.set_up_s)) for kill in found)
        self.report.row(
            {
                f"SIGKILL -> first step, {kind}": way.name,
                "device": self.place.name,
                "kills": total.count,
                "left_and_entered_ms": _median(kill.left_s for kill in found),
                "own_set_up_ms": _median(kill.set_up_s for kill in found),
                "state_ms": _median(kill.restored_s for kill in found),
                "first_step_ms": _median(kill.step_s for kill in found),
                "total_least_ms": total.least,
                "total_median_ms": total.median,
                "total_worst_ms": total.worst,
                "less_set_up_median_ms": without.median,
                "cpu_median_ms": _median(kill.cpu_s for kill in found),
            }
        )
        if way.kind == "elaunch":
            asked_ms, name = self.place.first_step_ms, f"{self.place.name}, {kind}"
            self.report.target(f"{name}: first step, less the set-up, median", without.median, "ms", below=asked_ms)
            self.report.target(f"{name}: the same, worst of {without.count}", without.worst, "ms", below=asked_ms)

    def _kill(self, way: Way, kind: str, found: list[Kill]) -> None:
        count = self.args.kills if way.kind == "elaunch" else max(1, self.args.kills // 2)
        while len(found) < count:
            with Run(way, kind, self.folder, self.place) as run:
                lines = run.settled(0.0, WORKERS)
                while len(found) < count:
                    pids = {line["slot"]: line["pid"] for line in lines if line["kind"] == "entered"}
                    steps = [line["t"] for line in lines if line["kind"] == "step" and line["slot"] == 0]
                    time.sleep(self.random.uniform(0.0, statistics.median(_gaps(steps[-SETTLED_STEPS:]))))
                    victim = self.random.choice([slot for slot in pids if slot >= way.first_victim])
                    killed_t = time.time()
                    os.kill(pids[victim], signal.SIGKILL)

                    def over(lines: list[Line], killed_t: float = killed_t, dead: int = pids[victim]) -> bool:
                        return kill_of(lines, killed_t, dead, run.committed()) is not None

                    lines = run.wait(over, "step after a kill", 120.0)
                    kill = kill_of(lines, killed_t, pids[victim], run.committed())
                    assert kill is not None
                    found.append(kill)
                    say(f"  {way.name}, {kind}: {len(found)}/{count}: slot {victim}, {1e3 * kill.total_s:.0f} ms")
                    if not way.keeps_size:
                        break
                    lines = run.settled(time.time(), WORKERS)

    def overhead(self, kind: str) -> None:
        """Runs in turn: the plain script under torchrun, and the elastic one under elaunch, on the same cores."""
        elaunch, torchrun = (next((w for w in self.ways if w.kind == one), None) for one in ("elaunch", "torchrun"))
        if elaunch is None or torchrun is None:
            return
        found: dict[str, list[QuietRun]] = {"elaunch": [], "torchrun": []}
        try:
            for pair in range(self.args.pairs):
                for way in (elaunch, torchrun)[:: -1 if pair % 2 else 1]:
                    say(f"  steps, {kind}: {way.name}, {pair + 1}/{self.args.pairs}")
                    found[way.kind].append(self._quiet(way, kind))
        finally:  # also where the time is up
            self._report_overhead(kind, list(zip(found["elaunch"], found["torchrun"])))

    def _quiet(self, way: Way, kind: str) -> QuietRun:
        """Runs a job without faults: the elastic script under elaunch, the plain one under torchrun."""
        steps: int = self.args.steps
        window = self.place.window
        limit_s = self.place.settle_s + 90 + steps
        with Run(way, kind, self.folder, self.place, plain=way.kind == "torchrun", window=window) as run:

            def is_over(lines: list[Line]) -> bool:
                return _count_steps(self._settled(lines)) >= WORKERS * (steps + window)

            lines = self._settled(run.wait(is_over, "end", limit_s))
        own = [line for line in lines if line["slot"] == 0]
        times = [line["t"] for line in own if line["kind"] == "step"]
        ends = [line["t"] for line in own if line["kind"] == "step" and line["step"] % window == 0]
        updated = [line["t"] for line in own if line["kind"] == "updated" and line["t"] < times[-1]]
        return QuietRun(
            [gap / window for gap in _gaps(ends)],
            _cpu_of_a_step(lines),
            [times[bisect.bisect(times, t)] - t for t in updated],
        )

    def _settled(self, lines: Sequence[Line]) -> list[Line]:
        """Returns the lines of steps that count."""
        steps = [line for line in lines if line["kind"] in ("updated", "step")]
        return [line for line in steps if line["t"] >= steps[0]["t"] + self.place.settle_s]

    def _report_overhead(self, kind: str, pairs: Sequence[tuple[QuietRun, QuietRun]]) -> None:
        if not pairs:
            return
        ratios = sorted(elaunch.step_s / torchrun.step_s for elaunch, torchrun in pairs)
        of_cpu = sorted(elaunch.cpu_s / torchrun.cpu_s for elaunch, torchrun in pairs)
        low, high = median_interval(ratios)
        self.report.row(
            {
                "step": kind,
                "device": self.place.name,
                "pairs": len(ratios),
                "plain_torchrun_ms": _median(torchrun.step_s for _, torchrun in pairs),
                "elaunch_ms": _median(elaunch.step_s for elaunch, _ in pairs),
                "ratio_median": statistics.median(ratios),
                "ratio_95_low": low,
                "ratio_95_high": high,
                "in_commit_ms": _median(itertools.chain.from_iterable(elaunch.in_commit_s for elaunch, _ in pairs)),
                "plain_cpu_ms": _median(torchrun.cpu_s for _, torchrun in pairs),
                "elaunch_cpu_ms": _median(elaunch.cpu_s for elaunch, _ in pairs),
                "cpu_ratio_median": statistics.median(of_cpu),
                "cpu_ratio_least": of_cpu[0],
                "cpu_ratio_most": of_cpu[-1],
            }
        )
        name, unit = f"{self.place.name}, {kind}", "x plain, torchrun"
        if self.place.bounds_cpu:
            self.report.target(f"{name}: processor time", statistics.median(of_cpu), unit, at_most=1.01)
        self.report.target(f"{name}: step time", statistics.median(ratios), unit, at_most=1.01)


def _lines_of(path: Path) -> list[Line]:
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _gaps(times: Sequence[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def _count_steps(lines: Sequence[Line]) -> int:
    return sum(line["kind"] == "step" for line in lines)


def _cpu_of_a_step(lines: Sequence[Line]) -> float:
    """Returns the processor seconds that a worker takes for a step; the mean over the workers."""
    found: list[float] = []
    for slot in range(WORKERS):
        steps = [line for line in lines if line["kind"] == "step" and line["slot"] == slot]
        found.append((steps[-1]["cpu_s"] - steps[0]["cpu_s"]) / (len(steps) - 1))
    return statistics.mean(found)


def _number(value: float) -> float:
    return value if value == value else 0.0


def _median(values: Any) -> float:
    return 1e3 * spread(values).median


def _free_ports(count: int) -> list[int]:
    """Returns so many ports in a row."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first = int(probe.getsockname()[1])
            try:
                for port in range(first + 1, first + count):
                    with socket.socket() as other:
                        other.bind(("127.0.0.1", port))
            except OSError:
                continue
        return list(range(first, first + count))


def _can_import(python: Path | None, module: str) -> bool:
    try:
        return (
            python is not None
            and not subprocess.run([python, "-c", f"import {module}"], capture_output=True).returncode
        )
    except OSError:
        return False


def _of_nccl() -> tuple[tuple[str, str], ...]:
    """Returns what elaunch sets for NCCL's groups, without which torch holds up, or ends, who survives."""
    from elaunch.workers.comm.native.nccl import SETTINGS

    return tuple(SETTINGS.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_device(parser)
    parser.add_argument("--only", choices=("kills", "overhead"))
    parser.add_argument("--kind", choices=("ddp", "fsdp"), help="instead of both")
    parser.add_argument("--ways", default="elaunch,torchft,nvrx,torchrun", help="with commas")
    parser.add_argument("--kills", type=int, help="under elaunch (default 20, quick 2); half as many under each peer")
    parser.add_argument("--pairs", type=int, help="of runs without faults (default 8, quick 1)")
    parser.add_argument("--steps", type=int, default=60, help="of each such run that count")
    parser.add_argument("--torchft-python", type=Path, help="an interpreter that can import torchft")
    parser.add_argument("--nvrx-python", type=Path, help="one that can import nvidia_resiliency_ext")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit-s", type=int, default=3600, help="what is measured until then is reported")
    parser.add_argument("--folder", type=Path, help="keep the traces, the logs and what all processes wrote there")
    args = parser.parse_args()
    args.kills = args.kills or (2 if args.quick else 20)
    args.pairs = args.pairs or (1 if args.quick else 8)
    args.device = "gpu" if on_gpu(args) else "cpu"
    place = ON_GPU if args.device == "gpu" else ON_CPU
    report = Report(
        f"a script of one's own that survives: {place.text}",
        notes=[
            "left_and_entered: from the kill until the last survivor is in the function again (torchrun: until the "
            "last new process has done its imports); own_set_up: groups and model; state: brought back; all by the "
            "slowest",
            "lines: of code, beside the plain script, which survives nothing",
            "cpu: processor time of a worker in a step, all its threads; without launchers and etcd",
            f"steps of runs without faults count from {place.settle_s:g} s after the first one",
            "torchrun and NVRx restore a DCP checkpoint, of each step on the CPU and of each 5th on a GPU; elaunch and "
            "torchft from memory",
            "torchft: replicas of one worker, time-outs of 0.3 s, so DDP only, and on the CPU only; the benchmark "
            "starts who died again",
            "NVRx: started without an agent, as torchrun ends all workers when one dies; rank 0, which has its store, "
            "is not killed; whoever dies is not replaced, so each kill has a job of its own. tuned: intervals of 20 ms",
        ],
    )
    if place is ON_GPU:
        report.notes += [
            "the workers of one GPU say that they are machines of their own (NCCL_HOSTID) and talk over loopback "
            "sockets (NCCL_SOCKET_IFNAME=lo), under all launchers alike",
            "the line of a step comes when the device has done it; steps without faults are timed in windows of "
            f"{place.window}, at whose ends alone the device is waited for",
            "NVRx has the settings of NCCL's groups that elaunch sets by itself; torchrun has torch's own",
            "in_commit: of the host, which is ahead of the device, and waits there for its step before",
        ]
    own = Path(sys.executable)
    ways = [Way("elaunch", "elaunch", own)]
    if place is ON_CPU and _can_import(args.torchft_python, "torchft"):
        ways.append(Way("torchft 0.2.0, tuned", "torchft", args.torchft_python))
    if _can_import(args.nvrx_python, "nvidia_resiliency_ext.inprocess"):
        rest: dict[str, Any] = {"keeps_size": False, "first_victim": 1}
        of_nccl = _of_nccl() if place is ON_GPU else ()
        tuned = (("NVRX_TUNED", "1"), *of_nccl)
        ways.append(Way("NVRx 0.4.1, tuned", "nvrx", args.nvrx_python, environment=tuned, **rest))
        if not args.quick:
            ways.append(Way("NVRx 0.4.1", "nvrx", args.nvrx_python, environment=of_nccl, **rest))
    ways.append(Way("torchrun, checkpoint", "torchrun", own))
    ways = [way for way in ways if way.kind in args.ways.split(",")]
    missing = set(args.ways.split(",")) - {way.kind for way in ways}
    if missing:
        report.notes.append(f"skipped, as no interpreter was given that can import it: {', '.join(sorted(missing))}")
    limit_time(args.limit_s)
    with tempfile.TemporaryDirectory(prefix="frameworks-") as temporary:
        folder = args.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        bench = Bench(args, folder, report, ways, place)
        try:
            bench.lines_changed()
            for kind in ("ddp", "fsdp") if args.kind is None else (args.kind,):
                if args.only != "overhead":
                    bench.kills(kind)
                if args.only != "kills":
                    bench.overhead(kind)
        except (JobFailed, TimeLimit) as error:
            bench.failed = True
            report.notes.append(f"FAILED: {error}")
        signal.alarm(0)
    report.print()
    report.write(args.json)
    return 1 if bench.failed else 0


if __name__ == "__main__":
    sys.exit(main())
