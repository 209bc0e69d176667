from __future__ import annotations

import json
import math
import os
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.detect import watchdog as module
from elaunch.detect.watchdog import TIMER_FILE, Expired, Watchdog, fifo_path, is_enabled, parse, worker_of
from elaunch.errors import LaunchError
from tests.helpers import Spawner, scaled, wait_until

# Sets three timers as user code does and lets one go; its pid goes to standard output.
CLIENT = """
import os, signal, sys
from torch.distributed.elastic.timer import FileTimerClient

client = FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal=signal.SIGUSR1)
client.acquire("step", 2000.5)
client.acquire("load", 1000)
client.acquire("save", 3000)
client.release("load")
sys.stdout.write(f"pid={os.getpid()}\\n")
"""


@pytest.fixture
def watchdog(tmp_path: Path) -> Iterator[Watchdog]:
    dog = Watchdog(str(tmp_path / "timers"))
    yield dog
    dog.close()


def send(dog: Watchdog, data: bytes) -> None:
    """Open, write and close, as each request of a client does."""
    fd = os.open(dog.path, os.O_WRONLY | os.O_NONBLOCK)
    os.write(fd, data)
    os.close(fd)


def request(pid: int, scope: str, expiry_s: float, number: int = signal.SIGKILL) -> bytes:
    fields = {"version": 1, "pid": pid, "scope_id": scope, "expiration_time": expiry_s, "signal": int(number)}
    return json.dumps(fields).encode() + b"\n"


def is_readable(dog: Watchdog) -> bool:
    return bool(select.select([dog], [], [], 0)[0])


def test_torchs_own_client_is_understood(watchdog: Watchdog, spawn: Spawner) -> None:
    client = spawn.python("-c", CLIENT, env={TIMER_FILE: watchdog.path})
    assert client.wait(60) == 0
    pid = client.pid
    assert f"pid={pid}" in client.text()
    assert watchdog.receive() == []
    assert watchdog.due_s() == 2000.5
    assert watchdog.expired(2000.4) == []
    assert watchdog.expired(2000.5) == [(pid, "step", signal.SIGUSR1)]


def test_the_fifo_is_for_this_user_alone_and_gone_after_close(tmp_path: Path) -> None:
    path = tmp_path / "timers"
    dog = Watchdog(str(path))
    mode = path.stat().st_mode
    assert stat.S_ISFIFO(mode)
    assert stat.S_IMODE(mode) == 0o600
    dog.close()
    dog.close()
    assert not path.exists()


def test_it_is_readable_only_while_there_are_requests_whoever_has_closed_the_fifo(watchdog: Watchdog) -> None:
    assert not is_readable(watchdog)
    assert watchdog.receive() == []
    send(watchdog, request(1, "a", 5))
    assert is_readable(watchdog)
    watchdog.receive()
    assert not is_readable(watchdog)


def test_workers_do_not_inherit_the_fifo(watchdog: Watchdog) -> None:
    assert not os.get_inheritable(watchdog.fileno())


def test_a_timer_is_moved_by_a_second_request_and_taken_back_by_a_negative_one(watchdog: Watchdog) -> None:
    send(watchdog, request(1, "a", 5) + request(1, "a", 50) + request(2, "a", 60))
    watchdog.receive()
    assert watchdog.due_s() == 50
    send(watchdog, request(1, "a", -1, 0))
    watchdog.receive()
    assert watchdog.due_s() == 60
    send(watchdog, request(2, "a", -1, 0) + request(3, "never set", -1, 0))
    assert watchdog.receive() == []
    assert watchdog.due_s() is None


