"""The state is lost, in part or with all workers: the job goes on from its checkpoint; no bit of the result changes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import pytest

from elaunch import checkpoints
from tests.faults.test_hybrid import Reference, reference, weights
from tests.faults.test_workers import ending, kill_at_once
from tests.helpers import ROOT, Spawned, Spawner, once_a_session, soak
from tests.jobs.watch import SCRIPT as OBJECTS
from tests.jobs.watch import Node, digests, elaunch, losses, wait_for, wait_for_step

LAYERS = ROOT / "tests" / "jobs" / "layers.py"
STEPS = ("--steps", "14")
OFTEN = ("--checkpoint-every=4",)
PATIENT = ("--wait-for-saves",)
LIMIT_S = 150.0

pytestmark = pytest.mark.timeout(400)


def run(
    spawn: Spawner,
    folder: Path,
    *script: str | Path,
    workers: int = 4,
    flags: tuple[str, ...] = (),
    name: str = "n0",
) -> Node:
    """A job with a checkpoint every eight steps: the next one does not wait for a slow disk."""
    saved = ("--checkpoint-dir", str(folder / "saved"), "--checkpoint-every", "8")
    many = ("--standalone", f"--nproc-per-node={workers}", "--consistency=bitwise", *saved, *flags)
    return elaunch(spawn, folder, *many, script=script, name=name)


def run_layers(spawn: Spawner, folder: Path, *arguments: str, flags: tuple[str, ...] = (), name: str = "n0") -> Node:
    return run(spawn, folder, LAYERS, *STEPS, *arguments, flags=flags, name=name)


def saved(node: Node, step: int) -> bool:
    return any(event["step"] == step for event in node.events("checkpoint"))


def wait_for_checkpoint(node: Node, step: int) -> None:
    wait_for(node, partial(saved, node, step), 60, f"a checkpoint after {step} steps")


def went_back_to(node: Node) -> list[int]:
    return [event["step"] for event in node.events("resume")]


def check(node: Node, expected: Reference, *before: Node) -> None:
    """That the job ended well, with the undisturbed run's results, bit by bit; earlier runs did its first steps."""
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    found, samples, ended = expected
    assert losses([*before, node]) == found
    assert digests([*before, node]) == samples
    assert weights(node) == ended


def names(folder: Path) -> set[str]:
    return {path.name for path in (folder / "saved").iterdir()}


def damage(folder: Path, step: int) -> None:
    """Change 64 bytes in the middle of a file of a checkpoint."""
    file = folder / "saved" / f"step-{step:09d}" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 64] = bytes(byte ^ 0xFF for byte in data[middle : middle + 64])
    file.write_bytes(data)


def check_passed_over(node: Node, folder: Path, step: int, older: int, problem: str = "bytes") -> None:
    """That the job said so once, went back to the one before, and wrote the damaged one anew."""
    saved = folder / "saved"
    (event,) = node.events("checkpoint_damaged")
    assert (event["step"], event["older"]) == (step, older)
    assert event["path"] == f"{saved}/step-{step:09d}.damaged"
    said = rf"\[elaunch\] the checkpoint {saved}/step-{step:09d} is damaged, and passed over: __0_0\.distcp:? {problem}"
    lines = [line for line in node.agent.text().splitlines() if "is damaged" in line]
    assert len(lines) == 1
    assert re.search(said, lines[0])
    assert went_back_to(node)[0] == older
    # The damaged one has gone like any other old one.
    assert [event["step"] for event in node.events("checkpoint")][-2:] == [8, 12]
    assert names(folder) == {"step-000000008", "step-000000012"}


def kill_all(node: Node, gate: Path) -> None:
    """At a step at which they wait, when the checkpoint before is there."""
    wait_for_step(node, 9)
    wait_for_checkpoint(node, 8)
    kill_at_once(node, list(node.pids().values()))
    gate.touch()


