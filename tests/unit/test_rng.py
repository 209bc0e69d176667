"""Random numbers belong to the micro-batch."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from elaunch.workers.random.rng import (
    layer_randomness,
    mix,
    read_generators,
    seed_layer,
    seed_micro_batch,
    set_generators,
)
from elaunch.workers.random.rows import RowsOfUnit, math_attention
from elaunch.workers.random.trace import RandomTrace
from tests.devices import needs_gpu
from tests.unit.random_layers import CASES, Attention, Case, run

WHOLE: tuple[RowsOfUnit, ...] = ((0, range(2), 0),)
PARTS: tuple[tuple[RowsOfUnit, ...], ...] = (((0, range(1), 0),), ((0, range(1, 2), 0),))
DROPOUT = CASES["dropout"]


def draw() -> tuple[list[float], float, float]:
    return torch.randn(3).tolist(), random.random(), float(np.random.rand())


def test_a_micro_batch_draws_the_same_numbers_whatever_was_drawn_before() -> None:
    seed_micro_batch(1, 2, 3)
    first = draw()
    torch.randn(1)  # leaves half a pair of normal numbers behind
    random.gauss(0, 1)
    seed_micro_batch(1, 2, 3)
    assert draw() == first


def test_each_of_seed_step_and_index_changes_all_generators() -> None:
    drawn = []
    for key in [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4), (2, 1, 3), (3, 2, 1)]:
        seed_micro_batch(*key)
        drawn.append(draw())
    assert all(len({str(numbers[part]) for numbers in drawn}) == len(drawn) for part in range(3))


def test_seeds_of_any_size_and_sign_can_be_used() -> None:
    for seed in (-1, 0, 2**64, 2**200):
        seed_micro_batch(seed, 0, 0)


class Accelerator:
    """Torch's module of an accelerator, with a generator of the CPU for that of the device."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, in_use: bool = True) -> None:
        self.generator, self.in_use = torch.Generator(), in_use
        self.manual_seed, self.set_rng_state = self.generator.manual_seed, self.generator.set_state
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch, "get_device_module", lambda _: self)

    def is_initialized(self) -> bool:
        return self.in_use

    def get_rng_state(self) -> torch.Tensor:
        assert self.in_use, "torch would begin to use the device"
        return self.generator.get_state()

    def draw(self) -> list[float]:
        return torch.randn(3, generator=self.generator).tolist()


def test_generators_go_on_from_where_they_were_read_that_of_the_device_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator(monkeypatch)
    read = read_generators()
    drawn = draw(), device.draw()
    device.draw()
    set_generators(read)
    assert (draw(), device.draw()) == drawn


def test_a_device_that_is_not_in_use_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Accelerator(monkeypatch, in_use=False)
    read, before = read_generators(), device.generator.get_state()
    seed_micro_batch(1, 2, 3)
    set_generators(read)
    device.in_use = True
    assert torch.equal(device.get_rng_state(), before)


@needs_gpu
def test_a_generator_of_a_device_goes_on_from_where_it_was_read() -> None:
    x = torch.ones(1000, device="cuda")
    read = read_generators()
    dropped = nn.functional.dropout(x)
    set_generators(read)
    assert torch.equal(nn.functional.dropout(x), dropped)


def test_neighbouring_keys_give_unrelated_64_bit_numbers() -> None:
    numbers = [mix(seed, step, index) for seed in range(4) for step in range(32) for index in range(32)]
    assert len(set(numbers)) == len(numbers)
    assert max(numbers) < 2**64
    ones = [sum(number >> bit & 1 for number in numbers) / len(numbers) for bit in range(64)]
    assert 0.4 < min(ones) <= max(ones) < 0.6


def test_the_numbers_are_pinned_so_that_versions_of_this_package_agree() -> None:
    assert (mix(0, 0, 0), mix(1, 2, 3)) == (6301843024424383696, 5809300636878265108)


