"""The event log: JSON lines, one file a node, appended as things happen."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

from elaunch.telemetry.events import Event, EventListener
from elaunch.threads import describe, tell

VERSION = 2  # of the names of events and their fields


class EventLog:
    """Appends events to a file, if there is one, and hands them to listeners.

    Args:
        path: of the file; ``%n`` in it stands for the name of the node.
        node: name of this node, a field of each event.
        console: write each event to standard error too.
        listeners: given each event; one that raises is given no more.

    Raises:
        OSError: the file cannot be opened for appending.
    """

    def __init__(
        self, path: str | None, node: str, console: bool = False, listeners: Sequence[EventListener] = ()
    ) -> None:
        self._node = node
        self._listeners = list(listeners)
        self._console = console
        self._fd = -1
        if path:
            self._fd = os.open(path.replace("%n", node), os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def write(self, kind: str, generation: int, t: float | None = None, /, **fields: Any) -> None:
        """Appends one event. A line is written whole or not at all.

        Args:
            kind: of the event.
            generation: the generation to which it belongs.
            t: Unix time in seconds; None: now.
            fields: what else there is to say; none of them takes the place of these, or of the node's name.
        """
        if self._fd < 0 and not self._console and not self._listeners:
            return
        now_t = time.time() if t is None else t
        event = {"v": VERSION, "t": now_t, "kind": kind, "node": self._node, "generation": generation}
        event |= {name: value for name, value in fields.items() if name not in event}
        self._hand_on(event)
        if self._fd < 0 and not self._console:
            return
        try:
            line = json.dumps(event, separators=(",", ":"), allow_nan=False)
        except ValueError:
            line = json.dumps(_finite(event), separators=(",", ":"))
        if self._console:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        if self._fd < 0:
            return
        try:
            os.write(self._fd, line.encode() + b"\n")
        except OSError as error:  # a full disk must not end the job
            self.close()
            print(f"[elaunch {self._node}] the event log ends here: {error.strerror}", file=sys.stderr, flush=True)

    def close(self) -> None:
        """Closes the file; later events go only to the console, if at all. Harmless when repeated."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _hand_on(self, event: Event) -> None:
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # whoever watches the job must not end it
                self._listeners.remove(listener)
                tell(f"[elaunch {self._node}] monitoring ends here: {describe(error)}", error)


def _finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have (a loss may be NaN)."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
