"""Hundreds of agents on one etcd: rendezvous, deaths, joins, drains, the loss of the leader; time, memory, traffic.

    python benchmarks/agents.py --sizes 50 100 200
    python benchmarks/agents.py --sizes 1000 --servers 3 --json agents.json
    python benchmarks/agents.py --torchrun --sizes 10

Agents are forks of one process that has their imports, so they share pages: the table has both what is resident and
what is a process's own. Each has one worker, a small C program (`--no-python`) without compute; this process speaks for
all workers, so that a change is timed until the last one has been told. All run on this machine and compete for its
cores. Needs a C compiler. What this starts ends with it, whatever ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import random
import re
import signal
import socket
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import psutil

from benchmarks.agents_crew import Crew, Member, compile_member, cpu_s, find_dead, wait_calm
from benchmarks.agents_torchrun import measure_torchrun, rows
from benchmarks.jobs import JobFailed, TimeLimit, limit_time
from benchmarks.report import Report, add_arguments
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.membership import job_prefix
from tests.forks import Forked, ForkServer
from tests.helpers import LAUNCHER_MODULES

JOB = "agents"
START_S = 240.0
CHANGE_S = 60.0
CALM_S = 2.0
QUIET = ("--health-policy=off", "--hang-timeout=off")
"""What an agent does for its machine and its workers once or more a second: here all would look at one machine."""

RENDEZVOUS_S, KNOWN_S, RESIDENT_MB = 5.0, 0.5, 45.0  # targets

SAMPLE = 12  # agents whose memory, threads and connections are read


@dataclass
class Usage:
    """Processor seconds and bytes at one moment; differences of two are those of the time between."""

    at_s: float
    leader_s: float
    agents_s: float
    etcd_s: float
    sent_bytes: float
    received_bytes: float

    def per_s(self, before: Usage) -> Usage:
        return self.minus(before, Usage(0, 0, 0, 0, 0, 0)).over(self.at_s - before.at_s)

    def minus(self, before: Usage, idle_per_s: Usage) -> Usage:
        """Returns what was used since, less what an idle job uses in that time."""
        time_s = self.at_s - before.at_s
        names = ("leader_s", "agents_s", "etcd_s", "sent_bytes", "received_bytes")
        used = {
            name: getattr(self, name) - getattr(before, name) - time_s * getattr(idle_per_s, name) for name in names
        }
        return Usage(time_s, **used)

    def over(self, count: float) -> Usage:
        return Usage(
            self.at_s / count,
            self.leader_s / count,
            self.agents_s / count,
            self.etcd_s / count,
            self.sent_bytes / count,
            self.received_bytes / count,
        )


@dataclass
class Figures:
    """What one job has shown; times in seconds."""

    agents: int
    times_s: dict[str, list[float]] = field(default_factory=dict)
    used: dict[str, Usage] = field(default_factory=dict)

    def add(self, what: str, seconds: float) -> None:
        self.times_s.setdefault(what, []).append(seconds)


class Fleet:
    """A job of many agents.

    Args:
        count: how many.
        servers: of etcd.
        folder: for all files; short, since sockets lie in it.
    """

    def __init__(self, count: int, servers: int, folder: Path, conf: str) -> None:
        self.count = count
        self.folder = folder
        self.crew = Crew(folder / "crew")
        self.etcds = [
            EmbeddedEtcd(_made(folder / f"etcd{n}"), peer=f"127.0.0.1:{_free_port()}" if servers > 1 else "")
            for n in range(servers)
        ]
        self.program = compile_member(folder)
        self.agents: dict[str, Forked] = {}
        self.conf = conf
        self._forks: ForkServer | None = None
        self._random = random.Random(0)

    def __enter__(self) -> Fleet:
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        self.env = env | {"TMPDIR": str(self.folder)}
        for etcd in self.etcds:
            etcd.start()
            etcd.wait_ready(20.0)
        self.endpoint = ",".join(etcd.endpoint for etcd in self.etcds)
        self._forks = ForkServer(LAUNCHER_MODULES, self.env)
        self.store = EtcdStore(self.endpoint, 20.0)
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()
        self.crew.close()
        trees = [psutil.Process(one.pid) for one in self.agents.values() if psutil.pid_exists(one.pid)]
        below = [child for tree in trees for child in _children(tree)]
        if self._forks is not None:
            self._forks.close()
        for etcd in self.etcds:
            etcd.stop()
        end_s = time.monotonic() + 20.0
        while (left := [one for one in (*trees, *below) if _runs(one)]) and time.monotonic() < end_s:
            for one in left:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            time.sleep(0.05)

    def start(self, name: str) -> None:
        """Starts an agent."""
        assert self._forks is not None
        least = max(1, self.count // 2)
        arguments = [
            f"--nnodes={least}:{self.count}",
            f"--rdzv-endpoint={self.endpoint}",
            f"--rdzv-id={JOB}",
            f"--rdzv-conf={self.conf}",
            f"--node-name={name}",
            "--local-addr=127.0.0.1",
            *QUIET,
            "--no-python",
            str(self.program),
            str(self.folder / "crew"),
        ]
        log = self.folder / f"{name}.log"
        self.agents[name] = self._forks.start("elaunch", arguments, self.env, self.folder, log, log)

    def pause_store(self, stop: bool) -> None:
        """Stops etcd, or lets it go on."""
        for etcd in self.etcds:
            assert etcd.pid is not None
            os.kill(etcd.pid, signal.SIGSTOP if stop else signal.SIGCONT)

    def leader(self) -> str:
        entry = self.store.get(f"{job_prefix(JOB)}leader")
        return entry.value.decode() if entry is not None else ""

    def generation(self) -> int:
        return max((member.generation for member in self.crew.members.values()), default=0)

    def settle(self, count: int, above: int, what: str, limit_s: float = CHANGE_S) -> tuple[float, int]:
        """Waits until so many workers are in one generation above this; returns when the last heard of it, and it."""

        def settled(members: dict[str, Member]) -> bool:
            newest = {member.generation for member in members.values()}
            return len(members) == count and len(newest) == 1 and min(newest) > above

        if not self.crew.wait(settled, limit_s):
            newest = sorted({member.generation for member in self.crew.members.values()})
            here = f"{len(self.crew.members)} workers ({count} expected) are in generations {newest}"
            raise JobFailed(f"{what}: {here}\n{self.tails()}")
        return max(member.heard_s for member in self.crew.members.values()), self.generation()

    def tails(self) -> str:
        """Returns the last lines of some agents."""
        logs = sorted(self.folder.glob("n*.log"), key=lambda path: -path.stat().st_mtime)[:3]
        return "\n".join(f"{path.name}: {path.read_text(errors='replace')[-600:]}" for path in logs)

    def usage(self, leader: str) -> Usage:
        """Returns what the processes have used so far."""
        others = [one.pid for name, one in self.agents.items() if name != leader]
        sent, received = zip(*(_traffic(etcd.endpoint) for etcd in self.etcds), strict=True)
        return Usage(
            time.monotonic(),
            cpu_s([self.agents[leader].pid]),
            cpu_s(others),
            cpu_s([etcd.pid for etcd in self.etcds if etcd.pid is not None]),
            sum(sent),
            sum(received),
        )

    def victim(self) -> Member:
        """Returns a worker of another node than the leader's."""
        leader = self.leader()
        return self._random.choice([one for node, one in sorted(self.crew.members.items()) if node != leader])


