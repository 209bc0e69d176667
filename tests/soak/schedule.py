"""What happens to which job, by chance from a seed; pure, so a seed and a number name a job that can be run again."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

HOSTS = ("a", "b", "c")
WORKERS = 2
"""Of each host."""

SETTINGS = {
    "init": ("init", "links"),
    "init native": ("init", "native"),
    "hybrid": ("hybrid", "links"),
    "hybrid native": ("hybrid", "native"),
    "attach": ("attach", "links"),
    "attach native": ("attach", "native"),
}
"""The API of a job, and what its tensors go over."""

STORES = {
    "etcd": (0, False),
    "first node": (1, False),
    "three nodes": (3, False),
    "first node, secret": (1, True),
    "three nodes, secret": (3, True),
}
"""How many nodes of a job host its etcd (0: it is a server apart), and whether it has a secret, so that all is TLS."""

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

ENDS_ONE = {"KILL", "STOP", "TERM", "SEGV", "memory limit"}
ENDS_HOST = {"agent killed", "node lost", "host cut off", "drain", "file limit"}

STEPS = {"init": 800, "hybrid": 800, "attach": 400}
"""Steps of a job, by its API: on a busy machine those of `attach` take much longer, and a dozen faults need fewer."""

EVERY = 40
"""Steps from one checkpoint to the next."""

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
    """One job and its faults.

    Attributes:
        store: one of `STORES`.
        spared: host and slot of a worker that no fault ends, nor its agent, so that they can be seen to grow. Only the
            leader of the job may let its node go, when there are to be fewer.
        steps: of the job; checkpoints come every `EVERY` of them.
    """

    number: int
    setting: str
    has_clocks: bool
    faults: tuple[Fault, ...]
    store: str = "etcd"
    spared: tuple[str, int] | None = None
    steps: int = STEPS["init"]

    @property
    def api(self) -> str:
        """`init`, `hybrid` or `attach`."""
        return SETTINGS[self.setting][0]


def second_host(fault: Fault, api: str) -> str:
    """Returns the host of the second worker that `two at once` hits.

    It is another one where each worker has the whole state; else the same, as the one copy of what a worker has alone
    is on another.
    """
    return HOSTS[(HOSTS.index(fault.host) + 1) % len(HOSTS)] if api == "init" else fault.host


def ends(fault: Fault, api: str) -> frozenset[tuple[str, int]]:
    """Returns the workers that a fault may end, by host and slot, as far as that is known before."""
    if fault.kind in ENDS_ONE:
        return frozenset({(fault.host, fault.slot)})
    if fault.kind == "two at once":
        return frozenset({(fault.host, fault.slot), (second_host(fault, api), 1 - fault.slot)})
    if fault.kind == "file limit" and fault.slot:
        return frozenset({(fault.host, 0)})
    if fault.kind in ENDS_HOST:
        return frozenset((fault.host, slot) for slot in range(WORKERS))
    return frozenset()


def sparing(fault: Fault, api: str, spared: tuple[str, int]) -> Fault:
    """Returns the fault, or the one most like it that does not end that worker: in another slot, or on another host."""
    others = (replace(fault, host=host, slot=slot) for host in HOSTS for slot in (fault.slot, 1 - fault.slot))
    near = sorted(others, key=lambda other: (other.host != fault.host, other.slot != fault.slot))
    return next(other for other in near if spared not in ends(other, api))


def possible(setting: str, has_clocks: bool, asked: Sequence[str] = ()) -> list[str]:
    """Returns the kinds of faults that such a job can meet, of those that are asked for (none: of all)."""
    out = set()
    if SETTINGS[setting][0] in WITHOUT_CHECKPOINTS:
        out.add("disk full")
    if not has_clocks:
        out.add("clock step")
    return [kind for kind in KINDS if kind not in out and kind in (asked or KINDS)]


def make_round(
    seed: int,
    number: int,
    count: int,
    settings: Sequence[str] = (),
    asked: Sequence[str] = (),
    stores: Sequence[str] = (),
    steps: int | None = None,
) -> Round:
    """Returns a job of one seed, which meets `count` faults. Each setting comes in turn, over each store in turn.

    Args:
        seed, number: they name the job.
        count: how many faults it meets.
        settings, asked, stores: of which settings, kinds of faults and stores it is; none: of all.
        steps: how many it has; None: as many as `STEPS` says.
    """
    chance = random.Random(f"{seed} {number}")
    names, hosted = list(settings or SETTINGS), list(stores or STORES)
    lap, place = divmod(number, len(names))
    setting = names[place]
    has_clocks = list(asked) == ["clock step"] or lap % BY_CLOCK == BY_CLOCK - 1
    kinds = possible(setting, has_clocks, asked)
    if not kinds:
        raise ValueError(f"a job of {setting!r} meets none of {', '.join(asked)}")
    weights = [KINDS[kind] for kind in kinds]
    spared = chance.choice(HOSTS), chance.randrange(WORKERS)
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
    store, api = hosted[(seed + lap + place) % len(hosted)], SETTINGS[setting][0]
    faults = tuple(sparing(fault, api, spared) for fault in faults)
    return Round(number, setting, has_clocks, faults, store, spared, steps or STEPS[api])
