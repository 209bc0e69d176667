"""Whoever can reach a port of a job, and has not its token, can neither stop the job nor make it fragile."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil
import pytest

from elaunch.wire import Attach, Evict, Ready, Report, Saved, encode
from elaunch.workers.comm.wire import VERSION
from tests.faults.test_workers import FOUR, left, reference
from tests.helpers import Spawner
from tests.hostile import hostile
from tests.jobs.watch import (
    SCRIPT,
    START_S,
    Node,
    assert_same,
    digests,
    elaunch,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)

STEPS = ("--steps", "60")
LONG = ("--steps", "200", "--sleep", "0.02")
HALF_OPEN = 300
THREE = ("--standalone", "--nproc-per-node=3")
SPOKEN = b"elaunch/%d " % VERSION
LINES = [
    b"[" * 4000 + b"\n",
    b'{"elaunch":1,"token":"\\ud800","from":"a","for":"link"}\n',
    SPOKEN + b"[" * 4000 + b"\n",
    SPOKEN + b"\xff\xfe {}\n",
    SPOKEN + b"1 " + b"[" * 4000 + b"\n",
    SPOKEN + b'1 0123456789abcdef0123456789abcdef {"from": "node0/0#0", "for": "link"}\n{"go": true}\n',
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"\n" * 5000,
    b"x" * 100_000,
    b"",
]


def ports(pid: int) -> list[int]:
    """At which a process listens for TCP connections."""
    found = psutil.Process(pid).net_connections("tcp")
    return [one.laddr.port for one in found if one.status == psutil.CONN_LISTEN]


def sizes(node: Node) -> list[int]:
    """The number of members of each generation that trained."""
    return [len(event["workers"]) for event in node.events("generation") if event["stage"] == "train"]


def ports_of(node: Node) -> list[int]:
    """Of the agent and of its workers."""
    found = [port for pid in (node.agent.pid, *node.pids().values()) for port in ports(pid)]
    assert len(found) >= 1 + len(node.pids()), found
    return found


def say(port: int, line: bytes) -> None:
    """Connect, say this, and hear what comes until the other side hangs up, or has had time to think about it."""
    with socket.create_connection(("127.0.0.1", port), 10) as stranger, contextlib.suppress(OSError):
        stranger.sendall(line)
        stranger.shutdown(socket.SHUT_WR)
        while stranger.recv(1 << 16):
            pass


def survives_a_kill(node: Node, slot: int, members: int) -> None:
    """The worker of a slot is killed; the others go on, and its replacement joins."""
    victim = next(worker for worker in node.members() if f"/{slot}#" in worker)
    os.kill(node.pids()[victim], signal.SIGKILL)
    wait_for(node, partial(left, node, victim), 30, f"a generation without {victim}")
    wait_for_members(node, members)


def ends_as_undisturbed(spawn: Spawner, folder: Path, node: Node, arguments: Sequence[str]) -> None:
    assert node.agent.wait(100) == 0, node.agent.tail()
    expected, samples, _ = reference(spawn, folder, *arguments)
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples


def test_a_job_survives_a_kill_after_whatever_strangers_have_said(spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = (SCRIPT, *STEPS, "--sleep", "0.04", "--crew", "3", "--hold", f"20:{gate}")
    node = elaunch(spawn, tmp_path, *THREE, script=script)
    wait_for_step(node, 3)
    first = node.pids()
    for slot, port in enumerate(ports_of(node)):
        for line in (*LINES, *hostile(slot, LINES, 300)):
            say(port, line)
    assert node.pids() == first, node.agent.tail()
    gate.touch()
    survives_a_kill(node, 1, 3)
    survives_a_kill(node, 0, 3)
    ends_as_undisturbed(spawn, tmp_path, node, STEPS)
    assert "defect" not in node.agent.text()


@pytest.mark.soak
def test_connections_that_say_nothing_do_not_take_a_workers_descriptors(spawn: Spawner, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    script = (SCRIPT, *STEPS, "--sleep", "0.03", "--crew", "3", "--hold", f"50:{gate}")
    limited = ("sh", "-c", 'ulimit -n 1024; exec "$@"', "sh")
    node = elaunch(spawn, tmp_path, *THREE, script=script, within=limited)
    wait_for_step(node, 3)
    target = node.pids()["node0/2#0"]
    (port,) = ports(target)
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
        wait_for_step(node, node.last_step() + 5)
        assert psutil.Process(target).num_fds() < 300
        survives_a_kill(node, 1, 3)
        assert node.pids()["node0/2#0"] == target
    gate.touch()
    ends_as_undisturbed(spawn, tmp_path, node, STEPS)


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        ("dead", "its thread that makes its links failed: RuntimeError: this thread dies"),
        ("deaf", "worker node0/1#0 runs, but refuses the connections of its peers; it is ended"),
    ],
)
def test_a_worker_that_no_peer_can_reach_any_more_is_replaced(
    spawn: Spawner, tmp_path: Path, kind: str, says: str
) -> None:
    gate = tmp_path / "gate"
    # On a busy machine it takes a worker seconds to end, in which the others must not come to the hold.
    script = (SCRIPT, *STEPS, "--sleep", "0.1", "--crew", "3", "--hold", f"50:{gate}", "--link", f"1:5:{kind}")
    node = elaunch(spawn, tmp_path, *THREE, script=script)
    wait_for_step(node, 8)
    if kind == "deaf":
        # It keeps the links that it has; only one that comes finds out.
        os.kill(node.pids()["node0/2#0"], signal.SIGKILL)
    wait_for(node, partial(left, node, "node0/1#0"), 60, "a generation without the worker that cannot be reached")
    wait_for_members(node, 3)
    assert says in node.agent.text()
    assert "node0/0#0" in node.members()
    gate.touch()
    ends_as_undisturbed(spawn, tmp_path, node, STEPS)


@pytest.mark.timeout(240)
def test_links_that_fail_whenever_they_are_made_stop_nothing_for_long(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, *STEPS, "--sleep", "0.01", "--quarrel", "0:5:2")
    node = elaunch(spawn, tmp_path, *THREE, script=script)
    ends_as_undisturbed(spawn, tmp_path, node, STEPS)
    assert "links to worker node0/2#0 failed 3 times in a row, and no step has committed" in node.agent.text()
    assert {"node0/0#0", "node0/1#0"} <= set(node.members())


@pytest.mark.soak
def test_a_job_does_not_mind_strangers_at_its_agents_socket(spawn: Spawner, tmp_path: Path) -> None:
    expected = reference(spawn, tmp_path, *LONG[:2])
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, *LONG))
    wait_for_step(node, 3)
    workers = sorted(node.pids().items())
    victim, pid = workers[1]
    sockets = {str(one.laddr) for one in psutil.Process(node.agent.pid).net_connections("unix")}
    (path,) = [path for path in sockets if re.search(r"/elaunch-\w+/agent$", path)]
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.socket(socket.AF_UNIX)) for _ in range(HALF_OPEN)]
        sent = [
            b"hello\n",
            b"[" * 1_000,
            encode(Report("step", {"kind": 1, "t": [], "generation": {}, "self": 0, "node": "b", "worker": None})),
            encode(Saved(1 << 50)),
            *(encode(Attach(worker, pid)) + encode(Ready("nowhere")) for worker, pid in workers),
            *(encode(Attach(worker, 1)) + encode(Evict(False, "go")) for worker, _ in workers),
            encode(Attach("b/0#0", 1)),
        ]
        for number, stranger in enumerate(strangers):
            stranger.connect(path)  # waits while too many do
            stranger.settimeout(20)
            if number < len(sent):
                socket.send_fds(stranger, [sent[number]], [0, 1, 2, 0, 1, 2])
        for stranger in strangers[: len(sent)]:
            with contextlib.suppress(ConnectionResetError):  # hung up on with something left to read
                assert stranger.recv(100) == b""
        wait_for_step(node, node.last_step() + 5)
        os.kill(pid, signal.SIGKILL)
        # Not one after the other: on a busy machine the replacement may be there before this process looks again.
        wait_for(node, lambda: sizes(node)[-2:] == [3, 4], START_S, "a generation of three, then of four")
    assert node.agent.wait(100) == 0, node.agent.tail()
    text = node.agent.text()
    assert text.count(": not a message: ") == 1
    assert text.count("has not started it; its connection is closed") == 2 * len(workers)
    assert text.count("have named no worker; the oldest are closed") == 1
    assert "Traceback" not in text
    assert [event["worker"] for event in node.events("worker_exited") if event.get("signal")] == [victim]
    assert_same(losses(node), expected[0], 1e-9)
    assert digests(node) == expected[1]
