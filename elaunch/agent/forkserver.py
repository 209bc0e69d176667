"""The process that workers are born from: small, single-threaded, forked off the agent before it has any thread.

    agent ──socket──> fork server ──fork, exec──> worker
                         │ └────fork────> warm parent (torch imported) ──fork, fork──> worker
                         └ reaps every worker and reports its end

Why not the agent itself: its threads make forking unsound, and a parent that only waits notices a death at once.
- The fork server ends every worker's process group when the agent goes away, for whatever reason; should it be killed
  too, the kernel ends the workers (PR_SET_PDEATHSIG). So a killed agent leaves no orphans.
- A warm parent has the heavy modules imported and has neither threads nor device contexts, which is checked; a fork of
  it runs the script within milliseconds. The worker is a grandchild of it and is adopted by the fork server
  (PR_SET_CHILD_SUBREAPER), so the warm parent may die without consequence.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import io
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
from typing import TYPE_CHECKING, Any, TextIO

from elaunch.agent.slow_import import pausing

if TYPE_CHECKING:
    import types

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
# What the agent may have handlers for, which must not act here.
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
DEVICES = "torch.cuda", "torch.xpu", "torch_npu.npu"
"""Modules whose `is_initialized` tells whether a device context exists."""

_LIBC = ctypes.CDLL(None, use_errno=True)


class Program(dict[str, Any]):
    """What a warm fork runs, in JSON form: {"module": bool, "target": str, "args": [str]}."""


def start() -> tuple[socket.socket, int]:
    """Starts the fork server; called while the process has one thread.

    Returns:
        The agent's end of the socket, and the fork server's pid. Each line on the socket is one JSON object:
        to the fork server {"op": "spawn", "worker", "argv", "env", "program" or null, "stdout" and "stderr": a path to
        append to or null, "cpus": those it may run on or null}, {"op": "warm", "env", "modules",
        "share": of a core that the imports take until a worker waits for them},
        {"op": "signal", "worker", "signal"}, {"op": "remove at the end", "folder"}; from it {"started": worker, "pid"},
        {"exited": worker, "pid", "exitcode", "signal", "t"}, {"warm": bool, "error"}.
    """
    ours, theirs = socket.socketpair()
    # A signal of the terminal finds the fork server deaf to it, from its first moment.
    signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
    pid = os.fork()
    if pid:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        theirs.close()
        return ours, pid
    status = 1
    try:
        # Not tied to the agent by PR_SET_PDEATHSIG: the end of the socket tells of its death, and then there is work.
        ours.close()
        program = ForkServer(theirs).run()
        status = _run_program(program) if program is not None else 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        # Whatever a script did to its streams: nothing may return into the agent's code.
        os._exit(status)


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Lets the kernel send this process a signal when its parent goes."""
    _LIBC.prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(1)


