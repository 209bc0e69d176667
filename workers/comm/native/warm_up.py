"""What a worker on a device loads before its first step, in the background."""

from __future__ import annotations

import threading

import torch

from elaunch import threads
from elaunch.workers.comm.native import nccl
from elaunch.workers.comm.native.nccl import NcclBulk
from elaunch.workers.device import load_kernels


class WarmUp:
    """Has a worker load what it would load in its first steps: in the background, while its script builds its model.

    Those whom it joins train meanwhile, and wait for none of it later. On the CPU there is nothing to load.

    Args:
        device: where it computes.
        backend: of its native groups; "": it has none.
    """

    def __init__(self, device: torch.device, backend: str) -> None:
        self._failure: BaseException | None = None
        self._thread: threading.Thread | None = None
        if device.type == "cpu":
            return
        if backend == NcclBulk.backend:
            nccl.set_environment()  # not by a thread beside others that read it

        def load() -> None:
            try:
                load_kernels(device)
                if backend == NcclBulk.backend:
                    nccl.load(device)
            except Exception as failure:  # raised where the script can see it
                self._failure = failure

        self._thread = threads.start("elaunch-warm-up", load, lambda _: None)

    def wait(self) -> None:
        """Returns when all is loaded.

        Raises:
            Exception: what loading has failed with.
        """
        self.end()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Returns when nothing is being loaded any more: a process must not end under a device's first calls."""
        if self._thread is not None:
            self._thread.join()
