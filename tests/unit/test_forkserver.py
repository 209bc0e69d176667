"""The fork server: what it starts, signals, reaps and ends, and how a fork differs from a fresh process.

It must be forked by a process with one thread, so each test starts `tests/jobs/plain_agent.py`, which does that.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.helpers import ROOT, Spawned, Spawner, child_environment, is_running, wait_until

AGENT = ROOT / "tests" / "jobs" / "plain_agent.py"
PROBE = ROOT / "tests" / "jobs" / "plain_probe.py"
LIMIT_S = 20.0
DELAY = "import time; time.sleep(600)"

Message = dict[str, Any]


class ForkServer:
    """A fork server, the process that forked it, and the test's line to it."""

    def __init__(self, spawn: Spawner, folder: Path) -> None:
        self.folder = folder
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(LIMIT_S)
            # Without PYTHONUNBUFFERED, which would hide what a fork owes to `-u`.
            self.agent: Spawned = spawn.python(
                AGENT, str(server.getsockname()[1]), env={"PYTHONUNBUFFERED": None}, cwd=folder, name="agent"
            )
            self.link, _ = server.accept()
        self.link.settimeout(LIMIT_S)
        self.rest = b""
        self.heard: list[Message] = []
        self.count = 0
        self.pid: int = self.hear("fork server")["fork server"]

    def send(self, *requests: Message) -> None:
        """Send them at once, so that they arrive together."""
        self.link.sendall(b"".join(json.dumps(request).encode() + b"\n" for request in requests))

    def hear(self, kind: str, value: object = None) -> Message:
        """The next message of a kind that was not heard yet, about a worker if one is named."""
        while True:
            for message in self.heard:
                if kind in message and value in (None, message[kind]):
                    self.heard.remove(message)
                    return message
            data = self.link.recv(1 << 16)
            assert data, f"the fork server ended without {kind}: {self.errors()}"
            *lines, self.rest = (self.rest + data).split(b"\n")
            self.heard.extend(json.loads(line) for line in lines)

    def spawn(self, worker: str, *argv: str | Path, **more: Any) -> int:
        """Start a worker; its pid."""
        self.send(request(worker, *argv, **more))
        pid: int = self.hear("started", worker)["pid"]
        return pid

    def run(self, worker: str, *argv: str | Path, **more: Any) -> Message:
        """Start a worker and wait for its end."""
        self.spawn(worker, *argv, **more)
        return self.hear("exited", worker)

    def warm(self, *modules: str, answer: bool = True) -> Message:
        """Ask for a warm parent, and wait until it is there or has failed."""
        self.send(warm_request(*modules))
        message = self.hear("warm")
        assert message["warm"] is answer, message
        return message

    def children(self) -> list[int]:
        return [child.pid for child in psutil.Process(self.pid).children()]

    def warm_pid(self) -> int:
        """The only child of the fork server while no worker runs."""
        (child,) = self.children()
        return child

    def errors(self) -> str:
        return (self.folder / "errors").read_text()


def environment(**changes: str) -> dict[str, str]:
    return child_environment({"PYTHONUNBUFFERED": None, **changes})


def request(worker: str, *argv: str | Path, warm: bool = False, module: bool = False, **changes: str) -> Message:
    """A spawn request for a Python script: by exec, or for the warm parent."""
    target, *args = map(str, argv)
    program = {"module": module, "target": target, "args": args}
    return {
        "op": "spawn",
        "worker": worker,
        "argv": [sys.executable, "-u", *(["-m"] if module else []), target, *args],
        "env": environment(**changes),
        "program": program if warm else None,
    }


class Gate:
    """Holds the import of a preloaded module up until it is opened."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "gate"
        self.request = warm_request("tests.jobs.plain_gate")
        self.request["env"]["PLAIN_GATE"] = str(self.path)

    def open(self, wish: str) -> None:
        part = self.path.with_suffix(".part")
        part.write_text(wish)
        part.rename(self.path)


def program_request(worker: str, *argv: str) -> Message:
    return {"op": "spawn", "worker": worker, "argv": list(argv), "env": environment(), "program": None}


def signal_request(worker: str, number: int) -> Message:
    return {"op": "signal", "worker": worker, "signal": number}


def warm_request(*modules: str) -> Message:
    return {"op": "warm", "env": environment(), "modules": list(modules), "share": 1.0}


@pytest.fixture
def forkserver(spawn: Spawner, tmp_path: Path) -> Iterator[ForkServer]:
    forkserver = ForkServer(spawn, tmp_path)
    yield forkserver
    forkserver.link.close()
    forkserver.agent.wait(LIMIT_S)
    print(forkserver.errors())


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path)


@pytest.fixture
def script(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Python script."""

    def write(text: str, name: str = "script.py") -> Path:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write


