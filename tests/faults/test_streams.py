"""Workers die whose data comes in order: each sample is used once, and the model is that of a run without deaths."""

from __future__ import annotations

import json
import re
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.helpers import Spawner, soak
from tests.jobs.watch import Node, assert_same, digests, elaunch, losses

SCRIPT = Path(__file__).parents[1] / "jobs" / "streams.py"
THREE = ("--standalone", "--nproc-per-node=3")


def run(spawn: Spawner, folder: Path, name: str, flags: tuple[str, ...], *arguments: str) -> Node:
    (folder / "used").mkdir(parents=True, exist_ok=True)
    node = elaunch(spawn, folder, *flags, script=(SCRIPT, "--used", str(folder / "used"), *arguments), name=name)
    assert node.agent.wait(120) == 0, node.agent.tail()
    return node


def used(folder: Path) -> dict[int, Counter[int]]:
    """What all workers together have used, by step."""
    found: dict[int, Counter[int]] = {}
    for log in (folder / "used").iterdir():
        for line in log.read_text().splitlines():
            step, _, samples = line.partition(" ")
            found.setdefault(int(step), Counter()).update(json.loads(samples))
    return found


def ends(node: Node) -> dict[str, tuple[int, float]]:
    """What each worker says at its end: steps, and the norm of the weights."""
    found = re.findall(r"(\S+) ended after (\d+) steps, norm (\S+)", node.agent.text())
    return {worker: (int(steps), float(norm)) for worker, steps, norm in found}


@pytest.mark.timeout(300)
@pytest.mark.soak
@pytest.mark.parametrize("moment", ["before", "after", "half"])
@pytest.mark.parametrize("at", [9, 25], ids=["in the middle", "at the end"])
def test_a_death_while_members_draw_a_step_changes_no_result(
    spawn: Spawner, tmp_path: Path, at: int, moment: str
) -> None:
    """A member that knows that the stream has ended may be waiting for the others when one of them dies."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    reference = run(spawn, whole, "reference", ("--standalone",))
    node = run(spawn, hurt, "hurt", THREE, f"--die-drawing={at}:{moment}")
    exits = {event["worker"]: event for event in node.events("worker_exited")}
    assert exits.pop("node0/1#0")["signal"] == signal.SIGKILL
    assert not any(event.get("exitcode") for event in exits.values()), node.agent.tail()
    assert node.agent.text().count("the stream has ended after 25 steps") == 1 + (at == 25 and moment != "before")
    ((_, (_, norm)),) = ends(reference).items()
    survivors = {worker: end for worker, end in ends(node).items() if worker.endswith("#0")}
    assert sorted(survivors) == ["node0/0#0", "node0/2#0"]
    assert {steps for steps, _ in ends(node).values()} == {25}
    assert [own for _, own in ends(node).values()] == pytest.approx([norm] * len(ends(node)), rel=1e-9)
    assert used(hurt) == used(whole)
    assert_same(losses(node), losses(reference), 1e-9)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "n_workers", "n_steps", "line"),
    [
        ("generator", 0, 25, "1 shard: each sample is used exactly once in a pass, if a shard gives the same samples"),
        ("datasets", 2, 25, "7 shards: each sample is used exactly once in a pass\n"),
        soak("generator", 1, 25, "1 shard: each sample is used exactly once in a pass, if a shard gives the same"),
        soak("datasets", 0, 25, "7 shards: each sample is used exactly once in a pass\n"),
        soak("shuffled", 1, 25, "7 shards: each sample is used exactly once in a pass, if a shard gives the same"),
        soak("cutting", 0, 25, "7 shards: each sample is used exactly once in a pass, if a shard gives the same"),
        soak("files", 3, 18, "10 shards: each sample is used exactly once in a pass\n"),
    ],
    ids=[
        "generator",
        "datasets, read ahead",
        "generator, read ahead",
        "datasets",
        "shuffled datasets",
        "cut by worker",
        "protocol",
    ],
)
def test_each_sample_is_used_once_whoever_dies_and_the_job_ends_with_its_stream(
    spawn: Spawner, tmp_path: Path, kind: str, n_workers: int, n_steps: int, line: str
) -> None:
    """The job is stopped after 8 steps and goes on from its checkpoint; then a worker dies, and another one comes."""
    whole, hurt = tmp_path / "whole", tmp_path / "hurt"
    reference = run(spawn, whole, "reference", ("--standalone",), "--data", kind)
    saved = (*THREE, "--checkpoint-dir", str(tmp_path / "saved"), "--checkpoint-every=4")
    data = ("--data", kind, f"--num-workers={n_workers}")
    before = run(spawn, hurt, "before", saved, *data, "--steps=8")
    node = run(spawn, hurt, "after", saved, *data, "--die-at=10", "--gather-at=13")

    assert f"a stream of {line}" in reference.agent.text()
    assert f"the stream has ended after {n_steps} steps" in node.agent.text()
    ((_, (_, norm)),) = ends(reference).items()
    assert sorted(ends(node)) == ["node0/0#0", "node0/1#1", "node0/2#0"]
    assert {steps for steps, _ in ends(node).values()} == {n_steps}
    assert [own for _, own in ends(node).values()] == pytest.approx([norm] * 3, rel=1e-9)
    assert [event["members"] for event in node.events("step") if event["step"] in (9, 11, n_steps - 1)] == [3, 2, 3]
    expected = used(whole)
    assert len(expected) == n_steps
    assert max(sum(expected.values(), Counter()).values()) == 2  # passes
    assert used(hurt) == expected
    log = before.log.read_bytes() + node.log.read_bytes()
    node.log.write_bytes(log)
    assert digests(node) == digests(reference)
    assert_same(losses(node), losses(reference), 1e-9)


@pytest.mark.timeout(300)
@pytest.mark.soak
def test_a_stream_that_does_not_repeat_itself_is_used_at_least_once_whoever_dies(
    spawn: Spawner, tmp_path: Path
) -> None:
    node = run(spawn, tmp_path, "hurt", THREE, "--data=live", "--die-at=10", "--gather-at=13")
    assert "a stream of 1 shard: each sample is used at least once in a pass. A worker" in node.agent.text()
    assert len(set(ends(node).values())) == 1
    found = used(tmp_path)
    assert sorted(found) == list(range(len(found)))
    assert all(step.total() == 12 for step in found.values())
    # All of the first pass; of the second one at most 11 do not fill a step.
    whole = sum(found.values(), Counter())
    assert set(whole) == set(range(150))
    assert sum(n >= 2 for n in whole.values()) >= 150 - 11


@pytest.mark.timeout(300)
@pytest.mark.soak
def test_a_loop_over_micro_batches_takes_a_stream_too(spawn: Spawner, tmp_path: Path) -> None:
    reference = run(spawn, tmp_path, "reference", ("--standalone",), "--batches")
    node = run(spawn, tmp_path, "hurt", THREE, "--batches", "--die-at=10", "--num-workers=1")
    assert node.agent.text().count("killed by SIGKILL; a replacement starts") == 1
    ((_, (n_steps, norm)),) = ends(reference).items()
    assert n_steps == 25
    assert {steps for steps, _ in ends(node).values()} == {25}
    assert [own for _, own in ends(node).values()] == pytest.approx([norm] * len(ends(node)), rel=1e-9)
    assert digests(node) == digests(reference)
    assert_same(losses(node), losses(reference), 1e-9)
