"""Which path state takes, by an estimate that is the same on all members.

Seconds of a move are those until the path stands, and the bytes of the busiest member over the rate of the slowest. A
rate that nobody has measured is assumed; those are set so that a path that has never been used must be clearly better.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from elaunch.errors import UsageError

PATH = "ELAUNCH_STATE_PATH"
"""The variable in which a user says what carries state that moves."""

AUTO, LINKS, NATIVE, NIXL = "auto", "links", "native", "nixl"

LINKS_BYTES_PER_S = 2e9
"""Over links, from and to pinned host memory."""

NATIVE_BYTES_PER_S = {"gloo": 1e9, "nccl": 8e9}
"""By backend. Gloo copies as often as a link does. HCCL's groups have no messages."""

OPEN_S = {"gloo": 0.03, "nccl": 2.0}
"""Until the first group of a process stands. NCCL: 1.5 to 2 s on a busy machine (torch 2.11, H100)."""

NIXL_BYTES_PER_S = 8e9
NIXL_OPEN_S = 0.1
"""For agents to learn of each other's memory."""


@dataclass(frozen=True)
class PathOffer:
    """What one member has, and what it has measured; None: nothing yet.

    Attributes:
        asked: the path that its user wants.
        host: name of its machine.
        backend: of its native groups; "": it has none.
        has_fabric: whether NIXL finds one.
        links_bytes_per_s, native_bytes_per_s, nixl_bytes_per_s: of its last move over each path.
        open_s: that its last native group for state took to stand.
    """

    asked: str = AUTO
    host: str = ""
    backend: str = ""
    has_fabric: bool = False
    links_bytes_per_s: float | None = None
    native_bytes_per_s: float | None = None
    nixl_bytes_per_s: float | None = None
    open_s: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns what `PathOffer(**fields)` makes it of again."""
        return asdict(self)


@dataclass(frozen=True)
class PathChoice:
    """A path and why it was taken.

    Attributes:
        path: its name.
        reason: for people.
        seconds: that a move over each possible path is estimated to take.
    """

    path: str
    reason: str
    seconds: Mapping[str, float]


def parse_path(text: str) -> str:
    """Reads the variable.

    Raises:
        UsageError: it names no path.
    """
    if text not in (AUTO, LINKS, NATIVE, NIXL):
        raise UsageError(
            f"{PATH}={text}: expected auto (the quickest by an estimate), links (elaunch's own connections), native "
            "(NCCL or Gloo) or nixl"
        )
    return text


def is_open_to_choice(offers: Sequence[PathOffer]) -> bool:
    """Returns whether there is anything but links, so that the members have to tell each other of their bytes."""
    asked = _asked(offers)
    return asked != LINKS and (_is_native(offers) or _is_nixl(offers, asked))


def choose(most_bytes: int, is_on_device: bool, offers: Sequence[PathOffer], is_open: bool) -> PathChoice:
    """Returns the path of a move.

    Args:
        most_bytes: of the member that sends or receives most.
        is_on_device: whether all of the state is where native groups take it from.
        offers: of all members.
        is_open: whether a native group of all of them stands.
    """
    asked = _asked(offers)
    seconds = {LINKS: most_bytes / _slowest((one.links_bytes_per_s for one in offers), LINKS_BYTES_PER_S)}
    if is_on_device and _is_native(offers):
        backend = offers[0].backend
        rate = _slowest((one.native_bytes_per_s for one in offers), NATIVE_BYTES_PER_S[backend])
        wait_s = 0.0 if is_open else max(OPEN_S[backend] if one.open_s is None else one.open_s for one in offers)
        seconds[NATIVE] = wait_s + most_bytes / rate
    if _is_nixl(offers, asked):
        rate = _slowest((one.nixl_bytes_per_s for one in offers), NIXL_BYTES_PER_S)
        seconds[NIXL] = NIXL_OPEN_S + most_bytes / rate
    if asked != AUTO:
        if asked in seconds and most_bytes:
            return PathChoice(asked, f"{PATH}={asked}", seconds)
        return PathChoice(LINKS, f"{PATH}={asked}, which these members cannot use for this state", seconds)
    path = min(seconds, key=lambda name: (seconds[name], name != LINKS))
    told = ", ".join(f"{name} {took_s:.3f} s" for name, took_s in seconds.items())
    return PathChoice(path, f"{most_bytes / 1e6:.1f} MB by the busiest member: {told}", seconds)


def _asked(offers: Sequence[PathOffer]) -> str:
    """What was asked for; where members were told different things, links serve."""
    asked = {one.asked for one in offers}
    return asked.pop() if len(asked) == 1 else LINKS


def _is_native(offers: Sequence[PathOffer]) -> bool:
    backends = {one.backend for one in offers}
    return len(offers) > 1 and len(backends) == 1 and backends <= NATIVE_BYTES_PER_S.keys()


def _is_nixl(offers: Sequence[PathOffer], asked: str) -> bool:
    """On one host it is slower than links."""
    return asked in (AUTO, NIXL) and all(one.has_fabric for one in offers) and len({one.host for one in offers}) > 1


def _slowest(measured: Iterable[float | None], assumed: float) -> float:
    return min((rate for rate in measured if rate), default=assumed)
