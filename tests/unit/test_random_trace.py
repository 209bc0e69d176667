"""Which random operations a layer does."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from elaunch.errors import StateError
from elaunch.workers.random.trace import RandomOp, trace_random
from tests.unit.random_layers import CASES, Case, Fn


def ops_of(case: Case) -> tuple[RandomOp, ...]:
    return case.trace().ops


def test_a_layer_that_draws_nothing_has_an_empty_trace() -> None:
    with torch.device("meta"):
        assert (
            trace_random(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(), CASES["dropout"].example, 2).ops == ()
        )
        assert trace_random(nn.Dropout(0.0), CASES["dropout"].example, 2).ops == ()


def test_the_dimension_of_the_rows_is_found_wherever_it_is() -> None:
    assert ops_of(CASES["dropout"]) == (RandomOp("bernoulli_.float", (1, 3, 4), 0, (12, 4, 1)),)
    assert ops_of(CASES["sequence first"]) == (RandomOp("bernoulli_.float", (5, 1, 3), 1, (6, 3, 1)),)
    assert ops_of(CASES["permuted"]) == (RandomOp("bernoulli_.float", (4, 1, 3), 1, (1, 12, 4)),)
    assert ops_of(CASES["rows and heads folded"]) == (RandomOp("bernoulli_.float", (3, 4), 0, (4, 1)),)
    assert ops_of(CASES["tensors of a size"])[1] == RandomOp("rand.default", (4,), None, (1,))
    assert ops_of(CASES["sequence first"])[0].shape_of(7) == (5, 7, 3)
    assert ops_of(CASES["rows and heads folded"])[0].shape_of(7) == (21, 4)
    assert ops_of(CASES["tensors of a size"])[1].shape_of(7) == (4,)


def test_the_layout_of_a_whole_unit_is_found() -> None:
    assert [op.stride for op in ops_of(CASES["gaps in memory"])] == [(12, 4, 1), (12, 1, 4)]
    assert [op.stride for op in ops_of(CASES["channels last"])] == [(12, 1, 6, 3)]
    assert [op.stride for op in ops_of(CASES["noise over an expanded tensor"])] == [(12, 4, 1)]


def test_several_arguments_may_be_given() -> None:
    trace = trace_random(nn.Bilinear(2, 2, 3, device="meta"), lambda n: (torch.zeros(n, 2, device="meta"),) * 2, 2)
    assert trace.ops == ()


@pytest.mark.parametrize("name", CASES)
def test_attention_with_dropout_is_marked(name: str) -> None:
    assert CASES[name].trace().fused == (name in ("attention", "multi-head attention", "encoder layer"))


def test_attention_that_returns_its_weights_or_has_no_dropout_is_not_fused() -> None:
    def weights(dropout: float, need_weights: bool) -> Case:
        def attend(x: torch.Tensor) -> torch.Tensor:
            inner = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True, device=x.device)
            result: torch.Tensor = inner(x, x, x, need_weights=need_weights)[0]
            return result

        return Case(lambda: Fn(attend))

    assert [weights(p, need).trace().fused for p, need in ((0.5, True), (0.0, False), (0.5, False))] == [0, 0, 1]


def test_tracing_leaves_the_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    ops_of(Case(lambda: Fn(lambda x: x * torch.rand(1).tolist()[0])))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    "layer, message",
    [
        (lambda x: F.dropout(x, 0.5) if x.sum() > 0 else x, "block cannot run without data for 2 rows at aten.*: "),
        (torch.nonzero, "block cannot run without data for 2 rows at aten.nonzero.default"),
        (lambda x: x.to("cpu"), "block cannot run without data .*_to_copy"),
        (lambda x: torch.binomial(x, x), "aten.binomial.default"),
        (lambda x: torch.rand(3, generator=torch.Generator()), "rand.generator, which draws from a generator of its"),
        (
            lambda x: F.dropout(x, 0.5) if len(x) > 2 else x,
            r"draws \[\] for 2 rows but \['bernoulli_.float'\] for one more",
        ),
        (lambda x: torch.rand(len(x), len(x)), r"rand.default of shape \(2, 2\) for 2 rows and \(3, 3\) for one more"),
        (lambda x: torch.rand(len(x) + 1), r"rand.default of shape \(3,\) for 2 rows and \(4,\) for one more"),
        (lambda x: torch.rand([1] * len(x)), r"rand.default of shape \(1, 1\) for 2 rows and \(1, 1, 1\) for one more"),
    ],
)
def test_a_layer_whose_numbers_have_no_rows_is_refused(layer: object, message: str) -> None:
    with pytest.raises(StateError, match=message):
        trace_random(Fn(layer), CASES["dropout"].example, 2, "block")  # type: ignore[arg-type]


def test_layers_and_examples_with_data_are_refused() -> None:
    with pytest.raises(StateError, match="layer Linear or its example is on cpu"):
        trace_random(nn.Linear(4, 4), CASES["dropout"].example, 2)
    with pytest.raises(StateError, match="layer Dropout or its example is on cpu"):
        trace_random(nn.Dropout(0.5), torch.zeros, 2)
