"""Workers die while activations, gradients and parameters of a model in layers go over native groups."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.faults.test_hybrid import FOUR, LIMIT_S, SCRIPT, check, reference
from tests.helpers import Spawner, soak
from tests.jobs.watch import assert_same, digests, elaunch, losses

pytestmark = pytest.mark.timeout(400)

STEPS = ("--steps", "60")


@pytest.mark.parametrize(
    ("deaths", "shape"),
    [
        (("0:20:compute", "3:40:share"), ("--dp=2", "--pp=2")),
        soak(("1:20:half", "2:40:passed"), ("--dp=2", "--pp=2")),
        soak(("3:20:ship", "0:40:enter"), ("--dp=2", "--pp=2")),
        soak(("2:20:share", "1:40:compute"), ("--dp=1", "--pp=4")),
    ],
)
def test_deaths_among_native_groups_change_no_bit(
    spawn: Spawner, tmp_path: Path, deaths: tuple[str, ...], shape: tuple[str, ...]
) -> None:
    expected = reference(spawn, tmp_path, *STEPS)
    flags = [flag for death in deaths for flag in ("--die", death)]
    slow = ("--row-seconds", "0.001", "--crew", "4")
    script: tuple[str | Path, ...] = (SCRIPT, *shape, *STEPS, *slow, *flags)
    node = elaunch(spawn, tmp_path, *FOUR, "--collectives=native", script=script)
    check(node, expected, [f"{death.split(':')[0]}#0" for death in deaths])
    swaps = {event["generation"]: event for event in node.events("collectives")}
    assert {event["backend"] for event in swaps.values()} == {"gloo"}
    begun = [event["step"] for event in swaps.values()]
    for death in deaths:
        assert any(step < int(death.split(":")[1]) for step in begun), f"none before {death}: {begun}"
    assert len(begun) > len(deaths), f"each crew that lasts has native groups: {begun}"


@pytest.mark.parametrize(
    ("consistency", "deaths"),
    [
        ("fast", ("1:15:tp", "2:40:tp")),
        soak("bitwise", ("0:15:tp", "3:40:tp")),  # each sum is an exchange, in a fixed order
        soak("fast", ("3:15:compute", "0:40:tp")),
    ],
)
def test_deaths_in_tensor_parallel_sums_of_native_groups_lose_no_step(
    spawn: Spawner, tmp_path: Path, consistency: str, deaths: tuple[str, ...]
) -> None:
    found, samples, _ = reference(spawn, tmp_path, *STEPS)
    flags = [flag for death in deaths for flag in ("--die", death)]
    script: tuple[str | Path, ...] = (
        SCRIPT,
        "--dp=2",
        "--pp=1",
        "--tp=2",
        *STEPS,
        "--row-seconds",
        "0.001",
        "--crew",
        "4",
        *flags,
    )
    four = ("--standalone", "--nproc-per-node=4", f"--consistency={consistency}", "--collectives=native")
    node = elaunch(spawn, tmp_path, *four, script=script)
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    # Sums over cut tensors have another order.
    assert_same(losses(node), found, 1e-9)
    assert digests(node) == samples
    killed = {event["worker"] for event in node.events("worker_exited") if event.get("signal") == signal.SIGKILL}
    assert killed == {f"node0/{death.split(':')[0]}#0" for death in deaths}, node.agent.tail()
    swaps = {event["generation"]: event["step"] for event in node.events("collectives")}
    assert len(swaps) > len(deaths), f"each crew that lasts has native groups: {swaps}"
