"""Layouts of frameworks: several meshes at once, pipeline stages, experts, flat ranges.

State is moved between them over real links, and compared bit by bit with what torch.distributed.checkpoint saves from
the one and loads into the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.state.checkpoint import CheckpointShard
from elaunch.workers.state.placement.layouts import AnyLayout, FlatBuffer, Layout, LayoutUnion, layout_from_json
from elaunch.workers.state.spaces import part_of
from elaunch.workers.state.tensors import TensorSpace
from tests.unit.comm_crew import crew, each, outcomes

R, S0, S1 = Replicate(), Shard(0), Shard(1)
MEMBERS = tuple(f"a/{number}#0" for number in range(4))
A, B, C, D = MEMBERS
SHAPES = {
    "embed": (12, 6),
    "layers.0.up": (8, 5),
    "layers.0.bias": (7,),
    "layers.1.up": (8, 5),
    "layers.1.bias": (7,),
    "experts": (6, 4, 4),
    "experts.0.one": (5, 2),
    "experts.1.one": (5, 2),
}


def truth() -> dict[str, Tensor]:
    """Parameters with what an optimizer keeps of them; no two elements are the same."""
    found: dict[str, Tensor] = {}
    count = 0
    for name, shape in SHAPES.items():
        for key in ("", "@exp_avg", "@step"):
            form = torch.Size(() if key == "@step" else shape)
            found[name + key] = torch.arange(count, count + form.numel(), dtype=torch.float64).view(form)
            count += form.numel()
    return found


WHOLE = truth()
HALVED: dict[str, tuple[Placement, ...]] = {"embed": (S0, S1), "layers.0.up": (R, S1), "layers.1.up": (R, S1)}
"""Over two axes."""

FLAT = FlatBuffer(0, 104, {"embed": 1, "layers.0.up": 75, "layers.0.bias": 96}, ("exp_avg",))
"""What is kept of three tensors, cut over two members; the other axis has halved the second one before."""

LAYOUTS: dict[str, AnyLayout] = {
    "whole": Layout((1,), (A,)),
    "strided": Layout(
        (2, 2),
        MEMBERS,
        {
            "embed": (_StridedShard(0, split_factor=2), S0),
            "layers.0.up": (_StridedShard(0, split_factor=2), S0),
            "layers.1.up": (S0, S1),
            "experts": (_StridedShard(1, split_factor=2), S1),
        },
    ),
    "one axis": Layout((4,), (D, C, B, A), dict.fromkeys(SHAPES, (S0,))),
    "pipeline stages": LayoutUnion(
        (
            Layout((1, 2), (A, B), HALVED).only(["embed", "layers.0.up", "layers.0.bias", "experts.0.one"]),
            Layout((1, 2), (C, D), HALVED).only(["embed", "layers.1.up", "layers.1.bias", "experts.1.one", "experts"]),
        )
    ),
    "virtual stages": LayoutUnion(
        (
            Layout((1,), (A,)).only(["embed", "layers.1.up", "layers.1.bias", "experts.1.one"]),
            Layout((1,), (B,)).only(["layers.0.up", "layers.0.bias", "experts.0.one", "experts"]),
        )
    ),
    "experts": LayoutUnion(
        (
            Layout((2, 2), MEMBERS, HALVED).only([name for name in SHAPES if not name.startswith("experts")]),
            Layout((1, 4), (A, C, B, D), {"experts": (R, S0)}).only(["experts"]),
            Layout((2,), (A, C)).only(["experts.0.one"]),
            Layout((2,), (B, D), {"experts.1.one": (S0,)}).only(["experts.1.one"]),
        )
    ),
    "flat": Layout((2, 2), MEMBERS, {"layers.0.up": (R, S0)}, flat=(FLAT,)),
    "flat parameters": Layout(
        (3,), (B, C, D), flat=(FlatBuffer(0, 117, {"layers.0.up": 0, "embed": 40}, ("", "exp_avg")),)
    ),
}


def layouts_in(layout: AnyLayout) -> tuple[Layout, ...]:
    return layout.layouts if isinstance(layout, LayoutUnion) else (layout,)


# -- what torch makes of a layout -----------------------------------------------------------------------------------


def dtensors(layout: AnyLayout, worker: str, filled: bool) -> dict[str, Any]:
    """A worker's state as torch has it, without what lies flat: DTensors on meshes as its rank sees them."""
    found: dict[str, Any] = {}
    for one in layouts_in(layout):
        if worker not in one.members:
            continue
        ranks = torch.tensor([MEMBERS.index(member) for member in one.members]).view(one.mesh)
        mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=MEMBERS.index(worker))
        for name in names_in(one):
            if not any(name in buffer for buffer in one.flat):
                placements = placements_in(one, name)
                local = chunk(WHOLE[name], one, placements, worker)
                found[name] = DTensor.from_local(
                    local if filled else torch.full_like(local, -1.0),
                    mesh,
                    placements,
                    run_check=False,
                    shape=WHOLE[name].shape,
                    stride=WHOLE[name].stride(),
                )
    return found


