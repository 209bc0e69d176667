"""Waiting, processes and ports: what tests of several folders need. The fixtures over these stand in conftest.py."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import pickle
import resource
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from _pytest.mark import ParameterSet

from tests import ROOT as ROOT
from tests import forks

T = TypeVar("T")

TEST_ID = "ELAUNCH_TEST_ID"
"""The environment variable that marks every process started during a test, however deep and whoever its parent is."""

POLL_S = 0.005
STOOD_STILL_S = 1.0  # a pause that takes so much longer than asked says that the process was not run
END_S = 5.0
LOG_TAIL_LINES = 40

LAUNCHER_MODULES = ",".join(
    (
        "elaunch.cli.run",
        "elaunch.agent.agent",
        "elaunch.rendezvous.etcd",
        "elaunch.failures",
        "psutil",
        "cryptography.x509",
        "cryptography.hazmat.primitives.kdf.hkdf",
        "cryptography.hazmat.primitives.serialization",
    )
)
"""What a launcher imports in the course of a job between nodes, separated by commas."""

SOAK = False
"""Whether everything runs in full (`pytest --soak`); set before any test module is imported."""

SHARED: Path | None = None
"""The folder of this session that all its processes share; the fixture `session_id` makes it."""

PORTS = range(22000, 32000)
_handed_out: set[int] = set()


def scaled(default: T, soak: T) -> T:
    """Returns how much of something a test does: examples, steps, inputs. `soak` is what `make soak` does."""
    return soak if SOAK else default


def soak(*values: object) -> ParameterSet:
    """Returns values for `parametrize` that only `make soak` tries."""
    return pytest.param(*values, marks=pytest.mark.soak)


def once_a_session(key: Sequence[object], make: Callable[[], T]) -> T:
    """Returns what `make` returned when it was first called with this key, in whichever process of the session.

    Another process that asks meanwhile waits. What is made must be what pickle can write.
    """
    assert SHARED is not None
    place = SHARED / hashlib.sha256(repr(key).encode()).hexdigest()
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not place.exists():
            made = place.with_suffix(".new")
            made.write_bytes(pickle.dumps(make()))
            made.rename(place)
    found: T = pickle.loads(place.read_bytes())
    return found


def wait_until(condition: Callable[[], T | None], timeout_s: float, what: str | Callable[[], str]) -> T:
    """Poll `condition` until it returns something true, and return that; fail the test after `timeout_s` seconds.

    `what` says what is waited for ("the worker to exit"); a callable is asked on failure only, so it can show logs.
    Time in which this process stood still does not count: what it waits for may have stood still with it.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value:
            return value
        now = time.monotonic()
        if now >= deadline:
            pytest.fail(f"waited {timeout_s:g} s in vain for {what if isinstance(what, str) else what()}")
        time.sleep(POLL_S)
        deadline += max(0.0, time.monotonic() - now - STOOD_STILL_S)


def find_free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on and that this session was not given before.

    It is below those that the system gives to outgoing connections, so that none of these takes it before it is used;
    so is the port 10000 below it, at which nodes with a static rendezvous meet.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port not in _handed_out:
            _handed_out.add(port)
            return port


@contextlib.contextmanager
def mute_address() -> Iterator[str]:
    """An address of this machine at which whoever connects gets no answer, not even a refusal.

    A server that has enough connections which it did not take yet lets further ones wait.
    """
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        yield f"127.0.0.1:{full.getsockname()[1]}"


def is_running(pid: int) -> bool:
    """The process exists and is not a zombie (which it stays for a while where process 1 is slow to reap orphans)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def child_environment(changes: Mapping[str, str | None] | None = None) -> dict[str, str]:
    """This process's environment with the repository importable and `changes` made; None removes a variable."""
    environment = {"ELAUNCH_SECRET_FILE": "none", **os.environ}  # whoever runs the tests may have one for all jobs
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    environment["PYTHONUNBUFFERED"] = "1"
    for name, value in (changes or {}).items():
        if value is None:
            environment.pop(name, None)
        else:
            environment[name] = value
    return environment


