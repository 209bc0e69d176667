"""Faults of every kind: are they detected, how soon, and who is blamed.

    python benchmarks/detection.py
    python benchmarks/detection.py --only exit slow --repeat 5
    python benchmarks/detection.py --quick --json detection.json

Real jobs of `detection_job.py`: real processes, kills, sockets and network namespaces (which only root can make);
layers sleep, so that the cores are free. Each fault is made again and again in a job that goes on:

- *exit*: a worker ends with exit code 3; *SIGKILL*. Until the agent has logged it. *Bare*: what the kernel takes to end
  a process that has imported torch and nothing else, for whoever waits for it.
- *SIGSTOP*; *loop*: Python that calls nothing and holds the interpreter's lock; *deadlock*: each worker waits in a
  collective for a message that its neighbour does not send. Until the event `hang`.
- *agent*: a node's agent is killed; *cable*: a host loses all its network; *cut*: two of three hosts lose each other,
  while both reach the store. Until another node has heard of the generation without it. *Deadlock over three hosts*: as
  above, until the event `hang` of one of them.
- *slow*: a worker takes longer for its work, in a job that only reports it; *link*: what it sends is throttled. Until
  the event `slow`; steps from the first slow one to the one that tells.
- *XID*, *ECC*: of a stand-in for NVIDIA's library (`tests/nvml_stub.c`). Until the event `health`.
- *memory*: a worker grows until the kernel kills it. Seconds from the event `health` to its death.
- *simulated*: the detector of slow workers on recorded steps, 24 workers: hours in which nobody is slow, and jobs in
  which one becomes slow. `tests/data/step_times.jsonl` is of a machine with a core for each worker,
  `step_times_busy.jsonl` of one with many more workers than cores.

Time is that of the machine's clock, from the moment in which the fault begins (a worker that does it to itself writes
it down first). *Blamed right*: the event names the worker, node or link to which it was done, and no other was
accused.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, percentile, spread
from elaunch.policy.stragglers.track import Change
from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults.test_health import memory_group
from tests.netns import Network, network
from tests.nvml_stub import StubNvml
from tests.unit.slow_series import Job as Series
from tests.unit.slow_series import recorded

LIMIT_S = 120.0
WORKERS = 4
LEASE_S = 5.0
LEVELS = (1.2, 1.5, 2.0)
THROTTLE_BYTES_PER_S = 4_000_000

Line = dict[str, Any]


@dataclass
class Found:
    """What became of the faults of one kind: seconds and, where they count, steps; None: not detected.

    `late`: how many took longer than they were allowed, where each has a limit of its own.
    """

    name: str
    asked: str = ""
    seconds: list[float | None] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    right: int = 0
    late: int = 0

    def add(self, seconds: float | None, right: bool, steps: int | None = None) -> None:
        self.seconds.append(seconds)
        self.right += right
        if steps is not None:
            self.steps.append(steps)

    @property
    def times(self) -> list[float]:
        return [one for one in self.seconds if one is not None]

    def cells(self) -> dict[str, str | int | float | None]:
        times, n = self.times, len(self.seconds)
        return {
            "fault": self.name,
            "times": n,
            "detected": len(times),
            "blamed_right": self.right,
            "p50_s": spread(times).median,
            "p99_s": percentile(times, 0.99),
            "steps_p50": spread(self.steps).median,
            "steps_p99": percentile(self.steps, 0.99),
            "asked": self.asked,
        }


class Node(Job):
    """One agent of a job of `detection_job.py`."""

    def __init__(
        self,
        folder: Path,
        *flags: str,
        name: str = "n0",
        within: tuple[str, ...] = (),
        script: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(name, Training(WORKERS, 0.0), folder)
        self.orders = folder / f"orders-{name}-{time.monotonic_ns()}"
        self.orders.mkdir()
        job = [HERE / "detection_job.py", "--orders", self.orders]
        self._command = [
            *within, *ELAUNCH, "--events", self.log, f"--node-name={name}", *flags, *(script or job)
        ]  # fmt: skip
        self._env = env or {}

    def begin(self) -> None:
        # Workers that start share one import of torch.
        env = {"ELAUNCH_WARM_START": "1", "ELAUNCH_PRELOAD": "torch,elaunch.workers.data_parallel.job", **self._env}
        self.agent = self.processes.start(self._command, **env)

    def launcher(self) -> subprocess.Popen[bytes]:
        return self.agent

    def of(self, kind: str) -> list[Line]:
        self.read()
        return [line for line in self.lines if line["kind"] == kind]

    def step(self) -> int:
        return max((line["step"] for line in self.of("step")), default=-1)

    def typical_s(self) -> float:
        """Seconds of a step, of the last ones."""
        last = [line["t"] for line in self.of("step")[-11:]]
        return spread(b - a for a, b in pairwise(last)).median

    def first(self, kind: str, after: int, where: Callable[[Line], bool] = lambda line: True) -> Line | None:
        """The first event of a kind behind the first `after` lines."""
        self.read()
        return next((line for line in self.lines[after:] if line["kind"] == kind and where(line)), None)

    def await_first(self, kind: str, after: int, where: Callable[[Line], bool] = lambda line: True) -> Line | None:
        """The same, with patience; None: it did not come."""
        try:
            self.wait(lambda: self.first(kind, after, where) is not None, f"an event {kind}", LIMIT_S)
        except JobFailed as error:
            print(error, file=sys.stderr)
            return None
        return self.first(kind, after, where)

    def members(self) -> list[str]:
        known = [line["workers"] for line in self.of("generation") if line["stage"] == "train"]
        return known[-1] if known else []

    def await_members(self, n_members: int, steps: int, without: str = "") -> None:
        """Until so many steps in a row were done by so many members, one of old not among them."""

        def there() -> bool:
            generations = [line["generation"] for line in self.of("step")[-steps:]]
            newest = self.of("generation")[-1:]
            return len(self.members()) == n_members and generations == [line["generation"] for line in newest] * steps

        self.wait(lambda: without not in self.members() and there(), f"{steps} steps of {n_members} workers", LIMIT_S)

    def await_steps(self, n_steps: int) -> None:
        """Until so many more steps were done."""
        end = self.step() + n_steps
        self.wait(lambda: self.step() >= end, f"step {end}", LIMIT_S)

    def worker(self, slot: int) -> str:
        return next(one for one in self.members() if f"/{slot}#" in one)

    def order(self, slot: int, text: str, in_steps: int = 2, at: int | None = None) -> Callable[[], Line]:
        """Have the worker of a slot do this, in so many steps or at one; what is returned waits for its beginning."""
        began = self.orders / f"{slot}.began"
        began.unlink(missing_ok=True)
        new = self.orders / f"{slot}.order"
        new.write_text(f"{self.step() + in_steps if at is None else at} {text}")
        new.rename(self.orders / str(slot))

        def wait() -> Line:
            self.wait(began.exists, f"worker {slot} to begin with {text}", LIMIT_S)
            line: Line = json.loads(began.read_text())
            return line

        return wait


def since(seen: Line | None, t: float) -> float | None:
    """Seconds from Unix time `t` to an event."""
    return None if seen is None else float(seen["t"] - t)


def steps_since(seen: Line | None, step: int) -> int | None:
    """The steps from this one to that which an event names, both counted."""
    return None if seen is None else int(seen["step"] - step + 1)


def exits(folder: Path, repeat: int) -> Iterator[Found]:
    """Workers that end, in one job."""
    code, killed = Found("exit code", "< 10 ms"), Found("SIGKILL", "< 10 ms")
    bare = Found("SIGKILL, bare process")
    for _ in range(repeat):
        bare.add(_end_bare(), True)
    with Node(folder, "--standalone", f"--nproc-per-node={WORKERS}") as node:
        victim = ""
        for turn in range(2 * repeat):
            found, slot = (code, killed)[turn % 2], turn // 2 % WORKERS
            node.await_members(WORKERS, 5, without=victim)
            victim, after = node.worker(slot), len(node.lines)
            if found is code:
                t = node.order(slot, "exit")()["t"]
            else:
                pid, t = node.workers()[slot], time.time()
                os.kill(pid, signal.SIGKILL)
            seen = node.await_first("worker_exited", after)
            found.add(since(seen, t), seen is not None and seen["worker"] == victim)
    yield from (code, killed, bare)


def _end_bare() -> float:
    """Seconds until a process that has imported torch has ended."""
    program = "import time, torch; print('ready', flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        descriptor, poll = os.pidfd_open(process.pid), select.poll()
        poll.register(descriptor, select.POLLIN)
        time.sleep(0.1)
        begin_s = time.perf_counter()
        process.kill()
        poll.poll()
        took_s = time.perf_counter() - begin_s
        os.close(descriptor)
    return took_s


def hangs(folder: Path, repeat: int) -> Iterator[Found]:
    """Workers that live and do not go on, in one job."""
    stopped, loop, deadlock = (
        Found(name, "< 3 steps + 2 s") for name in ("SIGSTOP", "loop with the GIL", "deadlock in a collective")
    )
    with Node(folder, "--standalone", f"--nproc-per-node={WORKERS}") as node:
        victim = ""
        for turn in range(3 * repeat):
            found, slot = (stopped, loop, deadlock)[turn % 3], turn // 3 % WORKERS
            node.await_members(WORKERS, 15, without=victim)
            victim, after = node.worker(slot), len(node.lines)
            allowed_s = 3 * node.typical_s() + 2
            if found is stopped:
                pid, t = node.workers()[slot], time.time()
                os.kill(pid, signal.SIGSTOP)
            elif found is loop:
                t = node.order(slot, "loop")()["t"]
            else:
                begun = [node.order(each, "cross", in_steps=10) for each in range(WORKERS)]
                t = max(one()["t"] for one in begun)
            seen = node.await_first("hang", after)
            # In a deadlock nobody is to blame more than others: it must be told as one, with who waits for whom.
            right = seen is not None and (seen["worker"] == victim or found is deadlock)
            if seen is not None and found is deadlock:
                right = len(seen["waits"]) == WORKERS
            took_s = since(seen, t)
            found.add(took_s, right)
            found.late += took_s is None or took_s > allowed_s
            victim = seen["worker"] if seen is not None else victim
            time.sleep(0.2)
            node.read()
            others = [line for line in node.lines[after:] if line["kind"] == "hang"]
            found.right -= len(others) > 1
    yield from (stopped, loop, deadlock)


@contextmanager
def three_hosts(folder: Path) -> Iterator[tuple[Network, dict[str, Node], Callable[[str], Node]]]:
    """A job of three hosts with one worker each; the last value starts a node on a host."""
    with ExitStack() as stack:
        wires = stack.enter_context(network())
        etcd = EmbeddedEtcd(str(folder / f"etcd-{time.monotonic_ns()}"), wires.gateway)
        etcd.start()
        stack.callback(etcd.stop)
        etcd.wait_ready()
        nodes: dict[str, Node] = {}
        places = {name: ("ip", "netns", "exec", wires.add(name)) for name in "abc"}

        def start(name: str) -> Node:
            conf = "--rdzv-conf=last_call_timeout=0,attach_timeout=90"
            flags = (f"--rdzv-endpoint={etcd.endpoint}", "--nnodes=1:3", conf)
            nodes[name] = stack.enter_context(Node(folder, *flags, name=name, within=places[name]))
            return nodes[name]

        for number, name in enumerate("abc", start=1):
            start(name)
            nodes["a"].await_members(number, 1)
        yield wires, nodes, start


def left_out(node: Node, names: str, after: int, t: float, found: Found) -> None:
    """Note when a node heard of the first generation that has fewer members, and whether they are these nodes."""

    def fewer(line: Line) -> bool:
        return line["stage"] == "train" and len(line["workers"]) < 3

    seen = node.await_first("generation", after, fewer)
    left = sorted(one.partition("/")[0] for one in seen["workers"]) if seen is not None else []
    found.add(since(seen, t), left == sorted(names))


def hangs_of(nodes: Mapping[str, Node]) -> list[Line]:
    """Those that the agents of these nodes have told of until now."""
    return sorted((line for node in nodes.values() for line in node.of("hang")), key=lambda line: float(line["t"]))


def nodes_lost(folder: Path, repeat: int) -> Iterator[Found]:
    """Agents killed, hosts without a network, hosts that lose each other, workers of all of them in a deadlock."""
    agent = Found("agent killed", f"< {LEASE_S:g} + 0.5 s")
    cable = Found("whole host cut off", f"< {LEASE_S:g} + 0.5 s")
    cut = Found("two hosts lose each other")
    deadlock = Found("deadlock over three hosts")
    with three_hosts(folder) as (wires, nodes, start):
        watcher = nodes["a"]
        for _ in range(repeat):
            watcher.await_members(3, 5)
            after, t = len(watcher.lines), time.time()
            nodes["c"].agent.kill()
            left_out(watcher, "ab", after, t, agent)
            nodes["c"].agent.wait()
            start("c")
        for _ in range(repeat):
            watcher.await_members(3, 5)
            after, t = len(watcher.lines), time.time()
            wires.plug("c", into=False)
            left_out(watcher, "ab", after, t, cable)
            wires.plug("c", into=True)
        for _ in range(repeat):
            watcher.await_members(3, 5)
            after, t = len(watcher.lines), time.time()
            wires.cut("a", "c")
            left_out(watcher, "ab", after, t, cut)
            wires.mend("a", "c")
        for _ in range(repeat):
            watcher.await_members(3, 15)
            n_before, step = len(hangs_of(nodes)), watcher.step() + 20
            begun = [node.order(0, "cross", at=step) for node in nodes.values()]
            t = max(one()["t"] for one in begun)
            watcher.wait(lambda known=n_before: len(hangs_of(nodes)) > known, "an event hang", LIMIT_S)  # type: ignore[misc]
            hang = hangs_of(nodes)[n_before]
            watcher.await_members(3, 5, without=hang["worker"])
            deadlock.add(since(hang, t), len(hang["waits"]) == 3 and len(hangs_of(nodes)) == n_before + 1)
    yield from (agent, cable, cut, deadlock)


def slow(folder: Path, repeat: int) -> Iterator[Found]:
    """A worker that takes longer for its work, a link that carries less, in one job that only tells of it."""
    levels = {factor: Found(f"slow {factor:g}x", "20 steps" if factor == 1.5 else "") for factor in LEVELS}
    link = Found("slow link")
    with Node(folder, "--standalone", f"--nproc-per-node={WORKERS}", "--slow-policy=report") as node:
        node.await_members(WORKERS, 60)  # what a job has to learn of itself
        for turn in range(repeat):
            slot = turn % WORKERS
            victim = node.worker(slot)
            for factor, found in levels.items():
                after = len(node.lines)
                begun = node.order(slot, f"slow {factor}")()
                seen = node.await_first("slow", after)
                right = seen is not None and (seen.get("worker"), seen["state"]) == (victim, "slow")
                found.add(since(seen, begun["t"]), right, steps_since(seen, begun["step"]))
                after = len(node.lines)
                node.order(slot, "slow 1")()
                node.await_first("slow", after, lambda line: bool(line["state"] == "recovered"))
                node.await_steps(20)
        for turn in range(repeat):
            slot = turn % WORKERS
            victim, after = node.worker(slot), len(node.lines)
            begun = node.order(slot, f"throttle {THROTTLE_BYTES_PER_S}")()
            seen = node.await_first("slow", after)
            right = seen is not None and seen.get("link", [""])[0] == victim
            link.add(since(seen, begun["t"]), right, steps_since(seen, begun["step"]))
            node.order(slot, "throttle 0")()
            node.await_steps(60)
    yield from (*levels.values(), link)


def devices(folder: Path, repeat: int) -> Iterator[Found]:
    """XIDs and memory errors, as NVIDIA's library would tell of them."""
    xid, ecc = Found("stub XID"), Found("stub ECC")
    flags = ("--standalone", f"--nproc-per-node={WORKERS}", "--health-policy=report")
    for job in range(math.ceil(repeat / WORKERS)):
        gpus = StubNvml(folder / f"nvml-{job}", WORKERS)
        with Node(folder, *flags, env=gpus.environment) as node:
            node.await_members(WORKERS, 3)
            # Each GPU tells of errors of its memory once.
            for turn in range(2 * min(WORKERS, repeat - WORKERS * job)):
                found, gpu, number = (xid, ecc)[turn % 2], turn // 2, 62 + turn
                time.sleep(random.random() * 5)  # not in step with the looks
                after, t = len(node.lines), time.time()
                if found is xid:
                    gpus.xid(gpu, number)
                else:
                    gpus.set(gpu, uncorrectable=1)
                seen = node.await_first("health", after)
                what = f"xid {number}" if found is xid else "ecc uncorrectable"
                found.add(since(seen, t), seen is not None and (seen["subject"], seen["what"]) == (f"GPU {gpu}", what))
    yield from (xid, ecc)