class ForkServer:
    """The fork server's loop. `run` returns only at the end of the agent, or in a freshly forked worker."""

    def __init__(self, link: socket.socket) -> None:
        os.setsid()
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._link = link
        self._poll = select.poll()
        self._pids: dict[str, int] = {}
        self._warm: socket.socket | None = None
        self._warm_pid = 0
        self._warm_rest = b""
        self._warm_pending: dict[str, dict[str, Any]] = {}
        self._early_signals: dict[str, int] = {}  # for workers that the warm parent has still to fork
        self._folders: list[str] = []  # the agent's temporary ones, which it cannot remove when it is killed
        self._early_ends: dict[int, int] = {}  # pid -> status of adopted workers that ended before they were announced
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in HANDLED:
            signal.signal(ignored, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)

    def run(self) -> Program | None:
        """Serves the agent until that ends; returns None then, and in a forked worker the program it is to run."""
        self._poll.register(self._link, select.POLLIN)
        self._poll.register(self._wake_read, select.POLLIN)
        rest = b""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._wake_read:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._wake_read, 4096)
                    self._reap()
                elif fd == self._link.fileno():
                    data = _receive(self._link)
                    if not data:
                        self._end_all()
                        return None
                    *lines, rest = (rest + data).split(b"\n")
                    for line in lines:
                        program = self._serve(json.loads(line))
                        if program is not None:
                            return program
                elif self._warm is not None and fd == self._warm.fileno():
                    data = _receive(self._warm)
                    if data:
                        *lines, self._warm_rest = (self._warm_rest + data).split(b"\n")
                        for line in lines:
                            self._from_warm(json.loads(line))
                    else:
                        self._lost_warm("the process that had the modules imported ended")

    def _tell(self, **message: Any) -> None:
        # The agent is gone: its end of the socket reports that to the loop.
        with contextlib.suppress(OSError):
            self._link.sendall(json.dumps(message).encode() + b"\n")

    def _serve(self, request: dict[str, Any]) -> Program | None:
        if request["op"] == "spawn":
            if request.get("program") is not None and self._warm is not None:
                self._warm_pending[request["worker"]] = request
                with contextlib.suppress(OSError):  # it has just ended: the loop is about to hear that
                    self._warm.sendall(json.dumps(request).encode() + b"\n")
            else:
                self._exec(request)
        elif request["op"] == "signal":
            pid = self._pids.get(request["worker"])
            if pid is not None:
                _signal_group(pid, request["signal"])
            elif request["worker"] in self._warm_pending:
                self._early_signals[request["worker"]] = request["signal"]
        elif request["op"] == "remove at the end":
            self._folders.append(request["folder"])
        elif request["op"] == "warm" and self._warm is None:
            return self._fork_warm(request)
        return None

    def _exec(self, request: dict[str, Any]) -> None:
        forkserver, argv = os.getpid(), request["argv"]
        # A signal that comes before the child has its own dispositions would meet the fork server's, and be lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            pid = os.fork()
        except OSError as error:
            print(f"elaunch: cannot start a process: {error.strerror}", file=sys.stderr, flush=True)
            self._tell(exited=request["worker"], pid=0, exitcode=127, signal=None, t=time.time())
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
            return
        if pid == 0:
            try:
                os.setsid()
                end_with_parent(forkserver)
                _default_signals()
                signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
                _settle(request)
                os.execvpe(argv[0], argv, request["env"])
            except Exception as error:  # a null byte in an argument is a ValueError
                why = error.strerror if isinstance(error, OSError) else str(error)
                os.write(2, f"elaunch: cannot start {argv[0]!r}: {why}\n".encode(errors="replace"))
            finally:
                os._exit(127)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        self._pids[request["worker"]] = pid
        self._tell(started=request["worker"], pid=pid)

    def _reap(self) -> None:
        names = {pid: worker for worker, pid in self._pids.items()}
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            worker = names.get(pid)
            if worker is not None:
                self._ended(worker, pid, status)
            elif self._warm_pending:
                self._early_ends[pid] = status

    def _ended(self, worker: str, pid: int, status: int) -> None:
        self._pids.pop(worker, None)
        killed = os.WIFSIGNALED(status)
        if status != 0:
            _signal_group(pid, signal.SIGKILL)  # what a failed worker has started does not outlive it
        self._tell(
            exited=worker,
            pid=pid,
            exitcode=None if killed else os.WEXITSTATUS(status),
            signal=os.WTERMSIG(status) if killed else None,
            t=time.time(),
        )

    def _end_all(self) -> None:
        for pid in self._pids.values():
            _signal_group(pid, signal.SIGKILL)
        if self._warm_pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._warm_pid, signal.SIGKILL)
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)

    # -- the warm parent ----------------------------------------------------------------------------------------

    def _fork_warm(self, request: dict[str, Any]) -> Program | None:
        ours, theirs = socket.socketpair()
        forkserver = os.getpid()
        pid = os.fork()
        if pid:
            theirs.close()
            self._warm, self._warm_pid = ours, pid
            self._poll.register(ours, select.POLLIN)
            return None
        ours.close()
        self._link.close()
        signal.set_wakeup_fd(-1)
        os.close(self._wake_read)
        os.close(self._wake_write)
        end_with_parent(forkserver)
        os.environ.clear()
        os.environ.update(request["env"])
        program = _keep_warm(theirs, forkserver, request["modules"], request.get("share", 1.0))
        if program is None:
            os._exit(0)
        return program

    def _from_warm(self, message: dict[str, Any]) -> None:
        if "failed" in message:
            self._start_anew(message["failed"], self._warm_pending.pop(message["failed"]))
            if not self._warm_pending:
                self._early_ends.clear()
        elif "started" in message:
            worker, pid = message["started"], message["pid"]
            self._warm_pending.pop(worker, None)
            self._pids[worker] = pid
            self._tell(**message)
            if worker in self._early_signals:
                _signal_group(pid, self._early_signals.pop(worker))
            if pid in self._early_ends:
                self._ended(worker, pid, self._early_ends[pid])
            if not self._warm_pending:
                self._early_ends.clear()
        elif message["warm"]:
            self._tell(**message)
        else:
            self._lost_warm(message["error"])

    def _lost_warm(self, why: str) -> None:
        if self._warm is None:
            return
        self._poll.unregister(self._warm)
        self._warm.close()
        self._warm = None
        self._warm_pid = 0
        self._warm_rest = b""
        self._tell(warm=False, error=why)
        for worker, request in self._warm_pending.items():
            self._start_anew(worker, request)
        self._warm_pending.clear()

    def _start_anew(self, worker: str, request: dict[str, Any]) -> None:
        """Starts a worker that the warm parent was to fork from nothing; if that fails too, its end is told."""
        self._exec(request)
        number = self._early_signals.pop(worker, None)
        if number is not None and worker in self._pids:
            _signal_group(self._pids[worker], number)


