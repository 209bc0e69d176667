"""A framework of its own on `attach()`, whose members hold everything and whose plan says who computes which rows.

    planned.py STEPS [SLOW_RANK]

The policy selector plans: rows of a member that is lost are dealt out anew. SLOW_RANK computes each row four times.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
import torch.distributed as dist

import elaunch
from elaunch.hooks import Generation, Group, Layout, TensorSpace, Verdict, Vote
from elaunch.plan import Plan, symmetric
from elaunch.policy.profile import LayerProfile
from tests.jobs import come_late

ROWS, COLUMNS = 48, 8
ROW_S = 0.0005


class Runtime:
    """Least squares by gradient descent; a row takes ROW_S of a worker's time."""

    def __init__(self, slow_rank: int) -> None:
        self.member = elaunch.attach(self)
        self.space = TensorSpace(self.member.worker)
        self.step, self.holds = 0, False
        self.times = 4 if self.member.rank == slow_rank else 1
        self.plan_followed: Plan | None = None
        n = self.member.size
        whole_model = LayerProfile(0.0, 0.0, 8 * COLUMNS, 0, 0, 0)
        self.member.use_plans(symmetric([f"w{rank}" for rank in range(n)], 1, ROWS, 1, dp=n), [whole_model])

    def train(self, steps: int) -> None:
        self.member.join(takes_plans=True)
        while self.step < steps or not self.member.finish():
            with self.member.attempt():
                loss = self.compute()
                self.member.commit()
                self.update()
                self.member.report(self.step - 1, loss=loss, sample_ids=range(ROWS * (self.step - 1), ROWS * self.step))

    def rows(self) -> list[int]:
        """The rows of the present plan that this worker computes."""
        assert self.plan_followed is not None
        tiles = (tile for tile in self.plan_followed.tiles if self.member.worker in tile.workers)
        return [row for tile in tiles for rows in tile.micro_batches for run in rows for row in run]

    def compute(self) -> float:
        begin_s, mine = time.monotonic(), self.rows()
        time.sleep(ROW_S * self.times * len(mine))
        rows = torch.tensor(mine, dtype=torch.float64)
        inputs = torch.stack([(rows * k + self.step).cos() for k in range(COLUMNS)], 1)
        errors = inputs @ self.weight - rows / ROWS
        sums = torch.cat([inputs.t() @ errors, errors.square().sum()[None]]) / ROWS
        self.member.took(time.monotonic() - begin_s, len(mine))
        dist.all_reduce(sums, group=self.member.process_group)
        self.gradient = sums[:-1]
        return sums[-1].item()

    def update(self) -> None:
        self.weight -= 0.1 * self.gradient
        self.step += 1

    def vote(self) -> Vote:
        return Vote(self.step, self.member.entered, self.holds)

    def pause(self) -> None:
        """Nothing runs in the background."""

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        if self.holds and self.step < verdict.step:
            self.update()

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        self.decision = self.member.choose(generation, group, verdict)
        return dict(self.decision.event)

    def transfer(self, group: Group, verdict: Verdict) -> int:
        if verdict.fresh and group.rank == 0:
            self.space.hold(Layout((1,), group.members[:1]), {"weight": torch.zeros(COLUMNS, dtype=torch.float64)})
        return self.space.move(group, Layout((group.size,), group.members)).received_bytes

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        self.space.install()
        self.weight = self.space.local("weight")
        self.plan_followed = self.decision.plan
        self.step, self.holds = verdict.step, True


if __name__ == "__main__":
    come_late()
    Runtime(int(sys.argv[2]) if len(sys.argv) > 2 else -1).train(int(sys.argv[1]))