def names_in(layout: Layout) -> list[str]:
    return [name for name in WHOLE if layout.names is None or name.partition("@")[0] in layout.names]


def placements_in(layout: Layout, name: str) -> tuple[Placement, ...]:
    whole = (R,) * len(layout.mesh)
    return layout.placements.get(name.partition("@")[0], whole) if WHOLE[name].dim() else whole


def chunk(tensor: Tensor, layout: Layout, placements: Sequence[Placement], worker: str) -> Tensor:
    """As torch cuts: along one axis after the other, strided ones last."""
    place = torch.unravel_index(torch.tensor(layout.members.index(worker)), layout.mesh)
    for axis in sorted(range(len(layout.mesh)), key=lambda axis: isinstance(placements[axis], _StridedShard)):
        dim = getattr(placements[axis], "dim", None)
        if dim is not None:
            empty = tensor.narrow(dim, 0, 0)
            tensor = [*tensor.chunk(layout.mesh[axis], dim), *[empty] * layout.mesh[axis]][int(place[axis])]
    return tensor.clone(memory_format=torch.contiguous_format)


def ranges(layout: AnyLayout, worker: str) -> dict[str, Tensor]:
    """What of its flat buffers a worker has: the buffers are filled and cut."""
    found: dict[str, Tensor] = {}
    for one in layouts_in(layout):
        for buffer in one.flat if worker in one.members else ():
            place = torch.unravel_index(torch.tensor(one.members.index(worker)), one.mesh)[buffer.axis]
            for name in filter(buffer.__contains__, names_in(one)):
                local = chunk(WHOLE[name], one, placements_in(one, name), worker).flatten()
                memory = torch.full((buffer.elements,), -1.0, dtype=torch.float64)
                start = buffer.starts[name.partition("@")[0]]
                memory[start : start + local.numel()] = local
                own = memory.chunk(one.mesh[buffer.axis])[int(place)]
                found[name] = own[own >= 0].clone()
    return found


def through_dcp(before: AnyLayout, after: AnyLayout) -> dict[str, dict[str, Tensor]]:
    """What torch.distributed.checkpoint loads for each worker of a layout, of what the workers of another one save.

    What lies flat there is saved as whole tensors, and is not loaded.
    """
    savers = {worker: DefaultSavePlanner() for worker in before.members}
    for worker, saver in savers.items():
        state = dtensors(before, worker, filled=True)
        if worker == before.members[0]:
            state |= {name: WHOLE[name] for one in layouts_in(before) for name in names_in(one) if flat_in(one, name)}
        saver.set_up_planner(state, is_coordinator=worker == before.members[0])
    plans, metadata = savers[before.members[0]].create_global_plan([one.create_local_plan() for one in savers.values()])
    storage: dict[Any, Tensor] = {}
    for plan, saver in zip(plans, savers.values(), strict=True):
        for item in plan.items:
            storage[item.index] = saver.resolve_data(item).clone()  # type: ignore[union-attr]
    found = {}
    for worker in after.members:
        state = dtensors(after, worker, filled=False)
        loader = DefaultLoadPlanner()
        loader.set_up_planner(state, metadata)
        for read in loader.create_local_plan().items:
            source = storage[read.storage_index]
            for dim, (first, length) in enumerate(zip(read.storage_offsets, read.lengths, strict=True)):
                source = source.narrow(dim, first, length)
            loader.resolve_tensor(read).copy_(source)
        found[worker] = {name: tensor.to_local() for name, tensor in state.items()}
    return found


def flat_in(layout: Layout, name: str) -> bool:
    return any(name in buffer for buffer in layout.flat)


