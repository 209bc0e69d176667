"""Device meshes of `torch.distributed` whose groups run over links.

    meshes = Meshes(process_group)                       # registered: the default group
    mesh = meshes.make(group, "cpu", (2, 2), ("dp", "tp"))    # on all members of the group alike

DTensor and `parallelize_module` work on such a mesh. It belongs to the group's generation: an interruption is raised by
whatever operation runs, in forward or backward, and the next generation makes a new mesh.
"""

# torch declares overloads for calls with and without an options object; here come only those with one.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import _redistribute as redistribute

from elaunch.errors import MeshError
from elaunch.rendezvous.membership import names_text
from elaunch.workers.comm.c10d.tables import NAME, enter
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.process_group import ElasticProcessGroup


class AxisGroup(ElasticProcessGroup):
    """The process group of one axis of a mesh, as this worker sees it; its members never change.

    Args:
        group: along the axis.
        name: under which functional collectives find it.
        ranks: its members in the default group.
    """

    def __init__(self, group: Group, name: str, ranks: Sequence[int]) -> None:
        super().__init__(lambda: group)
        self._name = name
        self._row = {rank: place for place, rank in enumerate(ranks)}

    @property
    def group_name(self) -> str:
        """Returns the name under which functional collectives find this group."""
        return self._name

    def getGroupName(self) -> str:
        """Returns `group_name`; torch calls it from C++."""
        return self._name

    def register(self) -> None:
        """Enters it in the tables of `torch.distributed`; `dist.destroy_process_group(group)` undoes it."""
        enter(self, self._name, f"ptd:{self._name}", "")

    def shutdown(self) -> None:
        """Does nothing: the links belong to the transport."""

    abort = shutdown

    def _places(self) -> dict[int, int]:
        return self._row


class Meshes:
    """The meshes of one worker."""

    def __init__(self) -> None:
        self._made: list[AxisGroup] = []
        self._generation = 0
        self._number = 0

    def make(
        self,
        group: Group,
        device_type: str,
        shape: Sequence[int],
        names: Sequence[str],
        without: Collection[str] = (),
    ) -> DeviceMesh | None:
        """Returns a mesh of the first members of a group, row by row. All members make the same meshes in the same
        order.

        Args:
            group: of all members.
            device_type: of their tensors.
            shape: of the mesh.
            names: of its axes.
            without: members that get no place.

        Returns:
            The mesh; None if this worker has no place in it.

        Raises:
            MeshError: it has more places than there are members for it, or not one name for each axis.
        """
        places = math.prod(shape)
        free = [rank for rank, member in enumerate(group.members) if member not in without]
        if not shape or len(names) != len(shape) or not 0 < places <= len(free):
            told = names_text([group.members[rank] for rank in free])
            raise MeshError(
                f"a mesh of {' x '.join(map(str, shape)) or 'no axes'} places, named {', '.join(names) or 'nothing'}, "
                f"cannot be made of {len(free)} members ({told}): give each axis one name, and choose sizes "
                f"whose product is {len(free)} at most"
            )
        self.forget_before(group.generation)
        ranks = torch.tensor(free[:places]).view(*shape)
        axes: list[AxisGroup] = []
        for axis in range(len(shape)):
            self._number += 1
            for row in ranks.movedim(axis, -1).reshape(-1, shape[axis]).tolist():
                if group.rank in row:
                    members = [group.members[rank] for rank in row]
                    along = Group(group.transport, group.generation, members, self._number)
                    axes.append(AxisGroup(along, f"{NAME}/{group.generation}/{self._number}/{names[axis]}", row))
        if not axes:
            return None
        forget_equal_meshes()
        for one in axes:
            one.register()
        self._made += axes
        if len(axes) > 1:
            return DeviceMesh.from_group(list(axes), device_type, ranks, mesh_dim_names=tuple(names))
        return DeviceMesh.from_group(axes[0], device_type, mesh_dim_names=tuple(names))

    def forget_before(self, generation: int) -> None:
        """Takes the groups of older generations out of torch's tables."""
        if generation == self._generation:
            return
        self._generation = generation
        self._number = 0
        for one in self._made:
            if one in distributed_c10d._world.pg_map:
                distributed_c10d.destroy_process_group(one)
        self._made = []


def forget_equal_meshes() -> None:
    """Empties the caches of DTensor, which take two meshes of the same shape for one.

    What they hold refers to the former mesh: to its groups, and to the place that this worker had in it. Each thread
    has caches of its own, and the backward of an accelerator runs in one that torch keeps for it.
    """
    _forget_here()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None and torch.get_device_module(accelerator).is_initialized():
        in_backward(torch.device(accelerator.type, torch.accelerator.current_device_index()), _forget_here)


def in_backward(device: torch.device, do: Callable[[], None]) -> None:
    """Does something in the thread in which torch goes backward on a device; on the CPU that is the present one."""

    class Does(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override,unused-ignore]
            do()
            return gradient

    with torch.inference_mode(False), torch.enable_grad():
        there = Does.apply(torch.zeros((), device=device, requires_grad=True))  # type: ignore[no-untyped-call]
        there.backward()


def _forget_here() -> None:
    # What torch.distributed.tensor.debug does, which to import takes dynamo, and with that a second.
    DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute._gen_transform_infos.cache_clear()
    redistribute.clear_redistribute_planner_cache()
