"""What the members have to move state over, and have measured; and the path that follows from it."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.opening import Connect
from elaunch.workers.comm.paths import StatePath, StepPath
from elaunch.workers.state.paths import nixl
from elaunch.workers.state.paths.choice import (
    AUTO,
    LINKS,
    NATIVE,
    NIXL,
    PATH,
    PathOffer,
    choose,
    is_open_to_choice,
    parse_path,
)
from elaunch.workers.state.paths.in_step import NativeStepPath
from elaunch.workers.state.paths.links import LinkPath
from elaunch.workers.state.paths.native import NativePath
from elaunch.workers.state.staging import copies_of

FACT = "elaunch.state_path"
"""Among the facts of a vote: this member's offer."""

MEASURED_BYTES = 8 << 20
"""A smaller move says little of a rate."""


class Offers:
    """One member's part in the choice of paths.

    What members offer they tell each other with their votes, so that all choose by the same. Where nobody has anything
    but links, nothing is told.

    Args:
        native: the native groups of this member.

    Attributes:
        last: the path of the last move of anything; None: there was nothing to choose from.
    """

    def __init__(self, native: NativeGroups) -> None:
        self._native = native
        self._asked = parse_path(os.environ.get(PATH) or AUTO)
        self._host = socket.gethostname()
        self._backend = ""
        self._measured: dict[str, float] = {}
        self._open_s: float | None = None
        self._connect: Connect | None = None
        self._offers: tuple[PathOffer, ...] = ()
        self._refused_in = 0
        self.last: str | None = None

    def facts(self) -> dict[str, Any]:
        """Returns what goes with this member's vote."""
        self._backend = self._backend or self._native.offered
        has_fabric = self._asked in (AUTO, NIXL) and nixl.has_fabric()
        if not self._backend and not has_fabric:
            return {}
        links, native, over_nixl = (self._measured.get(name) for name in (LINKS, NATIVE, NIXL))
        offer = PathOffer(self._asked, self._host, self._backend, has_fabric, links, native, over_nixl, self._open_s)
        return {FACT: offer.to_json()}

    def agreed(self, facts: Sequence[Mapping[str, Any]], connect: Connect) -> None:
        """Takes note of what the members of a generation offer.

        Args:
            facts: of all of them, in their order.
            connect: returns a client of the job's store, where a native group is opened.
        """
        self._connect = connect
        told = [PathOffer(**one[FACT]) for one in facts if FACT in one]
        self._offers = tuple(told) if len(told) == len(facts) else ()

    def choose(self, group: Group, most_bytes: int, device: torch.device | None, is_bounded: bool) -> StatePath | None:
        """Returns the path of a move, after all members have told each other how much that is."""
        if group.size == 1 or not self._offers or not is_open_to_choice(self._offers):
            self.last = None
            return None
        where = self._device()
        most, elsewhere = _told(group, most_bytes, device is not None and device.type != where.type)
        if not most:
            return None
        bulk = self._native.for_state(group.members)
        offers = self._offers
        choice = choose(most, not elsewhere, offers, bulk is not None)
        self.last = LINKS
        if choice.path == NIXL:
            self.last = NIXL
            links = LinkPath(group, copies_of(where, is_bounded))
            at = torch.device("cpu") if elsewhere else where
            return nixl.path(group, [one.host for one in offers], at, links, is_bounded)
        if choice.path != NATIVE or self._refused_in == group.generation:
            return None
        if bulk is None and (wrong := self._open(group)):
            self._refused(group.generation, wrong if group.rank == 0 else "")
            return None
        bulk = self._native.for_state(group.members)
        assert bulk is not None, "all members have opened it"
        self.last = NATIVE
        return NativePath(bulk, group, where, is_bounded, self._native.failed)

    def in_step(self, group: Group, most_bytes: int, device: torch.device) -> StepPath | None:
        """Returns what may carry a move in the background of the step that comes: a native group of its own.

        It begins to be opened here. Whether it stands its members find out in the step; where it does not on all, or
        is not chosen, the move goes over links.
        """
        if group.size == 1 or not self._offers or not is_open_to_choice(self._offers):
            self.last = None
            return None
        where = self._device()
        most, elsewhere = _told(group, most_bytes, device.type != where.type)
        if not most:
            return None
        # NIXL's reads are for moves in which all pause.
        choice = choose(most, not elsewhere, [replace(one, has_fabric=False) for one in self._offers], is_open=False)
        self.last = LINKS
        if choice.path != NATIVE or self._refused_in == group.generation:
            return None
        self.last = NATIVE
        assert self._connect is not None, "nobody offers anything before an agreement"
        begun = self._native.open_in_step(group.generation, group.members, group.rank, self._connect)
        return NativeStepPath(self._native, begun, group, where, partial(self._refused, group.generation))

    def took(self, path: StatePath, n_bytes: int, seconds: float) -> None:
        """Takes note of the rate of a path."""
        if n_bytes >= MEASURED_BYTES and self._offers:
            self._measured[path.name] = n_bytes / max(seconds, 1e-6)

    def _refused(self, generation: int, wrong: str) -> None:
        """Takes note that no native group stands on all members in a generation.

        Args:
            generation: its number.
            wrong: why, where this member is to say so; "" else.
        """
        self._refused_in, self.last = generation, LINKS
        if wrong:
            name = self._backend
            _say(f"the state of generation {generation} moves over links, as {name} cannot be opened for it: {wrong}")

    def _device(self) -> torch.device:
        """Where paths take state from."""
        found = torch.accelerator.current_accelerator(check_available=True) if self._backend != "gloo" else None
        return torch.device("cpu") if found is None else found

    def _open(self, group: Group) -> str:
        """Opens a native group on all members; returns why it does not stand on all, "" if it does."""
        assert self._connect is not None, "nobody offers anything before an agreement"
        others = group.others

        begin_s = time.monotonic()
        with heartbeat.waiting(others, group.generation):
            wrong = self._native.open_for_state(
                group.generation, group.members, group.rank, self._connect, lambda: group.transport.check(others)
            )
        if not wrong:
            self._open_s = time.monotonic() - begin_s
        told = group.reduce_bytes(" ".join(wrong.split())[:300].encode(), _first)
        if told:
            self._native.state_moved(stands=False)
        return told.decode(errors="replace")


def _told(group: Group, most_bytes: int, is_elsewhere: bool) -> tuple[int, int]:
    """Has all members tell each other; returns the most bytes of any, and whether the state of any is elsewhere."""
    told = group.reduce_bytes(f"{most_bytes} {int(is_elsewhere)}".encode(), _most)
    most, elsewhere = map(int, told.split())
    return most, elsewhere


def _most(notes: Sequence[bytes]) -> bytes:
    numbers = [[int(one) for one in note.split()] for note in notes]
    return " ".join(str(max(column)) for column in zip(*numbers, strict=True)).encode()


def _first(reasons: Sequence[bytes]) -> bytes:
    """Of several, one that is the same in whatever order they are combined."""
    return min((reason for reason in reasons if reason), default=b"")


def _say(line: str) -> None:
    print(f"[elaunch] {line}", file=sys.stderr, flush=True)
