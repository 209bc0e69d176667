"""What happens to which job, by chance from a seed; pure, so a seed and a number name a job that can be run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

HOSTS = ("a", "b", "c")
WORKERS = 2
"""Of each host."""

SETTINGS = {
    "init": ("init", "links"),
    "init native": ("init", "native"),
    "hybrid": ("hybrid", "links"),
    "hybrid native": ("hybrid", "native"),
    "attach": ("attach", "links"),
}
"""The API of a job, and what its tensors go over."""

KINDS = {
    "KILL": 3.0,
    "STOP": 2.0,
    "TERM": 1.0,
    "SEGV": 1.0,
    "two at once": 1.0,
    "agent killed": 1.0,
    "node lost": 1.0,
    "host cut off": 1.0,
    "store stopped": 1.0,
    "store killed": 1.0,
    "disk full": 1.0,
    "file limit": 1.0,
    "memory limit": 1.0,
    "clock step": 2.0,
    "slow link": 1.0,
    "slow worker": 1.0,
    "resize": 1.0,
    "drain": 1.0,
}
"""The faults, and how often each comes beside the others."""

WITHOUT_CHECKPOINTS = {"attach"}
"""APIs whose jobs here write none, so that a full disk is none of their business."""

BY_CLOCK = 3
"""One job in so many has clocks of its own, which can be stepped: its programs cannot be forks of imported ones."""


@dataclass(frozen=True)
class Fault:
    """One of `KINDS`: whom it hits, how long it lasts if it does, and how long after the one before it comes."""

    kind: str
    host: str
    slot: int
    seconds: float
    pause_s: float


@dataclass(frozen=True)
class Round:
    """One job and its faults."""

    number: int
    setting: str
    has_clocks: bool
    faults: tuple[Fault, ...]

    @property
    def api(self) -> str:
        """`init`, `hybrid` or `attach`."""
        return SETTINGS[self.setting][0]


def possible(setting: str, has_clocks: bool, asked: Sequence[str] = ()) -> list[str]:
    """Returns the kinds of faults that such a job can meet, of those that are asked for (none: of all)."""
    out = set()
    if SETTINGS[setting][0] in WITHOUT_CHECKPOINTS:
        out.add("disk full")
    if not has_clocks:
        out.add("clock step")
    return [kind for kind in KINDS if kind not in out and kind in (asked or KINDS)]


def make_round(seed: int, number: int, count: int, settings: Sequence[str] = (), asked: Sequence[str] = ()) -> Round:
    """Returns a job of one seed, which meets `count` faults. Each setting comes in turn."""
    chance = random.Random(f"{seed} {number}")
    names = list(settings or SETTINGS)
    setting = names[number % len(names)]
    has_clocks = list(asked) == ["clock step"] or (number // len(names)) % BY_CLOCK == BY_CLOCK - 1
    kinds = possible(setting, has_clocks, asked)
    if not kinds:
        raise ValueError(f"a job of {setting!r} meets none of {', '.join(asked)}")
    weights = [KINDS[kind] for kind in kinds]
    faults = tuple(
        Fault(
            chance.choices(kinds, weights)[0],
            chance.choice(HOSTS),
            chance.randrange(WORKERS),
            round(chance.uniform(0.3, 4.0), 2),
            round(chance.expovariate(4.0), 2),
        )
        for _ in range(count)
    )
    return Round(number, setting, has_clocks, faults)