GROWS = """
import sys, time
held = []
while True:
    held.append(bytearray(b"x") * (2 << 20))
    time.sleep(2 / int(sys.argv[1]))
"""
RATES = (20, 50, 100)  # MB a second


def memory(folder: Path, repeat: int) -> Iterator[Found]:
    """A worker that grows in a control group of 400 MB, of which some 150 are taken; looks are a second apart."""
    script = folder / "grows.py"
    script.write_text(GROWS)
    for rate in RATES:
        found = Found(f"memory by {rate} MB/s, told before the kill")
        for turn in range(repeat):
            group = memory_group(f"elaunch-benchmark-{os.getpid()}-{rate}-{turn}")
            try:
                within = ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")
                flags = ("--standalone", "--max-restarts=0", "--preload=")
                with Node(folder, *flags, within=within, script=[str(script), str(rate)]) as node:
                    node.agent.wait(LIMIT_S)
                    (end,) = node.of("worker_exited")
                    told = [line for line in node.of("health") if line["what"] == "memory" and line["t"] < end["t"]]
                    right = bool(told) and told[0]["worker"] == end["worker"]
                    found.add(end["t"] - told[0]["t"] if told else None, right)
            finally:
                end_s = time.monotonic() + 30
                while (group / "cgroup.procs").read_text().split() and time.monotonic() < end_s:
                    time.sleep(0.01)
                group.rmdir()
        yield found


