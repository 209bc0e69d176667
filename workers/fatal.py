"""The end of a training process that has lost a thread which it cannot do without."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from typing import NoReturn

from elaunch.failures import ERROR_FILE, record_own_error
from elaunch.threads import describe, tell

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


def _end_after(limit_s: float) -> None:
    with contextlib.suppress(RuntimeError):  # no more threads
        timer = threading.Timer(limit_s, os._exit, (1,))
        timer.daemon = True
        timer.start()
