"""One attempt to save a checkpoint: who takes part in it, how far it is, and whether the disk has room for it."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import CheckpointShard

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT})

BESIDE_A_TENSOR_BYTES = 2048
"""So much torch writes beside what is in a stored tensor, its entries in the metadata included."""


@dataclass(eq=False)
class SaveAttempt:
    """A checkpoint on its way to the disk.

    Attributes:
        step: number of steps that have committed.
        generation: in which it was begun.
        members: who write it, by rank.
        rank: of this worker among them.
        folder: to which all of them write.
        needed_bytes: of all of them on the disk.
        start_s: when it was begun.
        written: this worker has written its part, or has given up.
        over: this worker has nothing more to do for it.
        abandoned: it is not to be completed any more.
        gone: members that have left the job since.
        failed: this worker could not write its part.
        reason: why it is left incomplete, should it be.
        thread: which writes it here.
    """

    step: int
    generation: int
    members: tuple[str, ...]
    rank: int
    folder: Path
    needed_bytes: int
    start_s: float
    written: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    gone: frozenset[str] = frozenset()
    failed: bool = False
    reason: str = "another member could not write"
    thread: threading.Thread | None = None

    def is_wanted(self) -> bool:
        """Whether to go on writing."""
        return not self.abandoned.is_set() and os.path.exists(self.folder)


def make_folder(folder: Path) -> str:
    """Makes the folder of an attempt; returns why that is not possible, or nothing."""
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def bytes_on_disk(shard: CheckpointShard) -> int:
    """Returns how much room a member's part takes, a little more rather than less."""
    stored = shard.tensors.values()
    return sum(each.nbytes + BESIDE_A_TENSOR_BYTES * len(each.parts) for each in stored) + BESIDE_A_TENSOR_BYTES


def free_bytes(folder: Path) -> int | None:
    """Returns how much can still be written below a folder; None where its file system does not tell."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return None
    # Some network file systems have no size.
    return found.f_bavail * found.f_frsize if found.f_blocks else None
