"""Jobs that run choose how to go on: by what they have measured, and by what their user wants."""

from __future__ import annotations

import json
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from elaunch.detect.host import family
from elaunch.plan import Plan, n_rows, shares_of
from elaunch.policy.profile import Profile
from tests.faults.test_hybrid import LIMIT_S, SCRIPT, STEPS, reference, weights
from tests.helpers import Spawner, soak
from tests.jobs.watch import SCRIPT as OBJECTS
from tests.jobs.watch import (
    Event,
    Node,
    assert_same,
    digests,
    elaunch,
    losses,
    wait_for,
    wait_for_step,
)

PLANNED = OBJECTS.with_name("planned.py")
FOUR = ("--standalone", "--nproc-per-node=4")
SLOW = "the speed of workers has changed"

pytestmark = pytest.mark.timeout(400)


def decisions(node: Node) -> list[Event]:
    return node.events("decision")


def rebalanced(node: Node) -> Event | None:
    """The decision after a change of speeds, once the members go on by it."""
    changes = [event["t"] for event in node.events("transition") if event["cause"] == SLOW]
    return next((event for event in reversed(decisions(node)) if changes and event["t"] <= changes[-1]), None)


def work(plan: Plan) -> dict[str, int]:
    """Rows times layers of each worker."""
    found = dict.fromkeys(plan.workers, 0)
    for tile in plan.tiles:
        for worker in tile.workers:
            found[worker] += len(tile.layers) * sum(map(n_rows, tile.micro_batches))
    return found


def stop(node: Node) -> None:
    node.agent.process.send_signal(signal.SIGTERM)
    node.agent.wait(60)


