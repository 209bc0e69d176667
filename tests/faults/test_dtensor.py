"""Workers of examples/train_dtensor.py die and come back; the others go on in other layouts, in the same processes."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner, once_a_session, soak
from tests.jobs.watch import Node, assert_same, digests, elaunch, losses, wait_for, wait_for_step

SCRIPT = ROOT / "tests" / "jobs" / "dtensor.py"
SMALL = ("--layers=2", "--width=16", "--context=8", "--batch-size=12", "--corpus-bytes=20000", "--dtype=float64")
STEPS = ("--steps=10",)
LIMIT_S = 150.0
ROUNDING = 1e-10

pytestmark = pytest.mark.timeout(400)

Reference = tuple[dict[int, float], list[str]]


def run(spawn: Spawner, folder: Path, *arguments: str) -> Node:
    flags = ("--standalone", "--nproc-per-node=4")
    return elaunch(spawn, folder, *flags, script=(SCRIPT, *SMALL, *arguments))


def reference(spawn: Spawner, folder: Path, *arguments: str) -> Reference:
    """An undisturbed run by one worker; done once a session."""

    def run() -> Reference:
        node = elaunch(spawn, folder, "--standalone", script=(SCRIPT, *SMALL, *arguments), name="reference")
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        return losses(node), digests(node)

    return once_a_session((SCRIPT, *arguments), run)


def check(node: Node, expected: Reference, dead: list[str]) -> None:
    """That these workers were killed, and the others ended well in their first processes, with the same results."""
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    exits = {event["worker"]: event for event in node.events("worker_exited")}
    for worker in dead:
        assert exits.pop(f"node0/{worker}").get("signal") == signal.SIGKILL, node.agent.tail()
    assert not any(event.get("exitcode") for event in exits.values()), node.agent.tail()
    started = {event["worker"]: event["pid"] for event in node.events("worker_started")}
    ended = dict(re.findall(r"^ended (\S+) pid (\d+)", node.agent.text(), re.MULTILINE))
    survivors = {f"node0/{slot}#0" for slot in range(4)} - {f"node0/{worker}" for worker in dead}
    assert {worker: int(ended[worker]) for worker in survivors} == {worker: started[worker] for worker in survivors}
    found, samples = expected
    assert_same(losses(node), found, ROUNDING)
    assert digests(node) == samples


@pytest.mark.parametrize(
    ("phase", "slot"),
    [
        soak("compute", 0),
        soak("compute", 3),
        ("forward", 1),
        soak("enter", 2),
        soak("half", 0),
        ("half", 3),
        soak("passed", 0),
        soak("passed", 3),
    ],
)
def test_the_others_go_on_with_the_step_that_a_death_interrupted(
    spawn: Spawner, tmp_path: Path, phase: str, slot: int
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    node = run(spawn, tmp_path, *STEPS, "--layout=2x2", "--die", f"{slot}:4:{phase}")
    check(node, expected, [f"{slot}#0"])
    assert [event["plan"] for event in node.events("decision")][:2] == ["2x2", "1x2"]


@pytest.mark.parametrize("bound", [soak(()), ("--max-extra-bytes=300000",)])
def test_a_replacement_receives_its_parts_and_the_layout_grows_again(
    spawn: Spawner, tmp_path: Path, bound: tuple[str, ...]
) -> None:
    steps = ("--steps=20",)
    expected = reference(spawn, tmp_path, *steps)
    node = run(spawn, tmp_path, *steps, *bound, "--layout=2x2", "--crew=4", "--die=1:4:compute")
    check(node, expected, ["1#0"])
    assert [event["plan"] for event in node.events("decision")] == ["2x2", "1x2", "2x2"]
    assert node.members()[-1] == "node0/1#1"
    grown = [event for event in node.events("transition") if event["cause"] == "node0/1#1 joins"]
    assert all(event["bytes_moved"] > 0 for event in grown)
    assert len(grown) == 1


@pytest.mark.soak
@pytest.mark.parametrize(("first", "second", "moment"), [(1, 2, "vote"), (0, 1, "moving"), (1, 2, "receive")])
def test_a_second_death_before_all_have_moved_is_survived(
    spawn: Spawner, tmp_path: Path, first: int, second: int, moment: str
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    # Both halves of the model are left, each on one worker.
    node = run(spawn, tmp_path, *STEPS, "--layout=2x2", f"--die={first}:4:compute", f"--die={second}:4:{moment}")
    check(node, expected, [f"{first}#0", f"{second}#0"])


def test_a_death_while_the_members_move_by_themselves_is_survived(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    node = run(spawn, tmp_path, *STEPS, "--layout=4x1", "--switch=4:2x2", "--die=2:4:resume")
    check(node, expected, ["2#0"])


def test_without_replicas_the_job_ends_with_the_names_of_what_is_lost(spawn: Spawner, tmp_path: Path) -> None:
    node = run(spawn, tmp_path, *STEPS, "--layout=1x4", "--die=1:4:compute")
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
    lost = r"StateLost: no surviving worker has all of \d\.(qkv|up)\.weight.*; go on from the last checkpoint"
    assert re.search(lost, node.agent.text()), node.agent.tail()


class TestCheckpoints:
    """Of a framework on the hooks: what its space holds goes to the disk, and comes back in any layout."""

    ARGUMENTS = ("--steps=14", "--crew=4")

    def saving(self, spawn: Spawner, folder: Path, *arguments: str, name: str = "n0") -> Node:
        flags = ("--standalone", "--nproc-per-node=4", f"--checkpoint-dir={folder / 'saved'}", "--checkpoint-every=4")
        return elaunch(spawn, folder, *flags, script=(SCRIPT, *SMALL, *self.ARGUMENTS, *arguments), name=name)

    def wait_for_checkpoint(self, node: Node, step: int) -> None:
        wait_for(node, lambda: step in [one["step"] for one in node.events("checkpoint")], 60, f"checkpoint {step}")

    def check(self, node: Node, expected: tuple[dict[int, float], list[str]], *before: Node) -> None:
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        # Steps that were done again in another layout differ by rounding.
        found = {event["step"]: event["loss"] for one in (*before, node) for event in one.events("step")}
        assert_same(found, expected[0], ROUNDING)
        assert digests([*before, node]) == expected[1]

    @pytest.mark.soak
    def test_a_job_all_of_whose_workers_die_goes_on_from_its_checkpoint(self, spawn: Spawner, tmp_path: Path) -> None:
        expected = reference(spawn, tmp_path, "--steps=14")
        die = [f"--die={slot}:6:compute" for slot in range(4)]
        node = self.saving(spawn, tmp_path, "--layout=2x2", *die)
        self.check(node, expected)
        assert [event["step"] for event in node.events("resume")] == [4]

    def test_what_had_no_copy_comes_from_the_checkpoint_and_the_others_stay(
        self, spawn: Spawner, tmp_path: Path
    ) -> None:
        expected = reference(spawn, tmp_path, "--steps=14")
        node = self.saving(spawn, tmp_path, "--layout=1x4", "--die=1:6:compute")
        self.check(node, expected)
        assert [(event["step"], event["again"]) for event in node.events("resume")] == [(4, 2)]
        assert [event["worker"] for event in node.events("worker_exited") if event.get("signal")] == ["node0/1#0"]

    @pytest.mark.soak
    def test_a_job_that_is_started_again_goes_on_in_another_layout(self, spawn: Spawner, tmp_path: Path) -> None:
        expected = reference(spawn, tmp_path, "--steps=14")
        first = self.saving(spawn, tmp_path, "--layout=2x2", "--sleep=0.1", name="first")
        wait_for_step(first, 5)
        self.wait_for_checkpoint(first, 4)
        first.agent.signal(signal.SIGINT)
        assert first.agent.wait(LIMIT_S) == 1
        second = self.saving(spawn, tmp_path, "--layout=1x4", name="second")
        self.check(second, expected, first)
        assert [event["plan"] for event in second.events("decision")][:1] == ["1x4"]
        (resumed,) = second.events("resume")
        assert resumed["step"] >= 4

    @pytest.mark.soak
    def test_a_checkpoint_of_another_model_is_refused(self, spawn: Spawner, tmp_path: Path) -> None:
        first = self.saving(spawn, tmp_path, "--layout=2x2", name="first")
        assert first.agent.wait(LIMIT_S) == 0, first.agent.tail()
        second = self.saving(spawn, tmp_path, "--layout=2x2", "--width=32", name="second")
        assert second.agent.wait(LIMIT_S) == 1
        assert re.search(
            r"0.position.weight is torch.float64 \[8, 16\] there and torch.float64 \[8, 32\] here", second.agent.text()
        )
