"""Groups of some members: what `new_group`, `split_group` and `init_device_mesh` make."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, ItemsView, Iterator, KeysView, Sequence

from elaunch.errors import StateError
from elaunch.rendezvous.membership import names_text
from elaunch.workers.comm.group import Group


class Some:
    """Some members of a job, known by identity; it returns their group of the present generation.

    Args:
        whole: returns the group of all members.
        members: of this one, in its order.
        number: of this one, the same on all its members.
    """

    def __init__(self, whole: Callable[[], Group], members: Sequence[str], number: int) -> None:
        self.members = tuple(members)
        self._whole, self._number = whole, number
        self._found: Group | None = None

    def __call__(self) -> Group:
        """Returns the group.

        Raises:
            StateError: a member has left the job.
        """
        whole = self._whole()
        if self._found is None or self._found.generation != whole.generation:
            gone = [member for member in self.members if member not in whole.members]
            if gone:
                raise StateError(
                    f"this process group has {names_text(self.members)} in it, and {names_text(gone)} left the job: "
                    "make another one of the members that there are, by torch.distributed.new_group() or a new mesh"
                )
            self._found = Group(whole.transport, whole.generation, self.members, self._number)
        return self._found

    def ranks(self) -> dict[int, int]:
        """Returns the places in this group by the ranks in the default group, of those who are still there."""
        places = {member: place for place, member in enumerate(self.members)}
        return {rank: places[member] for rank, member in enumerate(self._whole().members) if member in places}


class Ranks(dict[int, int]):
    """Places in a group by ranks in the default group, as torch keeps them; they are those of the moment.

    Args:
        places: returns them.
    """

    def __init__(self, places: Callable[[], dict[int, int]]) -> None:
        super().__init__()
        self._places = places

    def __getitem__(self, rank: int) -> int:
        return self._places()[rank]

    def __contains__(self, rank: object) -> bool:
        return rank in self._places()

    def __iter__(self) -> Iterator[int]:
        return iter(self._places())

    def __len__(self) -> int:
        return len(self._places())

    def keys(self) -> KeysView[int]:  # type: ignore[override]
        """Returns the ranks in the default group."""
        return self._places().keys()

    def items(self) -> ItemsView[int, int]:  # type: ignore[override]
        """Returns pairs of ranks in the default group and in this one."""
        return self._places().items()


class Numbers:
    """Numbers of groups: all members of one find the same for it, whatever other groups they have made."""

    def __init__(self) -> None:
        self._generation = 0
        self._made: Counter[tuple[str, ...]] = Counter()

    def next(self, generation: int, members: tuple[str, ...]) -> int:
        """Returns the number of a new group of some members."""
        if generation != self._generation:
            self._generation, self._made = generation, Counter()
        self._made[members] += 1
        # Above those of meshes, which are counted from 1.
        return 1 << 31 | zlib.crc32(f"{generation}/{self._made[members]}/{members}".encode()) >> 1
