"""The second of two members of a Gloo group, which takes or gives one long message; the first is a test."""

from __future__ import annotations

import os
import signal
import sys
import time

import torch
import torch.distributed as dist

from elaunch.workers.comm.native.gloo import GlooBulk

ELEMENTS = 16 << 20
"""More than the sockets of a connection hold."""

if __name__ == "__main__":
    place, does = sys.argv[1:]
    bulk = GlooBulk("127.0.0.1")
    bulk.open(dist.FileStore(place, 2), 1, 2, messages=True)
    tensor = torch.ones(ELEMENTS)
    if does == "takes":
        coming = bulk.exchange([tensor[:0]] * 2, [tensor, tensor[:0]])
        os.kill(os.getpid(), signal.SIGSTOP)  # before any of it has come
    else:
        bulk.send(tensor, 0).wait()
    time.sleep(600)
