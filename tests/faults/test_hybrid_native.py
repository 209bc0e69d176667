"""Workers die while activations, gradients and parameters of a model in layers go over native groups."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.devices import BACKENDS, on_gpu
from tests.faults.test_hybrid import FOUR, LIMIT_S, SCRIPT, check, reference
from tests.helpers import Spawner, soak
from tests.jobs.watch import assert_same, digests, elaunch, losses

pytestmark = pytest.mark.timeout(400)

STEPS = ("--steps", "60")
SLOW = ("--row-seconds=0.001", "--crew=4", "--await-native")
ROUNDING = 1e-9


@pytest.mark.parametrize(
    ("dtype", "device"), [("bfloat16", "cpu"), on_gpu("bfloat16", "cuda"), on_gpu("float64", "cuda")]
)
def test_native_groups_give_every_bit_of_what_one_worker_gives(
    spawn: Spawner, tmp_path: Path, dtype: str, device: str
) -> None:
    steps = ("--steps=10", f"--dtype={dtype}")
    expected = reference(spawn, tmp_path, *steps, device=device)
    script: tuple[str | Path, ...] = (SCRIPT, "--dp=2", "--pp=2", *steps, "--await-native")
    node = elaunch(spawn, tmp_path, *FOUR, "--collectives=native", script=script, device=device)
    check(node, expected, [])
    (used,) = node.events("collectives")
    assert (used["backend"], used["step"]) == (BACKENDS[device], 1)


@pytest.mark.parametrize(
    ("deaths", "shape", "device"),
    [
        (("0:20:compute", "3:40:share"), ("--dp=2", "--pp=2"), "cpu"),
        soak(("1:20:half", "2:40:passed"), ("--dp=2", "--pp=2"), "cpu"),
        soak(("3:20:ship", "0:40:enter"), ("--dp=2", "--pp=2"), "cpu"),
        soak(("2:20:share", "1:40:compute"), ("--dp=1", "--pp=4"), "cpu"),
        on_gpu(("3:20:share",), ("--dp=2", "--pp=2"), "cuda"),
    ],
)
def test_deaths_among_native_groups_change_no_bit(
    spawn: Spawner, tmp_path: Path, deaths: tuple[str, ...], shape: tuple[str, ...], device: str
) -> None:
    """On a GPU by rounding only: copies of its state are updated by the CPU, which rounds otherwise."""
    expected = reference(spawn, tmp_path, *STEPS, device=device)
    flags = [flag for death in deaths for flag in ("--die", death)]
    script: tuple[str | Path, ...] = (SCRIPT, *shape, *STEPS, *SLOW, *flags)
    node = elaunch(spawn, tmp_path, *FOUR, "--collectives=native", script=script, device=device)
    dead = [f"{death.split(':')[0]}#0" for death in deaths]
    check(node, expected, dead, rounding=0.0 if device == "cpu" else ROUNDING)
    swaps = {event["generation"]: event for event in node.events("collectives")}
    assert {event["backend"] for event in swaps.values()} == {BACKENDS[device]}
    begun = [event["step"] for event in swaps.values()]
    for death in deaths:
        assert any(step < int(death.split(":")[1]) for step in begun), f"none before {death}: {begun}"
    assert len(begun) > len(deaths), f"each crew that lasts has native groups: {begun}"


@pytest.mark.parametrize(
    ("victim", "moment", "device"),
    [
        ("0#0", "6:native-moving", "cpu"),  # it sends
        ("1#1", "0:native-receive", "cpu"),  # it is the one that gets it
        ("3#0", "6:turn-compute", "cpu"),  # while others move
        soak("0#0", "6:turn-half", "cpu"),
        soak("1#1", "0:turn-enter", "cpu"),
        soak("2#0", "6:turn-passed", "cpu"),
        on_gpu("0#0", "6:native-moving", "cuda"),
    ],
)
def test_a_death_while_state_moves_natively_in_a_step_changes_no_bit(
    spawn: Spawner, tmp_path: Path, victim: str, moment: str, device: str
) -> None:
    """A worker dies, and another one while the replacement of that gets its state in the background of a step."""
    steps = ("--steps", "30")
    expected = reference(spawn, tmp_path, *steps, device=device)
    die = ("--die", "1:5:compute", "--die", f"{victim}:{moment}", "--snapshots", "2", "--crew", "4")
    script: tuple[str | Path, ...] = (SCRIPT, "--dp=2", "--pp=2", *steps, *die)
    flags = (*FOUR, "--collectives=native", "--policy=reroute")
    natively = {"ELAUNCH_STATE_PATH": "native"}
    node = elaunch(spawn, tmp_path, *flags, script=script, environment=natively, device=device)
    check(node, expected, ["1#0", victim], rounding=0.0 if device == "cpu" else ROUNDING)
    moves = [event for event in node.events("transition") if event["bytes_moved"]]
    assert {event["moved_over"] for event in moves} == {"native"}


@pytest.mark.parametrize(
    ("consistency", "deaths", "device"),
    [
        ("fast", ("1:15:tp", "2:40:tp"), "cpu"),
        soak("bitwise", ("0:15:tp", "3:40:tp"), "cpu"),  # each sum is an exchange, in a fixed order
        soak("fast", ("3:15:compute", "0:40:tp"), "cpu"),
        on_gpu("fast", ("1:15:tp",), "cuda"),
    ],
)
def test_deaths_in_tensor_parallel_sums_of_native_groups_lose_no_step(
    spawn: Spawner, tmp_path: Path, consistency: str, deaths: tuple[str, ...], device: str
) -> None:
    found, samples, _ = reference(spawn, tmp_path, *STEPS, device=device)
    flags = [flag for death in deaths for flag in ("--die", death)]
    shape = ("--dp=2", "--pp=1", "--tp=2")
    script: tuple[str | Path, ...] = (SCRIPT, *shape, *STEPS, *SLOW, *flags)
    four = ("--standalone", "--nproc-per-node=4", f"--consistency={consistency}", "--collectives=native")
    node = elaunch(spawn, tmp_path, *four, script=script, device=device)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    # Sums over cut tensors have another order.
    assert_same(losses(node), found, ROUNDING)
    assert digests(node) == samples
    killed = {event["worker"] for event in node.events("worker_exited") if event.get("signal") == signal.SIGKILL}
    assert killed == {f"node0/{death.split(':')[0]}#0" for death in deaths}, node.agent.tail()
    swaps = {event["generation"]: event["step"] for event in node.events("collectives")}
    assert len(swaps) > len(deaths), f"each crew that lasts has native groups: {swaps}"
