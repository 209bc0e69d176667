"""Ranges and lists of numbers, as flags give them."""

from __future__ import annotations

from elaunch.errors import UsageError


def parse_range(text: str, flag: str) -> tuple[int, int]:
    """Reads N or MIN:MAX; `flag` is whose value it is.

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


def parse_numbers(text: str, flag: str, what: str) -> tuple[int, ...]:
    """Reads N,...; `flag` is whose value it is, `what` are numbers of something.

    Raises:
        UsageError: one is no number, or less than 1.
    """
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not (part.isascii() and part.isdecimal()) or int(part) < 1:
            raise UsageError(f"{flag}={part}: expected numbers of {what}, 1 or more, with commas between them")
    return tuple(map(int, parts))
