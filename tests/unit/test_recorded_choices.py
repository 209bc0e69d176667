"""What is chosen never becomes worse: decisions beside those recorded before decisions were made faster.

`python -m tests.unit.test_recorded_choices` records them anew, where what a plan costs has changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from elaunch.plan import Plan, symmetric
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.profile import LayerProfile, LinkProfile, Profile, WorkerProfile
from elaunch.policy.select import Candidate, SelectorSettings, choose
from tests.helpers import soak

RECORDED = Path(__file__).with_name("recorded_choices.json")

BLOCK = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
UNEVEN = (replace(BLOCK, forward_s_per_row=0.2, backward_s_per_row=0.3), replace(BLOCK, forward_s_per_row=1.6))
BYTES = 2 * BLOCK.parameter_bytes + BLOCK.optimizer_bytes


@dataclass(frozen=True)
class Loss:
    """A job, who is lost and who joins."""

    dp: int
    pp: int
    tp: int
    n_layers: int
    units: int
    rows: int = 1
    lost: tuple[int, ...] = (0,)
    joined: int = 0
    memory: float | None = None  # of a worker, as a part of the whole model's state
    speeds: Mapping[int, float] = field(default_factory=dict)
    slow_links: bool = False
    even: bool = False
    widths: tuple[int, ...] = ()
    policy: str = "auto"

    @property
    def name(self) -> str:
        return repr(self)

    def plan(self) -> Plan:
        workers = [f"n{number // 4}/{number % 4}#0" for number in range(self.dp * self.pp * self.tp)]
        batch = self.dp * self.units * self.rows
        return symmetric(workers, self.n_layers, batch, self.rows, dp=self.dp, pp=self.pp, tp=self.tp)

    def members(self, plan: Plan) -> list[str]:
        gone = {plan.workers[number] for number in self.lost}
        return [*(worker for worker in plan.workers if worker not in gone), *(f"x/{n}#0" for n in range(self.joined))]

    def profile(self) -> Profile:
        layers = (BLOCK,) * self.n_layers if self.even else (UNEVEN[0], *[BLOCK] * (self.n_layers - 2), UNEVEN[1])
        memory = None if self.memory is None else int(self.memory * self.n_layers * BYTES)
        workers = {f"n{number // 4}/{number % 4}": WorkerProfile(speed) for number, speed in self.speeds.items()}
        links = {("n0/0", "n1/0"): LinkProfile(20.0, 0.5), ("n1/0", "n0/0"): LinkProfile(20.0, 0.5)}
        bandwidth = 100.0 if self.slow_links else 1e9
        return Profile(
            "recorded",
            layers,
            self.tp,
            bandwidth,
            0.01,
            width=self.tp,
            memory_bytes=memory,
            workers=workers,
            links=links if self.slow_links else {},
        )

    def candidates(self) -> Sequence[Candidate]:
        plan = self.plan()
        settings = SelectorSettings(policy=self.policy, widths=self.widths)  # type: ignore[arg-type]
        return choose(plan, plan, self.members(plan), self.profile(), settings).candidates


FEW = [
    Loss(4, 4, 1, 12, 8),
    Loss(4, 4, 1, 12, 8, even=True, lost=(5,)),
    Loss(3, 4, 2, 13, 6, rows=4, lost=(2, 9)),
    Loss(4, 3, 1, 10, 9, memory=0.6, lost=(3,)),
    Loss(4, 2, 1, 8, 8, speeds={1: 0.5, 6: 0.8}, lost=(2,)),
    Loss(4, 4, 1, 12, 4, slow_links=True, lost=(7,)),
    Loss(2, 4, 1, 12, 8, lost=(0, 1)),
    Loss(2, 3, 1, 9, 12, lost=(), joined=3),
    Loss(2, 2, 2, 9, 8, lost=(1,), joined=1, widths=(1, 4)),
    Loss(6, 2, 1, 7, 5, rows=3, lost=(0, 7, 8)),
]
MANY = [
    *(Loss(8, 8, 1, 24, 16, lost=(lost,)) for lost in (0, 35, 63)),
    *(Loss(8, 8, 1, 24, 16, lost=(lost,), memory=0.3) for lost in (0, 35)),
    *(Loss(16, 4, 1, 18, 12, rows=2, lost=(lost, lost + 1)) for lost in (0, 30)),
    *(Loss(6, 6, 1, 20, 18, lost=(lost,), speeds={2: 0.6, 20: 0.9}) for lost in (1, 14)),
    *(Loss(8, 4, 1, 16, 8, rows=4, lost=(lost, 20), slow_links=True) for lost in (1, 9)),
    *(Loss(32, 8, 4, 50, 16, lost=(lost,)) for lost in (0, 500)),
    Loss(12, 4, 1, 17, 90, lost=(7,)),
    Loss(5, 5, 1, 31, 10, lost=(1, 2, 3, 4), joined=2),
    Loss(4, 4, 1, 12, 16, lost=(), joined=8),
]


def recorded() -> dict[str, list[dict[str, Any]]]:
    found: dict[str, list[dict[str, Any]]] = json.loads(RECORDED.read_text())
    return found


@pytest.mark.parametrize("loss", [*FEW, *(soak(one) for one in MANY)], ids=lambda one: one.name)
@pytest.mark.timeout(120)
def test_every_policy_finds_a_plan_as_good_as_the_recorded_one(loss: Loss) -> None:
    found = {one.policy: one for one in loss.candidates()}
    for before in recorded()[loss.name]:
        now = found[before["policy"]]
        assert bool(now.rejected) <= before["rejected"], now.rejected
        if before["rejected"]:
            continue
        assert now.step is not None
        assert now.step.step_s <= before["step_s"] * (1 + 1e-9)
        assert now.score >= before["score"] * (1 - 1e-9)
        if now.step.step_s >= before["step_s"] * (1 - 1e-9):
            assert now.transition is not None
            assert now.transition.moved_bytes <= before["moved_bytes"]


def _entries(loss: Loss) -> Iterator[dict[str, Any]]:
    for one in loss.candidates():
        if one.rejected or one.step is None or one.transition is None:
            yield {"policy": one.policy, "rejected": True}
        else:
            moved = one.transition.moved_bytes
            yield {
                "policy": one.policy,
                "rejected": False,
                "step_s": one.step.step_s,
                "score": one.score,
                "moved_bytes": moved,
            }


def _record() -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    for loss in [*FEW, *MANY]:
        try:
            found[loss.name] = list(_entries(loss))
        except NotPossible as error:
            raise SystemExit(f"{loss}: {error}") from error
    RECORDED.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    _record()
