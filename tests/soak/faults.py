"""The faults, as they are done to a job: each waits for what it needs and says whom it may cost a process."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil

from tests.soak.means import DISK_MB, MB, memory_limit
from tests.soak.rig import Rig
from tests.soak.schedule import HOSTS, Fault, second_host
from tests.soak.steps import Unmet

Wait = float | Callable[[], object]
"""Seconds, or a condition."""

LIMIT_MB, SWELL_MB = 60, 300
"""What a worker may take more, and what it takes."""

SLOW_S, RATE = 0.15, 200_000
CLOCK_STEP_S = 1800
EXPELS_S = 0.5
"""A host that is cut off for so long may cost its workers their place: its lease has 1.3 s left, and what TCP has sent
meanwhile comes 0.6 or 1.4 s late."""


class Faults:
    """Does faults to one job.

    Attributes:
        victims: workers that may end by the fault under way; all others must keep their processes.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.victims: set[str] = set()
        self._do: dict[str, Callable[[Fault], Iterator[Wait]]] = {
            "KILL": lambda fault: self._signal(fault, signal.SIGKILL),
            "STOP": lambda fault: self._signal(fault, signal.SIGSTOP),
            "TERM": lambda fault: self._signal(fault, signal.SIGTERM),
            "SEGV": lambda fault: self._signal(fault, signal.SIGSEGV),
            "two at once": self._two,
            "agent killed": self._agent,
            "node lost": self._lose,
            "host cut off": self._cut,
            "store stopped": self._stop_store,
            "store killed": self._kill_store,
            "disk full": self._fill_disk,
            "file limit": self._limit_files,
            "memory limit": self._limit_memory,
            "clock step": self._step_clock,
            "slow link": lambda fault: self._slow(fault, f"rate {RATE}"),
            "slow worker": lambda fault: self._slow(fault, f"sleep {SLOW_S}"),
            "resize": self._resize,
            "drain": self._drain,
        }

    def do(self, fault: Fault) -> Iterator[Wait]:
        """Does a fault; between its parts it yields what is to be waited for."""
        self.victims = set()
        return self._do[fault.kind](fault)

    def _hit(self, host: str, slot: int, number: signal.Signals) -> str:
        worker = self.rig.worker(host, slot)
        self.victims.add(worker)
        os.kill(self.rig.hosts[host].pids[worker], number)
        return worker

    def _of_host(self, host: str) -> None:
        self.victims.update(self.rig.hosts[host].pids)

    def _ended(self, host: str, worker: str) -> Callable[[], bool]:
        node = self.rig.hosts[host]
        return lambda: worker in node.exits

    def _signal(self, fault: Fault, number: signal.Signals) -> Iterator[Wait]:
        yield self._ended(fault.host, self._hit(fault.host, fault.slot, number))

    def _two(self, fault: Fault) -> Iterator[Wait]:
        """Two workers, so fast after each other that nobody has gone on without the first."""
        other = second_host(fault, self.rig.round.api)
        first = self._hit(fault.host, fault.slot, signal.SIGKILL)
        yield fault.seconds / 40
        second = self._hit(other, 1 - fault.slot, signal.SIGKILL)
        yield self._ended(fault.host, first)
        yield self._ended(other, second)

    def _agent(self, fault: Fault) -> Iterator[Wait]:
        node = self.rig.hosts[fault.host]
        self._of_host(fault.host)
        node.agent.signal(signal.SIGKILL)
        pids = list(node.pids.values())
        yield lambda: not node.runs and not any(map(psutil.pid_exists, pids))
        node.note_lost()
        node.pids.clear()
        yield fault.seconds
        self.rig.start(fault.host)

    def _lose(self, fault: Fault) -> Iterator[Wait]:
        """The host is silent from one moment on, and so no kernel tells anybody that its processes are gone."""
        self._of_host(fault.host)
        self.rig.net.plug(fault.host, into=False)
        self.rig.kill(self.rig.hosts[fault.host])
        yield self._without(fault.host)
        self.rig.net.plug(fault.host, into=True)
        self.rig.start(fault.host)

    def _cut(self, fault: Fault) -> Iterator[Wait]:
        hosts = self._apart(fault) if fault.seconds > EXPELS_S else []
        for host in hosts:
            self._of_host(host)
        self.rig.net.plug(fault.host, into=False)
        yield fault.seconds
        self.rig.net.plug(fault.host, into=True)
        for host in hosts:
            self.rig.hosts[host].note_lost()

    def _apart(self, fault: Fault) -> list[str]:
        """Returns whom a cut may cost their place: its host, and all others where that alone serves the store."""
        alone = self.rig.round.store.startswith("first node") and self.rig.server(fault.host)[0] == fault.host
        return list(self.rig.hosts) if alone else [fault.host]

    def _stop_store(self, fault: Fault) -> Iterator[Wait]:
        _, pid = self.rig.server(fault.host)
        os.kill(pid, signal.SIGSTOP)
        yield fault.seconds
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def _kill_store(self, fault: Fault) -> Iterator[Wait]:
        """The server alone, which its agent starts again; or the agent that hosts it, and so all of that host."""
        host, pid = self.rig.server(fault.host)
        spared = self.rig.round.spared
        if host and fault.slot and not (spared and spared[0] == host):
            yield from self._agent(replace(fault, host=host))
        else:
            os.kill(pid, signal.SIGKILL)
            yield fault.seconds
            self.rig.store.start_again()
        yield self.rig.store_answers

    def _fill_disk(self, fault: Fault) -> Iterator[Wait]:
        """Until a checkpoint has failed for it; one must succeed when there is room again."""
        logs = [node.agent for node in self.rig.hosts.values()]
        before = [len(log.text()) for log in logs]
        filler = self.rig.disk / "filler"
        try:
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                for _ in range(DISK_MB * 100):
                    file.write(bytes(MB // 100))
            yield lambda: any(
                "no checkpoint after" in new or "could not write the checkpoint" in new
                for new in (log.text()[start:] for log, start in zip(logs, before, strict=True))
            )
        finally:
            filler.unlink()
        saved = self._saved()
        yield lambda: self._saved() > saved

    def _saved(self) -> int:
        return sum(event["kind"] == "checkpoint" for node in self.rig.all for event in node.events)

    def _limit_files(self, fault: Fault) -> Iterator[Wait]:
        """A worker, or an agent, can open nothing more while a worker beside it dies and comes back."""
        node = self.rig.hosts[fault.host]
        ends = 0 if fault.slot else 1  # the slot whose worker dies
        if fault.slot:
            limited = node.agent.pid
        else:
            worker = self.rig.worker(fault.host, 0)
            self.victims.add(worker)
            limited = node.pids[worker]
        highest = max(int(entry) for entry in os.listdir(f"/proc/{limited}/fd"))
        before = resource.prlimit(limited, resource.RLIMIT_NOFILE)
        resource.prlimit(limited, resource.RLIMIT_NOFILE, (highest + 1, before[1]))
        victim = self._hit(fault.host, ends, signal.SIGKILL)
        yield fault.seconds
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(limited, resource.RLIMIT_NOFILE, before)
        yield self._ended(fault.host, victim)

    def _limit_memory(self, fault: Fault) -> Iterator[Wait]:
        worker = self.rig.worker(fault.host, fault.slot)
        self.victims.add(worker)
        pid = self.rig.hosts[fault.host].pids[worker]
        with memory_limit(pid, LIMIT_MB):
            self.rig.order(worker, f"swell {SWELL_MB}\n")
            yield lambda: not Path(f"/proc/{pid}").exists()
            self.rig.order(worker, "")
        yield self._ended(fault.host, worker)

    def _step_clock(self, fault: Fault) -> Iterator[Wait]:
        self.rig.clocks[fault.host].step(CLOCK_STEP_S if fault.slot else -CLOCK_STEP_S)
        yield fault.seconds

    def _slow(self, fault: Fault, order: str) -> Iterator[Wait]:
        worker = self.rig.worker(fault.host, fault.slot)
        self.rig.order(worker, order + "\n")
        yield fault.seconds
        self.rig.order(worker, "")

    def _resize(self, fault: Fault) -> Iterator[Wait]:
        """One node fewer, which is the leader's choice, and then as many as before."""
        hosts = dict(self.rig.hosts)
        fewer = self.rig.ctl("resize", f"1:{len(HOSTS) - 1}")
        for host in hosts:
            self._of_host(host)
        yield lambda: fewer.process.poll() is not None and any(not node.runs for node in hosts.values())
        self._succeeded(fewer.process.poll(), "elaunch ctl resize", fewer.tail())
        (left,) = [node for node in hosts.values() if not node.runs]
        self._succeeded(left.agent.process.poll(), f"node {left.name}, which had left", left.agent.tail())
        self.victims = set(left.pids) | set(left.exits)
        yield self.rig.store_answers  # the node that has left may have hosted it
        more = self.rig.ctl("resize", f"1:{len(HOSTS)}")
        yield lambda: more.process.poll() is not None
        self._succeeded(more.process.poll(), "elaunch ctl resize", more.tail())
        left.look()
        left.pids.clear()
        self.rig.start(left.host)

    def _drain(self, fault: Fault) -> Iterator[Wait]:
        node = self.rig.hosts[fault.host]
        self._of_host(fault.host)
        if fault.slot:
            node.agent.signal(signal.SIGTERM)
        else:
            self.rig.ctl("drain", node.name)
        yield lambda: not node.runs
        self._succeeded(node.agent.process.poll(), f"node {node.name}, which had drained", node.agent.tail())
        node.look()
        if any(event.get("exitcode") for event in node.exits.values()):
            raise Unmet(f"workers of node {node.name}, which drained, ended with {node.exits}")
        node.pids.clear()
        self.rig.start(fault.host)

    def _without(self, host: str) -> Callable[[], bool]:
        """The others commit steps without this host."""
        begin = self.rig.last_step()
        name = self.rig.hosts[host].name
        others = [node for each, node in self.rig.hosts.items() if each != host]

        def there() -> bool:
            told = [node.generation for node in others]
            return (
                all(event and not any(worker.startswith(f"{name}/") for worker in event["workers"]) for event in told)
                and self.rig.last_step() > begin + 1
            )

        return there

    def _succeeded(self, code: int | None, who: str, tail: str) -> None:
        if code != 0:
            raise Unmet(f"{who} ended with {code}\n{tail}")


def patience_s() -> float:
    """How long a fault may take, on a machine as busy as this one."""
    return 90.0 * max(1.0, os.getloadavg()[0] / (2 * (os.cpu_count() or 1)))
