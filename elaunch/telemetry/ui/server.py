"""Serves the page over HTTP: read-only, and nothing that is not the page's own."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Collection
from functools import cache, partial
from http.server import BaseHTTPRequestHandler
from importlib import resources
from typing import Any

from elaunch import __version__
from elaunch.telemetry.bounded import SILENT_S, BoundedServer, HttpListener
from elaunch.telemetry.ui.history import JobHistory
from elaunch.telemetry.ui.plans import plan_document
from elaunch.threads import describe

TEXT, JSON = "text/plain; charset=utf-8", "application/json"
FILES = {
    "/": ("page.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
    "trusted-types 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
MOST_STACKS = 256 << 10
"""Bytes of a file of stacks that are shown."""

PLAN, STACKS = re.compile(r"/plan/(\d{1,9})\.json"), re.compile(r"/stacks/(\d{1,9})\.txt")

Refresh = Callable[[JobHistory], dict[str, Any]]
"""Adds what is new to the history; returns what the document has beside it."""


class JobPage:
    """What the page shows, for one request after the other.

    Args:
        history: of the job.
        refresh: called before a document is made.
        hold_s: how long a document is given out again, however many ask.
    """

    def __init__(self, history: JobHistory, refresh: Refresh = lambda history: {}, hold_s: float = 0.0) -> None:
        self._history, self._refresh, self._hold_s = history, refresh, hold_s
        self._made = b""
        self._made_s = 0.0
        self._lock = threading.Lock()
        self._plans: dict[str, bytes] = {}

    def take(self, event: Any) -> None:
        """Adds an event, in any thread."""
        with self._lock:
            self._history.take(event)

    def document(self) -> bytes:
        """Returns the document as JSON."""
        with self._lock:
            if not self._made or time.monotonic() >= self._made_s + self._hold_s:
                beside = self._refresh(self._history)
                self._made = encoded(self._history.document() | beside | {"elaunch": __version__})
                self._made_s = time.monotonic()
            return self._made

    def plan(self, change: int) -> bytes | None:
        """Returns the plan of a change as JSON; None: there is none."""
        with self._lock:
            text = self._history.plan_of(change)
            if not text:
                return None
            if text not in self._plans:
                if len(self._plans) > 8:
                    self._plans.clear()
                self._plans[text] = encoded(plan_document(text))
            return self._plans[text]

    def stacks(self, hang: int) -> bytes | None:
        """Returns the stacks of a hang; None: their file is not on this machine, or is none of ours."""
        with self._lock:
            path = self._history.stacks_path(hang)
        # An event names the file: nobody is to be shown another one by it.
        if not re.fullmatch(r"stacks(\.\d+)?\.txt", os.path.basename(path)):
            return None
        with contextlib.suppress(OSError, ValueError):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(fd, "rb") as file:
                if stat.S_ISREG(os.fstat(fd).st_mode):
                    return file.read(MOST_STACKS)
        return None


@cache
def file_of(name: str) -> bytes:
    """Returns a file of the page."""
    return resources.files("elaunch.telemetry.ui").joinpath("static", name).read_bytes()


def encoded(values: Any) -> bytes:
    """Returns JSON, of any text whatever."""
    return json.dumps(values, separators=(",", ":"), allow_nan=False).encode()


def is_own_host(given: str, names: Collection[str]) -> bool:
    """Returns whether a browser that sends this `Host` was pointed at this server, not at a name somebody else chose.

    A page from elsewhere can make the name under which it was loaded stand for this machine (DNS rebinding); it cannot
    do so with an address, nor with the names of this machine.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.]+\]|[^:\[\]]+)(:\d{1,5})?", given)
    if match is None:
        return False
    host = match[1].strip("[]").lower()
    if host in names:
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


class UiRequest(BaseHTTPRequestHandler):
    """One connection."""

    timeout = SILENT_S
    server_version = "elaunch"
    sys_version = ""
    server: UiServer

    def do_GET(self) -> None:
        """Answers with a file of the page, a document, a plan or stacks."""
        if not is_own_host(self.headers.get("Host", ""), self.server.names):
            self._answer(421, TEXT, b"this host name is not the server's: use its address\n")
            return
        try:
            kind, body = self._found(self.path.partition("?")[0])
        except Exception as error:  # a defect, which whoever looks at the page is to see
            self._answer(500, TEXT, describe(error).encode(errors="replace"))
            return
        if body is None:
            self._answer(404, TEXT, b"not found\n")
            return
        tag = f'"{hashlib.blake2b(body, digest_size=12).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._answer(304, kind, b"", tag)
        else:
            self._answer(200, kind, body, tag)

    def _found(self, path: str) -> tuple[str, bytes | None]:
        """Returns what is at a path, and of which kind it is; None: nothing."""
        page = self.server.page
        if path in FILES:
            name, kind = FILES[path]
            return kind, file_of(name)
        if path == "/job.json":
            return JSON, page.document()
        if match := PLAN.fullmatch(path):
            return JSON, page.plan(int(match[1]))
        if match := STACKS.fullmatch(path):
            return TEXT, page.stacks(int(match[1]))
        return TEXT, None

    def _answer(self, code: int, kind: str, body: bytes, tag: str = "") -> None:
        self.send_response(code)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        if tag:
            self.send_header("ETag", tag)
        if code != 304:
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing: the page asks every second."""


class UiServer(BoundedServer):
    """Listens at an address for browsers."""

    def __init__(self, page: JobPage, address: str, port: int) -> None:
        self.page = page
        self.names = {"localhost", socket.gethostname().lower(), address.lower()}
        super().__init__(address, port, UiRequest)


class UiListener(HttpListener):
    """A page that is served until it is closed.

    Args:
        page: what it shows.
        address, port: where it listens; port 0: a free one.
        flag: that said so.

    Raises:
        LaunchError: it cannot listen there.
    """

    def __init__(self, page: JobPage, address: str, port: int, flag: str) -> None:
        super().__init__(partial(UiServer, page), address, port, flag, "elaunch-ui")