@pytest.mark.parametrize("policy", ["reroute", soak("resize"), soak("reparallelize")])
def test_the_policy_that_the_user_wants_is_taken(spawn: Spawner, tmp_path: Path, policy: str) -> None:
    found, samples, _ = reference(spawn, tmp_path, *STEPS)
    script = (SCRIPT, "--dp=2", "--pp=2", *STEPS, "--die", "1:5:compute")
    node = elaunch(spawn, tmp_path, *FOUR, f"--policy={policy}", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert_same(losses(node), found, 1e-9)
    assert digests(node) == samples
    decision = next(event for event in decisions(node) if "node0/1#0 left" in event["reason"])
    assert decision["policy"] == policy
    assert {one["policy"] for one in decision["candidates"]} >= {"stay", "reroute", "resize", "reparallelize", "expand"}
    plan = Plan.parse(decision["plan"])
    plan.validate(["node0/0#0", "node0/2#0", "node0/3#0"])


@pytest.mark.soak
def test_resize_under_bitwise_moves_whole_micro_batches_and_changes_no_bit(spawn: Spawner, tmp_path: Path) -> None:
    found, samples, ended = reference(spawn, tmp_path, *STEPS)
    script = (SCRIPT, "--dp=2", "--pp=2", *STEPS, "--die", "1:5:compute")
    node = elaunch(spawn, tmp_path, *FOUR, "--policy=resize", "--consistency=bitwise", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    decision = next(event for event in decisions(node) if "node0/1#0 left" in event["reason"])
    assert decision["policy"] == "resize"
    plan = Plan.parse(decision["plan"])
    assert all(n_rows(runs) == plan.micro_batch_size for tile in plan.tiles for runs in tile.micro_batches)
    assert losses(node) == found
    assert digests(node) == samples
    assert weights(node) == ended


def test_when_everybody_is_back_the_job_returns_to_its_plan(spawn: Spawner, tmp_path: Path) -> None:
    # Sleeping takes as long on all workers, so in the end none is slow, however busy the machine is.
    script = (SCRIPT, "--dp=2", "--pp=2", "--steps", "100000", "--row-seconds", "0.01", "--die", "3:5:compute")
    node = elaunch(spawn, tmp_path, *FOUR, script=script)
    wait_for(node, lambda: any("node0/3#0 left" in event["reason"] for event in decisions(node)), 100, "a loss")
    given = Plan.parse(decisions(node)[0]["plan"])
    preferred_plan = given.renamed({"node0/3#0": "node0/3#1"}).tiles

    def is_home() -> bool:
        return Plan.parse(decisions(node)[-1]["plan"]).tiles == preferred_plan

    wait_for(node, is_home, 150, "the plan that the script gave")
    stop(node)


@pytest.mark.soak
def test_a_newcomer_becomes_the_partner_of_one_on_its_node_if_the_user_allows_it(
    spawn: Spawner, tmp_path: Path
) -> None:
    # One micro-batch in a step, so neither replicas nor stages make it faster.
    model = ("--units", "1", "--steps", "100000", "--row-seconds", "0.01")
    script = (SCRIPT, "--pp=1", "--idle=1", *model)
    # What only ties with `expand` here is not taken.
    flags = ("--standalone", "--nproc-per-node=2", "--tp=2", "--policy=resize")
    node = elaunch(spawn, tmp_path, *flags, script=script)

    def killed(worker: str, *plans: tuple[str, tuple[str, ...]]) -> None:
        """Kill a worker of the last plan when it has been used for a while; others with these TP groups follow."""
        wait_for_step(node, node.last_step() + 15)
        before = len(decisions(node))
        os.kill(node.pids()[worker], signal.SIGKILL)
        wait_for(node, lambda: len(decisions(node)) >= before + len(plans), 60, "a plan")
        found = decisions(node)[before : before + len(plans)]
        assert [(one["policy"], Plan.parse(one["plan"]).tiles[0].workers) for one in found] == [*plans]

    one, two = ("node0/0#0",), ("node0/0#0", "node0/1#1")
    killed("node0/1#0", ("stay", one), ("expand", two))
    # Who is left of a TP group does all of it again, from what it has of the other's part.
    killed("node0/1#1", ("reparallelize", one), ("stay", ("node0/0#0", "node0/1#2")))
    step = node.last_step() + 5
    wait_for_step(node, step)
    found, _, _ = reference(spawn, tmp_path, *model, "--stop", str(step))
    assert_same({number: loss for number, loss in losses(node).items() if number < step}, found, 1e-9)
    stop(node)


def test_layers_that_cannot_be_cut_so_are_named_at_the_start(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--pp=1", *STEPS)
    node = elaunch(spawn, tmp_path, "--standalone", "--tp=2,5", "--max-restarts=0", script=script)
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    assert "--tp=5: layer 0 (Layer): up.weight (24, 12) cannot be cut into 5" in node.agent.text()


def test_a_slow_worker_gets_less_to_do_and_the_others_more(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", "--steps", "100000", "--row-seconds", "0.008", "--slow", "1:12:3")
    node = elaunch(spawn, tmp_path, *FOUR, script=script)
    decision = wait_for(node, partial(rebalanced, node), 150, "a plan for the slow worker")
    plan = Plan.parse(decision["plan"])
    assert work(plan)["node0/1#0"] == min(work(plan).values()) < max(work(plan).values())
    step = node.last_step() + 3
    wait_for_step(node, step)
    found, _, _ = reference(spawn, tmp_path, "--steps", "100000", "--stop", str(step))
    assert_same({number: loss for number, loss in losses(node).items() if number < step}, found, 1e-9)
    stop(node)


def test_nor_does_a_data_parallel_job_wait_for_a_slow_worker(spawn: Spawner, tmp_path: Path) -> None:
    script = (OBJECTS, "--steps", "100000", "--global-batch-size", "48", "--sleep", "0.01", "--slow", "2:12:0.03")
    node = elaunch(spawn, tmp_path, *FOUR, script=script)
    decision = wait_for(node, partial(rebalanced, node), 150, "shares for the slow worker")
    counts = shares_of(Plan.parse(decision["plan"]))
    assert counts["node0/2#0"] == min(counts.values()) < max(counts.values())
    wait_for_step(node, node.last_step() + 3)
    # Who is not slow any more has as much to do as the others: its replacement has the slot, and is measured anew.
    stop(node)


def test_a_framework_of_its_own_has_its_plans_chosen(spawn: Spawner, tmp_path: Path) -> None:
    """Rows of one that dies are dealt out anew; each step has all rows once, so losses are as undisturbed."""
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=3", "--max-restarts=0", script=(PLANNED, "60"))
    wait_for_step(node, 8)
    os.kill(node.pids()["node0/1#0"], signal.SIGKILL)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    first, after = decisions(node)[:2]
    assert (first["policy"], first["reason"]) == ("given", "the script gave the plan")
    assert work(Plan.parse(first["plan"])) == {f"node0/{slot}#0": 16 for slot in range(3)}
    assert after["policy"] in {"reroute", "resize", "reparallelize"}
    done = work(Plan.parse(after["plan"]))
    assert done.keys() == {"node0/0#0", "node0/2#0"}
    assert sum(done.values()) == 48
    assert_same(losses(node), least_squares(60), 1e-9)


def least_squares(steps: int) -> dict[int, float]:
    """The losses of tests/jobs/planned.py with one worker."""
    weight = torch.zeros(8, dtype=torch.float64)
    rows = torch.arange(48, dtype=torch.float64)
    found = {}
    for step in range(steps):
        inputs = torch.stack([(rows * k + step).cos() for k in range(8)], 1)
        errors = inputs @ weight - rows / 48
        found[step] = float(errors.square().sum() / 48)
        weight = weight - 0.1 * inputs.t() @ errors / 48
    return found


def test_a_job_shows_its_profile_and_keeps_it_in_a_file(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that `ctl` finds this job, and none of another test.
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    file = tmp_path / "job.json"
    flags = (*FOUR, f"--profile={file}")
    node = elaunch(
        spawn, tmp_path, *flags, script=(SCRIPT, "--dp=2", "--pp=2", "--steps", "100000", "--row-seconds", "0.001")
    )
    wait_for(node, lambda: file.exists() and len(Profile.load(file).layers) == 4, 60, "a profile")
    wait_for(node, lambda: all(one.forward_s(3) >= 0.003 for one in Profile.load(file).layers), 60, "all layers in it")
    shown = spawn.elaunch("ctl", "profile", name="table")
    assert shown.wait(60) == 0, shown.tail()
    assert "3:4 " in shown.text()
    assert "a step: " in shown.text()
    printed = spawn.elaunch("ctl", "profile", "--json", name="json")
    assert printed.wait(60) == 0, printed.tail()
    assert len(Profile.from_json(printed.text()).layers) == 4
    stop(node)


@pytest.mark.parametrize(
    ("text", "message"), [soak("{", "is not JSON"), ("two layers", "has 2 layers and the model 4")]
)
def test_a_profile_of_another_model_is_refused_at_the_start(
    spawn: Spawner, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(_profile(n_layers=2)) if text == "two layers" else text)
    script = (SCRIPT, "--dp=2", "--pp=2", *STEPS)
    node = elaunch(spawn, tmp_path, *FOUR, f"--profile={file}", "--max-restarts=0", script=script)
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    assert message in node.agent.text()
    assert str(file) in node.agent.text()


@pytest.mark.parametrize("saved", [soak(False), True])
def test_where_no_plan_fits_the_job_ends_and_says_why(spawn: Spawner, tmp_path: Path, saved: bool) -> None:
    file = tmp_path / "small.json"
    file.write_text(json.dumps({**_profile(n_layers=4), "memory_bytes": 1000}))
    flags = ("--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every", "2") if saved else ()
    script = (SCRIPT, "--dp=2", "--pp=2", *STEPS, "--row-seconds", "0.002", "--die", "1:9:compute")
    node = elaunch(spawn, tmp_path, *FOUR, f"--profile={file}", "--max-restarts=0", *flags, script=script)
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    text = node.agent.text()
    assert "no plan for 3 members" in text, node.agent.tail()
    assert "may use 1,000" in text
    where = "from its checkpoint after " if saved else "from the start"
    assert f"start the job with more workers or memory, and it goes on {where}" in text


def test_clocks_are_raised_where_one_worker_holds_up_the_others_if_the_user_allows_it(
    spawn: Spawner, tmp_path: Path
) -> None:
    script = (
        SCRIPT,
        "--dp=2",
        "--pp=2",
        "--steps",
        "60",
        "--row-seconds",
        "0.002",
        "--clocks",
        "--die",
        "1:30:compute",
    )
    node = elaunch(spawn, tmp_path, *FOUR, "--allow-dvfs", "--policy=reroute", "--max-restarts=0", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    decision = next(event for event in decisions(node) if "node0/1#0 left" in event["reason"])
    # All of its stage is done by one worker now. How much faster it must be depends on what was measured.
    ((slot, clock_mhz),) = decision["clocks_mhz"].items()
    assert slot == "node0/0"
    assert clock_mhz in (1200, 1400, 1600, 1800, 2000)


def test_without_permission_no_clock_is_touched(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--dp=2", "--pp=2", *STEPS, "--clocks", "--die", "1:9:compute")
    node = elaunch(spawn, tmp_path, *FOUR, "--policy=reroute", script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    assert not any("clocks_mhz" in event for event in decisions(node))


def test_a_worker_alone_plans_nothing_ahead_that_stays_behind(spawn: Spawner, tmp_path: Path) -> None:
    """Processes that plan end with their worker, also when it is killed."""
    script = (SCRIPT, "--dp=2", "--pp=2", "--steps", "100000", "--row-seconds", "0.001")
    node = elaunch(spawn, tmp_path, *FOUR, script=script)
    wait_for_step(node, 12)
    first = node.pids()["node0/0#0"]
    planner = wait_for(node, lambda: _children(first, "ahead_process"), 60, "the process that plans")
    os.kill(first, signal.SIGKILL)
    wait_for(node, lambda: not any(Path(f"/proc/{pid}").exists() for pid in planner), 30, "its end")
    stop(node)


def _children(pid: int, name: str) -> list[int]:
    commands = {child: Path(f"/proc/{child}/cmdline") for child in family(pid)[1:]}
    return [child for child, command in commands.items() if command.exists() and name in command.read_text()]


def _profile(n_layers: int) -> dict[str, Any]:
    layer = {
        "count": n_layers,
        "forward_s_per_row": 0.001,
        "backward_s_per_row": 0.001,
        "parameter_bytes": 5000,
        "optimizer_bytes": 15000,
        "activation_bytes_per_row": 400,
        "output_bytes_per_row": 96,
    }
    return {
        "version": 1,
        "name": "small",
        "tensor_parallel": 1,
        "bandwidth_bytes_per_s": 1e9,
        "latency_s": 1e-5,
        "notes": [],
        "layers": [layer],
    }