def measure(fleet: Fleet, changes: int, say: bool = True) -> Figures:
    """Runs a job through its changes."""
    figures, n = Figures(fleet.count), fleet.count
    _rendezvous(fleet, figures)
    leader = fleet.leader()
    time.sleep(CALM_S)
    before = fleet.usage(leader)
    time.sleep(2 * CALM_S)
    idle = fleet.usage(leader).per_s(before)
    figures.used["idle"] = idle
    for _ in range(changes):
        _death_and_join(fleet, figures, leader, idle)
    _drain(fleet, figures, leader, idle)
    _lost_leader(fleet, figures)
    if say:
        print({"agents": n, **{what: [round(one, 3) for one in times] for what, times in figures.times_s.items()}})
    return figures


def _rendezvous(fleet: Fleet, figures: Figures) -> None:
    """All agents but one have begun and wait for etcd, which stands still; then it goes on, and the last one starts."""
    n = fleet.count
    names = [f"n{number:04d}" for number in range(n)]
    fleet.pause_store(True)
    begin_s = time.monotonic()
    for name in names:
        fleet.start(name)
    figures.add("start of the agents", time.monotonic() - begin_s)
    wait_calm([one.pid for one in fleet.agents.values()], START_S)
    figures.add("until they wait", time.monotonic() - begin_s)
    pids = [one.pid for one in fleet.agents.values()]
    before_s, begin_s = cpu_s(pids), time.monotonic()
    fleet.pause_store(False)
    if not fleet.crew.wait(lambda members: len(members) == n, START_S):
        raise JobFailed(f"{len(fleet.crew.members)} of {n} workers have started\n{fleet.tails()}")
    figures.add("rendezvous", max(one.begun_s for one in fleet.crew.members.values()) - begin_s)
    heard_s, _ = fleet.settle(n, 0, "the first generation", START_S)
    figures.add("all agents' processor time until then", cpu_s(pids) - before_s)
    figures.add("all train", heard_s - begin_s)