def test_a_whole_unit_draws_natively_what_its_seed_gives() -> None:
    class Look(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert torch._C._len_torch_dispatch_stack() == 0
            return torch.rand(2, 3)

    seed_layer(5, 6, 0, 7)
    assert torch.equal(torch.rand(2, 3), run(Look(), DROPOUT.trace(), torch.zeros(2), WHOLE))


def test_each_of_seed_step_unit_and_layer_changes_the_numbers() -> None:
    drawn = []
    for key in [(1, 2, 3, 4), (2, 2, 3, 4), (1, 3, 3, 4), (1, 2, 4, 4), (1, 2, 3, 5), (4, 3, 2, 1)]:
        seed_layer(*key)
        drawn.append(str(torch.rand(3).tolist()))
    assert len(set(drawn)) == len(drawn)


def test_a_layer_that_draws_nothing_neither_seeds_nor_looks() -> None:
    before = torch.get_rng_state()
    run(nn.Identity(), RandomTrace((), 2), torch.zeros(3), ())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("fails", [False, True])
def test_parts_leave_the_default_generator_as_it_was(fails: bool) -> None:
    before = torch.get_rng_state()
    x = DROPOUT.input(1)[:, :2] if fails else DROPOUT.input(1)
    try:
        run(DROPOUT.make(), DROPOUT.trace(), x, PARTS[0])
    except Exception:
        assert fails
    assert torch.equal(torch.get_rng_state(), before)


class Draws(TorchDispatchMode):
    """Collects the random operations that are done."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rows_by_unit", [WHOLE, PARTS[1]])
@pytest.mark.parametrize("case", [DROPOUT, Case(Attention, (4, 2, 3)), CASES["recurrent"]])
def test_backward_draws_nothing_and_a_second_forward_gives_the_same_gradient(
    case: Case, rows_by_unit: Sequence[RowsOfUnit]
) -> None:
    layer, trace, gradients = case.make(), case.trace(), []
    for _ in range(2):
        x = case.input(2)[rows_by_unit[0][1].start :].requires_grad_()
        result = run(layer, trace, x, tuple(rows_by_unit))
        before = torch.get_rng_state()
        with Draws() as draws:
            result.square().sum().backward()
        assert draws.names == []
        assert torch.equal(torch.get_rng_state(), before)
        assert x.grad is not None
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def test_a_layer_can_be_recomputed_by_running_the_context_again() -> None:
    layer, trace = CASES["several in a row"].make(), CASES["several in a row"].trace()
    gradients = []
    for recompute in (True, False):
        for rows_by_unit in (WHOLE, *PARTS):
            x = DROPOUT.input(2)[rows_by_unit[0][1].start : rows_by_unit[0][1].stop].requires_grad_()

            def forward(x: torch.Tensor, rows: tuple[RowsOfUnit, ...] = rows_by_unit) -> torch.Tensor:
                return run(layer, trace, x, rows)

            if recompute:
                result = torch.utils.checkpoint.checkpoint(
                    forward, x, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
                )
            else:
                result = forward(x)
            result.square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
    assert all(torch.equal(a, b) for a, b in zip(gradients[:3], gradients[3:], strict=True))
    assert torch.equal(torch.cat(gradients[1:3]), gradients[0])


def test_workers_that_are_threads_of_one_process_do_not_disturb_each_other() -> None:
    case = CASES["several in a row"]
    layer, trace, x = case.make(), case.trace(), case.input(2)
    expected = run(layer, trace, x, WHOLE)

    def worker(rows_by_unit: tuple[RowsOfUnit, ...]) -> bool:
        rows = slice(rows_by_unit[0][1].start, rows_by_unit[0][1].stop)
        results = (run(layer, trace, x[rows], rows_by_unit) for _ in range(30))
        return all(torch.equal(result, expected[rows]) for result in results)

    with ThreadPoolExecutor(4) as threads:
        assert all(threads.map(worker, (WHOLE, *PARTS, WHOLE)))


def test_shards_may_wait_for_each_other_between_their_draws() -> None:
    barrier = threading.Barrier(2, timeout=30)

    class Communicating(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = nn.functional.dropout(x, 0.5)
            barrier.wait()
            return x

    x = DROPOUT.input(2)[:, :2]
    trace = Case(lambda: nn.Dropout(0.5), (2, 4)).trace()

    def member(rank: int) -> torch.Tensor:
        return run(Communicating(), trace, x[:, rank : rank + 1], WHOLE, (rank, 2))

    with ThreadPoolExecutor(2) as threads:
        assert torch.equal(torch.cat(list(threads.map(member, range(2))), 1), run(nn.Dropout(0.5), trace, x, WHOLE))


def test_rows_that_do_not_follow_each_other_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match=r"range\(0, 1\) of unit 1 starts at row 2, but 1 rows precede"):
        run(DROPOUT.make(), DROPOUT.trace(), DROPOUT.input(2), ((0, range(1), 0), (1, range(1), 2)))
    with pytest.raises(AssertionError, match=r"range\(1, 3\) of 2 in unit 0"):
        run(DROPOUT.make(), DROPOUT.trace(), DROPOUT.input(2), ((0, range(1, 3), 0),))


@needs_gpu
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"recurrent"}))  # there RNNs are one operation
def test_parts_draw_the_same_on_an_accelerator(name: str) -> None:
    case, device = CASES[name], torch.device("cuda")
    layer, trace, x = case.make().to(device), case.trace(), case.input(2).to(device)

    def on_device(x: torch.Tensor, rows_by_unit: tuple[RowsOfUnit, ...]) -> torch.Tensor:
        with (
            math_attention(trace, device),
            layer_randomness(
                trace, seed=5, step=6, layer=7, rows_by_unit=rows_by_unit, micro_batch_size=2, device=device
            ),
        ):
            result: torch.Tensor = layer(x.clone())
            return result

    whole = on_device(x, WHOLE)
    parts = [on_device(part, rows) for part, rows in zip(x.split(1, case.batch_dim), PARTS)]
    torch.testing.assert_close(torch.cat(parts, case.batch_dim), whole)
