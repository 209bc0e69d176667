"""`elaunch schedule` on a real Slurm: elastic jobs come, grow, give nodes back; nodes and the daemon are lost."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.scheduler.model import ClusterNode, JobState
from elaunch.scheduler.service.advance import WaitLimits
from elaunch.scheduler.service.changes import JobNow
from elaunch.scheduler.service.decide import next_schedule
from elaunch.scheduler.service.documents import AgentStage, JobStage, by_name
from elaunch.scheduler.service.known import KnownSpeeds
from elaunch.scheduler.service.reports import JobReport
from elaunch.scheduler.service.stored import Stored, read_all
from elaunch.scheduler.speeds import TableSpeed
from elaunch.scheduler.suika import Suika
from elaunch.simulator.cluster import simulate_cluster
from elaunch.simulator.cluster_model import ClusterJob
from elaunch.simulator.jobs import cluster_nodes
from elaunch.simulator.traces import NodeChange
from tests.helpers import ROOT, Spawned, Spawner, wait_until
from tests.jobs.watch import Node as Agent
from tests.jobs.watch import digests, losses
from tests.slurm import TestSlurm, slurm

SCRIPT = ROOT / "tests" / "jobs" / "endless.py"
LIMIT_S = 90.0

pytestmark = pytest.mark.timeout(400)


class Cluster:
    """A Slurm, an etcd, the daemon, and what stands in etcd."""

    def __init__(self, spawn: Spawner, folder: Path, commands: TestSlurm, endpoint: str, store: EtcdStore) -> None:
        self.spawn, self.folder, self.slurm, self.store = spawn, folder, commands, store
        self.daemon: Spawned | None = None
        self.env = {
            "SLURM_CONF": str(commands.configuration),
            "PET_RDZV_ENDPOINT": endpoint,
            "ELAUNCH_PRELOAD": "",  # nobody dies: no warm parents
        }

    def schedule(self, *words: object) -> Spawned:
        return self.spawn.elaunch("schedule", *words, env=self.env, name=f"schedule-{words[0]}")

    def run(self, *flags: str) -> Spawned:
        events = self.folder / "schedule.jsonl"
        self.daemon = self.schedule(
            "run", f"--folder={self.folder / 'agents'}", "--devices=cpu", "--interval=0.5", f"--events={events}", *flags
        )
        return self.daemon

    def submit(self, name: str, *flags: str, rates: str = "", leave_s: int = 60) -> None:
        file = self.folder / f"{name}.toml"
        file.write_text(f'name = "{name}"\nleave_s = {leave_s}\n{rates}')
        events = self.folder / f"{name}-%n.jsonl"
        script = [SCRIPT, self.folder / f"{name}.end", "0.05"]
        ended = self.schedule("submit", *flags, file, "--", "--events", events, *script)
        assert ended.wait(LIMIT_S) == 0, ended.tail()

    def stored(self) -> Stored:
        return read_all(self.store, "main")

    def held(self) -> dict[str, list[str]]:
        """The nodes on which each job runs, as Slurm says."""
        found: dict[str, list[str]] = {}
        for name, node in self.slurm.running().items():
            found.setdefault(name.split(":")[2].split(".")[0], []).append(node)
        return {job: sorted(nodes) for job, nodes in found.items()}

    def agents(self, job: str) -> list[Agent]:
        return [Agent(None, path) for path in sorted(self.folder.glob(f"{job}-*.jsonl"))]  # type: ignore[arg-type]

    def agent(self, job: str, node: str) -> psutil.Process:
        """The process of a job's agent on a node."""
        number = next(agent.number for agent in self.stored().progress[job].agents if agent.node == node)
        words = {f"--node-name={node}-{number}", f"--rdzv-id={job}.0"}
        found = {
            process.pid: process
            for process in psutil.process_iter(["cmdline"])
            if words <= set(process.info["cmdline"] or ()) and str(self.folder) in " ".join(process.info["cmdline"])
        }
        pythons = {pid for pid, process in found.items() if process.name().startswith("python")}
        (agent,) = [found[pid] for pid in pythons if found[pid].ppid() not in pythons]
        return agent

    def last_step(self, job: str) -> int:
        return max((agent.last_step() for agent in self.agents(job)), default=-1)

    def settled(self, sizes: dict[str, int], without: str = "") -> dict[str, list[str]]:
        """Waits until jobs have so many nodes, all of which take part, as Slurm, etcd and the jobs say."""

        def there() -> dict[str, list[str]] | None:
            time.sleep(0.2)
            progress = self.stored().progress
            stages = {agent.stage for job in sizes if job in progress for agent in progress[job].agents}
            if stages != {AgentStage.JOINED} or [self.members(job) for job in sizes] != list(sizes.values()):
                return None
            held = self.held()
            used = [node for nodes in held.values() for node in nodes]
            return held if {job: len(nodes) for job, nodes in held.items()} == sizes and without not in used else None

        return wait_until(there, LIMIT_S, lambda: f"{sizes}; there are {self.held()}")

    def members(self, job: str) -> int:
        """How many did the newest step."""
        steps = [event for agent in self.agents(job) for event in agent.events("step")]
        return max(steps, key=lambda event: event["step"])["members"] if steps else 0

    def check_schedule(self) -> None:
        """What stands in etcd and what Slurm has is what the pure function says of it."""
        stored = self.stored()
        placements = by_name(stored.schedule.placements)
        jobs = [JobNow(spec, stored.progress[spec.name], placements[spec.name]) for spec in stored.jobs]
        nodes = [ClusterNode(row.name, row.devices, row.kind, row.rack, row.usable) for row in stored.schedule.nodes]
        speeds = KnownSpeeds().of([(spec, JobReport()) for spec in stored.jobs], nodes, time.time())
        again, _ = next_schedule(Suika(), jobs, nodes, speeds, time.time(), WaitLimits())
        assert by_name(again.placements).keys() == placements.keys()
        for name, placement in by_name(again.placements).items():
            assert dict(placement.allocation) == dict(placements[name].allocation)
            assert sorted(placement.allocation) == self.held()[name]

    def end(self, job: str) -> None:
        (self.folder / f"{job}.end").touch()
        wait_until(lambda: self.stored().progress[job].stage is JobStage.DONE, LIMIT_S, f"the end of {job}")