class Spawned:
    """A process in a session of its own, whose standard output and error go to `log`."""

    def __init__(self, process: subprocess.Popen[bytes] | forks.Forked, log: Path) -> None:
        self.process = process
        self.log = log

    @property
    def pid(self) -> int:
        return self.process.pid

    def text(self) -> str:
        """What it has written so far."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = LOG_TAIL_LINES) -> str:
        """The last lines of what it has written, under a heading."""
        return "\n".join([f"--- {self.log.name} (pid {self.pid})", *self.text().splitlines()[-lines:]])

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, not to its children."""
        self.process.send_signal(number)

    def wait(self, timeout_s: float) -> int:
        """The exit code, negative for a signal; fails the test, with the log, if that takes more than `timeout_s`."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.process.args!r} still runs after {timeout_s:g} s\n{self.tail()}")

    def wait_for_text(self, text: str, timeout_s: float) -> str:
        """Everything written, as soon as `text` is in it; fails the test if the process ends without writing it."""

        def seen() -> str | None:
            # Asked before reading: what it wrote last is then in the log.
            ended = self.process.poll() is not None
            written = self.text()
            if text in written:
                return written
            if ended:
                pytest.fail(f"ended with {self.process.returncode} without writing {text!r}\n{self.tail()}")
            return None

        return wait_until(seen, timeout_s, lambda: f"{text!r} from\n{self.tail()}")

    def end(self) -> None:
        """End the process and its process group: SIGTERM, and SIGKILL after 5 s.

        What a process that had ended before left in its group is not touched: that is for the test to fail on.
        """
        for numbers in ((signal.SIGTERM, signal.SIGCONT), (signal.SIGKILL,)):
            if self.process.poll() is not None:
                return
            for number in numbers:
                # Not reaped yet, so the number still belongs to this group; a fork server may reap at any moment.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(END_S)


class Spawner:
    """Starts processes for one test: `spawn([...])` any program, `spawn.python("-m", ...)` this interpreter."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._spawned: list[Spawned] = []

    def __call__(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        name: str | None = None,
    ) -> Spawned:
        """Start `command` in the environment that `child_environment(env)` gives; its log is `<number>-<name>.log`."""
        log = self._new_log(name or Path(command[0]).name)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [str(part) for part in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=child_environment(env),
                cwd=cwd or self._folder,
                start_new_session=True,
            )
        spawned = Spawned(process, log)
        self._spawned.append(spawned)
        return spawned

    def python(
        self,
        *arguments: str | Path,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        name: str = "python",
    ) -> Spawned:
        """Start this interpreter with `arguments`."""
        return self([sys.executable, *arguments], env=env, cwd=cwd, name=name)

    def elaunch(
        self,
        *arguments: object,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        name: str = "elaunch",
        errors: Path | None = None,
    ) -> Spawned:
        """Start `python -m elaunch arguments` without its imports, as `fork` does."""
        return self.fork(LAUNCHER_MODULES, "elaunch", *map(str, arguments), env=env, cwd=cwd, name=name, errors=errors)

    def fork(
        self,
        modules: str,
        module: str,
        *arguments: str | Path,
        env: Mapping[str, str | None] | None = None,
        cwd: Path | None = None,
        name: str,
        errors: Path | None = None,
    ) -> Spawned:
        """Start `python -m module arguments` as a fork of a process that has `modules` imported (tests/forks.py).

        `errors`: a file of its own for standard error.
        """
        log = self._new_log(name)
        log.touch()
        environment = child_environment(env)
        # Nothing that is meant for one program alone: what is imported may read it.
        of_server = child_environment({"PYTHONPATH": environment["PYTHONPATH"]})
        server = forks.server(modules, of_server | {TEST_ID: f"{environment[TEST_ID].partition('/')[0]}/shared"})
        process = server.start(
            module, [str(argument) for argument in arguments], environment, cwd or self._folder, log, errors or log
        )
        spawned = Spawned(process, log)
        self._spawned.append(spawned)
        return spawned

    def _new_log(self, name: str) -> Path:
        return self._folder / f"{len(self._spawned)}-{name}.log"

    def end_all(self) -> None:
        """End what still runs, last started first, and print the tail of each log: pytest shows it if a test fails."""
        for spawned in reversed(self._spawned):
            spawned.end()
        for spawned in self._spawned:
            print(spawned.tail())


def make_certificates(openssl: str, folder: Path) -> None:
    """An authority with a server's and a client's certificate, and a second authority."""

    def run(*words: str) -> None:
        subprocess.run([openssl, *words], cwd=folder, check=True, capture_output=True, timeout=60)

    new_key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    for name in ("ca", "other"):
        run(
            "req",
            "-x509",
            *new_key,
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-subj",
            f"/CN={name}",
        )
    for name in ("server", "client"):
        (folder / f"{name}.ext").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
        run("req", *new_key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        signing = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", f"{name}.ext")
        run("x509", "-req", "-in", f"{name}.csr", "-out", f"{name}.pem", *signing)


def own_children() -> tuple[frozenset[int], int, int]:
    """Returns what differs as soon as this process has started another one: those that live, and traces of others.

    Every process that a test leaves behind descends from one that this process or a fork server of it has started.
    """
    living: set[int] = set()
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(FileNotFoundError):  # it has just ended
            living.update(map(int, Path(f"/proc/self/task/{thread}/children").read_text().split()))
    return frozenset(living), resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt, forks.count()


def processes_left(token: str, known: frozenset[int]) -> list[psutil.Process]:
    """Running processes that carry `token` in their environment, or descend from this one and are not in `known`.

    Of a fork server's, those that it has started count.
    """
    known |= forks.own_pids()
    found = {process.pid: process for process in psutil.Process().children(recursive=True)}
    for pid in _marked_with(token):
        if pid not in found:
            try:
                found[pid] = psutil.Process(pid)
            except psutil.NoSuchProcess:
                continue
    return [
        process for pid, process in found.items() if pid not in known and is_running(pid) and not _is_helper(process)
    ]


def end_processes_left(token: str, known: frozenset[int], grace_s: float) -> list[str]:
    """Wait up to `grace_s` seconds for such processes to go by themselves; kill the others and say what they were."""
    deadline = time.monotonic() + grace_s
    while (left := processes_left(token, known)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    described = [_describe(process) for process in left]
    # A killed parent may just have forked, so this looks again until nothing is left.
    deadline = time.monotonic() + END_S
    while left and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(POLL_S)
        left = processes_left(token, known)
    return described


def _marked_with(token: str) -> Iterator[int]:
    """Processes whose environment was given TEST_ID=`token`, or `token` followed by a slash and more."""
    mark = f"{TEST_ID}={token}".encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            environment = Path(entry.path, "environ").read_bytes()
        except OSError:  # it has just ended, or belongs to another user
            continue
        if mark in environment and any(
            line == mark or line.startswith(mark + b"/") for line in environment.split(b"\0")
        ):
            yield int(entry.name)


def _is_helper(process: psutil.Process) -> bool:
    """One per interpreter, started by the standard library on first use, which ends when the interpreter does."""
    try:
        return "multiprocessing.resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True


def _describe(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}, parent {process.ppid()}, {process.status()}: {' '.join(process.cmdline())}"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}, gone meanwhile"
