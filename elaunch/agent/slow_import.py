"""Imports that leave most of a core to others, for as long as nobody waits for them."""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

LEAST_WORK_S = 0.001
"""Of processor time between two pauses."""


class _Pauses:
    """Has imports take a share of a core only, as the workers compute on it: they pause between two modules.

    A low priority would do this, too, but nobody without privileges gets out of one again: a worker would inherit it,
    and one that waits for the imports would wait for long.

    Args:
        link: on which a request comes; from then on there is no pause.
        share: of a core, above 0; 1: there is no pause.
    """

    def __init__(self, link: socket.socket, share: float) -> None:
        self._link, self._share = link, share
        self._worked_s = time.thread_time()

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Finds no module, but is asked for each before others are."""
        worked_s = time.thread_time() - self._worked_s
        if self._share < 1 and worked_s >= LEAST_WORK_S:
            if select.select([self._link], [], [], worked_s * (1 / self._share - 1))[0]:
                self._share = 1.0
            self._worked_s = time.thread_time()


@contextlib.contextmanager
def pausing(link: socket.socket, share: float) -> Iterator[None]:
    """Returns a context in which imports pause; see `_Pauses`."""
    pauses: Any = _Pauses(link, share)
    sys.meta_path.insert(0, pauses)
    try:
        yield
    finally:
        sys.meta_path.remove(pauses)
