"""For tests with several launchers: starts them with `node_worker.py`, reads its reports, and gives it orders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from tests.conformance.conftest import JOBS, LIMIT_S, Launcher
from tests.helpers import Spawned, is_running, wait_until

T = TypeVar("T")

HOST = "127.0.0.1"
GONE_S = 15.0


@dataclass(frozen=True, slots=True)
class Report:
    """What a worker saw when it started."""

    pid: int
    node: str
    child: int
    unreachable: str
    environment: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.environment[name]

    def number(self, name: str) -> int:
        return int(self.environment[name])

    @property
    def master(self) -> tuple[str, str]:
        return self["MASTER_ADDR"], self["MASTER_PORT"]


class Crew:
    """The launchers of one job and their workers. `release` is to run at the end, so that no worker outlives a test."""

    def __init__(self, launch: Launcher, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, Spawned] = {}
        self._launch = launch
        folder.mkdir()

    def start(
        self,
        name: str,
        *flags: object,
        script: Sequence[object] | None = None,
        env: Mapping[str, str | None] | None = None,
    ) -> Spawned:
        """Start a launcher; `script` stands in for `node_worker.py`, or is what follows it if it begins with `-`."""
        words = [] if script is None else list(script)
        if not words or str(words[0]).startswith("-"):
            words = [JOBS / "node_worker.py", self.folder, name, *words]
        self.nodes[name] = self._launch(*flags, *words, env=env, cwd=self.folder, name=name)
        return self.nodes[name]

    def reports(self) -> list[Report]:
        """Of all workers that there ever were, in the order of their reports."""
        paths = sorted(self.folder.glob("*.json"), key=lambda path: (path.stat().st_mtime_ns, path.name))
        return [Report(**json.loads(path.read_text())) for path in paths]

    def alive(self) -> list[Report]:
        return [report for report in self.reports() if is_running(report.pid)]

    def tails(self) -> str:
        return "\n".join(node.tail() for node in self.nodes.values())

    def wait(self, condition: Callable[[], T | None], what: str, limit_s: float = LIMIT_S) -> T:
        """Wait for a condition; fail with the logs, and at once if every launcher has ended."""

        def there() -> T | None:
            # Asked before the condition, so that what was done last counts.
            ended = all(node.process.poll() is not None for node in self.nodes.values())
            value = condition()
            if not value and ended:
                pytest.fail(f"every launcher has ended, without {what}\n{self.tails()}")
            return value

        return wait_until(there, limit_s, lambda: f"{what}\n{self.tails()}")

    def together(self, size: int, without: Iterable[Report] = (), limit_s: float = LIMIT_S) -> list[Report]:
        """Wait until the living workers are one complete world of `size`, none of them in `without`; by rank."""
        old = {report.pid for report in without}

        def there() -> list[Report] | None:
            alive = self.alive()
            ranks = sorted(report.number("RANK") for report in alive)
            sizes = {report.number("WORLD_SIZE") for report in alive}
            whole = ranks == list(range(size)) and sizes == {size} and not old & {report.pid for report in alive}
            return sorted(alive, key=lambda report: report.number("RANK")) if whole else None

        return self.wait(there, f"{size} workers of one attempt", limit_s)

    def order(self, code: int, *reports: Report) -> None:
        """Have these workers end with `code`; all of them, also those to come, if none is named."""
        for name in [str(report.pid) for report in reports] or ["all"]:
            (self.folder / f"{name}.part").write_text(str(code))
            (self.folder / f"{name}.part").rename(self.folder / f"{name}.order")

    def beats(self, report: Report) -> str:
        path = self.folder / f"{report.pid}.beats"
        return path.read_text() if path.exists() else ""

    def wait_beats(self, report: Report, count: int) -> None:
        """Let the worker, and so the launchers, live for `count` further tenths of a second of its own time."""
        target = len(self.beats(report)) + count
        self.wait(lambda: len(self.beats(report)) >= target, f"worker {report.pid} to live on")

    def codes(self, *names: str, limit_s: float = LIMIT_S) -> list[int]:
        """The exit codes of these launchers, or of all, once they have ended."""
        deadline = time.monotonic() + limit_s
        return [self.nodes[name].wait(max(0.1, deadline - time.monotonic())) for name in names or self.nodes]

    def kill_node(self, name: str) -> None:
        """End a launcher and its workers as the loss of their machine would."""
        self.nodes[name].signal(signal.SIGKILL)
        self.nodes[name].wait(GONE_S)
        lost = [report for report in self.alive() if report.node == name]
        for report in lost:
            with contextlib.suppress(ProcessLookupError):
                os.kill(report.pid, signal.SIGKILL)
        assert_gone(report.pid for report in lost)

    def release(self) -> None:
        if not (self.folder / "all.order").exists():
            self.order(0)


def assert_gone(pids: Iterable[int], limit_s: float = GONE_S) -> None:
    """None of these processes is left after a while."""
    numbers = list(pids)
    wait_until(lambda: not any(map(is_running, numbers)), limit_s, f"the end of {numbers}")


def is_listening(port: int) -> bool:
    """Something of this machine listens at the port of the loopback interface."""
    with socket.socket() as client:
        return client.connect_ex((HOST, port)) == 0


def talks_to(pid: int, port: int) -> bool:
    """The process has a connection to the port."""
    connections = psutil.Process(pid).net_connections("tcp")
    return any(link.raddr and link.raddr.port == port and link.status == "ESTABLISHED" for link in connections)
