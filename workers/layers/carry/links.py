"""Tensors over links; those of an accelerator go through host memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from elaunch.workers.comm.group import memory
from elaunch.workers.comm.traffic import Traffic


class LinkCarrier:
    """Carries tensors as messages of a traffic.

    Args:
        traffic: of the operation; who opened it closes it.
        worker: this one.
        staged: whether tensors lie where the links cannot reach them, so that each goes through host memory.
    """

    def __init__(self, traffic: Traffic, worker: str, staged: bool) -> None:
        self._traffic, self._worker, self._staged = traffic, worker, staged
        self._coming: dict[tuple[str, int], tuple[Tensor, Tensor]] = {}
        self._last: tuple[Tensor, Tensor] | None = None

    def post(self, peer: str, part: int, tensor: Tensor) -> None:
        """Has a part received in the background."""
        if self._staged:
            host = _on_host(tensor)
            self._coming[peer, part] = tensor, host
            tensor = host
        self._traffic.post(peer, part, memory(tensor))

    def before(self, peer: str, part: int) -> Sequence[int]:
        """Returns nothing: parts are told apart by their numbers."""
        return ()

    def send(self, peer: str, part: int, tensor: Tensor) -> None:
        """Sends a tensor; one that goes to several peers in turn is copied to the host once."""
        host = tensor
        if self._staged:
            if self._last is None or self._last[0] is not tensor:
                self._last = tensor, _on_host(tensor).copy_(tensor)
            host = self._last[1]
        self._traffic.send(peer, part, memory(host), host)

    def wait(self, peer: str, part: int) -> None:
        """Returns when a part is here."""
        self._traffic.wait(peer, part)
        if self._staged:
            tensor, host = self._coming.pop((peer, part))
            tensor.copy_(host, non_blocking=True)

    def arrived(self, peer: str, part: int) -> bool:
        """Returns whether a part is here."""
        return self._traffic.arrived(peer, part)

    def exchange(
        self, workers: Sequence[str], part: int, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]
    ) -> None:
        """Sends a message to each and waits for one of each."""
        for rank, other in enumerate(workers):
            if other != self._worker:
                self.post(other, part, incoming[rank])
                self.send(other, part, outgoing[rank])
        for other in workers:
            if other != self._worker:
                self.wait(other, part)

    def all_reduce(self, workers: Sequence[str], tensor: Tensor) -> Tensor | None:
        """Returns that it cannot."""
        return None

    def finish(self) -> None:
        """Does nothing: what is waited for is right, and the end of the traffic waits for what is sent."""

    def drop(self) -> None:
        """Does nothing: the traffic is over."""


def _on_host(tensor: Tensor) -> Tensor:
    """Memory as large as a tensor; pinned for a GPU, whose copies to and from it need no other."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
