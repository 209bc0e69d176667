"""The command `elaunch ctl top`: a job as it is now, in a terminal, drawn again as it changes."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from elaunch.cli import status
from elaunch.errors import RequestRefused
from elaunch.rendezvous.observer import Documents, Observer
from elaunch.telemetry.extras import is_missing

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

MISSING = "elaunch ctl top needs the package rich: pip install 'elaunch[top]'"
CALM_S = 0.2
"""Between two frames, however much changes."""


def console() -> Console:
    """Returns the terminal.

    Raises:
        RequestRefused: the package that draws is not there.
    """
    try:
        from rich.console import Console
    except ModuleNotFoundError as error:
        if not is_missing("rich", error):
            raise
        raise RequestRefused(MISSING) from error
    return Console()


def show(observer: Observer, job: str, endpoint: str, interval_s: float, once: bool) -> None:
    """Draws the job until it has ended or somebody presses Ctrl-C; once where that is asked for, or nobody looks.

    Args:
        observer: of the job.
        job: its name.
        endpoint: of its store.
        interval_s: between two frames if nothing changes.
        once: draw one frame.
    """
    terminal = console()
    if once or not sys.stdout.isatty():
        terminal.print(draw(observer.documents, job, endpoint, time.time(), terminal.options, sys.maxsize))
        return
    from rich.live import Live

    def now() -> RenderableType:
        return draw(observer.documents, job, endpoint, time.time(), terminal.options, terminal.height)

    try:
        with Live(now(), console=terminal, screen=True, auto_refresh=False) as live:
            while observer.documents.result is None:
                observer.wait(time.monotonic() + interval_s)
                calm_s = time.monotonic() + CALM_S
                while observer.wait(calm_s):
                    pass
                live.update(now(), refresh=True)
    except KeyboardInterrupt:
        pass
    terminal.print(draw(observer.documents, job, endpoint, time.time(), terminal.options, terminal.height))


def draw(
    documents: Documents, job: str, endpoint: str, now_t: float, options: ConsoleOptions, height: int
) -> RenderableType:
    """Returns the frame of a job at a Unix time; `options` are those of the terminal, and it has `height` lines."""
    from elaunch.telemetry.frame import frame

    values = status.as_values(documents, job, endpoint, now_t)
    ages: dict[str, str] = {}
    if documents.status is not None:
        ages["step"] = status.ago_text(now_t - documents.status.t)
        if documents.status.recovery is not None:
            ages["recovery"] = status.ago_text(now_t - documents.status.recovery.t)
    return frame(values, status.STATES[values["state"]], ages, options, height)