SCRIPTS = {
    "": "nothing",
    "import sys; sys.exit()": "exit without a code",
    "import sys; sys.exit(3)": "exit code",
    "import sys; sys.exit(259)": "exit code beyond a byte",
    "import sys; print('out'); sys.exit('the reason')": "exit with a text",
    "raise SystemExit(False)": "exit with a bool",
    "def f():\n    g()\n\n\ndef g():\n    raise ValueError('bad')\n\n\nf()\n": "exception",
    "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise OSError from error\n": "chained exception",
    "import json\njson.loads('{')\n": "exception in a library",
    "x = 1\nif x\n": "syntax error",
    "raise KeyboardInterrupt": "interrupt",
    "import os, sys; print('out', end=''); print('err', end='', file=sys.stderr); os._exit(4)": "os._exit",
    "import os, signal; print('out', end=''); os.kill(os.getpid(), signal.SIGKILL)": "SIGKILL",
    "import os, signal, time; os.kill(os.getpid(), signal.SIGTERM); time.sleep(60)": "SIGTERM",
    "import atexit; atexit.register(print, 'first'); atexit.register(print, 'second'); raise ValueError": "atexit",
    "import sys; sys.excepthook = lambda *found: print('hook', found[0], found[2].tb_lineno); 1 / 0": "excepthook",
    "import threading, time; threading.Timer(0.05, lambda: print('thread', __name__)).start()": "thread",
    "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()": "daemon thread",
    "import sys; print('out'); sys.stdout.close()": "closed output",
    "import sys; sys.stdout = sys.stderr = None": "no output",
    "import os; os.close(1); os.close(2)": "closed descriptors",
    "def f(x: 1 + 1): pass\n\nprint(f.__annotations__)\n": "annotations",
    "import sys; print(sys.stdin.read(), sys.argv[1:], __name__)": "input",
    "import atexit, pickle\nclass C: pass\natexit.register(lambda: print(pickle.loads(pickle.dumps(C()))"
    ".__class__.__module__))": "pickle",
    "import multiprocessing as m\ndef f(): print('child')\nif __name__ == '__main__':\n"
    "    for way in ('fork', 'spawn'):\n"
    "        p = m.get_context(way).Process(target=f); p.start(); p.join(); print(p.exitcode)\n": "children",
}
"""Scripts, and what each ends with."""


def written(path: Path) -> str:
    """What a worker left in a file, as soon as it has left something."""
    return wait_until(lambda: path.read_text() if path.exists() else None, LIMIT_S, f"something in {path}")


