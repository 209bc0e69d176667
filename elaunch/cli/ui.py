"""The command `elaunch ui`: a job in a browser, from its event logs or while it runs."""

from __future__ import annotations

import argparse
import contextlib
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from elaunch import threads
from elaunch.agent.config import LOOPBACK, parse_address
from elaunch.cli import status
from elaunch.cli.commands import run_command
from elaunch.cli.ctl import add_job_flags, open_job
from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.errors import StoreUnavailable, UsageError
from elaunch.rendezvous.observer import Observer

if TYPE_CHECKING:
    from elaunch.rendezvous.store import Store
    from elaunch.telemetry.ui.history import JobHistory
    from elaunch.telemetry.ui.server import JobPage

LOOK_S = 1.0
"""Between two looks at a job whose documents do not change, or whose etcd does not answer."""


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `elaunch ui`."""
    p = FlagParser(
        prog="elaunch ui",
        description="Serve a page that shows a job: its workers, its plans before and after each change, its steps and "
        "loss, each recovery by phase, decisions and hung workers. With event logs it is the job that wrote them, also "
        "while it runs; without, the job that runs, found as `elaunch ctl` finds it.\n\n"
        f"{VERBATIM}elaunch ui events-a.jsonl events-b.jsonl\n"
        f"{VERBATIM}elaunch ui --rdzv-endpoint=etcd:2379 --rdzv-id=run-17",
    )
    p.add_argument("logs", metavar="LOG", nargs="*", help="what --events writes, of one node or of all of them")
    p.flag(
        "--port",
        default="0",
        in_environment=False,
        metavar="[ADDRESS:]PORT",
        help="where the page is served, of this machine only unless an address is given; 0: a free port",
    )
    add_job_flags(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Runs the command until it is interrupted.

    Returns:
        0 after an interrupt, 1 when the page cannot be served, 2 for a command line that cannot be used.
    """
    return run_command("elaunch ui", _ui, parser().parse_args(argv))


def _ui(args: argparse.Namespace) -> None:
    if args.logs and (args.rdzv_endpoint or args.rdzv_id):
        raise UsageError("give event logs, or --rdzv-endpoint and --rdzv-id of a job that runs, not both")
    address = parse_address(args.port, "--port", LOOPBACK)
    if address is None:
        raise UsageError("--port: expected a port, 0 for a free one, or ADDRESS:PORT")
    from elaunch.telemetry.ui.server import UiListener

    with _page(args) as page:
        listener = UiListener(page, *address, "--port")
        print(f"elaunch ui: {listener.url} (Ctrl-C ends it)", flush=True)
        try:
            listener.wait()
        except KeyboardInterrupt:
            print(file=sys.stderr)
        finally:
            listener.close()


@contextlib.contextmanager
def _page(args: argparse.Namespace) -> Iterator[JobPage]:
    from elaunch.telemetry.ui.history import JobHistory
    from elaunch.telemetry.ui.logs import LogFollower
    from elaunch.telemetry.ui.server import JobPage

    if args.logs:
        logs = LogFollower(args.logs)

        def read_on(history: JobHistory) -> dict[str, Any]:
            for event in logs.new_events():
                history.take(event)
            return {"unreadable": logs.n_wrong}

        page = JobPage(JobHistory(source="logs"), read_on)
        page.document()
        yield page
        return
    with open_job(args) as (store, endpoint, job):
        follower = StatusFollower(store, endpoint, job)
        page = JobPage(JobHistory(job, "status"), follower.beside)
        with follower.into(page):
            yield page


class StatusFollower:
    """Follows the documents of a job, also while nobody looks: they hold only the newest step and recovery."""

    def __init__(self, store: Store, endpoint: str, job: str) -> None:
        self._store, self._endpoint, self._job = store, endpoint, job
        self._values: dict[str, Any] = {}
        self._before: dict[str, Any] = {}
        self._problem = ""
        self._is_closed = threading.Event()

    @contextlib.contextmanager
    def into(self, page: JobPage) -> Iterator[None]:
        """Adds what changes to a page, in a thread."""
        observer = Observer(self._store, self._job)
        self._look(observer, page)
        thread = threads.start("elaunch-ui-status", lambda: self._follow(observer, page), self._died)
        try:
            yield
        finally:
            self._is_closed.set()
            thread.join()

    def beside(self, history: JobHistory) -> dict[str, Any]:
        """Returns what the documents say of now."""
        from elaunch.telemetry.ui.from_status import beside_events

        return beside_events(self._values, status.STATES[self._values["state"]]) | {"problem": self._problem}

    def _follow(self, observer: Observer, page: JobPage) -> None:
        while not self._is_closed.is_set():
            try:
                with contextlib.closing(observer):
                    while not self._is_closed.is_set():
                        observer.wait(time.monotonic() + LOOK_S)
                        self._look(observer, page)
            except StoreUnavailable as error:
                self._problem = str(error)
            while not self._is_closed.wait(LOOK_S):
                try:
                    observer = Observer(self._store, self._job)
                    break
                except StoreUnavailable as error:
                    self._problem = str(error)

    def _look(self, observer: Observer, page: JobPage) -> None:
        from elaunch.telemetry.ui.from_status import events_of

        now_t = time.time()
        values = status.as_values(observer.documents, self._job, self._endpoint, now_t)
        for event in events_of(values, self._before, now_t):
            page.take(event)
        # A job that ends or begins anew has no status for a while: the next one is compared with the last.
        self._before = values | {"training": values["training"] or self._before.get("training")}
        self._values, self._problem = values, ""

    def _died(self, error: BaseException) -> None:
        self._problem = f"elaunch ui follows the job no more: {error}"