@pytest.fixture
def cluster(spawn: Spawner, tmp_path: Path, etcd: EmbeddedEtcd) -> Iterator[Cluster]:
    store = EtcdStore(etcd.endpoint, timeout_s=5.0)
    with contextlib.closing(store), slurm(spawn, nodes=4, cpus=1) as commands:
        here = Cluster(spawn, tmp_path, commands, etcd.endpoint, store)
        try:
            yield here
        finally:
            if here.daemon is not None:
                here.daemon.end()


RATES = """
[rates]
1 = 10.0
2 = 19.5
3 = {three}
"""


def test_elastic_jobs_share_a_slurm(cluster: Cluster) -> None:
    cluster.submit("a", "--basic=1", "--most=3", rates=RATES.format(three=28.0))
    cluster.submit("b", "--basic=1", "--most=3", rates=RATES.format(three=20.0))
    daemon = cluster.run()
    held = cluster.settled({"a": 2, "b": 2})  # growth goes where the next device brings most
    cluster.check_schedule()

    drained = held["b"][-1]
    cluster.slurm("scontrol", "update", f"NodeName={drained}", "State=DRAIN", "Reason=test")
    cluster.settled({"a": 2, "b": 1}, without=drained)
    cluster.check_schedule()

    daemon.signal(signal.SIGKILL)
    assert daemon.wait(LIMIT_S) == -signal.SIGKILL
    before = cluster.slurm.running()
    steps = cluster.last_step("a")
    cluster.submit("c", "--basic=1", "--priority=5")
    wait_until(lambda: cluster.last_step("a") > steps, LIMIT_S, "steps without a daemon")
    daemon = cluster.run()
    cluster.settled({"a": 1, "b": 1, "c": 1}, without=drained)
    cluster.check_schedule()
    after = cluster.slurm.running()
    assert {name for name in before if name in after} == set(after) - {"elaunch:main:c.0.0"}, "nothing was started anew"
    wait_until(lambda: cluster.last_step("c") >= 10, LIMIT_S, "steps of c")
    status = cluster.schedule("status")
    assert status.wait(LIMIT_S) == 0, status.tail()
    assert "job c: running on 1 device" in status.text()
    assert f"node {drained}: 1 device, not usable" in status.text()
    assert "job c needs 1 device" in status.text()

    cluster.end("c")
    cluster.slurm("scontrol", "update", f"NodeName={drained}", "State=RESUME")
    cluster.settled({"a": 2, "b": 2})
    cluster.end("a")
    cluster.end("b")

    wait_until(lambda: not cluster.held(), LIMIT_S, "the end of all agents")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(LIMIT_S) == 0, daemon.tail()
    for job in ("a", "b", "c"):
        progress = cluster.stored().progress[job]
        assert (progress.attempt, progress.agents) == (0, ()), "nobody began again"
        assert len(losses(cluster.agents(job))) > 10, "each step committed once, see there"
    done = {job: digests(cluster.agents(job)) for job in ("a", "b", "c")}
    for job in ("a", "b"):  # c was never disturbed, and these two at other steps
        assert done[job][: len(done["c"])] == done["c"]
    shared = min(len(done["a"]), len(done["b"]))
    assert done["a"][:shared] == done["b"][:shared]
    interrupted = [event for job in done for agent in cluster.agents(job) for event in agent.events("transition")]
    assert not any(event["interrupted"] for event in interrupted), "nodes come and leave between two steps"
    kinds = {event["kind"] for event in events(cluster.folder / "schedule.jsonl")}
    assert {"leads", "decided", "starts", "grows", "shrinks", "joined", "done"} <= kinds
    assert decisions(events(cluster.folder / "schedule.jsonl")) == simulated_decisions(drained)


