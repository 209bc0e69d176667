"""Scripts of transformers, TRL and accelerate, changed by a few lines: whoever dies, they train as if nobody had."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner, soak
from tests.jobs.watch import Node, elaunch, wait_for_step

pytestmark = pytest.mark.timeout(200)

TRAINER = ROOT / "tests" / "jobs" / "hf.py"
TRL = ROOT / "tests" / "jobs" / "hf_trl.py"
ACCELERATE = ROOT / "tests" / "jobs" / "hf_accelerate.py"


def run(spawn: Spawner, folder: Path, script: Path, *flags: str, workers: int = 3, name: str) -> Node:
    command = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=6")
    node = elaunch(spawn, folder, *command, script=(script, *flags), name=name)
    assert node.agent.wait(150) == 0, node.agent.tail()
    return node


def train(spawn: Spawner, folder: Path, *flags: str, workers: int = 3, name: str) -> Node:
    return run(spawn, folder, TRAINER, "--out", str(folder / name), *flags, workers=workers, name=name)


def numbers(text: str, start: str) -> list[tuple[float, ...]]:
    """The numbers of the lines that begin so, each line once."""
    found = dict.fromkeys(re.findall(rf"{start}(.*)\.$", text, re.MULTILINE))
    return [tuple(map(float, line.split())) for line in found]


def assert_same_steps(node: Node, calm: Node, rel: float) -> None:
    steps, expected = node.events("step"), calm.events("step")
    assert [(one["step"], one["digest"]) for one in steps] == [(one["step"], one["digest"]) for one in expected]
    assert len({one["digest"] for one in expected}) == len(expected)
    assert [one["loss"] for one in steps] == pytest.approx([one["loss"] for one in expected], rel=rel)
    assert {event.get("attempt", 0) for event in node.events("worker_started")} == {0}


@pytest.mark.parametrize(
    ("accumulation", "deaths"),
    [
        soak(1, ("1:0", "0:12")),  # TRL's is one of these
        soak(3, ("1:0", "0:5")),
    ],
)
def test_a_trainer_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, accumulation: int, deaths: tuple[str, ...]
) -> None:
    flags = ("--accumulation", str(accumulation), "--unlogged", "2")
    calm = train(spawn, tmp_path, *flags, name="calm")
    node = train(spawn, tmp_path, *flags, *[flag for death in deaths for flag in ("--die", death)], name="deaths")
    assert_same_steps(node, calm, 1e-4)
    assert len(node.events("worker_started")) == 3 + len(deaths)
    ends, undisturbed_ends = numbers(node.agent.text(), "end: "), numbers(calm.agent.text(), "end: ")
    assert len(undisturbed_ends) == 1  # all members have the same, also of steps that were not logged
    for own, expected in zip(ends, undisturbed_ends, strict=True):
        assert own == pytest.approx(expected, rel=1e-4)
        assert own[1] == pytest.approx(expected[1], rel=1e-6)
    states = [
        tmp_path / name / f"checkpoint-{'18' if accumulation == 1 else '6'}" / "trainer_state.json"
        for name in ("calm", "deaths")
    ]
    logs = [json.loads(state.read_text())["log_history"] for state in states]
    assert [set(log) for log in logs[0]] == [set(log) for log in logs[1]]
    for log, undisturbed in zip(logs[1], logs[0], strict=True):
        for key in {"step", "epoch", "loss", "learning_rate", "grad_norm", "eval_loss"} & set(log):
            assert log[key] == pytest.approx(undisturbed[key], rel=1e-3), key


@pytest.mark.parametrize(
    ("flags", "deaths"),
    [
        (("--fsdp=FULL_STATE_DICT",), ("1:0", "0:12")),
        soak(("--fsdp=SHARDED_STATE_DICT", "--accumulation=3"), ("2:0", "1:3", "0:5")),
        soak(("--fsdp=FULL_STATE_DICT", "--lora"), ("1:0", "0:12")),
        soak(("--lora",), ("1:0", "0:12")),
    ],
)
def test_a_trainer_with_shards_or_adapters_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...], deaths: tuple[str, ...]
) -> None:
    calm = train(spawn, tmp_path, *flags, name="calm")
    node = train(spawn, tmp_path, *flags, *[flag for death in deaths for flag in ("--die", death)], name="deaths")
    assert_same_steps(node, calm, 1e-4)
    assert len(node.events("worker_started")) == 3 + len(deaths)
    # The model can be used after the training as well, whole.
    ends, (expected,) = numbers(node.agent.text(), "end: "), numbers(calm.agent.text(), "end: ")
    for own in ends:
        assert own == pytest.approx(expected, rel=1e-4)


@pytest.mark.soak
def test_a_trainer_under_elaunch_has_the_losses_of_one_under_torchrun(spawn: Spawner, tmp_path: Path) -> None:
    calm = train(spawn, tmp_path, name="calm")
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(TRAINER))
    process = spawn.python(*command, "--out", str(tmp_path / "torchrun"), name="torchrun")
    assert process.wait(150) == 0, process.tail()
    (own,), (expected,) = numbers(calm.agent.text(), "end: "), numbers(process.text(), "end: ")
    assert own == pytest.approx(expected, rel=1e-5)


@pytest.mark.soak
def test_a_trainer_resumes_from_its_checkpoint_and_survives_a_death_before_its_first_step(
    spawn: Spawner, tmp_path: Path
) -> None:
    calm = train(spawn, tmp_path, name="calm")
    (tmp_path / "calm" / "checkpoint-18").rename(tmp_path / "calm" / "later")
    (tmp_path / "calm" / "checkpoint-16").rename(tmp_path / "calm" / "last")
    node = train(spawn, tmp_path, "--resume", "--die", "1:8", "--die", "0:12", name="calm")
    assert_weights_alike(node, calm)


def assert_weights_alike(node: Node, calm: Node) -> None:
    (own,), (expected,) = numbers(node.agent.text(), "end: "), numbers(calm.agent.text(), "end: ")
    assert (own[0], *own[2:]) == pytest.approx((expected[0], *expected[2:]), rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "deaths"),
    [
        ("sft", ("1:0", "0:12")),
        soak("dpo", ("2:0", "0:12")),
    ],
)
def test_a_trainer_of_trl_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, kind: str, deaths: tuple[str, ...]
) -> None:
    calm, node = (
        run(spawn, tmp_path, TRL, "--trainer", kind, "--out", str(tmp_path / name), *flags, name=name)
        for name, flags in (("calm", ()), ("deaths", [flag for death in deaths for flag in ("--die", death)]))
    )
    assert_same_steps(node, calm, 1e-4)
    assert len(node.events("worker_started")) == 3 + len(deaths)
    logs = [
        json.loads((tmp_path / name / "checkpoint-18" / "trainer_state.json").read_text())["log_history"]
        for name in ("calm", "deaths")
    ]
    assert [set(log) for log in logs[0]] == [set(log) for log in logs[1]]
    for log, undisturbed in zip(logs[1], logs[0], strict=True):
        # What TRL counts goes back to the last update, too; its means over batches depend on how samples are dealt out.
        for key in {"step", "epoch", "loss", "num_tokens", "learning_rate", "eval_loss"} & set(log):
            assert log[key] == pytest.approx(undisturbed[key], rel=1e-3), key


@pytest.mark.parametrize(
    ("example", "epochs", "n_steps"), [("train_transformers.py", 1, 64), ("train_accelerate.py", 5, 160)]
)
def test_an_example_survives_kill_9_as_it_says(
    spawn: Spawner, tmp_path: Path, example: str, epochs: int, n_steps: int
) -> None:
    out = ("--out", str(tmp_path / "out")) if "transformers" in example else ()
    command = ("--standalone", "--nproc-per-node=2", "--max-restarts=5")
    node = elaunch(spawn, tmp_path, *command, script=(ROOT / "examples" / example, f"--epochs={epochs}", *out))
    wait_for_step(node, 2)
    killed, survivor = node.events("worker_started")
    os.kill(killed["pid"], signal.SIGKILL)
    assert node.agent.wait(150) == 0, node.agent.tail()
    assert [event["step"] for event in node.events("step")] == list(range(n_steps))
    started = node.events("worker_started")
    assert [(event["worker"].partition("#")[0], event.get("attempt", 0)) for event in started[2:]] == [
        (killed["worker"].partition("#")[0], 0)
    ]
    ends = {event["worker"]: event.get("exitcode") for event in node.events("worker_exited")}
    assert ends[survivor["worker"]] == 0


@pytest.mark.parametrize(
    ("flags", "deaths"),
    [
        ((), ("1:0.0", "0:2.0")),
        soak(("--accumulation=2",), ("1:0.1", "0:2.5")),
        (("--accumulation=2", "--fsdp"), ("1:0.1", "0:2.5")),
    ],
)
def test_an_accelerate_script_goes_on_as_if_nobody_had_died(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...], deaths: tuple[str, ...]
) -> None:
    calm = run(spawn, tmp_path, ACCELERATE, *flags, name="calm")
    told = [flag for death in deaths for flag in ("--die", death)]
    node = run(spawn, tmp_path, ACCELERATE, *flags, *told, name="deaths")
    assert_same_steps(node, calm, 1e-8)
    epochs, expected = (numbers(one.agent.text(), "epoch [0-9]: ") for one in (node, calm))
    assert len(expected) == 3
    for own, undisturbed in zip(epochs, expected, strict=True):
        assert own == pytest.approx(undisturbed, rel=1e-6)
