"""One job on three hosts of this machine, as its event logs show it: who is a member, which steps have committed."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from elaunch import checkpoints
from tests.helpers import ROOT, Spawned, Spawner
from tests.jobs.plain_etcd import serving
from tests.jobs.watch import Node, elaunch
from tests.netns import Network, network
from tests.soak.means import Clock, small_disk
from tests.soak.schedule import EVERY, HOSTS, SETTINGS, STORES, WITHOUT_CHECKPOINTS, WORKERS, Round
from tests.soak.steps import Event, StepLog, Unmet
from tests.soak.stores import StoreApart, StoreOnNodes, StoreUnderTest, answers

SCRIPT = ROOT / "tests" / "jobs" / "soak.py"
SLOW_END = 150
"""The last steps take longer, so that a job does not end before it has met its faults."""
SLEEP_S, SLOW_SLEEP_S = 0.12, 0.5
CONF = "lease_ttl=2,link_timeout=2,last_call_timeout=90,attach_timeout=90"
END_S = 600.0
JOB_ID = "soak"


@dataclass
class HostNode:
    """An agent, and what its event log has said so far."""

    host: str
    name: str
    node: Node
    events: list[Event] = field(default_factory=list)
    pids: dict[str, int] = field(default_factory=dict)
    exits: dict[str, Event] = field(default_factory=dict)
    generation: Event | None = None
    step: Event | None = None
    lost_after: list[int] = field(default_factory=list)
    _read: dict[Path, int] = field(default_factory=dict)

    def look(self) -> None:
        """Takes in what has been logged since the last time."""
        for event in map(json.loads, self._new(self.node.log).splitlines()):
            self.events.append(event)
            if event["kind"] == "worker_started":
                self.pids[event["worker"]] = event["pid"]
            elif event["kind"] == "worker_exited":
                self.pids.pop(event["worker"], None)
                self.exits[event["worker"]] = event
            elif event["kind"] == "generation" and event["stage"] == "train":
                self.generation = event
            elif event["kind"] == "step":
                self.step = event

    def new_text(self) -> bytes:
        """Returns what its processes have printed since the last time."""
        return self._new(self.agent.log)

    def _new(self, path: Path) -> bytes:
        """Returns what has been written there since the last time, whole lines only."""
        if not path.exists():
            return b""
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            new = file.read()
        whole = new[: new.rfind(b"\n") + 1]
        self._read[path] = self._read.get(path, 0) + len(whole)
        return whole

    def note_lost(self) -> None:
        """Notes that nobody can ask its agent what the log has, or that others have gone on without it until here."""
        self.look()
        self.lost_after.append(len(self.events))

    @property
    def log(self) -> StepLog:
        """Returns what it has logged."""
        return StepLog(self.name, self.events, self.lost_after)

    @property
    def agent(self) -> Spawned:
        """Its process."""
        return self.node.agent

    @property
    def runs(self) -> bool:
        """Whether its agent has not ended."""
        return self.agent.process.poll() is None


class Rig:
    """A job under test.

    Args:
        spawn: starts its processes.
        folder: for logs and files, one of its own.
        round_: which job.
        net: its network, without hosts so far.
        disk: for its checkpoints.
        apart: its store, if none of its nodes hosts that.
    """

    def __init__(
        self, spawn: Spawner, folder: Path, round_: Round, net: Network, disk: Path, apart: StoreApart | None
    ) -> None:
        self.spawn, self.folder, self.round = spawn, folder, round_
        self.net, self.disk = net, disk
        self.control = folder / "control"
        self.control.mkdir()
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.spaces = {host: net.add(host) for host in HOSTS}
        servers, has_secret = STORES[round_.store]
        addresses = {host: net.address(host) for host in HOSTS}
        self.store: StoreUnderTest = apart or StoreOnNodes(addresses, servers)
        self._secret = {"ELAUNCH_SECRET": secrets.token_hex(16)} if has_secret else {}
        self.clocks = {host: Clock(folder, host) for host in HOSTS} if round_.has_clocks else {}
        self.all: list[HostNode] = []
        self.hosts: dict[str, HostNode] = {}
        self.pace(SLEEP_S)

    def start(self, host: str) -> HostNode:
        """Starts an agent on this host, under a new name."""
        api, collectives = SETTINGS[self.round.setting]
        number = sum(node.host == host for node in self.all)
        name = f"{host}{number or ''}"
        saves = [f"--checkpoint-dir={self.disk}", f"--checkpoint-every={EVERY}"]
        if api in WITHOUT_CHECKPOINTS:
            saves = []
        clock = self.clocks.get(host)
        temporary = self.temporary / name
        temporary.mkdir()
        node = elaunch(
            self.spawn,
            self.folder,
            f"--nnodes=1:{len(HOSTS)}",
            f"--nproc-per-node={WORKERS}",
            *self.store.flags,
            f"--rdzv-id={JOB_ID}",
            f"--rdzv-conf={CONF}",
            f"--collectives={collectives}",
            f"--node-name={name}",
            *saves,
            script=(SCRIPT, f"--api={api}", f"--steps={self.round.steps}", f"--control={self.control}"),
            name=name,
            environment={"TMPDIR": str(temporary), **self._secret, **(clock.environment if clock else {})},
            warm=clock is None,
            within=("ip", "netns", "exec", self.spaces[host]) if clock else (),
            host="" if clock else self.spaces[host],
        )
        started = HostNode(host, name, node)
        self.all.append(started)
        self.hosts[host] = started
        return started

    def look(self) -> None:
        """Takes in what all agents have logged, and where they host the store."""
        for node in self.all:
            node.look()
            self.store.note(node.host, node.new_text())

    # -- orders -------------------------------------------------------------------------------------------------------

    def pace(self, sleep_s: float) -> None:
        """Has each step of all workers take so much longer."""
        self._write("all", f"sleep {sleep_s}\n" if sleep_s else "")

    def order(self, worker: str, text: str) -> None:
        """Has the worker in this slot do something (tests/jobs/soak.py); no text: nothing any more."""
        self._write(worker.partition("#")[0].replace("/", "-"), text)

    def _write(self, name: str, text: str) -> None:
        new = self.control / f".{name}"
        new.write_text(text)
        new.rename(self.control / name)

    def ctl(self, *words: str) -> Spawned:
        """Starts `elaunch ctl` for this job."""
        command, *rest = words
        flags = (f"--rdzv-endpoint={self.store.endpoint}", f"--rdzv-id={JOB_ID}")
        return self.spawn.elaunch("ctl", command, *flags, *rest, name=f"ctl-{command}", env=self._secret)

    # -- what is true of it -------------------------------------------------------------------------------------------

    def worker(self, host: str, slot: int) -> str:
        """The worker that is in a slot of a host now."""
        found = [worker for worker in self.hosts[host].pids if worker.partition("/")[2].startswith(f"{slot}#")]
        if not found:
            raise Unmet(f"no worker is in slot {slot} of host {host}")
        return found[-1]

    def server(self, host: str) -> tuple[str, int]:
        """Returns a server of the store, if possible this host's: where it is (empty: on none), and its process."""
        agents = {name: node.agent.pid for name, node in self.hosts.items() if node.runs}
        found = self.store.server(agents, host)
        if found is None:
            raise Unmet(f"none of the hosts {', '.join(agents)} serves the store")
        return found

    def store_answers(self) -> bool:
        """Whether the store can be reached where it is known to be."""
        return answers(self.store.endpoint)

    def parts(self) -> list[str]:
        """Returns checkpoints that somebody has begun, and nobody completed or removed."""
        return [path.name for path in checkpoints.parts(self.disk)]

    def workers(self) -> dict[str, int]:
        """All workers that live, by their agents' logs, and their processes."""
        return {worker: pid for node in self.hosts.values() for worker, pid in node.pids.items()}

    def last_step(self) -> int:
        """The newest step that has committed."""
        return max((node.step["step"] for node in self.all if node.step), default=-1)

    def is_whole(self) -> bool:
        """Whether all workers there are commit steps, in one generation that all agents know."""
        living = self.workers()
        if len(living) != len(HOSTS) * WORKERS:
            return False
        told = [node.generation for node in self.hosts.values()]
        newest = max((event["generation"] for event in told if event), default=-1)
        if any(event is None or event["generation"] != newest for event in told):
            return False
        assert told[0] is not None
        last = max((node.step for node in self.all if node.step), key=lambda step: step["step"], default=None)
        return (
            sorted(told[0]["workers"]) == sorted(living)
            and last is not None
            and last["generation"] == newest
            and last["members"] == len(living)
        )

    def tails(self) -> str:
        """The last lines of all agents."""
        return "\n".join(node.agent.tail(25) for node in self.all)

    def kill(self, node: HostNode) -> None:
        """Kills an agent and all of its processes at once; its machine is lost, and so are its files."""
        pids = [node.agent.pid, *node.pids.values()]
        for child in psutil.Process(node.agent.pid).children(recursive=True):
            pids.append(child.pid)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        node.agent.wait(20)
        node.note_lost()
        node.pids.clear()
        shutil.rmtree(self.temporary / node.name)


def with_rig(folder: Path, round_: Round, use: Callable[[Rig], None]) -> None:
    """Makes the network, the store and the disk of a job, uses them, and ends all that they have started."""
    spawn = Spawner(folder)
    with ExitStack() as stack:
        net = stack.enter_context(network())
        apart = None
        if not STORES[round_.store][0]:
            apart = StoreApart(stack.enter_context(serving(folder / "etcd", net.gateway)))
        disk = stack.enter_context(small_disk(folder / "disk"))
        stack.callback(end_quietly, spawn, folder / "logs")
        use(Rig(spawn, folder, round_, net, disk, apart))


def end_quietly(spawn: Spawner, told: Path) -> None:
    """Ends all processes; what they wrote last goes into a file."""
    with told.open("w") as file, redirect_stdout(file):
        spawn.end_all()
