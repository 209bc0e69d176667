"""A group of torch's that is connected anew among other members, which torch can do from version 2.14 on.

Each member brings a group, one that it has left or a new one, and tells the others its handle. The order of the handles
is the order of ranks. All groups must have the same store, in which torch lets the members meet: so one of a former
generation serves as long as the members meet in the store that it was made with, and else a new one.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

TIMEOUT = timedelta(seconds=30)
PATIENCE_S, LOOK = 60.0, timedelta(seconds=0.5)
"""For what the others say: one with an error at once waits for those whose time-out tells them."""

PREFIX = "elaunch/reconfigure"
"""Of torch's keys. Those of the members' generation would be others for a group that is older."""

OPTIONS: Any = getattr(distributed_c10d, "ReconfigureOptions", None)
"""What torch's call takes; None: this torch has no such call."""

Make = Callable[[dist.Store], Any]
"""Returns a new group that meets in a store; of two members' their handles must differ."""


class LeftGroups:
    """Groups that this worker has left and may connect anew, each with the store that it was made with."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._groups: list[tuple[str, Any]] = []

    def leave(self, place: str, group: Any) -> None:
        """Takes a group in. Nothing is issued in it any more, and all its members know that it is over."""
        with self._lock:
            self._groups.append((place, group))

    def take(self, place: str) -> Any | None:
        """Returns the group left last of those whose members meet in a store; it is the caller's then."""
        with self._lock:
            for position in range(len(self._groups) - 1, -1, -1):
                if self._groups[position][0] == place:
                    return self._groups.pop(position)[1]
        return None


def place_of(store: dist.Store) -> str:
    """Returns which store a client, perhaps with prefixes, belongs to."""
    root: Any = _root(store)
    return f"{root.host}:{root.port}" if isinstance(root, dist.TCPStore) else str(id(root))


def connect(
    store: dist.Store, rank: int, size: int, left: LeftGroups, make: Make, over: Callable[[], bool]
) -> tuple[Any, bool]:
    """Connects a group of this member with one of each other member, all of which call this.

    If that fails on any of them, all try once more with new groups.

    Args:
        store: of this opening alone.
        rank: of this member.
        size: number of members.
        left: groups of former generations.
        make: makes a new one.
        over: whether the opening has become pointless.

    Returns:
        The group, and whether it is one that had been left.

    Raises:
        RuntimeError: it fails with new groups, too, or has become pointless.
    """
    wrong = ""
    for attempt in range(2):
        if over():
            break
        # A left group that has failed is not tried again.
        group, place = (left.take(place_of(store)) if attempt == 0 else None), dist.PrefixStore(str(attempt), store)
        was_left = group is not None
        if group is None:
            group = make(dist.PrefixStore(PREFIX, _root(store)))
        try:
            _reconfigure(group, place, rank, size, over)
            mine = ""
        except RuntimeError as error:
            mine = f"rank {rank}: {error}"
        wrong = next(filter(None, _exchange(place, "result", mine, rank, size, over)), "")
        if not wrong:
            return group, was_left
    raise RuntimeError(wrong or "the members have changed while it was opened")


def _reconfigure(group: Any, store: dist.Store, rank: int, size: int, over: Callable[[], bool]) -> None:
    # A number serves once in a store. The first member's is taken: it need not count what others have used.
    mine = f"{1 + secrets.randbelow(2**62)} {group.get_reconfigure_handle()}"
    told = [text.split(" ", 1) for text in _exchange(store, "handle", mine, rank, size, over)]
    options = OPTIONS()
    options.uuid, options.timeout = int(told[0][0]), TIMEOUT
    options.handles = [handle for _, handle in told]
    group.reconfigure(options).wait()


def _exchange(store: dist.Store, name: str, mine: str, rank: int, size: int, over: Callable[[], bool]) -> list[str]:
    """Returns what each member has said, by rank."""
    store.set(f"{name}/{rank}", mine)
    keys = [f"{name}/{peer}" for peer in range(size)]
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        try:
            store.wait(keys, LOOK)
        except dist.DistStoreError:
            if over():
                raise RuntimeError("the members have changed while it was opened") from None
            if time.monotonic() >= deadline_s:
                raise
        else:
            return [store.get(key).decode() for key in keys]


def _root(store: dist.Store) -> dist.Store:
    root: dist.Store = store._underlying_non_prefix_store if isinstance(store, dist.PrefixStore) else store  # type: ignore[attr-defined]
    return root
