"""Workers of a job whose model is cut over them die, and come back; no bit of the result changes."""

from __future__ import annotations

import os
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from elaunch.plan import Plan, symmetric
from tests.helpers import ROOT, Spawner, once_a_session, scaled, soak
from tests.jobs.watch import Node, assert_same, digests, elaunch, losses, wait_for, wait_for_members, wait_for_step

SCRIPT = ROOT / "tests" / "jobs" / "layers.py"
FOUR = ("--standalone", "--nproc-per-node=4", "--consistency=bitwise")
STEPS = ("--steps", "14")
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)

Reference = tuple[dict[int, float], list[str], dict[str, str]]


def weights(node: Node) -> dict[str, str]:
    """Digest of each layer at the end, the same on all who have it."""
    found: dict[str, str] = {}
    for layer, digest in re.findall(r"^weights (\d+) (\w+)", node.agent.text(), re.MULTILINE):
        assert found.setdefault(layer, digest) == digest, f"layer {layer} differs between workers\n{node.agent.tail()}"
    return found


def reference(spawn: Spawner, folder: Path, *arguments: str, device: str = "cpu") -> Reference:
    """An undisturbed run by one worker; done once a session."""

    def run() -> Reference:
        script: tuple[str | Path, ...] = (SCRIPT, "--pp=1", *arguments)
        node = elaunch(spawn, folder, "--standalone", script=script, name="reference", device=device)
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        return losses(node), digests(node), weights(node)

    return once_a_session((SCRIPT, device, *arguments), run)


def gone(node: Node, worker: str) -> bool:
    return worker not in node.members()


def run(spawn: Spawner, folder: Path, *arguments: str, policy: str = "auto") -> Node:
    return elaunch(spawn, folder, *FOUR, f"--policy={policy}", script=(SCRIPT, "--dp=2", "--pp=2", *arguments))


def check(node: Node, expected: Reference, dead: list[str], rounding: float = 0.0) -> None:
    """That these workers were killed, and the job ended well, with the undisturbed run's results, bit by bit.

    `rounding`: by how much losses may differ, relatively, where a result is not to have the same bits.
    """
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    exits = {event["worker"]: event for event in node.events("worker_exited")}
    for worker in dead:
        assert exits.pop(f"node0/{worker}").get("signal") == signal.SIGKILL, node.agent.tail()
    assert not any(event.get("exitcode") for event in exits.values()), node.agent.tail()
    found, samples, ended = expected
    assert digests(node) == samples
    if rounding:
        assert_same(losses(node), found, rounding)
        return
    assert losses(node) == found
    assert weights(node) == ended


@pytest.mark.parametrize(
    ("phase", "slot"),
    [
        soak("compute", 0),
        soak("compute", 3),
        soak("ship", 0),
        soak("ship", 3),
        soak("enter", 0),
        soak("enter", 3),
        soak("half", 0),
        soak("half", 3),
        soak("passed", 0),
        soak("passed", 3),
        ("share", 0),
        soak("share", 3),
    ],
)
def test_a_death_in_any_phase_of_a_step_changes_no_bit(spawn: Spawner, tmp_path: Path, phase: str, slot: int) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    node = run(spawn, tmp_path, *STEPS, "--die", f"{slot}:5:{phase}")
    check(node, expected, [f"{slot}#0"])


