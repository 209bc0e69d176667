"""A native group over NCCL by `nccl2`, the NCCL backend of torch 2.14 and later.

Its abort revokes the communicator: whoever waits in it is freed, and nothing that live peers may still read is given
back before the members, all of which have left it, connect the same object anew. Written against the source of torch
2.15, and not tried on a device; `TORCH_DIST_USE_NCCL2=0`, as for torch itself, chooses the older backend of `nccl.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from elaunch.workers.comm.native import reconfigure
from elaunch.workers.comm.native.bulk import keep
from elaunch.workers.comm.native.nccl import NO_TIMEOUT, NcclBulk

USE_NCCL2 = "TORCH_DIST_USE_NCCL2"
REVOKED_S = 30.0


def is_chosen(environ: Mapping[str, str], torchs: Any) -> bool:
    """Returns whether NCCL's groups are those of `nccl2`.

    Args:
        environ: of this process.
        torchs: what has torch's classes, `torch.distributed`.
    """
    return environ.get(USE_NCCL2) != "0" and reconfigure.OPTIONS is not None and hasattr(torchs, "ProcessGroupNCCL2")


class Nccl2Bulk(NcclBulk):
    """A group of `ProcessGroupNCCL2`, new or left by a former generation.

    Args:
        device: of this member.
        left: the groups that this worker has left.
    """

    def __init__(self, device: torch.device, left: reconfigure.LeftGroups) -> None:
        super().__init__(device)
        self._left = left
        self._place = ""

    def close(self) -> None:
        """Leaves the object to a later generation; if its revocation does not end, nobody gets it."""
        self.poison()
        group, self._group = self._group, None
        if self._abort is not None:
            self._abort.join(REVOKED_S)  # later, it would strike the next generation's communicator
            if group is not None and not self._abort.is_alive():
                self._left.leave(self._place, group)

    def _connect(self, store: dist.Store, rank: int, size: int) -> None:
        self._place = reconfigure.place_of(store)
        group, _ = reconfigure.connect(
            store, rank, size, self._left, lambda root: _new(root, rank, size), self._over.is_set
        )
        try:
            self._hold(group)
        except RuntimeError:
            group.abort()
            self._left.leave(self._place, group)
            raise


def _new(store: dist.Store, rank: int, size: int) -> Any:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.config.blocking = 0
    options.enable_reconfigure = True
    options._timeout = NO_TIMEOUT
    kind: Any = dist.ProcessGroupNCCL2  # type: ignore[attr-defined]
    group = kind(store, rank, size, options, None)  # the device is the current one of the thread that connects it
    keep(group)
    if not group.supports_reconfigure:
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        raise RuntimeError(
            f"nccl2 of torch {torch.__version__} with NCCL {nccl} cannot be connected anew when members change: "
            f"set {USE_NCCL2}=0"
        )
    return group
