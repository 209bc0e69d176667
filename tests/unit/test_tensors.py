"""Tensors placed on meshes of members, and moved between layouts over real links, one thread for each worker."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from elaunch.errors import GenerationChanged, StateError, StepInterrupted
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.state.modules import load_model, load_optimizer, tensors_of
from elaunch.workers.state.placement.layouts import Layout
from elaunch.workers.state.tensors import TensorSpace
from tests.helpers import scaled
from tests.unit.comm_crew import crew, each, outcomes

Truth = dict[str, Tensor]


def part(tensor: Tensor, mesh: Sequence[int], placements: Sequence[Placement], place: Sequence[int]) -> Tensor:
    """What torch gives to one place: it chunks along one axis after the other, along the strided ones last."""
    axes = sorted(range(len(mesh)), key=lambda axis: isinstance(placements[axis], _StridedShard))
    for axis in axes:
        placement = placements[axis]
        if isinstance(placement, Replicate):
            continue
        chunks = list(tensor.chunk(mesh[axis], placement.dim))  # type: ignore[attr-defined]
        empty = tensor.narrow(placement.dim, 0, 0)  # type: ignore[attr-defined]
        tensor = (chunks + [empty] * mesh[axis])[place[axis]]
    return tensor


def parts(layout: Layout, worker: str, truth: Truth) -> Truth:
    """What a worker has under a layout; its own copies."""
    if worker not in layout.members:
        return {}
    place = list(product(*map(range, layout.mesh)))[layout.members.index(worker)]
    plain = (Replicate(),) * len(layout.mesh)
    found = {}
    for name, tensor in truth.items():
        base = name.partition("@")[0]
        inherited = layout.placements.get(base, plain) if tensor.shape == truth[base].shape else plain
        found[name] = part(tensor, layout.mesh, layout.placements.get(name, inherited), place).clone()
    return found


@st.composite
def truths(draw: DrawFn) -> Truth:
    """Parameters of all shapes, with what AdamW keeps of them."""
    found: Truth = {}
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 9), max_size=3))
        dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
        size = torch.Size(shape)
        for key in ("", "@exp_avg", "@step"):
            form = torch.Size() if key == "@step" else size
            found[f"p{number}{key}"] = (torch.arange(form.numel()) + 17 * len(found)).to(dtype).view(form)
    return found


@st.composite
def layouts(draw: DrawFn, truth: Truth, workers: Sequence[str]) -> Layout:
    """A mesh of some of the workers in any order, and placements of some of the tensors."""
    meshes = [(1,), (2,), (3,), (4,), (1, 2), (2, 2), (2, 1, 2)]
    mesh = draw(st.sampled_from([mesh for mesh in meshes if torch.Size(mesh).numel() <= len(workers)]))
    members = tuple(draw(st.permutations(workers))[: torch.Size(mesh).numel()])
    placements: dict[str, tuple[Placement, ...]] = {}
    for name, tensor in truth.items():
        if "@" in name or not tensor.dim() or draw(st.integers(0, 3)) == 0:
            continue
        dims = st.integers(0, tensor.dim() - 1)
        if len(mesh) == 2 and mesh[1] > 1 and draw(st.booleans()):
            dim = draw(dims)  # as fully_shard places what is cut over the second axis already
            placements[name] = (_StridedShard(dim, split_factor=mesh[1]), Shard(dim))
        else:
            placements[name] = tuple(Shard(draw(dims)) if draw(st.booleans()) else Replicate() for _ in mesh)
    return Layout(mesh, members, placements)


def spaces_of(
    transports: Sequence[Transport], layout: Layout, truth: Truth, bound: int | None = None
) -> list[TensorSpace]:
    spaces = [TensorSpace(transport.worker, max_extra_bytes=bound) for transport in transports]
    hold(spaces, layout, truth)
    return spaces


def hold(spaces: Sequence[TensorSpace], layout: Layout, truth: Truth) -> None:
    shapes = {name: tensor.shape for name, tensor in truth.items()}
    for space in spaces:
        if space._worker in layout.members:
            space.hold(layout, parts(layout, space._worker, truth), {"rate": [0.1]}, shapes)


def check(spaces: Sequence[TensorSpace], layout: Layout, truth: Truth) -> None:
    """That each worker has, bit by bit, what distributing the whole tensors under the layout would give it."""
    for space in spaces:
        expected = parts(layout, space._worker, truth)
        assert space.layout == layout
        assert set(space.names()) == set(truth)
        assert space.values == {"rate": [0.1]}
        for name, tensor in expected.items():
            assert space.local(name).dtype == tensor.dtype
            assert torch.equal(space.local(name), tensor), name


def groups_of(transports: Sequence[Transport], generation: int = 1) -> list[Group]:
    return [Group(transport, generation, [one.worker for one in transports]) for transport in transports]


@settings(max_examples=scaled(30, 60), deadline=None)
@given(st.data())
def test_a_move_is_the_same_as_distributing_anew(data: st.DataObject) -> None:
    with crew(4) as transports:
        workers = [transport.worker for transport in transports]
        truth = data.draw(truths())
        bound = data.draw(st.sampled_from([None, 1 << 18]))
        before = data.draw(layouts(truth, workers))
        spaces = spaces_of(transports, before, truth, bound)
        groups = groups_of(transports)
        for _ in range(2):
            after = data.draw(layouts(truth, workers))
            # Who has no place in the new layout hears of it.
            each(lambda s, g, after=after: s.move(g, after if s._worker in after.members else None), spaces, groups)
            for space in spaces:
                space.install()
            check(spaces, after, truth)


def test_what_has_moved_and_was_not_installed_counts_in_the_next_move() -> None:
    truth: Truth = {"w": torch.arange(12.0).view(6, 2)}
    with crew(3) as transports:
        a, b, c = (transport.worker for transport in transports)
        cut = {"w": (Shard(0),)}
        swapped = Layout((2,), (b, a), cut)
        spaces = spaces_of(transports, Layout((2,), (a, b), cut), truth)
        each(lambda s, g: s.move(g, swapped), spaces, groups_of(transports))
        # The first goes on in the new layout; the second does not hear of it, and the third dies.
        spaces[0].install()
        hold(spaces[1:2], Layout((2,), (a, b), cut), {"w": torch.zeros(6, 2)})
        rest, whole = transports[:2], Layout((1,), (a,))
        each(lambda s, g: s.move(g, whole), spaces[:2], groups_of(rest, 2))
        for space in spaces[:2]:
            space.install()
        check(spaces[:1], whole, truth)
        assert c not in spaces[1].layout.members  # type: ignore[union-attr]


@pytest.mark.parametrize("bound", [None, 1 << 18])
def test_an_interrupted_move_is_done_again_by_those_who_are_left(bound: int | None) -> None:
    truth = {f"w{number}": torch.arange(90_000.0).view(300, 300) + number for number in range(4)}
    with crew(4) as transports:
        workers = [transport.worker for transport in transports]
        twice = Layout((2, 2), tuple(workers), dict.fromkeys(truth, (Replicate(), Shard(0))))
        spaces = spaces_of(transports, twice, truth, bound)

        def move(space: TensorSpace, group: Group) -> object:
            if group.rank == 3:
                group.transport.interrupt(2)
                group.transport.close()
                raise GenerationChanged(2)
            return space.move(group, Layout((4,), tuple(workers), dict.fromkeys(truth, (Shard(1),))))

        found = outcomes([partial(move, s, g) for s, g in zip(spaces, groups_of(transports), strict=True)])
        assert all(isinstance(one, StepInterrupted) for one in found)
        rest, after = transports[:3], Layout((3,), tuple(workers[:3]), dict.fromkeys(truth, (Shard(0),)))
        each(lambda s, g: s.move(g, after), spaces[:3], groups_of(rest, 2))
        for space in spaces[:3]:
            space.install()
        check(spaces[:3], after, truth)


def test_what_nobody_has_any_more_is_named() -> None:
    truth: Truth = {"w": torch.arange(4.0), "b": torch.arange(3.0)}
    with crew(2) as transports:
        a, b = (transport.worker for transport in transports)
        spaces = spaces_of(transports, Layout((2,), (a, b), {"w": (Shard(0),)}), truth)
        with pytest.raises(StateError, match="no surviving worker has all of w; go on from the last checkpoint"):
            spaces[0].move(Group(transports[0], 2, [a]), Layout((1,), (a,)))


def test_mistakes_are_refused() -> None:
    with pytest.raises(StateError, match=r"a mesh of \(2,\) needs one member for each place, got \('a',\)"):
        Layout((2,), ("a",))
    with pytest.raises(StateError, match=r"w is placed as \(\), and the mesh \(1,\) has 1 axes"):
        Layout((1,), ("a",), {"w": ()})
    space = TensorSpace("a")
    with pytest.raises(StateError, match=r"w is \[3\] here, and by its layout this worker has \[\(0, 2\)\] of \[4\]"):
        space.hold(Layout((2,), ("a", "b"), {"w": (Shard(0),)}), {"w": torch.zeros(3)}, shapes={"w": (4,)})
    with pytest.raises(StateError, match="nothing has moved"):
        space.install()
    with crew(2) as transports:
        spaces = [TensorSpace(transport.worker) for transport in transports]
        whole = [Layout((1,), (transport.worker,)) for transport in transports]
        for error in outcomes(
            [partial(s.move, g, whole[0]) for s, g in zip(spaces, groups_of(transports), strict=True)]
        ):
            assert "no member holds any tensor" in str(error)
        spaces[0].hold(whole[0], {"w": torch.zeros(3)})
        for error in outcomes(
            [partial(s.move, g, w) for s, g, w in zip(spaces, groups_of(transports, 2), whole, strict=True)]
        ):
            assert "the members move to 2 different layouts" in str(error)


def mesh_of(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """A mesh as its first rank sees it, without groups."""
    ranks = torch.arange(torch.Size(shape).numel()).view(shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=names, _init_backend=False, _rank=0)


def test_layouts_are_read_off_dtensors_on_a_mesh_or_some_of_its_axes() -> None:
    mesh, line = mesh_of((1, 2), ("dp", "tp")), mesh_of((2,), ("tp",))
    tensors = {
        "on both": DTensor.from_local(torch.zeros(2, 2), mesh, (Replicate(), Shard(1)), run_check=False),
        "on one": DTensor.from_local(torch.zeros(2, 2), line, (Shard(0),), run_check=False),
        "plain": torch.zeros(2),
    }
    layout = Layout.of(mesh, ("a", "b"), tensors)
    assert layout.placements == {"on both": (Replicate(), Shard(1)), "on one": (Replicate(), Shard(0))}
    assert Layout.from_json(layout.to_json()) == layout
    other = mesh_of((2,), ("pp",))
    with pytest.raises(StateError, match="on one is on DeviceMesh"):
        Layout.of(other, ("a", "b"), {"on one": tensors["on one"]})
    summed = DTensor.from_local(torch.zeros(2), line, (Partial(),), run_check=False)
    with pytest.raises(StateError, match=r"summed is placed as P.*, which has no chunk"):
        Layout.of(line, ("a", "b"), {"summed": summed}).to_json()


class Net(nn.Module):
    """Two of its parameters are one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(4, 3, bias=False)
        self.last.weight = self.first.weight


