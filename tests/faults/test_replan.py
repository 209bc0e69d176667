"""Jobs whose own script moves them between layouts, undisturbed and with deaths in between; no bit changes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from elaunch.plan import Plan
from tests.faults.test_hybrid import LIMIT_S, SCRIPT, STEPS, check, reference, run
from tests.helpers import Spawner, once_a_session, soak
from tests.jobs.watch import Node, elaunch

pytestmark = pytest.mark.timeout(400)

PHASES = ("3:4x1x1:weights", "3:2x2x1", "6:4x1x1:weights", "6:1x2x2:weights", "6:1x4x1", "8:2x2x1", "9:1x1x1:weights")
"""Weights alone, with the state after them; another layout in between; fewer workers; and with a plan that is new."""

TURNS = ("9:2x2x1", "10:4x1x1:weights", "10:1x4x1", "11:4x1x1:weights", "11:2x2x1")
GENERATED = (3, 6, 9, 10, 11)
"""The steps before which the weights alone go to workers that have all layers."""


def flags(replans: tuple[str, ...]) -> list[str]:
    return [f"--replan={one}" for one in replans]


def lent(node: Node) -> dict[tuple[str, str], set[str]]:
    """The digests of whole layers in the hands of those who had them, by step and layer."""
    found: dict[tuple[str, str], set[str]] = {}
    for step, layer, digest in re.findall(r"^lent (\d+) (\d+) 0/1 (\w+)", node.agent.text(), re.MULTILINE):
        found.setdefault((step, layer), set()).add(digest)
    return found


def held(spawn: Spawner, folder: Path) -> dict[tuple[str, str], set[str]]:
    """The same of one worker, which always has all layers; done once a session."""

    def make() -> dict[tuple[str, str], set[str]]:
        replans = tuple(f"{step}:1x1x1{weights}" for step in GENERATED for weights in (":weights", ""))
        node = elaunch(
            spawn, folder, "--standalone", script=(SCRIPT, "--pp=1", *STEPS, *flags(replans)), name="one-lends"
        )
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        return lent(node)

    return once_a_session((SCRIPT, "lent", *STEPS), make)


def test_a_script_alternates_layouts_with_the_weights_alone_or_with_all_and_no_bit_changes(
    spawn: Spawner, tmp_path: Path
) -> None:
    node = run(spawn, tmp_path, *STEPS, *flags((*PHASES, *TURNS)))
    check(node, reference(spawn, tmp_path, *STEPS), [])
    assert lent(node) == held(spawn, tmp_path)
    decisions = node.events("decision")
    assert [event["policy"] for event in decisions] == ["given", *["asked"] * len((*PHASES, *TURNS))]
    moved = [event["bytes_moved"] for event in node.events("transition")[1:]]
    assert len(moved) == len((*PHASES, *TURNS))
    # The way back from a plan that had the weights alone costs nothing, and the halves of a layer come from where it is
    # whole; any other change moves something.
    assert [place for place, n_bytes in enumerate(moved) if not n_bytes] == [1, 3, 7]
    assert "the script asked for the plan for the weights alone" in decisions[1]["reason"]


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("3#0", "6:resume"),
        soak("0#0", "6:resume"),
        soak("0#0", "6:vote"),
        soak("2#0", "6:vote"),
        soak("1#0", "6:connect"),
        soak("0#0", "6:held_state"),
        ("3#0", "10:held_state"),
        soak("1#0", "6:compute"),
    ],
)
def test_a_death_while_a_script_changes_layouts_changes_no_bit(
    spawn: Spawner, tmp_path: Path, victim: str, moment: str
) -> None:
    """The replacement runs the script from its beginning, and makes the calls of the step at which it comes."""
    steps = ("--steps", "30")
    expected = reference(spawn, tmp_path, *steps)
    replans = [f"{step}:{plan}" for step in range(6, 28, 2) for plan in ("4x1x1:weights", "2x2x1", "1x4x1")]
    node = run(spawn, tmp_path, *steps, "--die", f"{victim}:{moment}", "--crew", "4", *flags(tuple(replans)))
    check(node, expected, [victim])
    last = Plan.parse(node.events("decision")[-1]["plan"])
    assert f"node0/{victim.partition('#')[0]}#1" in last.workers
    assert [len(tile.layers) for tile in last.tiles] == [1] * 4


def test_a_step_with_the_weights_alone_elsewhere_is_refused(spawn: Spawner, tmp_path: Path) -> None:
    node = run(spawn, tmp_path, *STEPS, "--replan=3:4x1x1:weights")
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    text = "StateError: step 3 cannot begin: the weights alone follow another plan (weights_only=True); go back to the"
    assert text in node.agent.text()


@pytest.mark.parametrize(
    ("replan", "text"),
    [
        ("3:5x1x1", "StateError: replan(): the plan is for 5 workers, and the job is for 4 (node0/0#0, node0/1#0, "),
        soak("3:1x1x5", "StateError: replan(): a plan with tensor-parallel groups of 5: "),
    ],
)
def test_a_plan_that_the_job_cannot_follow_is_refused_with_its_values(
    spawn: Spawner, tmp_path: Path, replan: str, text: str
) -> None:
    node = run(spawn, tmp_path, *STEPS, f"--replan={replan}")
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    assert text in node.agent.text()
