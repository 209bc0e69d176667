"""What jobs need of which several workers share one device; import it before the first process group is made.

NCCL refuses two ranks of one machine on one device, so each worker says that it is a machine of its own, and they talk
over loopback sockets; under all launchers alike.
"""

from __future__ import annotations

import os
import time

# NCCL reads them when its first communicator is made.
os.environ.setdefault("NCCL_HOSTID", f"h{os.environ.get('LOCAL_RANK', '0')}")
os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")

import torch

LOOK_S = 0.0002


def device_of(local_rank: int) -> torch.device:
    """Returns the device of a worker of this machine, and makes it the current one."""
    if not torch.accelerator.is_available():
        return torch.device("cpu")
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    device = torch.device(accelerator.type, local_rank % torch.accelerator.device_count())
    torch.accelerator.set_device_index(device.index)
    return device


def await_device(device: torch.device) -> None:
    """Returns when a device has done what its present stream was given; the wait is Python's, so it can be ended."""
    if device.type == "cpu":
        return
    done = torch.Event(device)
    done.record(torch.accelerator.current_stream(device))
    while not done.query():
        time.sleep(LOOK_S)
