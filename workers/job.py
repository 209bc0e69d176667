"""What a training script sees of its job, whatever its kind."""

from __future__ import annotations

import torch

from elaunch.workers.runtime import Member


class BaseJob:
    """A job, seen from one of its workers.

    Args:
        member: this worker's runtime.
    """

    def __init__(self, member: Member) -> None:
        self._member = member

    @property
    def device(self) -> torch.device:
        """Returns where this worker computes."""
        return self._member.device

    @property
    def rank(self) -> int:
        """Returns the position of this worker in the present generation; it changes with the membership."""
        return self._member.rank

    @property
    def size(self) -> int:
        """Returns the number of members of the present generation, spares that hold the state among them."""
        return self._member.size

    @property
    def standby(self) -> bool:
        """Returns whether this worker is of a spare that holds the state (--spare-state): its samples do not count."""
        return self._member.joined and self.worker in self._member.generation.standby

    @property
    def generation(self) -> int:
        """Returns the number of the present generation; 0 before this worker has joined."""
        return self._member.generation.number if self._member.joined else 0

    @property
    def worker(self) -> str:
        """Returns the identity of this worker: node/local_rank#incarnation."""
        return self._member.worker

    def close(self) -> None:
        """Leaves the job. Called by itself at the end of the process."""
        self._member.close()
