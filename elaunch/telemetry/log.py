"""Reads event logs, those of a job's nodes together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from elaunch.errors import UsageError
from elaunch.telemetry.events import number


def parse_event(line: bytes) -> dict[str, Any] | None:
    """Returns the event of a line of a log; None: it is none."""
    try:
        event = json.loads(line)
        texts = isinstance(event["kind"], str) and isinstance(event["node"], str)
        known = texts and number(event["t"]) is not None and type(event["generation"]) is int
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    return event if known else None


def read_events(paths: Sequence[str]) -> list[dict[str, Any]]:
    """Returns the events of all these logs in the order of their times. A last line that is not whole is left out.

    Raises:
        UsageError: a file cannot be read, or a line is no event.
    """
    found: list[dict[str, Any]] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                lines = file.read().split(b"\n")[:-1]
        except OSError as error:
            raise UsageError(f"{path}: {error.strerror}") from error
        for place, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            event = parse_event(line)
            if event is None:
                raise UsageError(f"{path}:{place} is no event; `--events` writes the logs that can be read here")
            found.append(event)
    return sorted(found, key=lambda event: float(event["t"]))