def test_each_expired_process_is_named_once_by_the_earliest_timer_that_has_a_signal(watchdog: Watchdog) -> None:
    send(watchdog, request(1, "late", 9) + request(1, "quiet", 2, 0) + request(1, "early", 3, signal.SIGTERM))
    send(watchdog, request(2, "quiet", 4, -1) + request(3, "waits", 11))
    watchdog.receive()
    assert watchdog.expired(10) == [Expired(1, "early", signal.SIGTERM), Expired(2, "quiet", 0)]
    assert watchdog.expired(10) == []
    assert watchdog.due_s() == 11


def test_a_timer_that_never_expires_is_never_due(watchdog: Watchdog) -> None:
    send(watchdog, request(1, "a", math.inf))
    assert watchdog.receive() == []
    assert watchdog.due_s() is None
    assert watchdog.expired(1e18) == []


def test_a_process_that_is_gone_is_forgotten_with_what_it_wrote_last(watchdog: Watchdog) -> None:
    send(watchdog, request(1, "a", 5) + request(2, "a", 7))
    watchdog.receive()
    send(watchdog, request(1, "b", 6) + b"nonsense\n")
    (complaint,) = watchdog.forget(1)
    assert watchdog.due_s() == 7
    assert "nonsense" in complaint


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"nonsense", "Expecting value"),
        (b"\xff\xff", "codec can't decode"),
        (b"[" * 3000, ""),
        (b"[1]", "expected an object, found list"),
        (b"{}", "pid=None"),
        (request(0, "a", 5), "pid=0"),
        (request(-1, "a", 5), "pid=-1"),
        (request(1, "a", math.nan), "expiration_time=nan"),
        (request(1, "a", 5, 9999), "signal=9999"),
        (b'{"pid": true, "scope_id": "a", "expiration_time": 5, "signal": 9}', "pid=True"),
        (b'{"pid": 1, "scope_id": 2, "expiration_time": 5, "signal": 9}', "scope_id=2"),
        (b'{"pid": 1, "scope_id": "a", "expiration_time": "soon", "signal": 9}', "expiration_time='soon'"),
        (b'{"pid": 1, "scope_id": "a", "expiration_time": 1' + b"0" * 400 + b', "signal": 9}', "expiration_time=1000"),
        (b'{"pid": 1, "scope_id": "a", "expiration_time": 5}', "signal=None"),
    ],
)
def test_a_line_that_is_no_request_is_said_and_the_others_count(watchdog: Watchdog, line: bytes, reason: str) -> None:
    send(watchdog, request(1, "before", 5) + line.rstrip() + b"\n\n" + request(2, "after", 6))
    (complaint,) = watchdog.receive()
    assert complaint.startswith("watchdog: ignored b")
    assert reason in complaint
    assert len(complaint) < 500
    assert [expired.pid for expired in watchdog.expired(10)] == [1, 2]


def test_a_line_may_come_in_pieces(watchdog: Watchdog) -> None:
    line = request(1, "a", 5)
    send(watchdog, line[:20])
    assert watchdog.receive() == []
    send(watchdog, line[20:])
    assert watchdog.receive() == []
    assert watchdog.due_s() == 5


def test_a_line_without_end_is_dropped_before_it_grows_large(watchdog: Watchdog) -> None:
    send(watchdog, b"x" * 50_000)
    assert len(watchdog.receive()) == 1
    send(watchdog, b"\n" + request(1, "a", 5))
    assert watchdog.receive() == []
    assert watchdog.due_s() == 5


def test_a_fifo_that_an_agent_left_behind_is_replaced_but_a_file_is_not(tmp_path: Path) -> None:
    path = tmp_path / "timers"
    os.mkfifo(path)
    Watchdog(str(path)).close()
    path.write_text("somebody's work")
    with pytest.raises(LaunchError, match="exists and is no FIFO; name another one with TORCHELASTIC_TIMER_FILE"):
        Watchdog(str(path))
    assert path.read_text() == "somebody's work"


def test_a_folder_that_is_not_there_is_a_launch_error(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="No such file or directory"):
        Watchdog(str(tmp_path / "missing" / "timers"))