def decisions(logged: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """What jobs were to have, as the daemon has told it: `grow: grows from 1 to 2 devices (n1: 1, n3: 1)`."""
    told = [(event["job"], event["text"]) for event in logged if event["kind"] == "decided"]
    return [(job, text.partition(")")[0]) for job, text in told if not text.startswith("wait: ")]


def simulated_decisions(drained: str) -> list[tuple[str, str]]:
    """The same of the simulator, with the same jobs and nodes; there things happen far apart, in the same order."""

    def job(
        name: str, at_s: float, samples: float, most: int, rates: dict[int, float], priority: int = 0
    ) -> ClusterJob:
        return ClusterJob(JobState(name, at_s, 1, most, priority=priority), samples, TableSpeed(rates))

    jobs = [
        job("a", 0.0, 10_000.0, 3, {1: 10.0, 2: 19.5, 3: 28.0}),
        job("b", 0.0, 12_000.0, 3, {1: 10.0, 2: 19.5, 3: 20.0}),
        job("c", 200.0, 100.0, 1, {1: 1.0}, priority=5),
    ]
    changes = [NodeChange(100.0, drained=(drained,)), NodeChange(400.0, joined=(drained,))]
    run = simulate_cluster(jobs, cluster_nodes(4, 1, per_rack=4), Suika(), changes=changes)
    assert run.jobs["c"].ended_s == 300.0
    return [(one.job, f"{one.action}: {one.text}".partition(")")[0]) for one in run.decided]


@pytest.mark.soak
def test_a_lost_node_and_an_agent_that_does_not_leave(cluster: Cluster) -> None:
    cluster.slurm("scontrol", "update", "NodeName=n4", "State=DRAIN", "Reason=three are enough")
    cluster.submit("a", "--basic=2", "--most=3", rates=RATES.format(three=28.0), leave_s=5)
    daemon = cluster.run("--kill-timeout=3")
    cluster.settled({"a": 3})
    cluster.slurm.lose("n2", cluster.agent("a", "n2").pid)
    cluster.settled({"a": 2}, without="n2")
    assert "lost its agent on n2, which ended with NODE_FAIL" in daemon.text()
    cluster.slurm.start("n2")
    cluster.slurm("scontrol", "update", "NodeName=n2", "State=RESUME")
    cluster.settled({"a": 3})

    (growth,) = cluster.stored().schedule.placements[0].growths
    ((node, _),) = growth.devices
    cluster.agent("a", node).suspend()
    cluster.submit("b", "--basic=1", "--priority=5")
    cluster.settled({"a": 2, "b": 1})
    assert f"a its agent on {node} has not left within 5 s: it gets SIGTERM, and the job grows no more" in daemon.text()
    assert f"a its agent on {node} is still there 3 s after SIGTERM: killed" in daemon.text()
    cancelled = cluster.schedule("cancel", "a", "b")
    assert cancelled.wait(LIMIT_S) == 0, cancelled.tail()
    wait_until(lambda: not cluster.held(), LIMIT_S, "the end of all agents")
    wait_until(
        lambda: {cluster.stored().progress[job].stage for job in "ab"} == {JobStage.CANCELLED}, LIMIT_S, "their end"
    )
    losses(cluster.agents("a"))
    assert cluster.stored().progress["a"].attempt == 0


@pytest.mark.soak
@pytest.mark.parametrize("only_the_script", [True, False])
def test_a_time_limit_ends_a_job_as_the_docs_say(
    spawn: Spawner, tmp_path: Path, etcd: EmbeddedEtcd, only_the_script: bool
) -> None:
    """The batch script of docs/slurm.md; without `B:` in it, the signal kills the workers, too."""
    (text,) = re.findall(r"```sh\n(#!/bin/sh\n#SBATCH.*?)```", (ROOT / "docs" / "slurm.md").read_text(), re.DOTALL)
    words = {
        "etcd.example:2379": etcd.endpoint,
        "--nodes=4": "--nodes=2",
        "--nnodes=4 --nproc-per-node=8": f"--nnodes=2 --events {tmp_path}/%n.jsonl",
        "--time=1-0": "--time=1",
        "B:USR1@180": "B:USR1@30" if only_the_script else "USR1@30",
        "/shared/run7 train.py": f"{tmp_path}/saved {SCRIPT} {tmp_path}/end 0.05",
    }
    for word, ours in words.items():
        assert word in text
        text = text.replace(word, ours)
    script = tmp_path / "job.sh"
    script.write_text(text)
    with slurm(spawn, nodes=2, cpus=1) as commands:
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        submitted = spawn(
            ["sbatch", f"--output={tmp_path}/out", script],
            env={"SLURM_CONF": str(commands.configuration), "PATH": path, "ELAUNCH_PRELOAD": ""},
        )
        assert submitted.wait(LIMIT_S) == 0, submitted.tail()
        wait_until(lambda: not commands("squeue", "-h").strip(), 2 * LIMIT_S, lambda: (tmp_path / "out").read_text())
    out = (tmp_path / "out").read_text()
    logs = [Agent(None, path) for path in tmp_path.glob("*.jsonl")]  # type: ignore[arg-type]
    exits = [event for log in logs for event in log.events("worker_exited")]
    assert len(losses(logs)) > 20
    if only_the_script:
        assert re.search(r"have left, [0-9.]+ s after it was asked for", out), out
        assert "from which the job goes on when it is started again" in out
        assert len(exits) == 2
        assert list((tmp_path / "saved").glob("step-*"))
    else:
        assert signal.SIGUSR1 in [event.get("signal") for event in exits], out


def events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
