"""How the participant's thread tells its agent what is new."""

from __future__ import annotations

import traceback
from typing import Protocol

from elaunch.errors import ElaunchError
from elaunch.rendezvous.membership import Deadlock, DrainRequest, Generation, JobConfig, Result
from elaunch.rendezvous.node.setbacks import Setbacks


class Listener(Protocol):
    """What the agent wants to hear. Called from the participant's thread; must return at once."""

    def joined(self, config: JobConfig) -> None: ...
    def announced(self, generation: Generation) -> None: ...
    def resized(self, min_nodes: int, max_nodes: int) -> None: ...
    def drains(self, request: DrainRequest) -> None: ...
    def deadlocked(self, found: Deadlock) -> None: ...
    def ended(self, result: Result) -> None: ...
    def waits(self, text: str) -> None: ...
    def outage(self, why: str) -> None: ...
    def back(self, away_s: float) -> None: ...
    def absent(self, text: str) -> None: ...
    def warns(self, text: str) -> None: ...
    def refused(self, error: ElaunchError) -> None: ...


class Reporter:
    """Gives the parts of a participant their listener, and tells the user of what goes wrong without failing itself.

    Args:
        listener: the agent's.
        setbacks: says which failures were told already.
    """

    def __init__(self, listener: Listener, setbacks: Setbacks) -> None:
        self.listener = listener
        self._setbacks = setbacks

    def warn(self, text: str) -> None:
        """Tells the user; an empty text says that there is nothing new."""
        if text:
            try:
                self.listener.warns(text)
            except Exception:  # it is told on the way out of another error, and must not be one
                traceback.print_exc()

    def tell_setback(self, error: Exception, then: str) -> None:
        """Tells the user, once, what has failed and what happens now; shows where, if it is a defect."""
        is_defect = not isinstance(error, ElaunchError)
        text = f"a defect in the rendezvous of this node: {error!r}" if is_defect else str(error)
        if self._setbacks.is_new(text):
            if is_defect:
                traceback.print_exception(error)
            self.warn(f"{text}; {then}")
