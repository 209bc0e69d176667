"""Parts of micro-batches draw what the whole would have drawn."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from elaunch.errors import StateError
from elaunch.workers.random.rows import RowsOfUnit
from elaunch.workers.random.trace import RandomOp, RandomTrace
from tests.unit.random_layers import CASES, Case, Fn, run

pytestmark = pytest.mark.filterwarnings("ignore:dropout2d:UserWarning")


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, int, list[tuple[RowsOfUnit, ...]]]:
    """Rows per unit, the number of units, and all their rows cut into micro-batches of any rows in any order."""
    size, n_units = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    bounds = draw(st.sets(st.integers(1, max(1, size - 1))).map(sorted))
    pieces = [
        (unit, range(start, stop))
        for unit in range(n_units)
        for start, stop in zip([0, *bounds], [*bounds, size])
        if start < stop
    ]
    pieces = draw(st.permutations(pieces))
    micro_batches: list[tuple[RowsOfUnit, ...]] = []
    while pieces:
        taken, pieces = pieces[: (n := draw(st.integers(1, len(pieces))))], pieces[n:]
        first, rows_by_unit = 0, []
        for unit, rows in taken:
            rows_by_unit.append((unit, rows, first))
            first += len(rows)
        micro_batches.append(tuple(rows_by_unit))
    return size, n_units, micro_batches


def rows_of(x: torch.Tensor, rows_by_unit: tuple[RowsOfUnit, ...], size: int, batch_dim: int) -> torch.Tensor:
    numbers = [unit * size + row for unit, rows, _ in rows_by_unit for row in rows]
    return x.index_select(batch_dim, torch.tensor(numbers))


def whole_units(layer: nn.Module, trace: RandomTrace, x: torch.Tensor, size: int, batch_dim: int = 0) -> torch.Tensor:
    units = enumerate(x.split(size, batch_dim))
    return torch.cat([run(layer, trace, part, ((unit, range(size), 0),)) for unit, part in units], batch_dim)


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=12, deadline=None)
@given(cut=cuts())
def test_rows_of_units_draw_the_same_however_units_are_cut_and_joined(
    name: str, cut: tuple[int, int, list[tuple[RowsOfUnit, ...]]]
) -> None:
    size, n_units, micro_batches = cut
    case = CASES[name]
    layer, trace, x = case.make(), case.trace(size), case.input(size * n_units)
    if name == "tensors of a size":  # also draws once per unit
        micro_batches = [rows for rows in micro_batches if len({unit for unit, _, _ in rows}) == 1]
    expected = whole_units(layer, trace, x, size, case.batch_dim)
    for rows_by_unit in micro_batches:
        part = run(layer, trace, rows_of(x, rows_by_unit, size, case.batch_dim), rows_by_unit)
        whole = rows_of(expected, rows_by_unit, size, case.batch_dim)
        if case.exact:
            assert torch.equal(part, whole)
        else:
            torch.testing.assert_close(part, whole)


def heads(x: torch.Tensor) -> torch.Tensor:
    """(rows, T, heads, T): the heads may be a shard."""
    permuted = F.dropout(x.transpose(1, 2), 0.5)
    folded = F.dropout(permuted.flatten(0, 1), 0.3).view_as(permuted)
    replicated = F.dropout(folded.sum(1) * 0 + 1, 0.5).unsqueeze(1)
    return (folded * replicated).transpose(1, 2)


@settings(max_examples=30, deadline=None)
@given(cut=cuts(), tp_size=st.sampled_from([1, 2, 4]))
def test_members_of_a_tensor_parallel_group_draw_slices_of_what_the_whole_layer_draws(
    cut: tuple[int, int, list[tuple[RowsOfUnit, ...]]], tp_size: int
) -> None:
    size, n_units, micro_batches = cut
    case = Case(lambda: Fn(heads), (3, 4, 3))
    layer, trace, x = case.make(), case.trace(size), case.input(size * n_units)
    expected = whole_units(layer, trace, x, size)
    for rows_by_unit in micro_batches:
        whole = rows_of(expected, rows_by_unit, size, 0)
        shards = rows_of(x, rows_by_unit, size, 0).chunk(tp_size, 2)
        parts = [run(layer, trace, part, rows_by_unit, (rank, tp_size)) for rank, part in enumerate(shards)]
        assert torch.equal(torch.cat(parts, 2), whole)


def test_a_shard_of_what_is_drawn_once_per_unit_is_a_slice_of_it() -> None:
    case = Case(lambda: Fn(lambda x: x * torch.rand(x.shape[1], 1, device=x.device)), (4, 3))
    x = case.input(2)
    whole = run(case.make(), case.trace(), x, ((0, range(2), 0),))
    parts = [run(case.make(), case.trace(), x.chunk(2, 1)[t], ((0, range(2), 0),), (t, 2)) for t in range(2)]
    assert torch.equal(torch.cat(parts, 1), whole)


def test_a_part_may_lie_otherwise_in_memory_than_the_whole() -> None:
    case = Case(lambda: Fn(lambda x: torch.randn_like(x if len(x) == 4 else x.mT.contiguous().mT)), (5, 4))
    x = case.input(4)
    whole = run(case.make(), case.trace(4), x, ((0, range(4), 0),))
    for row in range(4):
        part = run(case.make(), case.trace(4), x[row : row + 1], ((0, range(row, row + 1), 0),))
        assert torch.equal(part, whole[row : row + 1])


def test_a_draw_per_unit_is_refused_where_rows_of_several_units_meet() -> None:
    case = Case(lambda: Fn(lambda x: x * torch.rand(1, device=x.device)))
    x = case.input(2)
    assert torch.equal(
        run(case.make(), case.trace(), x[:1], ((3, range(1, 2), 0),)),
        run(case.make(), case.trace(), x, ((3, range(2), 0),))[:1],
    )
    with pytest.raises(StateError, match=r"rand\.default \(1,\) in layer 7 draws once .* the rows 1:2 of 3, 0:1 of 4"):
        run(case.make(), case.trace(), x, ((3, range(1, 2), 0), (4, range(1), 1)))


@pytest.mark.parametrize(
    "layer, message",
    [
        (lambda x: torch.rand_like(x) if x.is_meta else torch.randn_like(x), r"draws randn_like.default \(1, 3, 4\)"),
        (lambda x: torch.rand_like(x) if x.is_meta else torch.rand_like(x[:, :2]), r"rand_like.default \(1, 2, 4\)"),
        (lambda x: torch.rand_like(x) if x.is_meta else torch.rand_like(x[0]), r"rand_like.default \(3, 4\)"),
        (lambda x: torch.rand_like(x) if x.is_meta else torch.rand_like(torch.rand_like(x)), "as number 1"),
        (lambda x: torch.rand_like(x) if x.is_meta else x, "draws nothing more as number 0"),
    ],
)
def test_a_layer_that_draws_other_numbers_than_when_it_was_traced_is_refused(layer: object, message: str) -> None:
    case = Case(lambda: Fn(layer))  # type: ignore[arg-type]
    with pytest.raises(StateError, match=message + r"(.|\n)*rand_like.default \(1, 3, 4\): which random operations"):
        run(case.make(), case.trace(), case.input(1), ((0, range(1), 0),))


def test_uneven_shards_are_refused() -> None:
    case = Case(lambda: nn.Dropout(0.5), (3, 4))
    with pytest.raises(StateError, match=r"bernoulli_.float \(2, 2, 4\) as number 0 .* tensor parallelism of 2"):
        run(case.make(), case.trace(), case.input(2)[:, :2], ((0, range(2), 0),), (0, 2))


@pytest.mark.parametrize(
    "layer, message",
    [
        (lambda x: x + torch.randperm(4, device=x.device), "randperm.default .* make it of rand, randn or bernoulli"),
        (lambda x: torch.multinomial(x[:, 0], 2), "multinomial.default .* make it of"),
        (lambda x: torch.rand(x.shape, out=torch.empty_like(x)), "rand.out .* out="),
        (lambda x: F.rrelu(x, training=True), "rrelu_with_noise.default .* one number for each element"),
        (lambda x: torch.normal(x[:, :1], x), "normal.Tensor_Tensor .* its first tensor is broadcast"),
        (lambda x: torch.utils.checkpoint.checkpoint(F.dropout, x, use_reentrant=False), "checkpoint whole layers"),
        (lambda x: torch.utils.checkpoint.checkpoint(F.dropout, x, use_reentrant=True), "checkpoint whole layers"),
    ],
)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
def test_operations_that_cannot_be_cut_run_whole_units_only(layer: object, message: str) -> None:
    case = Case(lambda: Fn(layer))  # type: ignore[arg-type]
    trace = case.trace()
    assert len(trace.obstacles) == 1
    x = case.input(2).requires_grad_()
    run(case.make(), trace, x, ((0, range(2), 0),))
    with pytest.raises(StateError, match=message):
        run(case.make(), case.trace(3), x, ((0, range(2), 0),))


def test_fused_attention_with_dropout_says_what_to_use_instead() -> None:
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    trace = RandomTrace((RandomOp("bernoulli_.float", (1, 1, 2, 2), 0, (4, 4, 2, 1)),), 2)
    q = torch.zeros(1, 1, 2, 4)
    with pytest.raises(StateError, match=r"attention_for_cpu.default in layer 7 .*sdpa_kernel\(SDPBackend.MATH\)"):
        run(Fn(lambda x: op(x, x, x, 0.5)[0]), trace, q, ((0, range(1), 0),))


def test_attention_without_dropout_is_no_random_operation() -> None:
    case = Case(lambda: Fn(lambda x: F.dropout(F.scaled_dot_product_attention(x, x, x), 0.5)), (1, 2, 4))
    x = case.input(2)
    assert [op.name for op in case.trace().ops] == ["bernoulli_.float"]
    part = run(case.make(), case.trace(), x[1:], ((0, range(1, 2), 0),))
    torch.testing.assert_close(part, run(case.make(), case.trace(), x, ((0, range(2), 0),))[1:])
