"""Ranges of numbers, as flags give them."""

from __future__ import annotations

from elaunch.errors import UsageError


def parse_range(text: str, flag: str) -> tuple[int, int]:
    """Read N or MIN:MAX; `flag` is whose value it is.

    Raises:
        UsageError: it is neither, or the range is empty.
    """
    parts = text.split(":")
    try:
        low, high = int(parts[0]), int(parts[-1])
    except ValueError:
        low = high = 0
    if len(parts) > 2 or not 1 <= low <= high:
        raise UsageError(f"{flag}={text}: expected N or MIN:MAX with 1 <= MIN <= MAX")
    return low, high
