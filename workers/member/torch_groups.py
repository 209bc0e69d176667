"""What a member offers `torch.distributed`: its default group, and device meshes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from elaunch.rendezvous.membership import Generation
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.c10d.store import JobStore
from elaunch.workers.comm.c10d.works import Interrupted
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.process_group import ElasticProcessGroup

# Meshes take a second to import, and most jobs have none.
if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from elaunch.workers.comm.mesh import Meshes


class TorchGroups:
    """The process groups of one member.

    Args:
        current: returns the group of the members of the time.
        device_type: of the tensors on meshes, and of those that the native group takes.
        native: the native groups of the member.
        generation: returns the generation that it is a member of.
        sums: whether native groups may sum; else links do, in a fixed order.

    Attributes:
        works: what is under way in the native group.
        interrupted: takes the interruptions of the default group's operations; None: these raise them.
    """

    def __init__(
        self,
        current: Callable[[], Group],
        device_type: str,
        native: NativeGroups,
        generation: Callable[[], Generation],
        sums: bool = True,
    ) -> None:
        self._current, self._device_type, self._generation = current, device_type, generation
        self.works = NativeWorks(lambda: native.current, device_type, native.failed, native, sums)
        self.interrupted: Interrupted | None = None

    @cached_property
    def default(self) -> ElasticProcessGroup:
        """The default group of `torch.distributed`, registered when it is first asked for."""
        group = ElasticProcessGroup(self._current, self.interrupted, self.works, JobStore(self._generation))
        group.register()
        return group

    def mesh(self, shape: Sequence[int], names: Sequence[str], without: Collection[str] = ()) -> DeviceMesh | None:
        """Returns a mesh of the first members; see `Meshes.make`."""
        assert self.default is not None  # a mesh asks the default group for this worker's rank
        return self._meshes.make(self._current(), self._device_type, shape, names, without)

    @cached_property
    def _meshes(self) -> Meshes:
        from elaunch.workers.comm.mesh import Meshes

        return Meshes()