def simulated(folder: Path, repeat: int) -> Iterator[Found]:
    """The detector on recorded steps; a fault of its own in each of `10 * repeat` jobs, and as many hours without."""
    crew = [f"n{number // 8}/{number % 8}#0" for number in range(24)]
    for busy in (False, True):
        series, where = list(recorded(busy).values()), " on a busy machine" if busy else ""
        calm = Found(f"{repeat} simulated hours in which nobody is slow{where}", "no alarm")
        for seed in range(repeat):
            calm.add(None, not play(series, crew, seed, 3600, None))
        yield calm
        for factor in LEVELS:
            found = Found(f"slow {factor:g}x, simulated{where}", "20 steps" if factor == 1.5 and not busy else "")
            for seed in range(10 * repeat):
                victim, begin = crew[seed % len(crew)], 100 + seed % 7
                changes = play(series, crew, seed, begin + 200, (victim, begin, factor))
                if not changes:
                    found.add(None, False)
                    continue
                right = changes[0].names == (victim,)
                found.add(math.nan, right, changes[0].step - begin + 1)
            yield found


def play(
    series: Sequence[Sequence[float]], crew: Sequence[str], seed: int, steps: int, slow: tuple[str, int, float] | None
) -> list[Change]:
    """So many steps of a job whose workers take what was recorded, each from a place of its own; what was found."""
    draw = random.Random(seed)
    places = [(draw.choice(series), draw.randrange(10**6)) for _ in crew]
    job = Series(crew)
    for step in range(steps):
        seconds = {one: times[(step + offset) % len(times)] for one, (times, offset) in zip(crew, places, strict=True)}
        if slow is not None and step >= slow[1]:
            seconds[slow[0]] *= slow[2]
        job.step(seconds)
        if job.changes:
            break
    return job.changes


