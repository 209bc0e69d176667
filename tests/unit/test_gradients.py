"""Gradients of several micro-batches, collected in buckets."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from elaunch.workers.data_parallel.gradients import DataParallel, GradientBuckets
from tests.devices import DEVICES


class Crew:
    """A model, its buckets (one per parameter unless told otherwise), and what was launched."""

    def __init__(self, model: nn.Module, bucket_bytes: int = 1, **options: Any) -> None:
        self.model = model
        self.launched: list[tuple[int, torch.Tensor]] = []
        names, parameters = zip(*model.named_parameters())
        self.buckets = GradientBuckets(
            parameters,
            lambda number, flat: self.launched.append((number, flat.clone())),
            bucket_bytes,
            bucket_bytes,
            names=names,
            **options,
        )

    @property
    def order(self) -> list[int]:
        return [number for number, _ in self.launched]


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def rows(start: int, stop: int) -> torch.Tensor:
    return torch.arange(32, dtype=torch.float64).sin().view(8, 4)[start:stop]


def grads(model: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in model.parameters()]


def expected(model: nn.Module, *losses: Callable[[nn.Module], torch.Tensor]) -> list[torch.Tensor]:
    twin = copy.deepcopy(model)
    for loss in losses:
        loss(twin).backward()
    return [torch.zeros_like(p) if p.grad is None else p.grad for p in twin.parameters()]


def test_the_buckets_hold_the_sum_of_the_micro_batches_in_reverse_order_of_the_parameters() -> None:
    crew = Crew(net())
    wanted = expected(crew.model, *(lambda m, i=i: m(rows(i, i + 2)).square().sum() for i in (0, 2, 4)))
    for start in (0, 2, 4):
        if start == 4:
            crew.buckets.arm()
        crew.model(rows(start, start + 2)).square().sum().backward()
    assert crew.order == [0, 1, 2, 3]
    for (_, flat), gradient in zip(crew.launched, reversed(wanted)):
        assert torch.equal(flat, gradient.reshape(-1))
    for own, gradient in zip(grads(crew.model), wanted):
        assert own is not None
        assert torch.equal(own, gradient)


@pytest.mark.parametrize("device", DEVICES)
def test_a_bucket_is_launched_while_backward_still_runs(device: str) -> None:
    model = net().to(device)
    crew = Crew(model)
    seen: list[int] = []
    model[0].register_full_backward_pre_hook(lambda *_: seen.append(len(crew.launched)))
    crew.buckets.arm()
    model(rows(0, 2).to(device).requires_grad_()).sum().backward()
    assert seen == [2]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_summed_is_the_memory_of_the_gradients_in_each_step(device: str) -> None:
    model, launched = net().to(device), list[torch.Tensor]()
    buckets = GradientBuckets(list(model.parameters()), lambda _, flat: launched.append(flat), 100, 100)
    places = []
    for _ in range(3):
        launched.clear()
        buckets.arm()
        model(rows(0, 2).to(device)).sum().backward()
        for flat in launched:
            flat.fill_(7.0)  # the sum
        gradients = [gradient for gradient in grads(model) if gradient is not None]
        assert all(bool((gradient == 7.0).all()) for gradient in gradients), "a gradient is a copy"
        places.append([one.data_ptr() for one in (*launched, *gradients)])
        assert {one.device.type for one in (*launched, *gradients)} == {device}
        buckets.zero()
    assert len(places[0]) > 4
    assert places[0] == places[1] == places[2]


def test_nothing_is_launched_before_the_last_backward() -> None:
    crew = Crew(net())
    crew.model(rows(0, 2)).sum().backward()
    assert crew.launched == []
    assert crew.buckets.n_launched == 0


def test_buckets_are_launched_in_order_even_if_their_gradients_come_in_another() -> None:
    class Crossed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(2, 2, bias=False)  # registered first, finished first
            self.first = nn.Linear(2, 2, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x @ self.first.weight, self.last.weight)

    crew = Crew(Crossed())
    crew.buckets.arm()
    crew.model(torch.ones(1, 2)).sum().backward()
    assert crew.order == [0, 1]


def test_the_weight_scales_what_a_micro_batch_adds() -> None:
    crew = Crew(net())
    wanted = expected(crew.model, lambda m: m(rows(0, 8)).square().mean())
    for start, stop in ((0, 3), (3, 8)):
        crew.buckets.weight = (stop - start) / 8
        crew.model(rows(start, stop)).square().mean().backward()
    crew.buckets.flush()
    for own, gradient in zip(grads(crew.model), wanted):
        torch.testing.assert_close(own, gradient, rtol=1e-12, atol=0)


def test_the_weight_counts_once_for_a_parameter_used_twice_and_for_a_loss_term_on_parameters() -> None:
    def loss(model: nn.Module) -> torch.Tensor:
        linear = model[2]  # type: ignore[index]
        twice = linear(torch.tanh(linear(rows(0, 1).new_ones(1, 6)) @ rows(0, 1).new_ones(3, 6)))
        total: torch.Tensor = twice.sum() + linear.weight.square().sum()
        return total

    crew = Crew(net())
    wanted = expected(crew.model, loss)
    crew.buckets.weight = 0.25
    loss(crew.model).backward()
    crew.buckets.flush()
    for own, gradient in zip(grads(crew.model), wanted):
        assert own is not None
        assert torch.equal(own, gradient * 0.25)


def test_with_weight_zero_not_even_a_gradient_that_is_not_finite_counts() -> None:
    crew = Crew(net())
    crew.buckets.weight = 0.0
    (crew.model(rows(0, 2)) * float("nan")).sum().backward()
    crew.buckets.flush()
    assert all(not flat.any() for flat in crew.buckets.flats)


def test_the_weight_does_not_touch_gradients_that_are_only_asked_for() -> None:
    crew = Crew(net())
    crew.buckets.weight = 0.5
    asked = torch.autograd.grad(crew.model(rows(0, 2)).sum(), list(crew.model.parameters()))
    wanted = expected(crew.model, lambda m: m(rows(0, 2)).sum())
    assert all(torch.equal(a, w) for a, w in zip(asked, wanted))
    assert all(not flat.any() for flat in crew.buckets.flats)


def test_a_worker_without_micro_batches_launches_zeros() -> None:
    crew = Crew(net())
    crew.buckets.zero()
    crew.buckets.flush()
    assert crew.order == [0, 1, 2, 3]
    assert all(not flat.any() for _, flat in crew.launched)
    crew.buckets.flush()
    assert crew.order == [0, 1, 2, 3]


def test_parameters_that_take_no_part_contribute_zeros_at_the_end_of_backward() -> None:
    crew = Crew(net())
    crew.buckets.arm()
    crew.model[2].bias.square().sum().backward()  # type: ignore[index]
    assert crew.order == [0, 1, 2, 3]
    assert [bool(flat.any()) for _, flat in crew.launched] == [True, False, False, False]


def test_a_gradient_that_autograd_leaves_undefined_is_zero() -> None:
    class Ignore(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
            return grads[0], None

    crew = Crew(net())
    crew.buckets.arm()
    Ignore.apply(crew.model(rows(0, 2)), crew.model[2].bias).sum().backward()  # type: ignore[no-untyped-call, index]
    assert crew.order == [0, 1, 2, 3]


def test_a_script_sees_gradients_of_whole_steps_only() -> None:
    crew = Crew(net())
    wanted = expected(crew.model, *(lambda m, i=i: m(rows(i, i + 2)).sum() for i in (0, 2, 4)))
    for start in (0, 2, 4):
        if start == 4:
            crew.buckets.arm()
        crew.model(rows(start, start + 2)).sum().backward()
        if start < 4:
            assert grads(crew.model) == [None] * 4
            nn.utils.clip_grad_norm_(crew.model.parameters(), 1e-3)
            crew.model.zero_grad()
            crew.model.zero_grad(set_to_none=False)
    assert all(torch.equal(flat, w.reshape(-1)) for (_, flat), w in zip(crew.launched, reversed(wanted)))


def test_the_end_of_the_last_backward_is_told_after_the_launches_and_only_then() -> None:
    told: list[list[int]] = []

    def finished() -> None:
        told.append(crew.order)

    crew = Crew(net(), finished=finished)
    crew.model(rows(0, 2)).sum().backward()
    assert told == []
    crew.buckets.arm()
    crew.model[0].bias.sum().backward()  # type: ignore[index]
    assert told == [[0, 1, 2, 3]]


@pytest.mark.parametrize("where", ["launch", "finished"])
def test_what_a_callback_raises_comes_out_of_backward(where: str) -> None:
    def fail(*_: Any) -> None:
        raise KeyError("interrupted")

    model = net()
    launch = fail if where == "launch" else lambda *_: None
    buckets = GradientBuckets(list(model.parameters()), launch, finished=fail)
    buckets.arm()
    with pytest.raises(KeyError, match="interrupted"):
        model(rows(0, 2)).sum().backward()


def test_an_interrupted_step_launches_nothing_more_and_can_be_done_again() -> None:
    crew = Crew(net())
    wanted = expected(crew.model, lambda m: m(rows(0, 2)).sum())

    def interrupted(number: int, flat: torch.Tensor) -> None:
        crew.launched.append((number, flat.clone()))
        if number == 1 and len(crew.launched) == 2:
            crew.buckets.disarm()

    crew.buckets._launch = interrupted
    crew.buckets.arm()
    crew.model(rows(0, 2)).sum().backward()
    assert crew.order == [0, 1]
    crew.model(rows(2, 4)).sum().backward()
    assert crew.order == [0, 1]

    crew.buckets.zero()
    crew.launched.append((-1, torch.empty(0)))
    crew.buckets.arm()
    crew.model(rows(0, 2)).sum().backward()
    assert crew.order == [0, 1, -1, 0, 1, 2, 3]
    assert all(torch.equal(flat, w.reshape(-1)) for (_, flat), w in zip(crew.launched[3:], reversed(wanted)))


def test_zero_starts_again_whatever_the_script_did_to_the_gradients() -> None:
    crew = Crew(net())
    crew.buckets.flush()
    crew.model.zero_grad(set_to_none=True)
    next(crew.model.parameters()).grad = torch.ones(6, 4, dtype=torch.float64)
    crew.buckets.zero()
    assert all(gradient is not None and not gradient.any() for gradient in grads(crew.model))
    next(crew.model.parameters()).grad.add_(1)  # type: ignore[union-attr]
    assert crew.buckets.flats[3].sum() == 24


def test_a_gradient_that_the_script_put_in_place_counts() -> None:
    crew = Crew(net())
    crew.buckets.zero()
    for parameter in crew.model.parameters():
        parameter.grad = torch.full_like(parameter, 2)
    crew.buckets.flush()
    assert all(bool((flat == 2).all()) for _, flat in crew.launched)
    crew.model.zero_grad(set_to_none=False)
    assert all(not flat.any() for flat in crew.buckets.flats)


@pytest.mark.filterwarnings("ignore:Using backward.*create_graph")
def test_a_backward_that_builds_a_graph_still_adds_to_the_buckets() -> None:
    crew = Crew(net())
    for last in (False, True):
        if last:
            crew.buckets.arm()
        crew.model(rows(0, 2)).sum().backward(create_graph=True)
    wanted = expected(crew.model, *[lambda m: m(rows(0, 2)).sum()] * 2)
    assert all(torch.equal(flat, w.reshape(-1)) for (_, flat), w in zip(crew.launched, reversed(wanted)))


def test_a_second_backward_after_the_last_one_is_a_clear_error() -> None:
    crew = Crew(net())
    crew.buckets.arm()
    loss = crew.model(rows(0, 2)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"2\.bias got a further gradient .*no_sync"):
        loss.backward()


def test_no_sync_keeps_gradients_for_a_later_backward() -> None:
    crew = Crew(net())
    model = DataParallel(crew.model, crew.buckets)
    crew.buckets.arm()
    with model.no_sync():
        model(rows(0, 2)).sum().backward()
    assert crew.launched == []
    model(rows(2, 4)).sum().backward()
    wanted = expected(crew.model, lambda m: m(rows(0, 4)).sum())
    for (_, flat), gradient in zip(crew.launched, reversed(wanted)):
        torch.testing.assert_close(flat, gradient.reshape(-1))


def test_activation_checkpoints_work() -> None:
    crew = Crew(net())
    crew.buckets.arm()
    checkpoint(crew.model, rows(0, 2), use_reentrant=False).sum().backward()
    wanted = expected(crew.model, lambda m: m(rows(0, 2)).sum())
    assert all(torch.equal(flat, w.reshape(-1)) for (_, flat), w in zip(crew.launched, reversed(wanted)))


def test_a_sparse_gradient_is_a_clear_error() -> None:
    crew = Crew(nn.Embedding(5, 2, sparse=True))
    with pytest.raises(RuntimeError, match=r"gradient of weight is torch.sparse_coo, .* use sparse=False"):
        crew.model(torch.tensor([1, 2])).sum().backward()


def test_a_parameter_unfrozen_after_wrapping_is_a_clear_error() -> None:
    model = net()
    model[0].requires_grad_(False)
    crew = Crew(model)
    assert [flat.numel() for flat in crew.buckets.flats] == [3, 18]
    crew.buckets.arm()
    model[0].requires_grad_(True)
    with pytest.raises(RuntimeError, match=r"0\.weight was frozen when the model was wrapped"):
        crew.buckets.arm()


def test_buckets_depend_on_the_parameters_alone_and_keep_to_their_sizes() -> None:
    def flats(first_bucket_bytes: int = 1 << 20, bucket_bytes: int = 1 << 20) -> list[int]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in (1, 2, 3, 50, 4, 5)]
        buckets = GradientBuckets(parameters, lambda *_: None, first_bucket_bytes, bucket_bytes)
        return [flat.numel() for flat in buckets.flats]

    assert flats() == [65]
    assert flats(4 * 5, 4 * 10) == [5, 4, 50, 6]
    assert flats(4 * 9, 4 * 5) == [9, 50, 5, 1]


def test_each_bucket_has_one_dtype_and_they_are_numbered_as_they_fill_up() -> None:
    kinds = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    parameters = [nn.Parameter(torch.zeros(1, dtype=kind)) for kind in kinds]
    buckets = GradientBuckets(parameters, lambda *_: None)
    assert [(flat.dtype, flat.numel()) for flat in buckets.flats] == [(torch.float64, 2), (torch.float32, 3)]


def test_a_parameter_that_comes_twice_has_one_place() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    assert [flat.numel() for flat in GradientBuckets([parameter, parameter], lambda *_: None).flats] == [3]


def test_names_must_be_as_many_as_parameters() -> None:
    with pytest.raises(ValueError, match="1 names for 2 parameters"):
        GradientBuckets([nn.Parameter(torch.zeros(1))] * 2, lambda *_: None, names=["a"])


def test_gradients_have_the_memory_order_of_their_parameters() -> None:
    model = nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    buckets = GradientBuckets(list(model.parameters()), lambda *_: None)
    assert model.weight.grad is not None
    assert model.weight.grad.stride() == model.weight.stride()
    model(torch.ones(1, 3, 4, 4)).sum().backward()
    buckets.flush()
    wanted = expected(model, lambda m: m(torch.ones(1, 3, 4, 4)).sum())
    assert torch.equal(model.weight.grad, wanted[0])
    assert buckets.flats[0].numel() == 4 * 3 * 4 + 4


def test_an_optimizer_does_with_the_buckets_what_it_does_without() -> None:
    plain, crew = net(), Crew(net())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (plain, crew.model)]
    for step in range(4):
        crew.buckets.zero()
        for model, optimizer in zip((plain, crew.model), optimizers):
            if model is crew.model:
                crew.buckets.arm()
            model(rows(step, step + 2)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), crew.model.parameters()))


def test_the_wrapper_looks_like_distributed_data_parallel() -> None:
    crew = Crew(net())
    model = DataParallel(crew.model, crew.buckets)
    assert model.module is crew.model
    assert torch.equal(model(rows(0, 1)), crew.model(rows(0, 1)))
    assert list(model.state_dict()) == [f"module.{key}" for key in crew.model.state_dict()]
    model.eval()
    assert not crew.model.training


def test_zero_grad_of_the_wrapper_leaves_a_step_in_flight_alone() -> None:
    crew = Crew(net())
    model = DataParallel(crew.model, crew.buckets)
    crew.buckets.arm()
    model(rows(0, 2)).sum().backward()
    model.zero_grad()
    assert all(gradient is not None and gradient.any() for gradient in grads(model))
    alone = DataParallel(net())
    alone(rows(0, 2)).sum().backward()
    alone.zero_grad()
    assert grads(alone) == [None] * 4


@pytest.mark.parametrize(
    "duplicate",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)), lambda model: AveragedModel(model).module],
)
def test_a_copy_of_the_wrapper_takes_no_part_in_synchronisation(duplicate: Callable[[nn.Module], DataParallel]) -> None:
    crew = Crew(net())
    twin = duplicate(DataParallel(crew.model, crew.buckets))
    crew.buckets.arm()
    with twin.no_sync():
        twin(rows(0, 2)).sum().backward()
    twin(rows(0, 2)).sum().backward()
    assert crew.launched == []
    assert all(gradient is not None for gradient in grads(twin))
