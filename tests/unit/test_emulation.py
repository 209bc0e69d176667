"""Emulated layers: they last as long as the profile says, and train like any others."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks import emulation
from benchmarks.emulation import (
    MOST_CARRIED_S,
    WORDS,
    EmulatedLayer,
    Slow,
    Words,
    emulated_layers,
    loss_fn,
    slowness,
)
from benchmarks.pipeline import cases, cut
from elaunch.plan import Stage, stages, symmetric
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.workers.layers.chain.chain import Chain
from elaunch.workers.layers.model import Draw, build, describe
from elaunch.workers.layers.tensor_parallel import TPRank
from tests.unit.engine_crew import train

LAYER = LayerProfile(0.25, 0.5, 0, 0, 0, 0, fixed_forward_s=1.0, fixed_backward_s=2.0)
PROFILE = Profile("three", (LAYER,) * 3, 1, 1e9, 0.0)
NO_TIME = PROFILE.scaled(0.0)


class Time:
    """A clock that only sleeping moves; each sleep lasts `overshoot_s` too long."""

    def __init__(self, overshoot_s: float = 0.0) -> None:
        self.overshoot_s = overshoot_s
        self.now_s = 0.0
        self.slept_s: list[float] = []

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.slept_s.append(seconds)
        self.now_s += seconds + self.overshoot_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    fake = Time()
    monkeypatch.setattr(emulation, "time", fake)
    monkeypatch.setattr(emulation, "_clock", emulation._Clock())
    return fake


def run(layers: list[EmulatedLayer], rows: int) -> tuple[Tensor, Tensor]:
    words, targets = torch.utils.data.default_collate([Words(256)[index] for index in range(rows)])
    y: Tensor = words
    for layer in layers:
        y = layer(y)
    return y, targets


def test_forward_and_backward_take_the_seconds_of_the_profile_for_their_rows(clock: Time) -> None:
    layers = [make() for make in emulated_layers(PROFILE)]
    for rows in (1, 4):
        began_s = clock.now_s
        y, targets = run(layers, rows)
        assert clock.now_s - began_s == 3 * LAYER.forward_s(rows)
        began_s = clock.now_s
        loss_fn(y, targets).backward()
        assert clock.now_s - began_s == 3 * LAYER.backward_s(rows)


def test_what_a_layer_really_computes_is_part_of_its_seconds(clock: Time) -> None:
    layers = [make() for make in emulated_layers(PROFILE)]

    def takes_a_while(*_: object) -> None:
        clock.now_s += 0.125

    layers[1].mix.register_forward_hook(takes_a_while)
    layers[1].mix.weight.register_hook(takes_a_while)
    y, targets = run(layers, 1)
    assert clock.now_s == 3 * LAYER.forward_s(1)
    loss_fn(y, targets).backward()
    assert clock.now_s == 3 * (LAYER.forward_s(1) + LAYER.backward_s(1))
    assert min(clock.slept_s) < LAYER.forward_s(1)


def test_a_sleep_that_was_too_long_shortens_the_next(clock: Time) -> None:
    clock.overshoot_s = MOST_CARRIED_S / 2
    y, targets = run([make() for make in emulated_layers(PROFILE)], 1)
    loss_fn(y, targets).backward()
    exact_s = 3 * (LAYER.forward_s(1) + LAYER.backward_s(1))
    assert clock.now_s == pytest.approx(exact_s + clock.overshoot_s, abs=1e-9)


def test_a_long_delay_is_not_made_up_for(clock: Time) -> None:
    clock.overshoot_s = 10 * MOST_CARRIED_S
    run([make() for make in emulated_layers(PROFILE)], 1)
    exact_s = 3 * LAYER.forward_s(1)
    assert clock.now_s == pytest.approx(exact_s + 3 * clock.overshoot_s - 2 * MOST_CARRIED_S, abs=1e-9)


def test_describing_the_layers_for_the_engine_takes_no_time(clock: Time) -> None:
    specs = describe(emulated_layers(PROFILE), Words(1024, width=16)[0][0][None], 4, None)
    assert clock.slept_s == []
    assert [spec.output[0] for spec in specs[:-1]] == [(16, 32)] * 2
    assert specs[-1].output[0] == (16, WORDS)


@pytest.mark.parametrize(("row_bytes", "width"), [(64 << 10, 32), (4 << 10, 8), (512, 128)])
def test_an_activation_row_has_the_bytes_that_were_asked_for(clock: Time, row_bytes: int, width: int) -> None:
    specs = describe(emulated_layers(PROFILE, width=width), Words(row_bytes, width)[0][0][None], 1, None)
    shape, dtype = specs[0].output
    assert shape.numel() * dtype.itemsize == row_bytes


def test_activations_computed_again_take_the_time_of_a_forward_again(clock: Time) -> None:
    plan = symmetric(["w0"], 3, 2, 2)
    train(plan, 1, layers=emulated_layers(PROFILE), dataset=Words(256), recompute=True)
    assert clock.now_s == 3 * (2 * LAYER.forward_s(2) + LAYER.backward_s(2))


def test_weight_gradients_take_their_share_of_the_backward_whenever_they_come(clock: Time) -> None:
    profile = Profile("three", (replace(LAYER, weight_share=0.25),) * 3, 1, 1e9, 0.0)
    (spec,) = describe(emulated_layers(profile)[1:2], torch.zeros(1, 2, 32), 4, None)
    layer = build(spec, emulated_layers(profile)[1], 3, torch.device("cpu"), None, TPRank())
    chain, draw = Chain([layer]), Draw(3, 0, ((0, range(4), 0),), 4)
    x = torch.randn(4, 2, 32)
    for first in (True, False):
        _, saved = chain.forward(x, draw)
        began_s = clock.now_s
        _, left = chain.input_gradient(saved, x, draw, lambda layer, grads: None)
        took_s = clock.now_s - began_s
        if first:
            assert took_s == 2 * LAYER.backward_s(4), "a whole one, and one in two parts to compare with it"
            continue
        assert took_s == 0.75 * LAYER.backward_s(4)
        for one in left:
            list(one.layers())
        assert clock.now_s - began_s == LAYER.backward_s(4)


def test_emulated_layers_learn_and_do_not_depend_on_the_plan() -> None:
    settings = {"layers": emulated_layers(NO_TIME), "dataset": Words(1024)}
    alone, parameters = train(symmetric(["w0"], 3, 12, 4), 4, **settings)
    cut = [Stage(range(2), (("w0",), ("w1",), ("w2",))), Stage(range(2, 3), (("w3",), ("w4",), ()))]
    shared, same = train(stages(3, 12, 4, cut), 4, **settings)
    assert alone[-1].loss < alone[0].loss
    for one, other in zip(alone, shared, strict=True):
        assert other.loss == pytest.approx(one.loss, rel=1e-10)
    assert all(torch.allclose(same[name], value, rtol=1e-8, atol=1e-12) for name, value in parameters.items())


def test_the_stages_of_the_benchmark_share_the_blocks_and_have_embedding_and_head_at_the_ends() -> None:
    assert cut(48, 8) == [range(7), *(range(first, first + 6) for first in range(7, 43, 6)), range(43, 50)]
    assert [len(stage) for stage in cut(48, 7)] == [8, 7, 7, 7, 7, 7, 7]


def test_the_plans_of_the_benchmark_are_symmetric_then_lack_a_worker_then_differ_in_depth() -> None:
    found = cases(50, 32, quick=False)
    assert [len(case.plan.workers) for case in found] == [8, 16, 24, 23, 21]
    assert [case.plan.n_units for case in found] == [32, 64, 96, 96, 96]
    assert [case.with_torch for case in found] == [True, False, False, False, False]
    assert [len(case.plan.workers) for case in cases(50, 12, quick=True)] == [8, 3]


def test_a_worker_becomes_slow_in_the_step_that_was_said() -> None:
    slow = [Slow.parse("n1/0:20:1.5"), Slow.parse("n1/0:30:1"), Slow.parse("n2/1:0:2")]
    assert [str(one) for one in slow] == ["n1/0:20:1.5", "n1/0:30:1", "n2/1:0:2"]
    assert [slowness(slow, "n1/0#3", step) for step in (19, 20, 29, 30)] == [1.0, 1.5, 1.5, 1.0]
    assert slowness(slow, "n2/1#0", 5) == 2.0
    assert slowness(slow, "n1/1#0", 25) == 1.0


def test_a_slow_worker_takes_so_many_times_as_long(clock: Time) -> None:
    slower = 1.0
    layers = [make() for make in emulated_layers(PROFILE, slowness=lambda: slower)]
    for slower in (1.0, 1.5):
        began_s = clock.now_s
        y, targets = run(layers, 2)
        assert clock.now_s - began_s == 3 * slower * LAYER.forward_s(2)
        began_s = clock.now_s
        loss_fn(y, targets).backward()
        assert clock.now_s - began_s == 3 * slower * LAYER.backward_s(2)