def _keep_warm(link: socket.socket, forkserver: int, modules: list[str], share: float) -> Program | None:
    """Imports the heavy modules, then forks a worker for each request. Returns in the forked worker."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    error = ""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # its pool would be the one thread that imports start
    with pausing(link, share):
        for module in modules:
            try:
                __import__(module)
            except Exception as failure:
                error = f"cannot import {module}: {failure}"
                break
    threads = len(os.listdir("/proc/self/task"))
    if not error and threads > 1:
        error = f"{threads} threads after the imports; a fork would not be sound"
    elif not error and any(sys.modules[name].is_initialized() for name in DEVICES if name in sys.modules):
        error = "a device context exists after the imports; a fork would not be sound"
    gc.freeze()  # the collector would otherwise write to, and so copy, every page that the forks share
    link.sendall(json.dumps({"warm": not error, "error": error}).encode() + b"\n")
    if error:
        return None
    rest = b""
    while data := link.recv(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            theirs, ours = os.pipe(), os.pipe()
            middle = os.fork()
            if middle == 0:
                os.close(theirs[0])
                os.close(ours[1])
                middle = os.getpid()
                if os.fork():
                    os._exit(0)
                link.close()
                return _adopted(request, middle, forkserver, theirs[1], ours[0])
            os.close(theirs[1])
            os.close(ours[0])
            pid = int(os.read(theirs[0], 32) or 0)
            os.waitpid(middle, 0)
            if not pid:  # it has ended before it was ready, with a traceback
                link.sendall(json.dumps({"failed": request["worker"]}).encode() + b"\n")
            else:
                link.sendall(json.dumps({"started": request["worker"], "pid": pid}).encode() + b"\n")
                with contextlib.suppress(BrokenPipeError):  # it was killed
                    os.write(ours[1], b"\0")
            os.close(theirs[0])
            os.close(ours[1])
    return None


def _adopted(request: dict[str, Any], middle: int, forkserver: int, tell: int, go: int) -> Program:
    """In the new worker: wait until the fork server is the parent, then look like a fresh process.

    The script begins only when the fork server knows it: else the end of the warm parent could leave a worker twice.
    """
    while os.getppid() == middle:
        time.sleep(0.0005)
    os.setsid()
    end_with_parent(forkserver)
    _default_signals()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # what a Python sets at its start
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["env"])
    _settle(request)
    os.write(tell, str(os.getpid()).encode())
    os.close(tell)
    if not os.read(go, 1):
        os._exit(1)
    os.close(go)
    return Program(request["program"])


def _settle(request: dict[str, Any]) -> None:
    """Gives a new worker its streams and its CPUs."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        path = request.get(name)
        if path is not None:
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            os.dup2(opened, fd)
            os.close(opened)
    if request.get("cpus"):
        os.sched_setaffinity(0, request["cpus"])