def test_models_and_optimizers_are_read_and_loaded() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, betas=(0.8, 0.9))
    model.norm(model.first(torch.randn(5, 4))).square().sum().backward()
    optimizer.step()
    tensors, values = tensors_of(model, optimizer)
    assert "last.weight" not in tensors
    space = TensorSpace("a")
    space.hold(Layout((1,), ("a",)), tensors, values)
    with torch.device("meta"):
        copy = Net()
    load_model(space, copy)
    assert copy.last.weight is copy.first.weight
    assert copy.first.weight.data_ptr() == model.first.weight.data_ptr(), "the tensors of the space, not copies"
    loaded = torch.optim.AdamW(copy.parameters())
    load_optimizer(space, copy, loaded)
    again, settings_ = tensors_of(copy, loaded)
    assert settings_ == values
    assert again.keys() == tensors.keys()
    assert all(torch.equal(again[name], tensors[name]) for name in tensors)
    other = Net()
    load_model(space, other)
    assert torch.equal(other.first.weight, model.first.weight), "what has memory is filled"
    assert other.first.weight.data_ptr() != model.first.weight.data_ptr()
    with pytest.raises(StateError, match=r"the model has first\.weight, and the job has no such tensor"):
        load_model(TensorSpace("b"), other)
    optimizer.state[model.first.weight]["trace"] = [1, 2]
    with pytest.raises(StateError, match=r"the optimizer keeps trace of first\.weight, which is neither"):
        tensors_of(model, optimizer)