PARTS: dict[str, Callable[[Path, int], Iterator[Found]]] = {
    "exit": exits,
    "hang": hangs,
    "node": nodes_lost,
    "slow": slow,
    "device": devices,
    "memory": memory,
    "simulated": simulated,
}
TIMES = {"exit": 25, "hang": 6, "node": 5, "slow": 5, "device": 10, "memory": 3, "simulated": 24}


def judge(report: Report, found: Found) -> None:
    """The targets that a kind of fault has."""
    times = found.times
    if found.name in ("exit code", "SIGKILL"):
        report.target(f"{found.name}, p99", percentile(times, 0.99), "s", below=0.01)
    elif found.name in ("agent killed", "whole host cut off"):
        report.target(f"{found.name}, p99", percentile(times, 0.99), "s", below=LEASE_S + 0.5)
    elif found.asked == "< 3 steps + 2 s":
        report.target(f"{found.name}, later than 3 steps + 2 s", found.late, "", at_most=0)
    elif found.asked == "20 steps":
        report.target(f"{found.name}, p99", percentile(found.steps, 0.99), "steps", at_most=20)
    elif found.asked == "no alarm":
        report.target(f"false alarms in {found.name}", len(found.seconds) - found.right, "", at_most=0)


def judge_blame(report: Report, all_found: Sequence[Found]) -> None:
    """How many of the faults that were detected were laid to whom they were done."""
    groups: dict[str, list[Found]] = {}
    for found in all_found:
        if found.asked != "no alarm" and found.times:
            place = found.name.find("simulated")
            groups.setdefault(found.name[place:] if place >= 0 else "real jobs", []).append(found)
    for group, some in groups.items():
        part = sum(found.right for found in some) / sum(len(found.times) for found in some)
        report.target(f"blamed right, {group}", part, "of detected", at_least=0.99)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--repeat", type=int, help="of each fault")
    parser.add_argument("--limit-s", type=int, default=3000, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    report = Report("detection: faults of every kind, who is blamed, and how soon")
    folder = Path(tempfile.mkdtemp(prefix="elaunch-detection-"))
    limit_time(args.limit_s)
    all_found: list[Found] = []
    try:
        for part in args.only:
            for found in PARTS[part](folder, args.repeat or (1 if args.quick else TIMES[part])):
                all_found.append(found)
                report.row(found.cells())
                judge(report, found)
    except (TimeLimit, JobFailed) as error:
        report.notes.append(str(error))
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)
    judge_blame(report, all_found)
    report.notes.append("real processes, sockets and namespaces on one machine; layers sleep; GPUs are a stand-in")
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