def _death_and_join(fleet: Fleet, figures: Figures, leader: str, idle: Usage) -> None:
    """A worker is killed; its agent starts another one, which joins."""
    n, former, victim = fleet.count, fleet.generation(), fleet.victim()
    node, before, ended = victim.name.partition("/")[0], fleet.usage(leader), fleet.crew.ended
    begin_s = time.monotonic()
    os.kill(_worker_pid(fleet.agents[node].pid), signal.SIGKILL)

    def heard(members: dict[str, Member]) -> bool:
        others = [one for name, one in members.items() if name != node]
        return fleet.crew.ended > ended and all(one.generation > former for one in others)

    if not fleet.crew.wait(heard, CHANGE_S):
        raise JobFailed(f"the death of {victim.name} is not known to all\n{fleet.tails()}")
    known_s = max(one.heard_s for name, one in fleet.crew.members.items() if name != node)
    figures.add("death", known_s - begin_s)
    if not fleet.crew.wait(lambda members: node in members, CHANGE_S):
        raise JobFailed(f"no worker follows {victim.name}\n{fleet.tails()}")
    joiner = fleet.crew.members[node]
    heard_s, number = fleet.settle(n, former + 1, "a join")
    figures.add("join", heard_s - joiner.begun_s)
    time.sleep(CALM_S)
    used = fleet.usage(leader).minus(before, idle).over(number - former)
    figures.used[f"change {number}"] = used