# -- moves ----------------------------------------------------------------------------------------------------------


def hold(space: TensorSpace, layout: AnyLayout, worker: str) -> None:
    tensors = {**dtensors(layout, worker, filled=True), **ranges(layout, worker)}
    # A range does not say how large the whole is: that of a parameter is told, that of what is kept follows.
    shapes = {name: WHOLE[name].shape for name in WHOLE}
    space.hold(layout, tensors, {"rate": 0.5}, shapes)


def groups_of(transports: Sequence[Transport]) -> list[Group]:
    return [Group(transport, 1, MEMBERS) for transport in transports]


def check(space: TensorSpace, worker: str, layout: AnyLayout, expected: Mapping[str, Tensor]) -> None:
    assert {name for name in WHOLE if space.has(name)} == set(expected)
    for name, tensor in expected.items():
        local = space.local(name)
        assert local.shape == tensor.shape, (worker, name)
        assert torch.equal(local, tensor), (worker, name)
        if local.numel():
            assert local.data_ptr() == space.chunks(name)[0][1].data_ptr(), "no copy"


@pytest.mark.parametrize("bound", [None, 1 << 18])
def test_a_move_between_two_layouts_is_what_a_checkpoint_would_bring(bound: int | None) -> None:
    names = list(LAYOUTS)
    with crew(4) as transports:
        for step in (1, 3) if bound is None else (5,):
            for place in range(len(names)):
                # Every layout is left and reached, from several others.
                before, after = LAYOUTS[names[place]], LAYOUTS[names[(place + step) % len(names)]]
                spaces = [TensorSpace(worker, max_extra_bytes=bound) for worker in MEMBERS]
                for worker, space in zip(MEMBERS, spaces, strict=True):
                    if worker in before.members:
                        hold(space, before, worker)
                loaded = through_dcp(before, after)
                each(lambda s, g, to=after: s.move(g, to), spaces, groups_of(transports))
                for worker, space in zip(MEMBERS, spaces, strict=True):
                    space.install()
                    assert space.layout == after
                    assert space.values == {"rate": 0.5}
                    check(space, worker, after, {**loaded.get(worker, {}), **ranges(after, worker)})


def test_members_of_pipeline_stages_give_the_layouts_that_they_know() -> None:
    before, after = LAYOUTS["pipeline stages"], LAYOUTS["virtual stages"]
    assert isinstance(before, LayoutUnion)
    assert isinstance(after, LayoutUnion)
    with crew(4) as transports:
        spaces = [TensorSpace(worker) for worker in MEMBERS]
        for worker, space in zip(MEMBERS, spaces, strict=True):
            stage = next(one for one in before.layouts if worker in one.members)
            hold(space, stage, worker)
        given = [*after.layouts, None, None]
        each(lambda s, g, to: s.move(g, to), spaces, groups_of(transports), given)
        for worker, space in zip(MEMBERS, spaces, strict=True):
            space.install()
            assert space.layout == after
            check(space, worker, after, through_dcp(before, after).get(worker, {}))


def test_a_stage_of_which_everybody_was_lost_is_named() -> None:
    before = LAYOUTS["pipeline stages"]
    with crew(4) as transports:
        spaces = [TensorSpace(worker) for worker in MEMBERS[:2]]
        for worker, space in zip(MEMBERS, spaces, strict=False):
            hold(space, before, worker)
        groups = [Group(transport, 1, MEMBERS[:2]) for transport in transports[:2]]
        left = Layout((2,), (A, B)).only([name for name in SHAPES if "1" not in name and name != "experts"])
        each(lambda s, g: s.move(g, left), spaces, groups)
        for space in spaces:
            space.install()
            check(space, A, left, {name: WHOLE[name] for name in names_in(left)})


def test_what_has_no_place_in_the_new_layout_is_named() -> None:
    with crew(2) as transports:
        spaces = [TensorSpace(worker) for worker in MEMBERS[:2]]
        hold(spaces[0], Layout((1,), (A,)), A)
        groups = [Group(transport, 1, MEMBERS[:2]) for transport in transports]
        some = Layout((1,), (B,)).only(["embed", "experts"])
        for error in outcomes([partial(s.move, g, some) for s, g in zip(spaces, groups, strict=True)]):
            assert isinstance(error, StateError)
            assert "the members hold layers.0.up, layers.0.up@exp_avg, " in str(error)
            assert "give nobody a part of it" in str(error)


