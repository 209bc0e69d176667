"""The host of a job's store is lost: how soon the others go on.

    python benchmarks/lost_host.py
    python benchmarks/lost_host.py --only silent --repeat 3 --json lost_host.json

Real jobs of `detection_job.py` with c10d, on hosts made of network namespaces (which only root can make), with a worker
each. The first one hosts etcd, alone or with the two after it (*three servers*), and is lost in one of two ways: its
agent is *killed*, and the kernel ends its worker and its etcd with it; or the host is *silent*: its cable is pulled,
and nobody can tell it from one that hangs. Each loss is of a job of its own, at a random moment.

Time is from the loss to the first step of the others, by the event log. A job counts as gone on if no worker of the
others was started again, no step is missing in the logs, none stands twice in those of the others, and they did 20
more steps.

*torchrun*: its c10d is a store in the first agent. Until that of another host has ended; asked 60 s long.
"""

from __future__ import annotations

import argparse
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.detection import Node
from benchmarks.jobs import HERE, TORCHRUN, Job, JobFailed, TimeLimit, Training, limit_time
from benchmarks.report import Report, add_arguments, spread
from elaunch.errors import StoreUnavailable
from elaunch.rendezvous.cluster.members import ClusterMembers
from elaunch.rendezvous.conf import RendezvousConf
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.security.identity import guest
from elaunch.rendezvous.security.secret import SecuritySettings
from tests.netns import Network, network

PORT = 29400
LIMIT_S = 90.0
STEPS = 20
LEASE_S = RendezvousConf().lease_ttl
ALLOWED_S = LEASE_S + 1.0  # until the next step


@dataclass
class Loss:
    """One kind of loss, and what became of it: seconds to the next step of the others."""

    hosts: int
    servers: int
    how: str
    seconds: list[float] = field(default_factory=list)
    tried: int = 0

    @property
    def name(self) -> str:
        return f"{self.how}, {self.hosts} hosts, {self.servers} server{'s' if self.servers > 1 else ''}"

    def cells(self) -> dict[str, str | int | float | None]:
        times = spread(self.seconds)
        return {
            "loss": self.how,
            "hosts": self.hosts,
            "servers": self.servers,
            "times": self.tried,
            "went_on": len(self.seconds),
            "least_s": times.least,
            "median_s": times.median,
            "worst_s": times.worst,
            "asked": f"< {ALLOWED_S:g} s",
        }


KINDS = [
    *(("killed", hosts, 1) for hosts in (2, 3, 4)),
    *(("killed", hosts, 3) for hosts in (3, 4)),
    *(("silent", hosts, 1) for hosts in (3, 4)),
    *(("silent", hosts, 3) for hosts in (3, 4)),
]


@contextmanager
def job(folder: Path, loss: Loss) -> Iterator[tuple[Network, list[Node]]]:
    """A job whose members are the workers of all hosts, and whose store is on as many servers as it should be."""
    names = "abcd"[: loss.hosts]
    with network() as wires, ExitStack() as stack:
        spaces = [wires.add(name) for name in names]
        job_id = str(time.monotonic_ns())
        endpoint = ",".join(f"{wires.address(name)}:{PORT}" for name in names[: loss.servers])
        flags = (
            *("--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", f"--rdzv-id={job_id}"),
            *(f"--nnodes=1:{loss.hosts}", "--rdzv-conf=last_call_timeout=60"),
        )
        nodes = [
            stack.enter_context(Node(folder, *flags, name=host, within=("ip", "netns", "exec", space)))
            for host, space in zip(names, spaces, strict=True)
        ]
        by = nodes[1]  # whoever is left
        by.wait(lambda: by.of("generation") != [], "a generation", LIMIT_S)
        by.wait(lambda: len(by.members()) == loss.hosts, "all to be members", LIMIT_S)
        by.wait(lambda: max(_steps(nodes), default=0) >= STEPS, f"{STEPS} steps", LIMIT_S)
        if loss.servers > 1:
            by.wait(lambda: _servers(endpoint, job_id) == loss.servers, f"a store on {loss.servers} hosts", LIMIT_S)
        yield wires, nodes


def _servers(endpoint: str, job: str) -> int:
    """How many servers of the store of a job have a vote."""
    store = EtcdStore(endpoint, timeout_s=2.0, pem=guest(SecuritySettings(), job, time.time()))
    try:
        return sum(one.votes for one in ClusterMembers(store).list())
    except StoreUnavailable:
        return 0
    finally:
        store.close()


def _steps(nodes: list[Node]) -> list[int]:
    return [line["step"] for node in nodes for line in node.of("step")]