def test_nor_does_one_of_a_worker_whose_samples_are_loaded_ahead(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    node = run(spawn, tmp_path, *STEPS, "--die", "3:5:half", "--loaders", "2")
    check(node, expected, ["3#0"])


def test_nor_does_one_while_weight_gradients_are_deferred(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    node = run(spawn, tmp_path, *STEPS, "--deferred", "2", "--die", "3:5:half", policy="reroute")
    check(node, expected, ["3#0"])
    given, *others = node.events("decision")
    assert Plan.parse(given["plan"]).deferred == 2
    assert any(event["policy"] == "reroute" and "node0/3#0 left" in event["reason"] for event in others)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        soak("3#0", "5:vote"),
        soak("0#0", "5:vote"),
        soak("2#0", "5:held_state"),
        soak("0#0", "5:connect"),
        soak("2#0", "5:moving"),  # it has a copy of what the first one had
        ("0#0", "5:receive"),  # nobody is left of the first stage
        soak("3#0", "5:resume"),
        soak("0#0", "5:resume"),
        soak("3#0", "5:compute"),
        soak("2#0", "6:ship"),
        soak("0#0", "5:passed"),
        soak("1#1", "0:receive"),
        soak("1#1", "0:resume"),
        # While its replacement joins: the state moves during a step.
        soak("0#0", "6:moving"),
        soak("3#0", "6:turn-compute"),
        soak("1#1", "0:turn-compute"),
        soak("0#0", "6:turn-ship"),
        soak("1#1", "0:turn-enter"),
        ("2#0", "6:turn-half"),
        soak("3#0", "6:turn-passed"),
        soak("1#1", "0:turn-share"),
        soak("0#0", "30:barrier"),  # at the end of the job
    ],
)
def test_a_second_death_in_any_phase_of_a_recovery_changes_no_bit(
    spawn: Spawner, tmp_path: Path, victim: str, moment: str
) -> None:
    steps = ("--steps", "30")
    expected = reference(spawn, tmp_path, *steps)
    die = ("--die", "1:5:compute", "--die", f"{victim}:{moment}")
    node = run(spawn, tmp_path, *steps, *die, "--snapshots", "2", "--crew", "4", policy="reroute")
    check(node, expected, ["1#0", victim])


@pytest.mark.parametrize("moment", ["moving", soak("receive")])
def test_nor_does_one_while_state_moves_in_little_memory(spawn: Spawner, tmp_path: Path, moment: str) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    victim = {"moving": "2#0", "receive": "0#0"}[moment]
    die = ("--die", "1:5:compute", "--die", f"{victim}:5:{moment}")
    bound = ("--max-extra-bytes", "262144")
    node = run(spawn, tmp_path, *STEPS, *die, "--snapshots", "2", *bound, policy="reroute")
    check(node, expected, ["1#0", victim])


def test_replacements_take_the_lost_places_again_and_again(spawn: Spawner, tmp_path: Path) -> None:
    steps = ("--steps", "60")
    expected = reference(spawn, tmp_path, *steps)
    node = run(spawn, tmp_path, *steps, "--row-seconds=0.003", "--crew", "4", policy="reroute")
    wait_for_step(node, 4)
    dead = []
    for slot in (1, 2, 0):
        victim = next(worker for worker in node.pids() if f"/{slot}#" in worker)
        os.kill(node.pids()[victim], signal.SIGKILL)
        dead.append(victim.partition("/")[2])
        wait_for(node, partial(gone, node, victim), 30, "a generation without it")
        wait_for_members(node, 4)
    check(node, expected, dead)
    plans = [Plan.parse(event["plan"]) for event in node.events("decision")]
    assert [event["policy"] for event in node.events("decision")] == ["given", *["reroute", "stay"] * 3]
    # The survivors kept their places.
    assert [len(tile.layers) for tile in plans[-1].tiles] == [2] * 4
    assert plans[-1].workers == ("node0/0#1", "node0/1#1", "node0/2#1", "node0/3#0")


