"""A module whose import takes processor time, and then another module: for tests of the process that imports ahead."""

from __future__ import annotations

import time

WORK_S = 0.05

_end_s = time.thread_time() + WORK_S
while time.thread_time() < _end_s:
    pass

import colorsys  # noqa: E402, F401
