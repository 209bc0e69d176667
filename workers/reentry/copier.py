"""A thread for copies, which stays: to start one for each would wait for a turn on a core that is busy."""

from __future__ import annotations

import functools
import os
import queue
from collections.abc import Callable

from elaunch import threads

Task = tuple[Callable[[], object], Callable[[BaseException], object]]


def later(run: Callable[[], object], died: Callable[[BaseException], object]) -> None:
    """Has a function called by the thread, after those before.

    Args:
        run: the function.
        died: called with what it raises.
    """
    _tasks().put((run, died))


@functools.cache
def _tasks() -> queue.SimpleQueue[Task]:
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()

    def run() -> None:
        while True:
            _run_next(tasks)

    threads.start("elaunch-copy", run, lambda _: None)
    return tasks


def _run_next(tasks: queue.SimpleQueue[Task]) -> None:
    run, died = tasks.get()  # names that end here: what they hold may be a model that is left
    try:
        run()
    except BaseException as error:
        died(error)


# A forked child, such as a loader's, does not have the thread.
os.register_at_fork(after_in_child=_tasks.cache_clear)