def test_a_stage_without_any_worker_left_is_taken_over_by_the_others(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    node = elaunch(
        spawn,
        tmp_path,
        "--standalone",
        "--nproc-per-node=3",
        "--consistency=bitwise",
        script=(SCRIPT, "--pp=3", *STEPS, "--die", "1:5:compute"),
    )
    check(node, expected, ["1#0"])
    decision = node.events("decision")[1]
    assert decision["policy"] in ("resize", "reparallelize")
    refused = {one["policy"]: one["rejected"] for one in decision["candidates"]}
    assert "nobody else has the layers 2:3 of node0/1#0" in refused["reroute"]


def test_eight_workers_with_tensor_parallelism_survive_the_loss_of_one(spawn: Spawner, tmp_path: Path) -> None:
    found, samples, _ = reference(spawn, tmp_path, *STEPS)
    script = (SCRIPT, "--dp=2", "--pp=2", "--tp=2", *STEPS, "--die", "5:5:compute")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=8", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert_same(losses(node), found, 1e-9)
    assert digests(node) == samples


@pytest.mark.parametrize(
    ("plan", "moment"),
    [
        (("--pp=4",), "5:compute"),  # nobody else has its layers
        soak(("--dp=2", "--pp=2"), "5:half"),
    ],
)
def test_frozen_parameters_and_loaded_values_survive_a_death_bitwise(
    spawn: Spawner, tmp_path: Path, plan: tuple[str, ...], moment: str
) -> None:
    """The replacement runs the script from its beginning, and so loads the first values again."""
    steps = ("--steps", "40", "--frozen")
    expected = reference(spawn, tmp_path, *steps)
    script: tuple[str | Path, ...] = (SCRIPT, *plan, *steps, "--die", f"1#0:{moment}", "--crew", "4")
    node = elaunch(spawn, tmp_path, *FOUR, "--policy=auto", script=script)
    check(node, expected, ["1#0"])
    plans = [Plan.parse(event["plan"]) for event in node.events("decision")]
    # Its layers went to others, and on to the replacement.
    assert len(plans) == 3
    assert "node0/1#1" in plans[-1].workers


def test_replicas_that_differ_are_repaired_and_no_bit_of_the_result_changes(spawn: Spawner, tmp_path: Path) -> None:
    steps = ("--steps", "40", "--frozen")
    expected = reference(spawn, tmp_path, *steps)
    script = (SCRIPT, "--dp=2", "--pp=2", *steps, "--spoil=3:7")
    node = elaunch(spawn, tmp_path, *FOUR, "--check-replicas=1,repair", script=script)
    check(node, expected, [])
    (event,) = node.events("replicas_repaired")
    assert event["step"] == 7
    assert "the replicas of layer 2 differ after 7 steps (after 6 they were the same)" in event["differ"]
    assert "is not the same on node0/3#0 as on node0/" in event["differ"]


def test_without_copies_the_job_ends_with_the_names_of_what_is_lost(spawn: Spawner, tmp_path: Path) -> None:
    node = run(spawn, tmp_path, *STEPS, "--snapshots", "0", "--die", "1:5:compute")
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    lost = r"StateLost: no surviving worker has all of layers\.0\..*@optimizer.*; go on from the last checkpoint"
    assert re.search(lost, node.agent.text()), node.agent.tail()


def test_a_plan_that_is_asked_for_is_changed_to_between_two_steps(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that `ctl` finds this job, and none of another test.
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    steps = ("--steps", str(scaled(60, 400)))
    expected = reference(spawn, tmp_path, *steps)
    # So that it still runs when `ctl` has started for the second time.
    node = run(spawn, tmp_path, *steps, f"--row-seconds={scaled(4, 1) / 1000}", policy="reroute")
    names = ["a", "b", "c", "d"]
    for number, plan in enumerate((symmetric(names, 4, 24, 3, pp=4), symmetric(names, 4, 24, 3, dp=4)), 1):
        wait_for_step(node, 10 * number)
        file = tmp_path / f"{number}.plan"
        file.write_text(str(plan))
        asked = spawn.elaunch("ctl", "plan", "--set", str(file), name=f"ctl{number}")
        assert asked.wait(60) == 0, asked.tail() + node.agent.tail()
        assert "all 4 members have changed over" in asked.text()
    check(node, expected, [])
    assert [event["policy"] for event in node.events("decision")] == ["given", "asked", "asked"]
    changes = [event for event in node.events("transition") if event["cause"] == "a new plan was asked for"]
    assert len(changes) == 2
    assert all(event["bytes_moved"] > 0 for event in changes)