class TestWorkers:
    @pytest.mark.parametrize("code", [0, 1, 3, 127, 255])
    def test_an_exit_code_is_reported(self, forkserver: ForkServer, code: int) -> None:
        forkserver.send(program_request("w", "sh", "-c", f"exit {code}"))
        pid = forkserver.hear("started", "w")["pid"]
        end = forkserver.hear("exited", "w")
        assert (end["exitcode"], end["signal"], end["pid"]) == (code, None, pid)

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV, signal.SIGINT])
    def test_a_death_by_signal_is_reported_as_one(self, forkserver: ForkServer, number: int) -> None:
        forkserver.send(program_request("w", "sleep", "600"))
        os.kill(forkserver.hear("started", "w")["pid"], number)
        end = forkserver.hear("exited", "w")
        assert (end["exitcode"], end["signal"]) == (None, number)

    def test_many_that_end_together_are_all_reported(self, forkserver: ForkServer) -> None:
        names = [f"w{number}" for number in range(40)]
        forkserver.send(*(program_request(name, "sh", "-c", f"exit {number}") for number, name in enumerate(names)))
        assert [forkserver.hear("exited", name)["exitcode"] for name in names] == list(range(40))

    def test_a_program_that_cannot_be_started_is_named(self, forkserver: ForkServer) -> None:
        forkserver.send(program_request("w", "no-such-program"))
        assert forkserver.hear("exited", "w")["exitcode"] == 127
        assert "cannot start 'no-such-program': No such file or directory" in forkserver.errors()

    def test_a_signal_that_follows_at_once_ends_the_worker(self, forkserver: ForkServer) -> None:
        # The fork server ignores SIGTERM itself; a child that is not itself yet must not.
        for number in range(20):
            worker = f"w{number}"
            forkserver.send(program_request(worker, "sleep", "600"), signal_request(worker, signal.SIGTERM))
            assert forkserver.hear("exited", worker)["signal"] == signal.SIGTERM

    def test_a_signal_for_a_worker_that_has_ended_is_nothing(self, forkserver: ForkServer) -> None:
        forkserver.send(program_request("w", "true"))
        forkserver.hear("exited", "w")
        forkserver.send(signal_request("w", signal.SIGKILL), signal_request("x", signal.SIGKILL))
        forkserver.send(program_request("v", "true"))
        assert forkserver.hear("exited", "v")["exitcode"] == 0

    def test_a_signal_reaches_what_the_worker_has_started(self, forkserver: ForkServer) -> None:
        forkserver.send(program_request("w", "sh", "-c", "sleep 600 & echo $! > child; wait"))
        child = int(written(forkserver.folder / "child"))
        forkserver.send(signal_request("w", signal.SIGTERM))
        assert forkserver.hear("exited", "w")["signal"] == signal.SIGTERM
        wait_until(lambda: not is_running(child), LIMIT_S, "the end of the child")

    def test_children_do_not_outlive_a_worker_that_failed(self, forkserver: ForkServer) -> None:
        forkserver.send(program_request("w", "sh", "-c", "(trap '' TERM; sleep 600) & echo $! > child; exit 3"))
        child = int(written(forkserver.folder / "child"))
        assert forkserver.hear("exited", "w")["exitcode"] == 3
        wait_until(lambda: not is_running(child), LIMIT_S, "the end of the child")


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("changes", [{"stdout": "/no/such/folder/log"}, {"argv": ["true", "\0"]}], ids=["log", "argv"])
def test_a_worker_that_cannot_be_started_has_ended(
    forkserver: ForkServer, script: Callable[..., Path], warm: bool, changes: dict[str, Any]
) -> None:
    if warm:
        forkserver.warm("json")
    else:
        changes = {**changes, "program": None}
    if warm and "argv" in changes:
        changes = {"program": {"module": False, "target": "\0", "args": []}}
    forkserver.send({**request("w", script("print('never')"), warm=warm), **changes})
    assert forkserver.hear("exited", "w")["exitcode"] != 0
    path = script("print('well')")
    assert forkserver.run("next", path, warm=warm)["exitcode"] == 0


class TestEnd:
    def workers(self, forkserver: ForkServer, script: Callable[..., Path]) -> list[int]:
        """An exec'd worker, a fork of the warm parent, and a child of each: all deaf to SIGTERM."""
        text = (
            "import signal, subprocess, sys, os, time\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
            "open(sys.argv[1] + '.part', 'w').write(f'{os.getpid()} {child.pid}')\n"
            "os.rename(sys.argv[1] + '.part', sys.argv[1])\n"
            "time.sleep(600)\n"
        )
        path = script(text)
        forkserver.warm("json")
        forkserver.spawn("fresh", path, "fresh")
        forkserver.spawn("fork", path, "fork", warm=True)
        return [int(pid) for name in ("fresh", "fork") for pid in written(forkserver.folder / name).split()]

    def test_the_end_of_the_agent_ends_all(self, forkserver: ForkServer, script: Callable[..., Path]) -> None:
        pids = self.workers(forkserver, script)
        forkserver.agent.signal(signal.SIGKILL)
        forkserver.agent.wait(LIMIT_S)
        wait_until(lambda: not any(map(is_running, [forkserver.pid, *pids])), LIMIT_S, "the end of all")

    def test_the_end_of_the_forkserver_ends_the_workers(
        self, forkserver: ForkServer, script: Callable[..., Path]
    ) -> None:
        pids = self.workers(forkserver, script)
        warm = {child.pid for child in psutil.Process(forkserver.pid).children()} - set(pids)
        os.kill(forkserver.pid, signal.SIGKILL)
        workers = [pids[0], pids[2], *warm]
        wait_until(lambda: not any(map(is_running, workers)), LIMIT_S, "the end of the workers")
        for child in (pids[1], pids[3]):  # these are for the agent to end: tests/integration/test_warm.py
            os.kill(child, signal.SIGKILL)

    def test_signals_of_a_terminal_do_not_end_it(self, forkserver: ForkServer) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            os.kill(forkserver.pid, number)
        forkserver.send(program_request("w", "true"))
        assert forkserver.hear("exited", "w")["exitcode"] == 0
        assert os.getsid(forkserver.pid) == forkserver.pid


