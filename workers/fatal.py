"""The end of a training process that has lost a thread which it cannot do without."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

from elaunch import threads
from elaunch.failures import ERROR_FILE, record_own_error
from elaunch.threads import describe, tell
from elaunch.waits import watch

LAST_WORDS_S = 5.0
"""How long a process that ends may take to write down why: a pipe that nobody reads must not keep it alive."""


class PartFailed(RuntimeError):
    """A part of the runtime failed in a training process; the cause is the error."""


def end_process(what: str, error: BaseException) -> NoReturn:
    """Ends this training process with status 1, so that its agent replaces it. For any thread.

    The reason goes to standard error, with the traceback, and into the worker's error file, from which the agent's
    line and the table of failures take it. An error file that is there already is left: it tells of the first failure.

    Args:
        what: the part that failed, as in "its link listener failed".
        error: why.
    """
    try:
        _end_after(LAST_WORDS_S)
        failed = PartFailed(f"the worker's {what} failed: {describe(error)}")
        failed.__cause__ = error
        path = os.environ.get(ERROR_FILE)
        if path and not os.path.exists(path):
            record_own_error(failed)
        worker = os.environ.get("ELAUNCH_WORKER")
        tell(f"{f'worker {worker}' if worker else 'this process'} ends: its {what} failed: {describe(error)}", error)
        with contextlib.suppress(Exception):
            sys.stdout.flush()
    finally:
        os._exit(1)


@contextlib.contextmanager
def within(limit_s: float, what: str) -> Iterator[None]:
    """Ends this training process if what the caller does takes longer than that, and says now and then that it lasts.

    Args:
        limit_s: in seconds.
        what: as in "its leaving failed" and "waiting: its leaving".
    """
    over = threading.Event()

    whose = f"the {what} of worker {os.environ.get('ELAUNCH_WORKER', '')}"

    def late() -> None:
        end_process(what, TimeoutError(f"it was not over after {limit_s:g} s"))

    try:
        threads.start("elaunch-limit", lambda: watch(over, _say, whose, limit_s, late), lambda error: None)
    except RuntimeError:  # no more threads, as at the end of the interpreter: this one needs none of Python's
        faulthandler.dump_traceback_later(limit_s, exit=True)
    try:
        yield
    finally:
        over.set()
        faulthandler.cancel_dump_traceback_later()


def _say(line: str) -> None:
    print(f"[elaunch] {line}", file=sys.stderr, flush=True)


def _end_after(limit_s: float) -> None:
    with contextlib.suppress(RuntimeError):  # no more threads
        timer = threading.Timer(limit_s, os._exit, (1,))
        timer.daemon = True
        timer.start()
