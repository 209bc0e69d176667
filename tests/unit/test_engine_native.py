"""The engine over Gloo groups: the same losses and weights as over links, wherever the two are swapped."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from elaunch.errors import CollectiveFailed
from elaunch.plan import Plan, symmetric
from elaunch.workers.comm.native.opening import GroupKey
from elaunch.workers.layers.carry.links import LinkCarrier
from elaunch.workers.layers.carry.native import NativeCarrier
from elaunch.workers.layers.carry.routes import ROWS, NativeRoutes, tp_key
from elaunch.workers.layers.messages import Kind, exchanges, tag
from elaunch.workers.random.trace import RandomTrace
from elaunch.workers.state.layout import LayerSpec, StateLayout
from tests.helpers import scaled, soak
from tests.unit.engine_crew import Natively, train
from tests.unit.plan_strategies import valid_plans

STEPS = 5


def names(count: int) -> list[str]:
    return [f"a/{number}#0" for number in range(count)]


def grid(dp: int, pp: int, tp: int, n_layers: int = 4) -> Plan:
    return symmetric(names(dp * pp * tp), n_layers, 8, 1, dp=dp, pp=pp, tp=tp)


def same(plan: Plan, natively: Natively, **settings: Any) -> None:
    """Trains over links alone and with native groups, and compares to the last bit."""
    expected, weights = train(plan, STEPS, **settings)
    found, here = train(plan, STEPS, natively=natively, **settings)
    assert found == expected
    assert here.keys() == weights.keys()
    assert all(torch.equal(here[name], weights[name]) for name in weights)


@pytest.mark.parametrize(
    ("dp", "pp", "tp"), [(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2), soak(1, 4, 1), soak(3, 1, 1), soak(2, 2, 2)]
)
def test_native_groups_give_the_same_losses_and_weights_to_the_last_bit(dp: int, pp: int, tp: int) -> None:
    natively = Natively()
    same(grid(dp, pp, tp), natively, clip_norm=0.5, snapshots=1)
    assert (natively.calls["send"] > 0) == (pp > 1)
    assert (natively.calls["exchange"] > 0) == (dp > 1 or tp > 1)
    assert natively.calls["all_reduce"] == 0


def test_a_worker_to_whom_the_plan_gives_nothing_takes_part_in_the_same_operations() -> None:
    natively = Natively()
    same(replace(grid(2, 1, 1), idle=("a/2#0",)), natively, snapshots=0)
    assert natively.calls["exchange"] > 0


def test_links_serve_before_and_after_the_native_groups() -> None:
    natively = Natively(begin=2, end=4)
    same(grid(2, 2, 1), natively, snapshots=0)
    # Of 4 workers in 2 steps: each of 8 samples goes on once, and comes back once.
    assert natively.calls["send"] == 2 * (8 + 8)


@pytest.mark.parametrize("tp", [2, soak(4)])
def test_sums_of_no_fixed_order_are_the_backends(tp: int) -> None:
    plan, natively = grid(1, 1, tp), Natively()
    expected, weights = train(plan, STEPS, consistency="fast")
    found, here = train(plan, STEPS, consistency="fast", natively=natively)
    assert natively.calls["all_reduce"] > 0
    for one, other in zip(found, expected, strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-9)
    assert all(torch.allclose(here[name], weights[name], rtol=1e-7) for name in weights)


class Aborted:
    """A group with the manners of a device's: its work ends with garbage, and the error comes late."""

    backend = "device"
    error: str | None = None

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return type("Done", (), {"wait": lambda self, timeout=None: True})()

    def errored(self) -> str | None:
        return self.error


def test_a_step_with_garbage_from_an_aborted_group_does_not_come_to_the_barrier() -> None:
    plan, bulk, failed = grid(1, 1, 2), Aborted(), list[int]()
    routes = NativeRoutes(plan, StateLayout(plan, [spec_of(layer) for layer in range(4)]), "a/0#0", bitwise=False)
    bulks: Any = {tp_key(plan.workers): bulk}
    carrier = NativeCarrier(routes, (), bulks, torch.device("cpu"), 7, exact=False, failed=failed.append)
    assert carrier.all_reduce(plan.workers, torch.ones(3)) is not None
    carrier.finish()
    bulk.error = "aborted"
    with pytest.raises(CollectiveFailed, match="generation 7 failed: aborted"):
        carrier.finish()
    assert failed == [7]


def test_links_carry_what_lies_on_a_device_through_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = grid(2, 2, 1)
    expected, weights = train(plan, 2)
    make, staged = LinkCarrier.__init__, list[LinkCarrier]()

    def on_a_device(self: LinkCarrier, traffic: Any, worker: str, _: bool) -> None:
        staged.append(self)
        make(self, traffic, worker, True)

    monkeypatch.setattr(LinkCarrier, "__init__", on_a_device)
    found, here = train(plan, 2)
    assert staged
    assert found == expected
    assert all(torch.equal(here[name], weights[name]) for name in weights)


@settings(max_examples=scaled(5, 40), deadline=None)
@given(plan=valid_plans(max_layers=4, max_units=4, max_workers=5, tp=(1, 2)))
def test_native_groups_carry_any_plan(plan: Plan) -> None:
    """Also tilings in which rows are needed in another order than they are made in, and several messages to one end."""
    same(plan, Natively(), snapshots=0)


@settings(max_examples=scaled(50, 150), deadline=None)
@given(plan=valid_plans(tp=(1, 2)))
def test_both_ends_of_a_native_group_know_it_and_the_order_of_its_messages(plan: Plan) -> None:
    specs = [spec_of(layer) for layer in range(plan.n_layers)]
    layout = StateLayout(plan, specs)
    every = {worker: NativeRoutes(plan, layout, worker, bitwise=True) for worker in plan.workers}
    needs = every[plan.workers[0]].needs
    assert len(set(needs)) == len(needs)
    for worker, routes in every.items():
        assert routes.needs == needs
        for peer, parts in routes.incoming.items():
            assert GroupKey(ROWS, (peer, worker)) in needs
            assert len(set(parts)) == len(parts)
        wanted = {
            (rows.peer, tag(kind, rows.number))
            for one in exchanges(plan, worker).values()
            for kind, some in ((Kind.ACTIVATION, one.x_from), (Kind.INPUT_GRADIENT, one.dy_from))
            for rows in some
            if rows.peer != worker
        }
        assert wanted == {(peer, part) for peer, parts in routes.incoming.items() for part in parts}
        for bundles in (routes.gradients, routes.parameters):
            for bundle in bundles:
                assert bundle.key in needs
                for end in {end for sender, to, _ in bundle.messages for end in (sender, to)}:
                    theirs = every[end].gradients if bundles is routes.gradients else every[end].parameters
                    assert bundle in theirs


def spec_of(index: int) -> LayerSpec:
    shapes = {"cut": torch.Size((4, 64)), "whole": torch.Size((96,))}
    dtypes = {"cut": torch.float32, "whole": torch.bfloat16}
    output, trace = (torch.Size((4,)), torch.float32), RandomTrace((), 1)
    return LayerSpec(index, f"layer {index}", shapes, dtypes, {"cut": 0}, output, trace)