def probe(forkserver: ForkServer, *argv: str | Path, **more: Any) -> Message:
    """What the probe saw of the process it ran in."""
    forkserver.count += 1
    end = forkserver.run(f"probe{forkserver.count}", *argv, "facts", **more)
    assert end["exitcode"] == 0, forkserver.errors()
    file = forkserver.folder / "facts"
    found: Message = json.loads(file.read_text())
    file.unlink()
    return found


def assert_alike(fork: Message, fresh: Message) -> None:
    """They differ in nothing that a script may rely on."""
    assert fork.pop("random") != fresh.pop("random")
    # The interpreter adds this one itself where the locale is C.
    for facts in (fork, fresh):
        facts["environment"].pop("LC_CTYPE", None)
    assert fork == fresh


def outcome(forkserver: ForkServer, *argv: str | Path, warm: bool) -> tuple[object, ...]:
    """Exit code, signal, standard output and standard error of a script."""
    output, errors = forkserver.agent.text(), forkserver.errors()
    forkserver.count += 1
    end = forkserver.run(f"run{forkserver.count}", *argv, warm=warm)
    return (
        end["exitcode"],
        end["signal"],
        forkserver.agent.text().removeprefix(output),
        forkserver.errors().removeprefix(errors),
    )


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A folder with the probe as a script, behind a link, in a package and in an archive; it is not the cwd."""
    folder = tmp_path / "local"
    package = folder / "package"
    package.mkdir(parents=True)
    text = PROBE.read_text()
    (package / "__init__.py").touch()
    (package / "inside.py").write_text(text)
    (folder / "probe.py").write_text(text)
    (tmp_path / "top.py").write_text(text)
    (tmp_path / "link.py").symlink_to(folder / "probe.py")
    with zipfile.ZipFile(folder / "probe.pyz", "w") as archive:
        archive.writestr("__main__.py", text)
    return folder


class TestFork:
    """What runs as a fork of the warm parent is compared with what `python -u` makes of the same."""

    @pytest.mark.parametrize(
        "argv",
        [
            ("local/probe.py", "--flag", "-m", "a b", ""),
            ("./local/../local/probe.py",),
            ("link.py",),
            ("local/probe.pyz", "argument"),
        ],
    )
    def test_a_script_sees_the_process_it_expects(
        self, forkserver: ForkServer, local: Path, argv: tuple[str, ...]
    ) -> None:
        forkserver.warm("json")
        fork, fresh = (probe(forkserver, *argv, warm=warm, ONLY_HERE="1") for warm in (True, False))
        assert fork["environment"] == environment(ONLY_HERE="1")
        assert_alike(fork, fresh)

    @pytest.mark.parametrize("module", ["top", "local.package.inside", "tests.jobs.plain_probe"])
    def test_a_module_sees_the_process_it_expects(self, forkserver: ForkServer, local: Path, module: str) -> None:
        forkserver.warm("json")
        fork, fresh = (probe(forkserver, module, "--flag", module=True, warm=warm) for warm in (True, False))
        assert_alike(fork, fresh)

    @pytest.mark.parametrize("text", SCRIPTS, ids=SCRIPTS.values())
    def test_it_ends_like_a_fresh_process(self, forkserver: ForkServer, script: Callable[..., Path], text: str) -> None:
        forkserver.warm("json")
        path = script(text)
        fresh = outcome(forkserver, path, "argument", warm=False)
        assert outcome(forkserver, path, "argument", warm=True) == fresh

    def test_a_missing_module_is_named(self, forkserver: ForkServer) -> None:
        forkserver.warm("json")
        end = forkserver.run("w", "no_such_module", module=True, warm=True)
        assert end["exitcode"] == 1
        assert "No module named no_such_module" in forkserver.errors()

    def test_files_left_open_are_written(self, forkserver: ForkServer, script: Callable[..., Path]) -> None:
        forkserver.warm("json")
        text = "import sys; kept = open(sys.argv[1], 'w'); kept.write('text'); alias = [kept]; kept.loop = alias\n"
        assert forkserver.run("w", script(text), "file", warm=True)["exitcode"] == 0
        assert (forkserver.folder / "file").read_text() == "text"

    def test_random_numbers_differ_between_forks(self, forkserver: ForkServer, script: Callable[..., Path]) -> None:
        forkserver.warm("random", "numpy")
        path = script("import random, numpy; print('drawn', random.random(), numpy.random.random())")
        for number in range(3):
            assert forkserver.run(f"w{number}", path, warm=True)["exitcode"] == 0
        drawn = re.findall(r"drawn (\S+) (\S+)", forkserver.agent.text())
        assert len(set(drawn)) == len({python for python, _ in drawn}) == len({array for _, array in drawn}) == 3

    def test_it_is_a_child_of_the_forkserver_and_outlives_the_warm_parent(
        self, forkserver: ForkServer, script: Callable[..., Path]
    ) -> None:
        forkserver.warm("json")
        parent = forkserver.warm_pid()
        pid = forkserver.spawn("w", script("with open('here', 'w') as f: f.write('yes')\n" + DELAY), warm=True)
        written(forkserver.folder / "here")
        assert psutil.Process(pid).ppid() == forkserver.pid
        os.kill(parent, signal.SIGKILL)
        assert forkserver.hear("warm")["warm"] is False
        forkserver.send(signal_request("w", signal.SIGTERM))
        assert forkserver.hear("exited", "w")["signal"] == signal.SIGTERM


class TestSlowImports:
    """On cores that workers compute on, the imports of the warm parent take a share only."""

    def begin(self, forkserver: ForkServer, share: float) -> None:
        forkserver.send({**warm_request("tests.jobs.busy_module"), "share": share})

    def test_they_pause(self, forkserver: ForkServer) -> None:
        begin_s = time.monotonic()
        self.begin(forkserver, 0.1)
        assert forkserver.hear("warm")["warm"]
        assert time.monotonic() - begin_s > 0.5

    def test_they_do_not_once_a_worker_waits_for_them(
        self, forkserver: ForkServer, script: Callable[..., Path]
    ) -> None:
        path = script("import sys; print('pauses', any(type(one).__name__ == '_Pauses' for one in sys.meta_path))")
        self.begin(forkserver, 0.0005)  # 100 s
        assert forkserver.run("w", path, warm=True)["exitcode"] == 0
        assert "pauses False" in forkserver.agent.text()
        assert forkserver.hear("warm")["warm"]


def spawn_late(forkserver: ForkServer, *requests: Message) -> None:
    """Let the fork server find the end of its warm parent and these requests at the same moment."""
    warm = forkserver.warm_pid()
    os.kill(forkserver.pid, signal.SIGSTOP)
    os.kill(warm, signal.SIGKILL)
    wait_until(lambda: not is_running(warm), LIMIT_S, "the end of the warm parent")
    forkserver.send(*requests)
    os.kill(forkserver.pid, signal.SIGCONT)


class TestWithoutWarmParent:
    """The warm parent is a convenience: without one, workers start by exec."""

    def assert_fresh(self, forkserver: ForkServer, script: Callable[..., Path]) -> None:
        path = script("import sys; print('modules', 'tests.jobs.plain_gate' in sys.modules, 'no' in sys.modules)")
        assert forkserver.run("after", path, warm=True)["exitcode"] == 0
        assert "modules False False" in forkserver.agent.text()

    def test_a_module_that_cannot_be_imported_is_named(
        self, forkserver: ForkServer, script: Callable[..., Path]
    ) -> None:
        message = forkserver.warm("json", "no.such", "zlib", answer=False)
        assert message["error"] == "cannot import no.such: No module named 'no'"
        self.assert_fresh(forkserver, script)

    def test_a_failure_leaves_no_process_and_no_work_behind(self, forkserver: ForkServer) -> None:
        process = psutil.Process(forkserver.pid)
        forkserver.warm("no_such_module", answer=False)
        wait_until(lambda: not process.children(), LIMIT_S, "the end of the warm parent")
        wait_until(lambda: process.status() == psutil.STATUS_SLEEPING, LIMIT_S, "the fork server to wait")
        forkserver.warm("json")
        assert len(process.children()) == 1
        assert forkserver.heard == []

    @pytest.mark.parametrize(
        ("wish", "error"),
        [
            ("fail", "cannot import tests.jobs.plain_gate: this module cannot be imported today"),
            ("thread", "2 threads after the imports; a fork would not be sound"),
            ("torch.cuda.context", "a device context exists after the imports; a fork would not be sound"),
            ("torch_npu.npu.context", "a device context exists after the imports; a fork would not be sound"),
        ],
    )
    def test_workers_that_wait_for_a_preload_that_fails_are_started(
        self, forkserver: ForkServer, script: Callable[..., Path], gate: Gate, wish: str, error: str
    ) -> None:
        path = script("import sys; sys.exit(7)")
        forkserver.send(gate.request, request("a", path, warm=True), request("b", path, warm=True))
        gate.open(wish)
        assert forkserver.hear("warm")["error"] == error
        assert [forkserver.hear("exited", worker)["exitcode"] for worker in "ab"] == [7, 7]
        self.assert_fresh(forkserver, script)

    def test_workers_that_wait_for_a_warm_parent_that_is_killed_are_started(
        self, forkserver: ForkServer, script: Callable[..., Path], gate: Gate
    ) -> None:
        path = script("import sys; sys.exit(7)")
        forkserver.send(gate.request, request("a", path, warm=True), request("b", path, warm=True))
        os.kill(wait_until(lambda: forkserver.children(), LIMIT_S, "the warm parent")[0], signal.SIGKILL)
        assert forkserver.hear("warm") == {"warm": False, "error": "the process that had the modules imported ended"}
        assert [forkserver.hear("exited", worker)["exitcode"] for worker in "ab"] == [7, 7]
        self.assert_fresh(forkserver, script)

    def test_a_worker_asked_for_as_the_warm_parent_dies_is_started(
        self, forkserver: ForkServer, script: Callable[..., Path]
    ) -> None:
        forkserver.warm("json")
        spawn_late(forkserver, request("w", script("import sys; sys.exit(7)"), warm=True))
        assert forkserver.hear("exited", "w")["exitcode"] == 7


class TestPendingSignals:
    """A signal for a worker that waits for the warm parent is kept until the worker is there."""

    @pytest.mark.parametrize("wish", ["go", "fail"])
    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
    def test_it_reaches_the_worker(self, forkserver: ForkServer, gate: Gate, wish: str, number: int) -> None:
        path = forkserver.folder / "sleep.py"
        path.write_text(DELAY)
        forkserver.send(gate.request, request("w", path, warm=True), signal_request("w", number))
        gate.open(wish)
        assert forkserver.hear("exited", "w")["signal"] == number

    def test_it_reaches_the_worker_when_the_warm_parent_is_killed(self, forkserver: ForkServer, gate: Gate) -> None:
        path = forkserver.folder / "sleep.py"
        path.write_text(DELAY)
        forkserver.send(gate.request, request("w", path, warm=True), signal_request("w", signal.SIGTERM))
        os.kill(wait_until(lambda: forkserver.children(), LIMIT_S, "the warm parent")[0], signal.SIGKILL)
        assert forkserver.hear("exited", "w")["signal"] == signal.SIGTERM

    def test_it_reaches_a_fork_at_once(self, forkserver: ForkServer) -> None:
        path = forkserver.folder / "sleep.py"
        path.write_text(DELAY)
        forkserver.warm("json")
        for number in range(20):
            worker = f"w{number}"
            forkserver.send(request(worker, path, warm=True), signal_request(worker, signal.SIGTERM))
            assert forkserver.hear("exited", worker)["signal"] == signal.SIGTERM