def test_mistakes_in_layouts_are_refused() -> None:
    with pytest.raises(
        StateError, match=r"90 elements along axis 0 cannot be cut into equal ranges on the mesh \(4,\)"
    ):
        Layout((4,), MEMBERS, flat=(FlatBuffer(0, 90, {"w": 0}, ("",)),))
    with pytest.raises(StateError, match="each says which tensors lie in it"):
        LayoutUnion((Layout((1,), (A,)),))
    both = LayoutUnion((Layout((1,), (A,)).only(["w"]), Layout((2,), (A, B), {"w": (S0,)}).only(["w"])))
    with pytest.raises(StateError, match=r"two layouts give a/0#0 different parts of w"):
        TensorSpace(A).hold(both, {"w": torch.zeros(4)})
    with pytest.raises(StateError, match="v is held here, and its layout gives this worker no part of it"):
        TensorSpace(A).hold(Layout((1,), (A,)).only(["w"]), {"v": torch.zeros(4)})
    cut = Layout((2,), (A, B), {"w": (S0,)}, flat=(FlatBuffer(0, 4, {"w": 0}, ("",)),))
    with pytest.raises(StateError, match=r"w lies in a flat buffer along axis 0 .* is placed there as S.*0"):
        TensorSpace(A).hold(cut, {"w": torch.zeros(2)}, shapes={"w": (4,)})
    with crew(2) as transports:
        spaces = [TensorSpace(worker) for worker in MEMBERS[:2]]
        for space, length in zip(spaces, (3, 4), strict=True):
            space.hold(Layout((1,), (space._worker,)), {"w": torch.zeros(length)})
        groups = [Group(transport, 1, MEMBERS[:2]) for transport in transports]
        whole = Layout((1,), (A,))
        for error in outcomes([partial(s.move, g, whole) for s, g in zip(spaces, groups, strict=True)]):
            assert "one name is one tensor" in str(error)


def test_layouts_come_back_from_json() -> None:
    for layout in LAYOUTS.values():
        assert layout_from_json(layout.to_json()) == layout


def test_layouts_are_read_off_tensors_on_several_meshes() -> None:
    dense = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("dp", "tp"), _init_backend=False, _rank=0)
    sparse = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("ep",), _init_backend=False, _rank=0)
    line = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("tp",), _init_backend=False, _rank=0)
    tensors = {
        "up": DTensor.from_local(torch.zeros(2, 2), line, (S1,), run_check=False),
        "experts": DTensor.from_local(torch.zeros(1, 2), sparse, (S0,), run_check=False),
        "experts@step": torch.zeros(()),
        "count": torch.zeros(3),
    }
    layout = LayoutUnion.of([dense, sparse], MEMBERS, tensors)
    assert layout == LayoutUnion(
        (
            Layout((2, 2), MEMBERS, {"up": (R, S1)}, ("count", "up")),
            Layout((4,), MEMBERS, {"experts": (S0,)}, ("experts",)),
        )
    )
    other = DeviceMesh("cpu", torch.arange(2), mesh_dim_names=("pp",), _init_backend=False, _rank=0)
    with pytest.raises(StateError, match=r"experts is on DeviceMesh.* none of "):
        LayoutUnion.of([dense, other], MEMBERS, tensors)


def test_each_part_is_in_a_checkpoint_once_also_of_pipeline_stages_and_flat_ranges() -> None:
    for layout in LAYOUTS.values():
        shards: list[CheckpointShard] = []
        for worker in layout.members:
            space = TensorSpace(worker)
            hold(space, layout, worker)
            shards.append(part_of(space, worker))
        described = [name for shard in shards for name, _, _ in shard.facts.get("items", ())]
        assert sorted(described) == sorted(WHOLE)
        assert [shard.facts.get("values") for shard in shards] == [{"rate": 0.5}] + [None] * (len(shards) - 1)
        written = {name: torch.full_like(tensor, -1.0) for name, tensor in WHOLE.items()}
        for shard in shards:
            for name, of_item in shard.tensors.items():
                for box, tensor in of_item.parts:
                    there = written[name][tuple(slice(start, stop) for start, stop in box)]
                    assert (there == -1).all()
                    there.copy_(tensor)
        assert all(torch.equal(written[name], WHOLE[name]) for name in WHOLE)
