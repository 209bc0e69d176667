"""Engines whose weights follow another plan for a while, or whose state goes to and fro."""

from __future__ import annotations

import threading
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.plan import Plan, symmetric
from elaunch.workers.layers.change.held_state import StepReport
from elaunch.workers.layers.engine import Engine
from tests.helpers import soak
from tests.unit.engine_crew import train, whole

pytestmark = pytest.mark.job

FOUR = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]
BEFORE, AFTER = 2, 2
"""Steps that commit before the plans change, and after."""


def plan(dp: int = 1, pp: int = 1, tp: int = 1) -> Plan:
    return symmetric(FOUR, 4, 12, 3, dp=dp, pp=pp, tp=tp)


TRAINING, PIPELINE, REPLICAS, CUT = plan(dp=2, pp=2), plan(pp=4), plan(dp=4), plan(dp=2, tp=2)


@cache
def undisturbed() -> tuple[list[StepReport], dict[str, Tensor]]:
    return train(TRAINING, BEFORE + AFTER)


class Script:
    """What each of the workers does between its first steps and the others.

    Args:
        course: plans, each for the weights alone or for all.
    """

    def __init__(self, *course: tuple[Plan, bool]) -> None:
        self.course = course
        self.lock = threading.Lock()
        self.engines: list[Engine] = []
        self.weights: list[dict[str, Tensor]] = []
        self.received: list[int] = [0] * len(course)

    def __call__(self, engine: Engine) -> None:
        group = engine._here.group
        for _ in range(BEFORE):
            engine.train_step()
        with self.lock:
            self.engines.append(engine)
        self.note(engine)
        for place, (wanted, weights_only) in enumerate(self.course):
            if weights_only:
                received_bytes = engine.lend(group, wanted)
            else:
                received_bytes = engine.change(group, wanted, BEFORE, pausing=True)
            engine.install()
            with self.lock:
                self.received[place] += received_bytes
            assert engine.plan == wanted
            self.note(engine)
            for layer in engine.layers.values():
                layer.module.train(not weights_only)
            if weights_only:
                with pytest.raises(StateError, match="step 2 cannot begin: the weights alone follow another plan"):
                    engine.train_step()

    def note(self, engine: Engine) -> None:
        """The first worker notes the weights of all."""
        group = engine._here.group
        group.barrier()
        if group.rank == 0:
            there: Any = [SimpleNamespace(layers=one.layers) for one in self.engines]
            self.weights.append({name: value.clone() for name, value in whole(there).items()})
        group.barrier()


@pytest.mark.parametrize(
    ("course", "free"),
    [
        (((REPLICAS, True), (TRAINING, False)), (False, True)),
        (((CUT, True), (REPLICAS, True), (TRAINING, False)), (False, False, True)),
        soak(((PIPELINE, False), (REPLICAS, True), (PIPELINE, False)), (False, False, True)),
        (((REPLICAS, True), (PIPELINE, False)), (False, False)),
        soak(((PIPELINE, False), (REPLICAS, False), (TRAINING, False)), (False, False, True)),
    ],
)
def test_weights_are_the_same_under_each_plan_and_training_goes_on_bit_by_bit(
    course: tuple[tuple[Plan, bool], ...], free: tuple[bool, ...]
) -> None:
    script = Script(*course)
    reports, ended = train(TRAINING, AFTER, script=script)
    expected, weights = undisturbed()
    assert reports == expected[BEFORE:]
    assert ended.keys() == weights.keys()
    assert all(torch.equal(ended[name], weights[name]) for name in weights)
    assert len(script.weights) == 1 + len(course)
    for found in script.weights[1:]:
        assert all(torch.equal(found[name], value) for name, value in script.weights[0].items())
    assert tuple(not received_bytes for received_bytes in script.received) == free


def test_modules_are_in_the_mode_in_which_they_were_lent_when_they_are_back() -> None:
    modes: list[bool] = []

    def script(engine: Engine) -> None:
        group = engine._here.group
        engine.lend(group, REPLICAS)
        engine.install()
        for layer in engine.layers.values():
            layer.module.eval()
        engine.change(group, TRAINING, 0, pausing=True)
        engine.install()
        modes.extend(module.training for layer in engine.layers.values() for module in layer.module.modules())

    train(TRAINING, 1, script=script)
    assert modes
    assert all(modes)