def _default_signals() -> None:
    signal.set_wakeup_fd(-1)
    for number in (*HANDLED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)


def _run_program(program: Program) -> int:
    """Runs a script as `python -u [-m] script args…` would, in this process.

    Returns:
        The exit status: of SystemExit as Python defines it, 1 with a traceback for an exception.
    """
    import random
    import types

    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    sys.stdout = sys.__stdout__ = _unbuffered(sys.__stdout__, 1)  # type: ignore[assignment, misc]
    sys.stderr = sys.__stderr__ = _unbuffered(sys.__stderr__, 2)  # type: ignore[assignment, misc]
    sys.argv = [program["target"], *program["args"]]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    status, interrupted = 0, False
    try:
        _run_main(main, program["target"], program["module"])
    except SystemExit as end:
        status = _exit_status(end)
    except BaseException as error:
        status, interrupted = 1, isinstance(error, KeyboardInterrupt)
        # The first two frames are of this module, and a fresh process would not show them.
        trace = error.__traceback__.tb_next.tb_next if error.__traceback__ and error.__traceback__.tb_next else None
        sys.excepthook(type(error), error.with_traceback(trace), trace)
    _finish_interpreter()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    return status


def _run_main(main: types.ModuleType, target: str, is_module: bool) -> None:
    import builtins
    import importlib.machinery
    import pkgutil
    import runpy

    main.__dict__["__builtins__"] = builtins
    path = os.path.join(os.getcwd(), target)
    if is_module:
        sys.path[0] = os.getcwd()
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]
    elif pkgutil.get_importer(path) is not None:  # an archive with a __main__ in it
        sys.path[0] = path
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]
    else:
        sys.path[0] = os.path.dirname(os.path.realpath(target))
        main.__dict__.update(
            __file__=path, __cached__=None, __loader__=importlib.machinery.SourceFileLoader("__main__", path)
        )
        with io.open_code(path) as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
        exec(code, main.__dict__)


def _unbuffered(stream: TextIO | None, fd: int) -> TextIO | None:
    """The standard stream as `python -u` opens it: what is written is out, also before os._exit."""
    if stream is None:
        return None
    raw: Any = io.FileIO(fd, "wb", closefd=False)
    raw.name = stream.name
    text: Any = io.TextIOWrapper(raw, stream.encoding, stream.errors, newline="\n", write_through=True)
    text.mode = "w"
    fresh: TextIO = text
    return fresh


def _exit_status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    print(end.code, file=sys.stderr)
    return 1


def _finish_interpreter() -> None:
    """What the interpreter does at its end: join non-daemon threads, run the exit handlers, flush what is open."""
    import atexit
    import threading

    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    files = [
        item for item in gc.get_objects() if type(item) in (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom)
    ]
    # Text first: it goes into the buffers of the others.
    for file in (sys.stdout, sys.stderr, *sorted(files, key=lambda file: type(file) is not io.TextIOWrapper)):
        with contextlib.suppress(Exception):
            file.flush()


def _receive(link: socket.socket) -> bytes:
    try:
        return link.recv(1 << 16)
    except (ConnectionResetError, InterruptedError):
        return b""


def _signal_group(pid: int, number: int) -> None:
    """Signals a worker's process group; before its setsid the group does not exist and the worker itself gets it."""
    try:
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
