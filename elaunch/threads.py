"""How this package starts its threads, none of which dies in silence, and where its own processes find it.

    threads.start("elaunch-heartbeat", self._run, lambda error: end_process("heartbeat", error))

`died` says what the death means to others: the process ends, whoever waits is told, or nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from elaunch.waits import watch

Died = Callable[[BaseException], None]


def start(name: str, run: Callable[[], object], died: Died) -> threading.Thread:
    """Starts a daemon thread.

    Args:
        name: of the thread, as debuggers and the line about its death show it.
        run: what the thread does. An exception that leaves it is written to standard error, with its traceback.
        died: called in the thread with that exception. It must not wait: it comes before the traceback is written,
            since standard error may be a pipe that nobody reads. What it raises is written too.

    Returns:
        The thread, which runs.

    Raises:
        RuntimeError: the system gives this process no more threads.
    """
    thread = prepare(name, run, died)
    thread.start()
    return thread


def prepare(name: str, run: Callable[[], object], died: Died) -> threading.Thread:
    """Makes a thread as `start` does, for a caller that starts it later."""

    def guarded() -> None:
        try:
            run()
        except BaseException as error:  # SystemExit too, which `threading` would pass over in silence
            if sys.is_finalizing():  # what the thread used has been taken apart around it
                return
            try:
                died(error)
            except BaseException as second:
                tell(f"the death of thread {name} could not be handled: {describe(second)}", second)
            tell(f"thread {name} died: {describe(error)}", error)

    return threading.Thread(target=guarded, name=name, daemon=True)


@contextlib.contextmanager
def telling(say: Callable[[str], None], what: str, limit_s: float | None = None) -> Iterator[None]:
    """Says now and then that the caller waits, for calls that block.

    Args:
        say: tells the user; called from a thread of its own.
        what: is waited for.
        limit_s: of the call, in seconds; None: it has none.
    """
    over = threading.Event()
    start("elaunch-wait", lambda: watch(over, say, what, limit_s), lambda error: None)
    try:
        yield
    finally:
        over.set()


def with_elaunch(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment in which `python -P -m elaunch...` finds the same elaunch as this process."""
    folder = Path(__file__).absolute().parent.parent
    if folder.name in ("site-packages", "dist-packages"):  # there it is found anyway
        return dict(environment)
    paths = (str(folder), environment.get("PYTHONPATH"))
    return {**environment, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def describe(error: BaseException) -> str:
    """Returns an exception's type and message on one line, whatever its `__str__` does."""
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def tell(line: str, error: BaseException) -> None:
    """Writes a line and the traceback of an error to standard error, in one call. Never raises."""
    with contextlib.suppress(Exception):
        trace = "".join(traceback.format_exception(error))
        sys.stderr.write(f"[elaunch] {line}\n{trace}")
        sys.stderr.flush()
