"""The job that `freed.py` runs: a small model whose gradients go over a native group, and whose workers die in it.

A worker dies, before its gradients go into the sums that the others wait for, when the file `die-RANK` is there. With
`silent` in it a child holds its connections open, so that no kernel tells the others: as when a machine is lost.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import elaunch
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.data_parallel.reducer import Reducer

SILENT_S = 4
OTHERS_S = 0.4
"""For the others to come to the sums that they wait for."""


class Notes:
    """Notes when news of a generation came and when the training thread was free of the native sums of the one before.

    Args:
        path: gets a line of JSON for each time that the training thread was freed: `news_t`, `freed_t`.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._freed_t, self._news_t = path, 0.0, 0.0
        poison, in_native = NativeGroups.poison, Reducer._in_native

        def news(groups: NativeGroups, below: int) -> None:
            if groups.current is not None and not self._news_t:
                self._news_t = time.time()
                self._write()
            poison(groups, below)

        def wait(reducer: Reducer, group: Group, what: Callable[..., None]) -> None:
            before = reducer.error
            in_native(reducer, group, what)
            if before is None and reducer.error is not None:
                self._freed_t = time.time()
                self._write()

        setattr(NativeGroups, "poison", news)  # noqa: B010
        setattr(Reducer, "_in_native", wait)  # noqa: B010

    def _write(self) -> None:
        if self._freed_t and self._news_t:
            line = json.dumps({"news_t": self._news_t, "freed_t": self._freed_t})
            self._path.open("a").write(line + "\n")
            self._freed_t = self._news_t = 0.0

    def step(self) -> None:
        """Forgets what belonged to a step that is over."""
        self._freed_t = self._news_t = 0.0


def may_die(order: Path) -> None:
    """Dies if that was asked for."""
    if not order.exists():
        return
    time.sleep(OTHERS_S)
    silently = "silent" in order.read_text()
    order.unlink()
    libc = ctypes.CDLL(None)
    if silently and libc.fork() == 0:  # without what Python does in a child: it closes the connections
        libc.sleep(SILENT_S)
        libc._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rank = os.environ["LOCAL_RANK"]
    notes = Notes(args.folder / f"freed-{os.environ['ELAUNCH_WORKER'].replace('/', '-')}.jsonl")
    job = elaunch.init()
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1))
    model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=1e-3)
    job.register(model=model, optimizer=optimizer)
    samples: list[Any] = [(torch.randn(64), torch.randn(1)) for _ in range(512)]
    for step in job.steps(samples, global_batch_size=32, micro_batch_size=8, steps=10**9):
        for inputs, targets in step:
            time.sleep(0.02)
            may_die(args.folder / f"die-{rank}")
            nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        notes.step()


if __name__ == "__main__":
    main()
