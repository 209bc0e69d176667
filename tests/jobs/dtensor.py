"""The trainer of examples/train_dtensor.py, that can hurt itself on request: `--die SLOT:STEP:PHASE`.

`--ask STEP:AxB` asks for a layout by a plan, before this step, as a framework's own code does.

The phases are those of tests/jobs/train.py and tests/jobs/layers.py, and `forward`: in the first sum of a forward pass.
"""

from __future__ import annotations

import argparse
import os
import sys

from elaunch.plan import symmetric
from elaunch.workers.comm.group import Group
from tests import ROOT
from tests.jobs import come_late, say
from tests.jobs.hangs import Hangs
from tests.jobs.layers import LayerFaults
from tests.jobs.train import Pace, die

sys.path.insert(0, str(ROOT / "examples"))
from train_dtensor import Trainer, parse, switch_of


class Watched(Trainer):  # type: ignore[misc]  # an example is no module where types are checked
    """A trainer that dies, or slows down, at the given moments; it looks like a job to those who see to that."""

    def __init__(
        self, arguments: list[str], requests: list[str], crew: int, sleep_s: float, hangs: list[str], asks: list[str]
    ) -> None:
        super().__init__(parse(arguments))
        self.args.switch = Asks(self, dict(map(switch_of, asks))) if asks else self.args.switch
        self._member = self.member
        self.faults = TensorFaults(self, requests)
        self.pace = Pace(self, self.args.steps, sleep_s, crew, 0, "")
        self.hangs = Hangs(hangs, [], [], self.worker)

    @property
    def worker(self) -> str:
        return str(self.member.worker)

    @property
    def size(self) -> int:
        return int(self.member.size)

    @property
    def generation(self) -> int:
        return int(self.member.generation.number)

    def gradients(self) -> float:
        self.pace.before()
        if self.faults.due("compute"):
            die()
        loss = float(super().gradients())
        self.hangs.at(self.step)
        self.pace.after()
        return loss


class Asks:
    """Looked at before each step, asks for the plan of some: once, also where the step is done again."""

    def __init__(self, trainer: Watched, asks: dict[int, tuple[int, int]]) -> None:
        self.trainer, self.left = trainer, asks

    def get(self, step: int, wanted: tuple[int, int]) -> tuple[int, int]:
        trainer = self.trainer
        if (shape := self.left.pop(step, None)) is None:
            return wanted
        replicas, parts = shape
        names = [f"any{number}" for number in range(replicas * parts)]
        trainer.member.replan(symmetric(names, 1, 12, 12 // replicas, dp=replicas, tp=parts))
        say(f"asked for {shape} and goes by {trainer.shape}")
        replicas, parts = trainer.wanted
        return replicas, parts


class TensorFaults(LayerFaults):
    """Ends this process at the requested moments of a trainer."""

    OF_ONE_STEP = (*LayerFaults.OF_ONE_STEP, "forward")

    def __init__(self, trainer: Watched, requests: list[str]) -> None:
        super().__init__(trainer, requests)
        if self.steps:
            self._die_around(Group, "all_reduce", before="forward")
            self._die_around(Trainer, "vote", before="vote")
            self._die_around(Trainer, "resume", before="resume")


def main() -> None:
    come_late()
    parser = argparse.ArgumentParser()
    parser.add_argument("--die", action="append", default=[])
    parser.add_argument("--crew", type=int, default=0, help="with fewer members, steps take 0.1 s more")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds, in each step")
    parser.add_argument("--hang", action="append", default=[], help="see tests/jobs/hangs.py")
    parser.add_argument("--ask", action="append", default=[], help="STEP:AxB")
    ours, rest = parser.parse_known_args()
    trainer = Watched(rest, ours.die, ours.crew, ours.sleep, ours.hang, ours.ask)
    trainer.train()
    say(f"ended {trainer.worker} pid {os.getpid()}")


if __name__ == "__main__":
    main()
