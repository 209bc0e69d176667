"""The loop that moves bytes: one for every operation, in whichever thread runs it."""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Callable, Collection
from typing import Protocol

from elaunch.errors import LinkLost


class Line(Protocol):
    """What the loop needs of a link: see `Link`."""

    peer: str
    socket: socket.socket

    def advance(self, events: int = 0) -> None:
        """Moves what the socket takes and gives now. `events` is what poll reported; 0 when it was not asked."""

    def wants(self) -> int:
        """Returns the poll events that let this link go on; 0 when its share of the operation is done."""

    def check(self) -> None:
        """Raises `LinkLost` when the link has been silent for too long."""


CHECK_S = 1.0
"""How often the links that something is awaited of are looked at, whether they are silent."""


def drive(
    links: Collection[Line],
    wake: int,
    woken: Callable[[], Collection[Line]],
    is_open: Callable[[], bool] | None = None,
    deadline_s: float | None = None,
    beside: Callable[[], Collection[Line]] = tuple,
) -> None:
    """Advances `links` until none of them wants anything and `is_open` (if given) says that nothing can follow.

    Each write to the eventfd `wake` leads to a call of `woken`, which returns the links that were given something to
    do, be they new ones. What it raises ends the loop, as do the errors of the links. Raises `LinkLost` when
    `deadline_s`, a time of `time.monotonic`, passes. What `beside` returns, at first and after each wake, are more
    links, which advance meanwhile; nobody waits for them.
    """
    active, others = _that_want(links), _that_want(beside())
    if not active and is_open is None:
        return
    poll = select.poll()
    # First, so that it is reported first: what was posted before bytes came is then known when they are read.
    poll.register(wake, select.POLLIN)
    masks = {descriptor: link.wants() for descriptor, link in (active | others).items()}
    for descriptor, mask in masks.items():
        poll.register(descriptor, mask)
    check_s = time.monotonic() + CHECK_S
    while active or (is_open is not None and is_open()):
        now_s = time.monotonic()
        if deadline_s is not None and now_s >= deadline_s:
            raise LinkLost(next(iter(active.values())).peer, "silent until the operation's deadline")
        if now_s >= check_s:
            check_s = now_s + CHECK_S
            for link in active.values():
                link.check()
        wait_s = (check_s if deadline_s is None else min(check_s, deadline_s)) - now_s
        for ready, events in poll.poll(wait_s * 1000):
            changed: Collection[Line]
            if ready == wake:
                os.eventfd_read(wake)
                changed = woken()
                for link in changed:
                    link.advance()
                for descriptor, link in _that_want(beside()).items():
                    others[descriptor], masks[descriptor] = link, link.wants()
                    poll.register(descriptor, masks[descriptor])
            elif ready in active:
                link = active[ready]
                link.advance(events)
                changed = (link,)
            elif ready in others:
                _advance_beside(others, ready, events, poll, masks)
                continue
            else:
                # `woken` has just taken away what it wanted.
                continue
            for link in changed:
                descriptor, mask = link.socket.fileno(), link.wants()
                if mask == masks.get(descriptor, 0):
                    continue
                masks[descriptor] = mask
                if mask:
                    active[descriptor] = link
                    poll.register(descriptor, mask)
                else:
                    poll.unregister(descriptor)
                    del active[descriptor]


def _that_want(links: Collection[Line]) -> dict[int, Line]:
    """Advances some links; returns those that want more, by the numbers of their sockets."""
    for link in links:
        link.advance()
    return {link.socket.fileno(): link for link in links if link.wants()}


def _advance_beside(
    others: dict[int, Line], descriptor: int, events: int, poll: select.poll, masks: dict[int, int]
) -> None:
    link = others[descriptor]
    link.advance(events)
    mask = link.wants()
    if not mask:
        del others[descriptor], masks[descriptor]
        poll.unregister(descriptor)
    elif mask != masks[descriptor]:
        masks[descriptor] = mask
        poll.modify(descriptor, mask)
