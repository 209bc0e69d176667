"""Devices and machines get sick under a job: it is told of, and a node leaves before it fails.

The GPUs are those of a stand-in for NVIDIA's library; the workers compute on the CPU.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.faults.test_nodes import Cluster
from tests.faults.test_workers import reference
from tests.helpers import Spawner, soak, wait_until
from tests.jobs.watch import (
    SCRIPT,
    Event,
    Node,
    assert_same,
    digests,
    elaunch,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)
from tests.nvml_stub import StubNvml

OFTEN = "--health-interval=0.02"


def health(node: Node) -> list[Event]:
    return [event for event in node.events("health") if event["subject"].startswith("GPU")]


def wait_for_health(node: Node, what: str) -> Event:
    def found() -> Event | None:
        return next((event for event in health(node) if event["what"] == what), None)

    event: Event = wait_for(node, found, 60, f"the event `health` of {what}")
    return event


@pytest.mark.parametrize(("what", "verdict"), [("xid 95", "drain"), soak("lost", "lost")])
def test_a_node_with_a_sick_gpu_leaves_and_no_step_is_lost(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, what: str, verdict: str
) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "40")
    gate = tmp_path / "gate"
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "40", "--gather", "3", "--hold", f"20:{gate}")
    gpus = StubNvml(tmp_path / "nvml", 2)
    sick = cluster.add("a", 2, OFTEN, environment=gpus.environment)
    staying = cluster.add("b")
    wait_for_members(cluster.nodes, 3)
    if what == "lost":
        gpus.set(1, lost=1)
    else:
        gpus.xid(1, 95)
    event = wait_for_health(sick, what)
    (worker,) = [one for one in sick.pids() if one.startswith("a/1#")]
    assert (event["worker"], event["subject"], event["verdict"]) == (worker, "GPU 1", verdict)
    sick.agent.wait_for_text("the workers of this node leave at the next step boundary; the others go on", 60)
    gate.touch()
    assert sick.agent.wait(60) == 0, sick.agent.tail()
    assert [event.get("exitcode") for event in sick.events("worker_exited")] == [0, 0]
    assert staying.agent.wait(100) == 0, staying.agent.tail()
    assert_same(losses(cluster.nodes), expected, 1e-9)
    assert digests(cluster.nodes) == samples
    # No step was interrupted: no generation came of a death.
    assert all("died" not in event["cause"] and "lost" not in event["cause"] for event in staying.events("generation"))


@pytest.mark.soak
def test_of_two_nodes_that_are_sick_at_once_one_stays(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "40")
    gate = tmp_path / "gate"
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "40", "--gather", "2", "--hold", f"20:{gate}")
    gpus = StubNvml(tmp_path / "nvml", 1)
    nodes = [cluster.add(name, 1, OFTEN, environment=gpus.environment) for name in "ab"]
    wait_for_members(nodes, 2)
    wait_for_step(nodes, 19)
    gpus.xid(0, 95)
    texts = ["the workers of this node leave at the next step boundary; the others go on", "this node stays in the job"]
    for text in texts:
        wait_until(lambda text=text: any(text in node.agent.text() for node in nodes), 60, text)  # type: ignore[misc]
    gate.touch()
    for node in nodes:
        assert node.agent.wait(100) == 0, node.agent.tail()
    told = sorted([text in node.agent.text() for text in texts] for node in nodes)
    assert told == [[False, True], [True, False]]
    assert_same(losses(nodes), expected, 1e-9)
    assert digests(nodes) == samples


def test_what_gpus_say_of_themselves_is_told_with_its_figures(spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    gpus = StubNvml(tmp_path / "nvml", 2)
    gpus.set(0, uncorrectable=2)
    script = (SCRIPT, "--steps", "20", "--hold", f"5:{gate}")
    flags = ("--standalone", "--nproc-per-node=2", OFTEN)
    node = elaunch(spawn, tmp_path, *flags, script=script, environment=gpus.environment)
    assert wait_for_health(node, "ecc uncorrectable")["verdict"] == "watch"  # from before the job
    wait_for_step(node, 3)
    gpus.set(1, uncorrectable=1, remap_failed=1, remap_pending=1, recovery=1)
    gpus.xid(1, 31)
    for what in ("remap failed", "remap pending", "recovery", "xid 31"):
        wait_for_health(node, what)
    told = {(event["worker"], event["what"]): (event["verdict"], event["evidence"]) for event in health(node)}
    assert told.pop(("node0/1#0", "xid 31")) == ("watch", {"xid": 31, "count": 1, "application": True})
    told.pop((None, "ecc uncorrectable"), None)  # before the worker was started, or
    told.pop(("node0/0#0", "ecc uncorrectable"), None)
    assert told == {
        ("node0/1#0", "ecc uncorrectable"): ("drain", {"new": 1, "total": 1}),
        ("node0/1#0", "remap failed"): ("drain", {}),
        ("node0/1#0", "remap pending"): ("watch", {}),
        ("node0/1#0", "recovery"): ("drain", {"recovery": "reset"}),
    }
    gate.touch()
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert "this node stays in the job, which would have no other node without it" in node.agent.text()


@pytest.mark.soak
def test_with_the_policy_report_a_sick_node_stays(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "40", "--gather", "2", "--hold", f"20:{gate}")
    gpus = StubNvml(tmp_path / "nvml", 1)
    sick = cluster.add("a", 1, OFTEN, "--health-policy=report", environment=gpus.environment)
    other = cluster.add("b")
    wait_for_members(cluster.nodes, 2)
    gpus.xid(0, 79)
    assert wait_for_health(sick, "xid 79")["verdict"] == "lost"
    sick.agent.wait_for_text("GPU 0 of worker a/0#", 30)
    gate.touch()
    for node in (sick, other):
        assert node.agent.wait(100) == 0, node.agent.tail()
    assert "leave at the next step boundary" not in sick.agent.text()


@pytest.mark.soak
def test_a_sick_node_without_another_stays_until_one_comes(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path) -> None:
    cluster = Cluster(spawn, tmp_path, etcd, "1:2", "--steps", "4000", "--sleep", "0.02", "--crew", "1")
    gpus = StubNvml(tmp_path / "nvml", 1)
    sick = cluster.add("a", 1, OFTEN, environment=gpus.environment)
    wait_for_step(sick, 3)
    gpus.xid(0, 48)
    sick.agent.wait_for_text("this node stays in the job, which would have no other node without it", 60)
    wait_for_step(sick, sick.last_step() + 10)
    other = cluster.add("b")
    assert sick.agent.wait(100) == 0, sick.agent.tail()
    wait_for_step(other, max(sick.last_step(), other.last_step()) + 5)
    assert {worker.split("/")[0] for worker in other.members()} == {"b"}
    losses(cluster.nodes)


def test_without_nvidias_library_nothing_is_said_of_devices(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, "--standalone", OFTEN, script=(SCRIPT, "--steps", "5"))
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert health(node) == []
    assert "nvml" not in node.agent.text().lower()


def test_a_job_that_takes_no_look_at_its_health_runs(spawn: Spawner, tmp_path: Path) -> None:
    gpus = StubNvml(tmp_path / "nvml", 1)
    gpus.set(0, lost=1)
    node = elaunch(
        spawn,
        tmp_path,
        "--standalone",
        OFTEN,
        "--health-policy=off",
        script=(SCRIPT, "--steps", "20"),
        environment=gpus.environment,
    )
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert node.events("health") == []


def test_many_open_files_of_a_worker_are_told_of(spawn: Spawner, tmp_path: Path) -> None:
    """With a limit that the agent is below, and a worker reaches by what it opens."""
    script = tmp_path / "opens.py"
    script.write_text(
        "import os, resource, sys, time\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))\n"
        "held = [os.open(os.devnull, os.O_RDONLY) for _ in range(185)]\n"
        "while not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"
    )
    gate = tmp_path / "gate"
    node = elaunch(spawn, tmp_path, "--standalone", OFTEN, script=(script, gate))
    event: Event = wait_for(node, lambda: next(iter(node.events("health")), None), 60, "an event of the descriptors")
    assert (event["subject"], event["what"]) == ("worker node0/0#0", "file descriptors")
    assert event["evidence"]["limit"] == 200
    gate.touch()
    assert node.agent.wait(60) == 0, node.agent.tail()


CGROUP = Path("/sys/fs/cgroup")


def memory_group(name: str) -> Path:
    """A control group for memory of this test's own, of the version that this machine has.

    Skips the test where this process may not make one: the same decision is tested on files in test_host.py.
    """
    own = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in Path("/proc/self/cgroup").read_text().splitlines()}
    version_1 = (CGROUP / "memory/memory.limit_in_bytes").exists()
    root = CGROUP / "memory" if version_1 else CGROUP
    parent = root / own.get("memory" if version_1 else "", "/").lstrip("/")
    folder = (parent if parent.is_dir() else root) / name
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made in {folder.parent}: {error.strerror}")
    try:
        (folder / ("memory.limit_in_bytes" if version_1 else "memory.max")).write_text(str(400 << 20))
    except OSError as error:
        folder.rmdir()
        pytest.skip(f"the memory of a control group cannot be bounded: {error.strerror}")
    return folder


def test_a_worker_that_fills_its_memory_is_told_of_before_it_is_killed(spawn: Spawner, tmp_path: Path) -> None:
    group = memory_group(f"elaunch-test-{os.getpid()}")
    script = tmp_path / "grows.py"
    script.write_text(
        "import time\nheld = []\nwhile True:\n    held.append(bytearray(b'x') * (2 << 20))\n    time.sleep(0.02)\n"
    )
    events = tmp_path / "events.jsonl"
    try:
        # The group is entered before elaunch starts, so that agent and worker are in it from their first page.
        enter = f'echo $$ > {group}/cgroup.procs; exec "$@"'
        command: list[str | Path] = ["sh", "-c", enter, "sh", sys.executable, "-m", "elaunch"]
        flags: list[str | Path] = [
            "--standalone",
            "--max-restarts=0",
            "--health-interval=0.1",
            "--preload=",
            "--events",
            events,
            script,
        ]
        node = Node(spawn([*command, *flags], name="elaunch"), events)
        assert node.agent.wait(100) == 1, node.agent.tail()
        (told,) = [event for event in node.events("health") if event["what"] == "memory"][:1]
        (end,) = node.events("worker_exited")
        assert end["signal"] == 9, "the kernel killed it"
        assert told["t"] < end["t"]
        assert (told["evidence"]["worker"], told["evidence"]["limit_bytes"]) == ("node0/0#0", 400 << 20)
        assert told["worker"] == "node0/0#0"
        assert told["evidence"]["full_in_s"] > 0
    finally:
        wait_until(lambda: not (group / "cgroup.procs").read_text().split(), 30, "the end of the group's processes")
        group.rmdir()