def test_the_environment_switches_it_on_and_may_name_the_fifo(tmp_path: Path) -> None:
    assert is_enabled({"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    assert not is_enabled({"TORCHELASTIC_ENABLE_FILE_TIMER": "0"})
    assert not is_enabled({})
    assert fifo_path({TIMER_FILE: "/somewhere/else"}, str(tmp_path)) == "/somewhere/else"
    fresh = fifo_path({}, str(tmp_path))
    assert fresh.startswith(f"{tmp_path}/watchdog_timer_")
    assert fresh != fifo_path({}, str(tmp_path))


def test_a_process_belongs_to_the_worker_whose_session_it_is_in(spawn: Spawner) -> None:
    code = "import subprocess as s, sys; c = s.Popen(['sleep', '60']); sys.stdout.write(f'child={c.pid}\\n'); c.wait()"
    worker = spawn([sys.executable, "-u", "-c", code])
    text = worker.wait_for_text("child=", 30)
    child = int(text.split("child=")[1])
    assert worker_of(worker.pid, {worker.pid}) == worker.pid
    assert wait_until(lambda: worker_of(child, {worker.pid}), 10, "the child's session") == worker.pid
    assert worker_of(os.getpid(), {worker.pid}) is None
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert worker_of(ended.pid, {worker.pid}) is None


VALID = b'{"version": 1, "pid": 4711, "scope_id": "step", "expiration_time": 5.5, "signal": 9}'
HOSTILE = [
    b"[" * 60_000,
    b'{"pid": ' + b"[" * 900 + b"]" * 900 + b"}",
    VALID.replace(b"4711", b"9" * 3000),
    VALID.replace(b"4711", b"99999999999"),
    VALID.replace(b"4711", b"9" * 5000),
    VALID.replace(b"5.5", b"9" * 400),
    VALID.replace(b"5.5", b"NaN"),
    VALID.replace(b"9}", b"65}"),
    VALID.replace(b"step", b"\\ud800"),
    VALID[:-1],
    VALID + VALID,
    b"\xff" * 50,
]


@settings(deadline=None, derandomize=True, max_examples=scaled(100, 300))
@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.integers(0, len(VALID)), st.integers(0, len(VALID)), st.binary(max_size=4)).map(
            lambda cut: VALID[: cut[0]] + cut[2] + VALID[cut[1] :]
        ),
        st.sampled_from(HOSTILE),
    )
)
def test_any_line_is_a_request_or_none(line: bytes) -> None:
    problem = ""
    try:
        request = parse(line)
    except ValueError as error:
        problem = str(error)
    else:
        worker_of(request.pid, ())
        assert not math.isnan(request.expiry_s)
    assert len(problem) < 1000


@pytest.mark.parametrize("line", HOSTILE, ids=range(len(HOSTILE)))
def test_whatever_comes_the_next_request_counts(watchdog: Watchdog, line: bytes) -> None:
    send(watchdog, line + b"\n" + request(1, "a", 5))
    said = watchdog.receive()
    assert all(len(text) < 2000 for text in said)
    for expired in watchdog.expired(1e18):
        worker_of(expired.pid, ())
    assert watchdog.due_s() is None


def test_many_lines_that_are_no_requests_are_counted(watchdog: Watchdog) -> None:
    send(watchdog, b"x\n" * 5000)
    said = watchdog.receive()
    assert len(said) == module.MAX_LINES + 1
    assert said[-1] == f"watchdog: ignored {5000 - module.MAX_LINES} more lines"
    assert watchdog.receive() == []


def test_timers_are_bounded(watchdog: Watchdog, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_TIMERS", 2)
    send(watchdog, b"".join(request(1, scope, 5) for scope in "abc"))
    (complaint,) = watchdog.receive()
    assert "there are 2 timers already" in complaint
    send(watchdog, request(1, "a", -1) + request(1, "c", 7))
    assert watchdog.receive() == []