def _drain(fleet: Fleet, figures: Figures, leader: str, idle: Usage) -> None:
    """A tenth of the nodes is announced to be taken away, at one moment."""
    nodes = sorted(name for name in fleet.crew.members if name != leader)[: max(1, fleet.count // 10)]
    former, before = fleet.generation(), fleet.usage(leader)
    leaving = [fleet.crew.members[name] for name in nodes]
    for one in leaving:
        one.leaves = True
    begin_s = time.monotonic()
    for name in nodes:
        fleet.agents[name].send_signal(signal.SIGUSR1)
    heard_s, number = fleet.settle(fleet.count - len(nodes), former, "a drain")
    figures.add("drain", heard_s - begin_s)
    ended_s = [fleet.agents[name].wait(CHANGE_S) for name in nodes]
    figures.add("drained agents ended", time.monotonic() - begin_s)
    figures.add("exit codes", float(sum(map(abs, ended_s))))
    figures.add("generations of the drain", float(number - former))
    time.sleep(CALM_S)
    for name in nodes:
        del fleet.agents[name]
    figures.used["drain"] = fleet.usage(leader).minus(before, idle)


def _lost_leader(fleet: Fleet, figures: Figures) -> None:
    """The leader's agent is killed, and its worker with it; another worker finds that its peer is dead."""
    leader, former = fleet.leader(), fleet.generation()
    lost = fleet.crew.members[leader]
    teller = next(one for name, one in sorted(fleet.crew.members.items()) if name != leader)
    count = len(fleet.crew.members) - 1
    begin_s = time.monotonic()
    fleet.agents[leader].kill()
    if not fleet.crew.wait(lambda members: members.get(leader) is not lost, CHANGE_S):
        raise JobFailed("the leader's worker outlives its agent")
    find_dead(teller, lost)
    heard_s, _ = fleet.settle(count, former, "the loss of the leader")
    figures.add("lost leader", heard_s - begin_s)


def memory(pids: list[int]) -> dict[str, float]:
    """Returns medians over some processes: MiB resident, proportional and own; threads; connections over TCP."""
    rows = []
    for pid in pids:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
        kib = {name: int(re.search(rf"^{name}:\s+(\d+)", text, re.M)[1]) for name in ("Rss", "Pss")}  # type: ignore[index]
        own = sum(int(one) for one in re.findall(r"^Private_\w+:\s+(\d+)", text, re.M))
        process = psutil.Process(pid)
        connections = [one for one in process.net_connections("tcp") if one.status == psutil.CONN_ESTABLISHED]
        rows.append((kib["Rss"] / 1024, kib["Pss"] / 1024, own / 1024, process.num_threads(), len(connections)))
    names = ("resident_mib", "pss_mib", "own_mib", "threads", "connections")
    return dict(zip(names, (float(statistics.median(column)) for column in zip(*rows, strict=True)), strict=True))


def _worker_pid(agent: int) -> int:
    """Returns the pid of the one worker below an agent."""
    return next(one.pid for one in _children(psutil.Process(agent)) if one.name() == "member")


def _children(process: psutil.Process) -> list[psutil.Process]:
    """Returns all descendants, by the kernel's own lists: psutil would read all processes of the machine."""
    found = []
    with contextlib.suppress(OSError, psutil.Error):
        for task in os.listdir(f"/proc/{process.pid}/task"):
            for pid in Path(f"/proc/{process.pid}/task/{task}/children").read_text().split():
                child = psutil.Process(int(pid))
                found += [child, *_children(child)]
    return found


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _traffic(endpoint: str) -> tuple[float, float]:
    """Returns the bytes that an etcd has sent to its clients, and received from them."""
    text = urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=20.0).read().decode()
    kinds = ("sent", "received")
    found = [re.search(rf"^etcd_network_client_grpc_{kind}_bytes_total (\S+)", text, re.M) for kind in kinds]
    sent, received = (float(one[1]) if one else math.nan for one in found)
    return sent, received


def _made(path: Path) -> str:
    path.mkdir(mode=0o700)
    return str(path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def running(count: int, servers: int, conf: str) -> Iterator[Fleet]:
    """Starts a job of so many agents, and ends it."""
    with (
        tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as folder,
        Fleet(count, servers, Path(folder), conf) as fleet,
    ):
        yield fleet


def main() -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--sizes", type=int, nargs="+", default=[50, 100, 200], metavar="N", help="numbers of agents")
    parser.add_argument("--servers", type=int, default=1, choices=(1, 3), help="servers of etcd")
    parser.add_argument("--changes", type=int, default=5, help="deaths, each with a join")
    parser.add_argument("--conf", default="lease_ttl=20,connect_timeout=300", help="--rdzv-conf of the agents")
    parser.add_argument("--torchrun", action="store_true", help="measure torchrun's agents instead, with c10d")
    parser.add_argument("--limit-s", type=int, default=290)
    args = parser.parse_args()
    limit_time(args.limit_s)
    report = Report("Agents on one etcd" if args.servers == 1 else f"Agents on {args.servers} servers of etcd")
    for count in [20] if args.quick else args.sizes:
        try:
            if args.torchrun:
                for row in rows(count, measure_torchrun(count, args.changes, _free_port())):
                    report.row(row)
                continue
            with running(count, args.servers, args.conf) as fleet:
                figures = measure(fleet, args.changes)
                tell(report, fleet, figures)
        except (JobFailed, TimeLimit) as error:
            print(f"{count} agents: {error}", file=sys.stderr)
            break
    report.print()
    report.write(args.json)
    return 0


def tell(report: Report, fleet: Fleet, figures: Figures) -> None:
    """Adds the rows of one job."""
    changes = [used for what, used in figures.used.items() if what.startswith("change")]
    pids = [
        one.pid for one in list(fleet.agents.values())[:: max(1, len(fleet.agents) // SAMPLE)] if one.poll() is None
    ]
    for what, seconds in figures.times_s.items():
        report.row(
            agents=figures.agents,
            what=what,
            count=len(seconds),
            median=round(statistics.median(seconds), 3),
            least=round(min(seconds), 3),
            worst=round(max(seconds), 3),
        )
    for what, used in (
        ("idle, each second", figures.used["idle"]),
        ("a death or a join", _median(changes)),
        ("the drain", figures.used["drain"]),
    ):
        report.row(
            agents=figures.agents,
            of=what,
            leader_ms=round(1e3 * used.leader_s, 2),
            other_agent_ms=round(1e3 * used.agents_s / (figures.agents - 1), 3),
            etcd_ms=round(1e3 * used.etcd_s, 2),
            sent_kb=round(used.sent_bytes / 1e3, 1),
            received_kb=round(used.received_bytes / 1e3, 1),
        )
    used_memory = memory(pids)
    report.row({"agents": figures.agents, **{what: round(value, 1) for what, value in used_memory.items()}})
    ask(report, figures, used_memory["resident_mib"] * 2**20 / 1e6)


def ask(report: Report, figures: Figures, resident_mb: float) -> None:
    """Adds the targets of 1,000 agents, which a smaller job has to meet as well."""
    of = f"{figures.agents} agents"
    report.target(f"{of}: rendezvous", max(figures.times_s["rendezvous"]), "s", below=RENDEZVOUS_S)
    report.target(
        f"{of}: a death is known to all, median", statistics.median(figures.times_s["death"]), "s", below=KNOWN_S
    )
    report.target(f"{of}: resident memory of one, which shares pages", resident_mb, "MB", below=RESIDENT_MB)


def _median(usages: list[Usage]) -> Usage:
    """Returns the medians, each field for itself."""
    names = Usage.__dataclass_fields__
    return Usage(**{name: statistics.median(getattr(one, name) for one in usages) for name in names})


if __name__ == "__main__":
    sys.exit(main())
