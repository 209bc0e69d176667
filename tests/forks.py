"""Launchers as forks of a process that has imported what they need, through elaunch's own fork server.

Imports are two thirds of what a launcher takes, and torch takes 1.5 s of processor time, which each test job would
spend once, in the process that its workers are forked from. A launcher forked from a process that has torch hands it on
to that one. One server for each list of modules is started on first use, and ends with this process.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from tests import ROOT

START_S = 120.0
"""Seconds that a server may take to import its modules, or to fork, on a busy machine."""


class ForkServer:
    """A process with some modules imported, whose forks run `python -m` programs."""

    def __init__(self, modules: str, env: Mapping[str, str]) -> None:
        """Starts it, and returns when its modules are imported.

        Raises:
            RuntimeError: it cannot import them.
        """
        self._link, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.jobs.forked", "serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd=ROOT,
                env=dict(env),
            )
        self._rest = b""
        self._pids: dict[str, int] = {}
        self._ended: dict[str, int] = {}
        self._warm = False
        self._send(op="warm", env=dict(env), modules=modules.split(","))
        self._receive_until(lambda: self._warm)
        self.pids = {self._process.pid, *(child.pid for child in psutil.Process(self._process.pid).children())}
        """The server's own: its process, and the one with the modules, which is its only child as long as it is new."""

    @property
    def started(self) -> int:
        return len(self._pids)

    def used_s(self) -> float:
        """Returns the processor time, in seconds, of all programs that have ended, with that of their descendants."""
        times = psutil.Process(self._process.pid).cpu_times()
        return float(times.children_user + times.children_system)

    def start(
        self, module: str, arguments: Sequence[str], env: Mapping[str, str], folder: Path, log: Path, errors: Path
    ) -> Forked:
        """Starts `python -m module arguments` in a folder, in a session of its own, with its streams in these files."""
        name = str(len(self._pids))
        program = ["run", str(folder), module, *arguments]
        self._send(
            op="spawn",
            worker=name,
            argv=[sys.executable, "-m", "tests.jobs.forked", *program],
            env=dict(env),
            program={"module": True, "target": "tests.jobs.forked", "args": program},
            stdout=str(log),
            stderr=str(errors),
        )
        self._receive_until(lambda: name in self._pids)
        return Forked(self, name, self._pids[name], [sys.executable, "-m", module, *arguments])

    def status(self, name: str, timeout_s: float = 0.0) -> int | None:
        """Returns the exit status of a program, negative for a signal; None while it still runs after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while name not in self._ended and self._receive(max(0.0, end_s - time.monotonic())):
            pass
        return self._ended.get(name)

    def close(self) -> None:
        """Ends the server, and with it whatever it has forked."""
        self._link.close()
        self._process.wait(START_S)

    def _send(self, **message: Any) -> None:
        self._link.sendall(json.dumps(message).encode() + b"\n")

    def _receive_until(self, condition: Callable[[], object]) -> None:
        end_s = time.monotonic() + START_S
        while not condition():
            if not self._receive(max(0.0, end_s - time.monotonic())):
                raise RuntimeError(f"the fork server did not answer within {START_S:g} s")

    def _receive(self, timeout_s: float) -> bool:
        """Reads what has come within this time; returns whether anything has."""
        poll = select.poll()
        poll.register(self._link, select.POLLIN)
        if not poll.poll(timeout_s * 1000):
            return False
        data = self._link.recv(1 << 16)
        if not data:
            raise RuntimeError("the fork server has ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            message = json.loads(line)
            if "warm" in message:
                if not message["warm"]:
                    raise RuntimeError(f"the fork server is of no use: {message['error']}")
                self._warm = True
            elif "started" in message:
                self._pids[message["started"]] = message["pid"]
            elif "exited" in message:
                killed = message["signal"]
                self._ended[message["exited"]] = message["exitcode"] if killed is None else -killed
        return True


class Forked:
    """A program that a server has forked, with the part of subprocess.Popen's interface that tests use."""

    def __init__(self, server: ForkServer, name: str, pid: int, args: list[str]) -> None:
        self._server, self._name, self.pid, self.args = server, name, pid, args

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def poll(self) -> int | None:
        return self._server.status(self._name)

    def wait(self, timeout: float | None = None) -> int:
        while True:
            status = self._server.status(self._name, 3600.0 if timeout is None else timeout)
            if status is not None:
                return status
            if timeout is not None:
                raise subprocess.TimeoutExpired(self.args, timeout)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


_servers: dict[tuple[str, str], ForkServer] = {}


def server(modules: str, env: Mapping[str, str]) -> ForkServer:
    """Returns this process's server for these modules, separated by commas, started in that environment."""
    key = modules, env.get("PYTHONPATH", "")
    if key not in _servers:
        _servers[key] = ForkServer(modules, env)
    return _servers[key]


def own_pids() -> set[int]:
    """Returns the pids of all servers and of the processes that they fork: not those of what they have started."""
    return {pid for one in _servers.values() for pid in one.pids}


def count() -> int:
    """Returns how many programs were forked."""
    return sum(one.started for one in _servers.values())


def used_s() -> float:
    """Returns the processor time, in seconds, of all programs that were forked and have ended."""
    return sum(one.used_s() for one in _servers.values())


def close_all() -> None:
    """Ends all servers."""
    for one in _servers.values():
        one.close()
    _servers.clear()