def lose(folder: Path, loss: Loss) -> None:
    """Loses the first host once."""
    loss.tried += 1
    with job(folder, loss) as (wires, nodes):
        first, left = nodes[0], nodes[1:]
        started = [len(node.of("worker_started")) for node in left]
        time.sleep(random.random() * 2)
        t = time.time()
        if loss.how == "killed":
            first.agent.kill()
        else:
            wires.plug("a", into=False)

        def later() -> list[dict[str, float]]:
            lines = [line for node in left for line in node.of("step") if line["t"] > t]
            return sorted((line for line in lines if line["members"] == len(left)), key=lambda line: line["t"])

        left[0].wait(lambda: len(later()) > STEPS, "steps of those that are left", LIMIT_S)
        steps, known = _steps(left), set(_steps(nodes))
        if len(steps) > len(set(steps)) or known != set(range(max(known) + 1)):
            raise JobFailed("a step is missing or stands twice")
        if [len(node.of("worker_started")) for node in left] != started:
            raise JobFailed("a worker of the others was started again")
        loss.seconds.append(later()[0]["t"] - t)


class TorchrunHosts(Job):
    """The same hosts under torchrun."""

    def __init__(self, folder: Path, wires: Network, names: str) -> None:
        super().__init__("torchrun", Training(len(names), 0.02), folder)
        self._wires, self._spaces = wires, {name: wires.add(name) for name in names}
        self.agents: dict[str, subprocess.Popen[bytes]] = {}

    def begin(self) -> None:
        for name, space in self._spaces.items():
            conf = f"--rdzv-conf=last_call_timeout=5,is_host={name == 'a'}"  # torchrun asks for the host's name
            command = [
                *["ip", "netns", "exec", space, *TORCHRUN, f"--nnodes=1:{len(self._spaces)}", "--rdzv-backend=c10d"],
                *[f"--rdzv-endpoint={self._wires.address('a')}:{PORT}", "--rdzv-id=job", "--max-restarts=10"],
                *[conf, f"--local-addr={self._wires.address(name)}"],
                *[str(HERE / "peers/torchrun_train.py"), f"--commits={self.log}", *self.training.flags],
            ]
            self.agents[name] = self.processes.start(command, GLOO_SOCKET_IFNAME="eth0")

    def launcher(self) -> subprocess.Popen[bytes]:
        return self.agents["a"]


def lose_torchrun(folder: Path, hosts: int) -> dict[str, str | int | float | None]:
    """What becomes of the others of a job under torchrun."""
    names = "abcd"[:hosts]
    with network() as wires, TorchrunHosts(folder, wires, names) as running:
        running.wait_complete(-1, STEPS, LIMIT_S)
        t, n_commits = time.time(), len(running.commits())
        running.agents["a"].kill()
        others = [agent for name, agent in running.agents.items() if name != "a"]
        end_s = time.monotonic() + 60.0
        while any(agent.poll() is None for agent in others) and time.monotonic() < end_s:
            time.sleep(0.05)
        took_s = time.time() - t
        running.read()
        ended = sum(agent.poll() is not None for agent in others)
        return {
            "torchrun": f"killed, {hosts} hosts",
            "others_ended": f"{ended} of {len(others)}",
            "within_s": took_s,
            "steps_after": sum(one.t > t + 1 for one in running.commits()[n_commits:]),
        }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", choices=("killed", "silent", "torchrun"), nargs="+", help="some of the losses")
    parser.add_argument("--repeat", type=int, help="losses of each kind")
    parser.add_argument("--limit-s", type=int, default=3000, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    wanted = args.only or ("killed", "silent", "torchrun")
    losses = [Loss(hosts, servers, how) for how, hosts, servers in KINDS if how in wanted]
    if args.quick:
        losses = [one for one in losses if one.hosts == 3]
    report = Report("lost host: the first host of a job, and the store on it")
    folder = Path(tempfile.mkdtemp(prefix="elaunch-lost-host-"))
    limit_time(args.limit_s)
    try:
        for _ in range(args.repeat or (1 if args.quick else 12)):
            for loss in losses:
                try:
                    lose(folder, loss)
                except JobFailed as error:
                    print(f"{loss.name}: {error}", file=sys.stderr)
        if "torchrun" in wanted:
            report.row(lose_torchrun(folder, 3))
    except (TimeLimit, JobFailed) as error:
        report.notes.append(str(error))
    finally:
        signal.alarm(0)
        shutil.rmtree(folder, ignore_errors=True)
    for loss in losses:
        report.row(loss.cells())
        report.target(f"{loss.name}, worst", spread(loss.seconds).worst, "s", below=ALLOWED_S)
    if losses:
        tried = sum(one.tried for one in losses)
        report.target("jobs that went on", sum(len(one.seconds) for one in losses), f"of {tried}", at_least=tried)
    report.notes.append(f"lease_ttl {LEASE_S:g} s; real processes and namespaces on one machine; layers sleep")
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
