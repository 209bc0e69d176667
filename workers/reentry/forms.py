"""Ways into re-entry: a function, the body of a loop, or a whole script."""

from __future__ import annotations

import functools
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from elaunch.errors import UsageError
from elaunch.workers.reentry.run import Reentry, Reset
from elaunch.workers.reentry.state import ElasticState
from elaunch.workers.refusals import refuse_spare_state


def elastic(function: Callable[..., Any] | None = None, *, every: int = 1, reset: Reset | Sequence[Reset] = ()) -> Any:
    """Has a function entered by every worker of its job, and entered again whenever the members change.

    The function gets an `ElasticState` before its own arguments. Under torchrun, or in a plain Python process, it is
    entered once.

    Args:
        function: the function.
        every: commits that count; the others are passed over, so that at most so many steps are done again.
        reset: called before the function is entered again, when RANK and WORLD_SIZE are those of the new members and
            no process group is left: for what else the process keeps of the former ones. One function, or several.

    Raises:
        UsageError: `every` is below 1.
    """
    _check_every(every)
    resets = _listed(reset)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return _begin(every, resets).run(lambda state: function(state, *args, **kwargs))

        return call

    return decorate if function is None else decorate(function)


class Elastic:
    """A loop whose body every worker enters, and enters again whenever the members change.

        for state in elaunch.Elastic():
            with state:
                ...     # as in a function for `elastic`

    The `with` ends the body where the members change, and the loop begins it again; a body that comes to its end ends
    the loop. Names that the body has set stay, and with them what they hold, until it sets them anew.

    Args:
        every: as for `elastic`.
        reset: as for `elastic`.

    Raises:
        UsageError: `every` is below 1.
    """

    def __init__(self, *, every: int = 1, reset: Reset | Sequence[Reset] = ()) -> None:
        _check_every(every)
        self._every, self._resets = every, _listed(reset)

    def __iter__(self) -> Iterator[ElasticState]:
        """Yields the state of each entry.

        Raises:
            UsageError: the body of the loop has no `with state:`, or `break` left it while the members changed.
        """
        reentry = _begin(self._every, self._resets)
        reentry.join()
        while not reentry.over:
            entries, entry = reentry.entry, ElasticState(reentry, {})
            try:
                yield entry
            except GeneratorExit:
                if not reentry.over:
                    raise UsageError(
                        "the loop over elaunch.Elastic() was left while its members change; let its body end instead"
                    ) from None
                raise
            if reentry.entry == entries:
                raise UsageError("the body of a loop over elaunch.Elastic() is one block: with state: ...")


def _begin(every: int, resets: Sequence[Reset]) -> Reentry:
    refuse_spare_state("an elastic function")
    return Reentry(every, resets)


def _listed(reset: Reset | Sequence[Reset]) -> Sequence[Reset]:
    return (reset,) if callable(reset) else tuple(reset)


def elastic_script(*, every: int = 1, reset: Reset | Sequence[Reset] = ()) -> ElasticState:
    """Has the script that calls it run anew from its first line on, in the same process, whenever the members change.

    For scripts that train at their top level. It stands where nothing has been set up yet; modules that were imported
    stay as they are.

    Args:
        every: as for `elastic`.
        reset: as for `elastic`.

    Returns:
        The state of this run of the script.

    Raises:
        UsageError: `every` is below 1, or there is no script, as in an interactive session.
        SystemExit: the last run is over; what is left of the first one has been done in it.
    """
    if _Script.state is not None:
        return _Script.state
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if path is None:
        raise UsageError("elastic_script() was called where there is no script; use elaunch.elastic with a function")

    def run(state: ElasticState) -> None:
        _Script.state = state
        try:
            if spec is not None:
                runpy.run_module(spec.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            _Script.state = None

    elastic(run, every=every, reset=reset)()
    raise SystemExit(0)


class _Script:
    """The run of the script that is under way."""

    state: ElasticState | None = None


def _check_every(every: int) -> None:
    """Raises UsageError where every so many commits cannot count."""
    if every < 1:
        raise UsageError(f"elastic(every={every}): expected 1 or more")