@pytest.mark.soak
def test_a_job_all_of_whose_workers_die_goes_on_from_its_checkpoint(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    node = run_layers(spawn, tmp_path, "--dp=2", "--pp=2", "--hold", f"10:{gate}")
    kill_all(node, gate)
    check(node, expected)
    assert went_back_to(node) == [8]
    assert "the job goes on from its checkpoint of 8 steps" in node.agent.text()
    assert checkpoints.complete(tmp_path / "saved") == [8]


def test_without_restarts_it_ends_and_says_that_there_is_one(spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    node = run_layers(spawn, tmp_path, "--dp=2", "--pp=2", "--hold", f"10:{gate}", flags=("--max-restarts=0",))
    kill_all(node, gate)
    assert node.agent.wait(LIMIT_S) == 1
    assert "there is a checkpoint of 8 steps, but --max-restarts 0 is used up" in node.agent.text()


@pytest.mark.parametrize("slot", [1, soak(0)])
def test_what_nobody_has_a_copy_of_comes_from_the_checkpoint(spawn: Spawner, tmp_path: Path, slot: int) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    node = run_layers(spawn, tmp_path, "--dp=2", "--pp=2", "--snapshots=0", "--hold", f"10:{gate}")
    wait_for_step(node, 9)
    wait_for_checkpoint(node, 8)
    os.kill(node.pids()[f"node0/{slot}#0"], signal.SIGKILL)
    gate.touch()
    check(node, expected)
    assert went_back_to(node)[0] == 8
    assert node.events("resume")[0]["again"] in (2, 3)
    assert "parts of the state were lost" in node.agent.text()


@pytest.mark.parametrize(("slot", "moment"), [(1, "written"), (0, "complete")])
def test_a_death_while_one_is_written_leaves_the_one_before(
    spawn: Spawner, tmp_path: Path, slot: int, moment: str
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    die = ("--die", f"{slot}:8:{moment}", "--hold", f"7:{gate}")
    script = (LAYERS, *STEPS, "--dp=2", "--pp=2", "--snapshots=0", *die)
    node = run(spawn, tmp_path, *script, flags=("--checkpoint-every=4",))
    wait_for_checkpoint(node, 4)
    gate.touch()
    check(node, expected)
    assert went_back_to(node)[0] == 4
    why = {"written": "node0/1#0 did not write", "complete": "node0/0#0 did not complete it"}[moment]
    assert f"after 8 steps is left incomplete: {why}; its files were removed" in node.agent.text()
    # A later one was completed, and nothing is left of the first attempt.
    whole = checkpoints.complete(tmp_path / "saved")
    assert whole[0] in (8, 12)
    assert {path.name for path in (tmp_path / "saved").iterdir()} == {f"step-{step:09d}" for step in whole}


@pytest.mark.parametrize("slot", [1, soak(0)])
def test_a_full_disk_leaves_nothing_behind_and_training_goes_on(spawn: Spawner, tmp_path: Path, slot: int) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    script = (LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", "--full", f"{slot}:8", "--hold", f"10:{gate}")
    node = run(spawn, tmp_path, *script, flags=OFTEN)
    wait_for_checkpoint(node, 4)
    wait_for(node, lambda: f"node0/{slot}#0 could not write the checkpoint" in node.agent.text(), 60, "a failed save")
    # While the job waits in a step, what could not be completed is gone.
    assert names(tmp_path) == {"step-000000004"}
    gate.touch()
    check(node, expected)
    (line,) = (line for line in node.agent.text().splitlines() if "could not write" in line)
    assert "the checkpoint after 8 steps: OSError: [Errno 27] File too large; its files were removed" in line
    assert [event["step"] for event in node.events("checkpoint")] == [4, 12]
    assert names(tmp_path) == {"step-000000004", "step-000000012"}


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB, where the job's checkpoints go."""
    if os.geteuid() != 0:
        pytest.skip("a file system of its own can only be mounted by root")
    folder = tmp_path / "saved"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_a_disk_that_is_full_is_tried_again_when_there_is_room(
    spawn: Spawner, tmp_path: Path, small_disk: Path
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    # An earlier run that died while it saved has left one, and there is something else.
    left = small_disk / "step-000000099.7-ab.part"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(bytes(100_000))
    (small_disk / "filler").write_bytes(bytes(900_000))
    script = (LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", "--hold", f"7:{gate}")
    node = run(spawn, tmp_path, *script, flags=OFTEN)
    wait_for(node, lambda: "no checkpoint after 4 steps" in node.agent.text(), 60, "a save for which there is no room")
    wait_for(node, lambda: names(tmp_path) == {"filler"}, 20, "what the earlier run left to be removed")
    (small_disk / "filler").unlink()
    gate.touch()
    check(node, expected)
    (line,) = (line for line in node.agent.text().splitlines() if "no checkpoint" in line)
    assert re.search(rf"after 4 steps: {small_disk} has 14\d kB free, and it takes 1\d\d kB$", line)
    assert names(tmp_path) == {"step-000000008", "step-000000012"}


def test_a_job_all_of_whose_workers_die_passes_over_a_damaged_checkpoint(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    script = (LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", "--hold", f"10:{gate}")
    node = run(spawn, tmp_path, *script, flags=OFTEN)
    wait_for_step(node, 9)
    wait_for_checkpoint(node, 8)
    damage(tmp_path, 8)
    kill_all(node, gate)
    check(node, expected)
    check_passed_over(node, tmp_path, 8, 4)


@pytest.mark.parametrize("slot", [1, soak(0)])
def test_survivors_that_lost_parts_of_the_state_pass_over_a_damaged_checkpoint(
    spawn: Spawner, tmp_path: Path, slot: int
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    gate = tmp_path / "gate"
    script = (LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", "--snapshots=0", "--hold", f"10:{gate}")
    node = run(spawn, tmp_path, *script, flags=OFTEN)
    wait_for_step(node, 9)
    wait_for_checkpoint(node, 8)
    damage(tmp_path, 8)
    os.kill(node.pids()[f"node0/{slot}#0"], signal.SIGKILL)
    gate.touch()
    check(node, expected)
    check_passed_over(node, tmp_path, 8, 4)
    assert node.events("resume")[0]["again"] in (6, 7)


def stopped_with_damage(spawn: Spawner, folder: Path, spoil: Callable[[Path, int], None] = damage) -> Node:
    """A job that was stopped after nine steps, and the newest of its checkpoints was damaged then."""
    hold = ("--hold", f"10:{folder / 'never'}")
    first = run(spawn, folder, LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", *hold, flags=OFTEN, name="first")
    wait_for_step(first, 9)
    wait_for_checkpoint(first, 8)
    first.agent.signal(signal.SIGINT)
    assert first.agent.wait(LIMIT_S) == 1
    spoil(folder, 8)
    # Of a run that died in the middle of a save.
    (folder / "saved" / "step-000000012.7-abc.part").mkdir()
    return first


def cut(folder: Path, step: int) -> None:
    os.truncate(folder / "saved" / f"step-{step:09d}" / "__0_0.distcp", 1000)


def remove(folder: Path, step: int) -> None:
    (folder / "saved" / f"step-{step:09d}" / "__0_0.distcp").unlink()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("spoil", "problem"), [(damage, "bytes"), (cut, r"has 1000 bytes, expected \d+ "), (remove, "is missing")]
)
def test_a_job_that_is_started_again_passes_over_a_damaged_checkpoint(
    spawn: Spawner, tmp_path: Path, spoil: Callable[[Path, int], None], problem: str
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    first = stopped_with_damage(spawn, tmp_path, spoil)
    second = run(spawn, tmp_path, LAYERS, *STEPS, *PATIENT, "--pp=4", flags=OFTEN, name="second")
    check(second, expected, first)
    check_passed_over(second, tmp_path, 8, 4, problem)


@pytest.mark.parametrize(
    ("moment", "slot"), [("outcome", 1), soak("outcome", 0), soak("outcomes", 1), soak("outcomes", 0)]
)
def test_a_death_while_a_checkpoint_is_passed_over_changes_no_bit(
    spawn: Spawner, tmp_path: Path, slot: int, moment: str
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    first = stopped_with_damage(spawn, tmp_path)
    script = (LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", "--die", f"{slot}:0:{moment}")
    second = run(spawn, tmp_path, *script, flags=OFTEN, name="second")
    check(second, expected, first)
    check_passed_over(second, tmp_path, 8, 4)
    killed = [event["worker"] for event in second.events("worker_exited") if event.get("signal") == signal.SIGKILL]
    assert killed[0] == f"node0/{slot}#0"


def test_where_no_checkpoint_is_whole_the_job_ends_with_their_names(spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = (LAYERS, *STEPS, *PATIENT, "--dp=2", "--pp=2", "--hold", f"10:{gate}")
    node = run(spawn, tmp_path, *script, flags=OFTEN)
    wait_for_step(node, 9)
    wait_for_checkpoint(node, 8)
    for step in (4, 8):
        damage(tmp_path, step)
    kill_all(node, gate)
    assert node.agent.wait(LIMIT_S) == 1
    text = node.agent.text()
    assert "no checkpoint is whole, nothing older than these is left: " in text
    assert all(f"{tmp_path}/saved/step-{step:09d}: __0_0.distcp: bytes" in text for step in (4, 8))
    # Once: it is not started again and again to find the same.
    assert text.count("all workers are started again") == 1


def test_a_job_that_is_started_again_goes_on_under_another_plan(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    first = run_layers(spawn, tmp_path, "--dp=2", "--pp=2", "--hold", f"10:{tmp_path / 'never'}", name="first")
    wait_for_step(first, 9)
    wait_for_checkpoint(first, 8)
    first.agent.signal(signal.SIGINT)
    assert first.agent.wait(LIMIT_S) == 1
    second = run_layers(spawn, tmp_path, "--pp=4", name="second")
    check(second, expected, first)
    assert went_back_to(second) == [8]


def test_a_job_that_is_over_has_nothing_left_to_do(spawn: Spawner, tmp_path: Path) -> None:
    arguments = (LAYERS, "--steps", "16", "--pp=2")
    first = run(spawn, tmp_path, *arguments, workers=2, name="first")
    assert first.agent.wait(LIMIT_S) == 0, first.agent.tail()
    assert [event["step"] for event in first.events("checkpoint")] == [8, 16]
    second = run(spawn, tmp_path, *arguments, workers=2, name="second")
    assert second.agent.wait(LIMIT_S) == 0, second.agent.tail()
    assert second.events("step") == []
    assert weights(second) == weights(first)


def plain_python(spawn: Spawner, *arguments: str, env: Mapping[str, str] | None, name: str) -> Spawned:
    """A worker of its own, without any launcher."""
    return spawn.fork("tests.jobs.preloaded", "tests.jobs.layers", "--pp=1", *STEPS, *arguments, env=env, name=name)


@pytest.mark.soak
def test_plain_python_reads_the_same_settings(spawn: Spawner, tmp_path: Path) -> None:
    env = {"ELAUNCH_CHECKPOINT_DIR": str(tmp_path / "saved"), "ELAUNCH_CHECKPOINT_EVERY": "8"}
    whole, half = (
        plain_python(spawn, "--stop", stop, env=env if stop == "9" else None, name=f"to{stop}") for stop in ("14", "9")
    )
    assert (whole.wait(LIMIT_S), half.wait(LIMIT_S)) == (0, 0)
    assert checkpoints.complete(tmp_path / "saved") == [8]
    rest = plain_python(spawn, env=env, name="rest")
    assert rest.wait(LIMIT_S) == 0, rest.tail()
    lines = [line for line in whole.text().splitlines() if line.startswith(("step", "weights"))]
    assert [line for line in rest.text().splitlines() if line.startswith(("step", "weights"))] == lines[8:]


Undisturbed = tuple[dict[int, float], list[str], list[str]]


class TestDataParallel:
    ARGUMENTS = (OBJECTS, "--steps", "14", "--extras")

    def undisturbed(self, spawn: Spawner, folder: Path) -> Undisturbed:
        return once_a_session(self.ARGUMENTS, lambda: self.run_undisturbed(spawn, folder))

    def run_undisturbed(self, spawn: Spawner, folder: Path) -> Undisturbed:
        node = elaunch(spawn, folder, "--standalone", "--nproc-per-node=3", script=self.ARGUMENTS, name="undisturbed")
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        return losses(node), digests(node), ending(node.agent.text())

    def check(self, node: Node, undisturbed: Undisturbed, *before: Node) -> None:
        assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
        found, samples, ends = undisturbed
        assert losses([*before, node]) == found
        assert digests([*before, node]) == samples
        assert ending(node.agent.text()) == ends

    def test_a_job_all_of_whose_workers_die_goes_on_from_its_checkpoint(self, spawn: Spawner, tmp_path: Path) -> None:
        undisturbed = self.undisturbed(spawn, tmp_path)
        gate = tmp_path / "gate"
        node = run(spawn, tmp_path, *self.ARGUMENTS, "--gather", "3", "--hold", f"10:{gate}", workers=3)
        kill_all(node, gate)
        self.check(node, undisturbed)
        assert went_back_to(node) == [8]
        assert "the job goes on from its checkpoint of 8 steps" in node.agent.text()

    def test_so_does_one_that_is_started_again(self, spawn: Spawner, tmp_path: Path) -> None:
        undisturbed = self.undisturbed(spawn, tmp_path)
        hold = ("--gather", "3", "--hold", f"10:{tmp_path / 'never'}")
        first = run(spawn, tmp_path, *self.ARGUMENTS, *hold, workers=3, name="first")
        wait_for_step(first, 9)
        wait_for_checkpoint(first, 8)
        first.agent.signal(signal.SIGINT)
        assert first.agent.wait(LIMIT_S) == 1
        second = run(spawn, tmp_path, *self.ARGUMENTS, workers=3, name="second")
        self.check(second, undisturbed, first)
        assert went_back_to(second) == [8]

    @pytest.mark.soak
    def test_it_passes_over_a_damaged_one(self, spawn: Spawner, tmp_path: Path) -> None:
        undisturbed = self.undisturbed(spawn, tmp_path)
        hold = ("--gather", "3", "--hold", f"10:{tmp_path / 'never'}")
        first = run(spawn, tmp_path, *self.ARGUMENTS, *hold, *PATIENT, workers=3, flags=OFTEN, name="first")
        wait_for_step(first, 9)
        wait_for_checkpoint(first, 8)
        first.agent.signal(signal.SIGINT)
        assert first.agent.wait(LIMIT_S) == 1
        damage(tmp_path, 8)
        second = run(spawn, tmp_path, *self.ARGUMENTS, *PATIENT, workers=3, flags=OFTEN, name="second")
        self.check(second, undisturbed, first)
        check_passed_over(second, tmp_path, 8, 4)

    @pytest.mark.soak
    def test_so_does_one_all_of_whose_workers_die(self, spawn: Spawner, tmp_path: Path) -> None:
        undisturbed = self.undisturbed(spawn, tmp_path)
        gate = tmp_path / "gate"
        hold = ("--gather", "3", "--hold", f"10:{gate}")
        node = run(spawn, tmp_path, *self.ARGUMENTS, *hold, *PATIENT, workers=3, flags=OFTEN)
        wait_for_step(node, 9)
        wait_for_checkpoint(node, 8)
        damage(tmp_path, 8)
        kill_all(node, gate)
        self.check(node, undisturbed)
        check_passed_over(node, tmp_path, 8, 4)

    def test_a_checkpoint_of_other_settings_is_refused(self, spawn: Spawner, tmp_path: Path) -> None:
        first = run(spawn, tmp_path, *self.ARGUMENTS, workers=1, name="first")
        assert first.agent.wait(LIMIT_S) == 0, first.agent.tail()
        second = run(spawn, tmp_path, *self.ARGUMENTS, "--global-batch-size", "12", workers=1, name="second")
        assert second.agent.wait(LIMIT_S) == 1
        assert "global_batch_size is 24 there and 12 here" in second.agent.text()
