"""Workers that run and do not go on are found, their stacks kept, and the job goes on; who only takes long is not."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from elaunch.detect.hang import CHANGE_S
from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.helpers import ROOT, Spawner, once_a_session, soak
from tests.jobs.watch import SCRIPT, Node, assert_same, digests, elaunch, losses

LAYERS = ROOT / "tests" / "jobs" / "layers.py"
DTENSOR = ROOT / "tests" / "jobs" / "dtensor.py"
THREE = ("--standalone", "--nproc-per-node=3")
FOUR = ("--standalone", "--nproc-per-node=4", "--consistency=bitwise")
STEPS = 50
AT = 25
DATA_PARALLEL = ("--steps", str(STEPS), "--sleep", "0.01")
HYBRID = ("--dp=2", "--pp=2", "--steps", str(STEPS), "--row-seconds", "0.0005")
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)

Reference = tuple[dict[int, float], list[str]]


def reference(spawn: Spawner, folder: Path, script: Path) -> Reference:
    """Losses and digests of an undisturbed run by one worker; done once a session."""
    arguments = (script, "--steps", str(STEPS), *(("--pp=1",) if script == LAYERS else ()))

    def run() -> Reference:
        node = elaunch(spawn, folder, "--standalone", script=arguments, name="reference")
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        return losses(node), digests(node)

    return once_a_session(("undisturbed", *arguments), run)


def found(node: Node) -> dict[str, Any]:
    """The one hang of a job."""
    (event,) = node.events("hang")
    return event


def check(node: Node, expected: Reference, worker: str) -> dict[str, Any]:
    """That this worker alone was blamed and killed, its stacks are there, and the job ended as if it had not been."""
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    event = found(node)
    assert event["worker"] == worker, node.agent.tail()
    assert_only_killed(worker, [node])
    assert_same(losses(node), expected[0], 1e-9)
    assert digests(node) == expected[1]
    stacks = Path(event["stacks"]).read_text()
    assert stacks.startswith(f"{worker}, pid ")
    assert event["place"] in node.agent.text()
    assert event["stacks"] in node.agent.text()
    return event


def assert_only_killed(worker: str, nodes: Sequence[Node]) -> None:
    """That this member was killed, and the others finished."""
    exits = {one["worker"]: one for node in nodes for one in node.events("worker_exited")}
    assert exits.pop(worker).get("signal") == signal.SIGKILL
    # The job may be over before the replacement is a member; then it is ended.
    replacement = exits.pop(f"{worker.removesuffix('#0')}#1", {"exitcode": 0})
    assert replacement.get("exitcode") == 0 or replacement["signal"] in (signal.SIGTERM, signal.SIGKILL)
    assert {one.get("exitcode") for one in exits.values()} == {0}, nodes[0].agent.tail()


KINDS = {
    "loop": "in a loop that calls nothing",
    "call": "in a call that keeps the interpreter's lock",
    "sleep": "asleep",
    "lock": "asleep",
}


@pytest.mark.parametrize("kind", [soak("loop"), "call", soak("sleep"), soak("lock")])
def test_a_data_parallel_worker_that_hangs_is_replaced(spawn: Spawner, tmp_path: Path, kind: str) -> None:
    expected = reference(spawn, tmp_path, SCRIPT)
    script = (SCRIPT, *DATA_PARALLEL, "--hang", f"1:{AT}:{kind}")
    node = elaunch(spawn, tmp_path, *THREE, "--log-dir", str(tmp_path / "logs"), script=script)
    event = check(node, expected, "node0/1#0")
    assert event["doing"] == f"in step {AT}, {KINDS[kind]}"
    assert event["step"] == AT
    assert event["since_s"] >= event["limit_s"] > event["typical_step_s"] > 0
    assert re.match(rf"hangs\.py:\d+ in {kind} < hangs\.py:\d+ in hang < ", event["place"])
    assert Path(event["stacks"]).is_relative_to(tmp_path / "logs")
    # As faulthandler writes it, and as py-spy does where there is one.
    assert re.search(rf"hangs\.py.* in {kind}$|^ +{kind} .*hangs\.py", Path(event["stacks"]).read_text(), re.MULTILINE)


@pytest.mark.parametrize(("slot", "kind"), [soak(0, "loop"), soak(3, "call"), (2, "lock")])
def test_a_worker_of_a_hybrid_job_that_hangs_in_a_layer_is_replaced(
    spawn: Spawner, tmp_path: Path, slot: int, kind: str
) -> None:
    expected = reference(spawn, tmp_path, LAYERS)
    node = elaunch(spawn, tmp_path, *FOUR, script=(LAYERS, *HYBRID, "--hang", f"{slot}:{AT}:{kind}"))
    event = check(node, expected, f"node0/{slot}#0")
    assert event["doing"] == f"in step {AT}, {KINDS[kind]}"
    assert f" in {kind} < " in event["place"]


@pytest.mark.soak
def test_one_that_does_not_come_to_the_next_step_is_replaced(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, LAYERS)
    script = (LAYERS, *HYBRID, "--hang-between", "--hang", f"1:{AT}:sleep")
    event = check(elaunch(spawn, tmp_path, *FOUR, script=script), expected, "node0/1#0")
    assert event["doing"] == f"before step {AT}, asleep"
    assert event["limit_s"] > 30


@pytest.mark.soak
def test_one_that_saves_or_logs_for_all_between_two_steps_is_no_hang(spawn: Spawner, tmp_path: Path) -> None:
    """It may sleep there for far longer than a step takes: on a file system, or for a server's answer."""
    script = (LAYERS, *HYBRID, "--hang-between", "--pause", f"0:{AT}:6")
    node = elaunch(spawn, tmp_path, *FOUR, script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert node.events("hang") == []
    assert len(node.events("worker_exited")) == 4


@pytest.mark.soak
def test_a_worker_of_a_runtime_with_hooks_that_hangs_is_replaced(spawn: Spawner, tmp_path: Path) -> None:
    model = ("--layout=2x2", "--layers=2", "--width=32", "--heads=2", "--batch-size=8", "--context=16")
    script: tuple[str | Path, ...] = (DTENSOR, *model, "--steps=40", "--corpus-bytes=100000", "--hang", f"2:{AT}:lock")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=4", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    event = found(node)
    assert (event["worker"], event["doing"]) == ("node0/2#0", f"in step {AT}, asleep")
    assert " in lock < " in event["place"]
    assert sorted(losses(node)) == list(range(40))


def test_of_workers_that_wait_for_each_other_one_is_taken_out(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, SCRIPT)
    node = elaunch(spawn, tmp_path, *THREE, script=(SCRIPT, *DATA_PARALLEL, "--cross", str(AT)))
    event = check(node, expected, "node0/2#0")
    assert [re.sub(r", operation \d+$", "", one) for one in event["waits"]] == [
        f"node0/0#0 for node0/1#0, in step {AT}",
        f"node0/1#0 for node0/2#0, in step {AT}",
        f"node0/2#0 for node0/0#0, in step {AT}",
    ]


@pytest.mark.parametrize("limit", [soak("auto"), "3"])
def test_of_workers_of_two_nodes_too(etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path, limit: str) -> None:
    """No agent sees all of them: each says that its own wait, and the leader finds that nobody else is left."""
    expected = reference(spawn, tmp_path, SCRIPT)
    flags = (
        "--nnodes=2",
        "--nproc-per-node=2",
        f"--rdzv-endpoint={etcd.endpoint}",
        "--rdzv-id=job",
        "--rdzv-conf=attach_timeout=90",
        f"--hang-timeout={limit}",
    )
    script = (SCRIPT, *DATA_PARALLEL, "--cross", str(AT))
    nodes = [elaunch(spawn, tmp_path, *flags, f"--node-name={name}", script=script, name=name) for name in ("a", "b")]
    for node in nodes:
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    (event,) = [event for node in nodes for event in node.events("hang")]
    members = next(one["workers"] for one in nodes[0].events("generation") if one["generation"] == event["generation"])
    assert event["worker"] == members[3]
    assert event["doing"] == f"in step {AT}, waits like all 4 members"
    assert [re.sub(r", operation \d+$", "", one) for one in event["waits"]] == [
        f"{worker} for {members[(rank + 1) % 4]}, in step {AT}" for rank, worker in enumerate(members)
    ]
    assert event["since_s"] > event["limit_s"] > (CHANGE_S if limit == "auto" else 2.9)
    assert f"{event['worker']}, pid " in Path(event["stacks"]).read_text()
    assert_only_killed(event["worker"], nodes)
    assert_same(losses(nodes), expected[0], 1e-9)
    assert digests(nodes) == expected[1]


def test_as_long_as_bytes_come_nobody_hangs(spawn: Spawner, tmp_path: Path) -> None:
    """All workers wait in one operation, which a slow link makes last far longer than the limit."""
    script = (SCRIPT, "--steps=26", "--width=512", "--dtype=float32", "--throttle", f"1:{AT}:100000")
    node = elaunch(spawn, tmp_path, *THREE, "--hang-timeout=2", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert node.events("hang") == []
    assert node.events("step")[-1]["seconds"] > 4


def test_a_collective_that_one_worker_leaves_out_is_no_hang(spawn: Spawner, tmp_path: Path) -> None:
    """What the others expect does not come, and the links say so: the step is done again."""
    expected = reference(spawn, tmp_path, SCRIPT)
    node = elaunch(spawn, tmp_path, *THREE, script=(SCRIPT, *DATA_PARALLEL, "--skip", f"1:{AT}"))
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert_same(losses(node), expected[0], 1e-9)


def test_one_that_works_on_has_the_users_limit(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, SCRIPT)
    script = (SCRIPT, *DATA_PARALLEL, "--hang", f"1:{AT}:work")
    event = check(elaunch(spawn, tmp_path, *THREE, "--hang-timeout=3", script=script), expected, "node0/1#0")
    assert event["limit_s"] == 3.0
    assert event["doing"] == f"in step {AT}, busy"


@pytest.mark.parametrize("load", [0, soak(2)])
@pytest.mark.soak
def test_evaluations_pauses_of_all_and_noise_under_load_are_no_hang(spawn: Spawner, tmp_path: Path, load: int) -> None:
    """The first worker alone evaluates for many steps' time, then all do, then all pause, beside other work."""
    for number in range(load * (os.cpu_count() or 1)):
        spawn.python("-c", "while True: pass", name=f"load{number}")
    all_of = [
        word
        for slot in range(3)
        for word in ("--busy", f"{slot}:30:4", "--pause", f"{slot}:40:4", "--busy", f"{slot}:{20 + slot}:0.5")
    ]
    script: tuple[str | Path, ...] = (SCRIPT, *DATA_PARALLEL, "--busy", "0:25:6", *all_of)
    node = elaunch(spawn, tmp_path, *THREE, script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert node.events("hang") == []
    assert {event["worker"] for event in node.events("worker_exited")} == {f"node0/{slot}#0" for slot in range(3)}
    assert len(losses(node)) == STEPS


@pytest.mark.soak
def test_off_means_off(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, *DATA_PARALLEL, "--pause", f"1:{AT}:6")
    node = elaunch(spawn, tmp_path, *THREE, "--hang-timeout=off", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert node.events("hang") == []
