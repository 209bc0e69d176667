"""The trainer of examples/train_fsdp2_hooks.py, which kills itself on request: `--die LOCAL_RANK:STEP:WHERE`.

WHERE is `forward`, with some modules unsharded; `backward`; `barrier`, where its peers wait for its word; `update`,
after its own update; and `copy`, at the beginning of a step, before it has sent the copy of its state.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from typing import Any

import torch
from torch import nn

from elaunch.workers.frameworks.copies import SpaceCopies
from tests import ROOT
from tests.jobs import come_late, say

sys.path.insert(0, str(ROOT / "examples"))
from train_fsdp2_hooks import Trainer, parse

parser = argparse.ArgumentParser()
parser.add_argument("--die", action="append", default=[])
parser.add_argument("--sleep", type=float, default=0.0)


class Mortal(Trainer):  # type: ignore[misc]  # an example is no module where types are checked
    def __init__(self, arguments: list[str], deaths: list[str], sleep_s: float) -> None:
        super().__init__(parse(arguments))
        self.deaths, self.sleep_s = deaths, sleep_s
        worker = self.job.member.worker
        self.slot = worker.partition("/")[2].partition("#")[0] if worker.endswith("#0") else ""
        commit = self.job.member.commit
        exchange = SpaceCopies._exchange

        def committing(note: bytes = b"") -> Any:
            self.die("barrier")
            notes = commit(note)
            self.update = True
            return notes

        def exchanging(copies: SpaceCopies, group: Any, made: Any) -> None:
            if f"{self.slot}:{made.key.step}:copy" in self.deaths:
                # The others come to the barrier of this step, and their copies are complete, but for that of this one.
                threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()
                copies._copies.finish()
                copies._hear(group, made.held)
                time.sleep(60)
            exchange(copies, group, made)

        self.job.member.commit = committing
        SpaceCopies._exchange = exchanging  # type: ignore[assignment,method-assign]

    def build(self) -> nn.Module:
        model: nn.Module = super().build()
        return model.double()

    def gradients(self) -> float:
        time.sleep(self.sleep_s)
        if not self.job.trains:
            return float(super().gradients())
        last = self.job.model.blocks[-1]
        # The root is whole until its backward, the first block is done.
        handles = [last.register_forward_pre_hook(lambda *_: self.die("forward"))]
        handles += [last.register_full_backward_hook(lambda *_: self.die("backward"))]
        loss = float(super().gradients())
        for handle in handles:
            handle.remove()
        return loss

    def die(self, where: str) -> None:
        if f"{self.slot}:{self.job.step}:{where}" in self.deaths:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)


def main() -> None:
    come_late()
    ours, rest = parser.parse_known_args()
    trainer = Mortal(rest, ours.die, ours.sleep)
    trainer.train()
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in trainer.job.model.parameters()]
    say(f"weights {sum(one.double().square().sum().item() for one in whole):.10f}.")
    trainer.job.member.close()
    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
