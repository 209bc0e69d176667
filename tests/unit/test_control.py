"""The agent's control socket: whatever a connection sends, or does not send, ends that connection and nothing else."""

from __future__ import annotations

import array
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from elaunch.accepting import PAUSE_S
from elaunch.agent import control
from elaunch.agent.agent import Agent
from elaunch.agent.config import AgentConfig, OutputSettings, RendezvousSettings, WorkerProgram
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.slots import SlotState
from elaunch.agent.supervisor import Supervisor
from elaunch.detect.heartbeat import FILE_BYTES
from elaunch.rendezvous.cluster.inquiry import new_challenge, question_line, read_answer
from elaunch.rendezvous.membership import Generation, GenerationStage
from elaunch.rendezvous.memory import MemoryStore
from elaunch.wire import (
    Attach,
    Evict,
    Joined,
    Logged,
    Message,
    Progress,
    Ready,
    Report,
    Saved,
    Unreachable,
    decode,
    encode,
)
from tests.helpers import ROOT, child_environment

WORKER = "a/0#0"


class NoForkServer:
    """Stands for the fork server: it starts nothing and says nothing."""

    def __init__(self) -> None:
        self.link, self._other = socket.socketpair()

    def remove_at_the_end(self, folder: str) -> None:
        pass

    def signal(self, worker: str, number: int) -> None:
        pass

    def late(self, now_s: float) -> tuple[str, bool]:
        return "", False

    def close(self) -> None:
        self.link.close()
        self._other.close()


class Node:
    """A real agent whose loop the test turns, with workers that this process stands for."""

    def __init__(self, folder: Path) -> None:
        self.events = folder / "events.jsonl"
        config = AgentConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=2,
            job="job",
            rendezvous=RendezvousSettings("standalone"),
            program=WorkerProgram("train.py"),
            node="a",
            output=OutputSettings(events=str(self.events)),
        )
        self._forkserver = NoForkServer()
        self.agent = Agent(config, MemoryStore, cast(Supervisor, self._forkserver), "127.0.0.1")
        for slot in self.agent._life.slots:
            slot.worker, slot.state, slot.pid = f"a/{slot.local_rank}#0", SlotState.STARTING, os.getpid()
        self.agent._life.generation = Generation(3, GenerationStage.START)
        self.control = self.agent._control
        self._links: list[socket.socket] = []

    def turn(self, times: int = 3) -> None:
        for _ in range(times):
            self.agent._inbox.post(lambda life: [])  # so that a turn with nothing to do does not wait
            self.agent._turn()

    def connect(self) -> socket.socket:
        link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        link.settimeout(20)
        link.connect(self.control.path)
        self._links.append(link)
        self.turn(2)
        return link

    def attach(self, worker: str = WORKER, pid: int = 1) -> socket.socket:
        link = self.connect()
        assert self.send(link, Attach(worker, pid))
        assert b"Welcome" in link.recv(1 << 16)
        return link

    def send(self, link: socket.socket, *messages: Message | bytes) -> bool:
        """Send all at once; whether the agent keeps the connection."""
        link.sendall(b"".join(one if isinstance(one, bytes) else encode(one) for one in messages))
        self.turn()
        return self.keeps(link)

    def keeps(self, link: socket.socket) -> bool:
        link.setblocking(False)
        try:
            return link.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        finally:
            link.settimeout(20)

    def logged(self, kind: str) -> list[dict[str, Any]]:
        events = [json.loads(line) for line in self.events.read_text().splitlines()]
        return [event for event in events if event["kind"] == kind]

    def close(self) -> None:
        for link in self._links:
            link.close()
        agent = self.agent
        agent._outputs.close()
        agent._control.close()
        agent._watches.close()
        agent._liveness.close()
        agent._journal.close()
        agent._selector.close()
        os.close(agent._inbox._read_fd)
        os.close(agent._inbox._write_fd)
        self._forkserver.close()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


HOSTILE = {
    "no JSON": b"hello\n",
    "no text": b"\xff\xfe\n",
    "nested": b"[" * 3000 + b"\n",
    "nested in a message": b'{"v":' + b"[" * 900 + b"]" * 900 + b',"kind":"Attach","body":{}}\n',
    "huge number": b'{"v":1,"kind":"Attach","body":{"worker":"a/0#0","pid":' + b"9" * 3900 + b"}}\n",
    "half a character": b'{"v":1,"kind":"Attach","body":{"worker":"\\ud800","pid":1}}\n',
    "another worker's": encode(Attach("b/0#0", 1)),
    "nobody's": encode(Attach("", 1)),
    "no Attach": encode(Report("step", {"step": 1})),
    "no Attach, but a checkpoint": encode(Saved(1 << 40)),
    "long without an end": b"x" * 5000,
}


@pytest.mark.parametrize("what", HOSTILE)
def test_who_does_not_begin_as_a_worker_does_is_hung_up_on(
    node: Node, what: str, capfd: pytest.CaptureFixture[str]
) -> None:
    worker = node.attach()
    stranger = node.connect()
    assert not node.send(stranger, HOSTILE[what])
    assert capfd.readouterr().err.count(f"a connection of process {os.getpid()}: ") == 1
    assert node.send(worker, Report("step", {"step": 7}))
    assert node.logged("step")[-1]["step"] == 7
    assert node.agent._life.saved is None


@pytest.mark.parametrize(
    "message",
    [
        Attach(WORKER, 1),
        Attach("a/1#0", 1),
        Ready(""),
        Ready("somewhere"),
        Ready("127.0.0.1:99999"),
        Ready("h" * 400 + ":1"),
        Ready("127.0.0.1:²"),
        Joined(4),
        Joined(1 << 62),
        b'{"v":1,"kind":"Joined","body":{"generation":-1}}\n',
        b'{"v":1,"kind":"Saved","body":{"step":' + b"9" * 4000 + b"}}\n",
        b'{"v":1,"kind":"Unreachable","body":{"generation":1e99,"peer":"a/1#0","refused":true,"silent":false}}\n',
        Report("slow", {"link": 3}),
    ],
    ids=repr,
)
def test_what_no_worker_sends_ends_its_connection_and_no_other(
    node: Node, message: Message | bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    worker, other = node.attach(), node.attach("a/1#0")
    assert not node.send(worker, message)
    assert f"worker {WORKER}: " in capfd.readouterr().err
    assert node.send(other, Ready("127.0.0.1:1"))
    assert [slot.state for slot in node.agent._life.slots] == [SlotState.ATTACHED, SlotState.READY]
    assert list(node.control.connections) == ["a/1#0"]


def test_an_unforeseen_error_ends_one_connection_with_a_traceback(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(life: Lifecycle, worker: str) -> None:
        raise ZeroDivisionError("a defect")

    worker, other = node.attach(), node.attach("a/1#0")
    monkeypatch.setattr(Lifecycle, "on_progress", broken)
    assert not node.send(worker, Progress(1))
    said = capfd.readouterr().err
    assert f"worker {WORKER}: what it sent cannot be taken" in said
    assert "Traceback" in said
    assert node.keeps(other)


@pytest.mark.parametrize("name", ["kind", "t", "generation", "node", "self", "worker", "fields"])
@pytest.mark.parametrize("value", [7, "text", None, [1], {"a": 1}, float("nan")], ids=repr)
def test_a_report_may_have_any_fields(node: Node, name: str, value: object) -> None:
    worker = node.attach()
    assert node.send(worker, Report("step", {name: value, "step": 2}))
    (event,) = node.logged("step")
    assert event["node"] == "a"
    assert event["step"] == 2
    assert isinstance(event["t"], int | float)
    assert event["generation"] == (value if name == "generation" and value == 7 else 3)


def test_a_worker_is_told_up_to_which_step_the_log_has_its_reports(node: Node) -> None:
    link = node.attach()
    steps = [Report("step", {"step": step, "generation": 3}) for step in (2, 3)]
    assert node.send(link, *steps, Report("slow", {"step": 9}), Report("step", {"step": -1, "generation": 3}))
    assert link.recv(1 << 16) == encode(Logged(3, 3))
    assert [event["step"] for event in node.logged("step")] == [2, 3, -1]


def test_an_excuse_is_one_short_line(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    worker = node.attach()
    node.send(worker, Ready("127.0.0.1:1"), Joined(3))
    assert node.send(worker, Evict(True, "x\n" * 10_000))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "leaves at the next" in line]
    assert len(line) < 500


def test_what_a_worker_sent_last_is_in_the_log_before_its_end_is_told(node: Node) -> None:
    link = node.attach()
    link.sendall(encode(Report("step", {"step": 7})) + encode(Report("step", {"step": 8})))
    link.close()
    node.agent._on_forkserver({"exited": WORKER, "pid": 1, "exitcode": None, "signal": 9, "t": 5.0})
    assert [event["step"] for event in node.logged("step")] == [7, 8]
    assert node.agent._life.doc().progress.logged == 9


def test_others_may_say_what_they_like_of_peers(node: Node) -> None:
    worker = node.attach()
    assert node.send(worker, Unreachable(1 << 62, "x" * 1000, True), Unreachable(0, "", False, True))


def test_a_worker_whose_process_is_known_is_nobody_else(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    sleeping = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        node.agent._life.slots[0].pid = sleeping.pid
        stranger = node.connect()
        assert not node.send(stranger, Attach(WORKER, sleeping.pid))
        assert f"whose process {sleeping.pid} has not started it" in capfd.readouterr().err
    finally:
        sleeping.communicate(b"\n")


SAYS = """
import socket, sys
from elaunch.wire import Attach, encode
link = socket.socket(socket.AF_UNIX)
link.connect(sys.argv[1])
link.sendall(encode(Attach(sys.argv[2], 1)))
print(len(link.recv(10000)))
"""


@pytest.mark.parametrize("new_session", [False, True])
def test_a_process_that_a_worker_starts_may_be_the_worker(node: Node, new_session: bool) -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", SAYS, node.control.path, WORKER],
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
        start_new_session=new_session,
    )
    while child.poll() is None:
        node.turn()
    assert int(child.communicate()[0]) > 0


def test_the_workers_own_process_takes_its_name_back(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    node.agent._life.slots[0].pid = 0  # its start has not been heard of yet
    child = subprocess.Popen(
        [sys.executable, "-c", SAYS + "sys.stdout.flush(); link.recv(1)", node.control.path, WORKER],
        cwd=ROOT,
        env=child_environment(),
        stdout=subprocess.PIPE,
    )
    while not node.control.connections:
        node.turn()
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, start_new_session=True)
    try:
        node.agent._life.slots[0].pid = other.pid
        node.control.connections[WORKER].pid = child.pid
        own = node.connect()
        next(iter(node.control._strangers)).pid = other.pid
        assert node.send(own, Attach(WORKER, 1))
        assert f"worker {WORKER} takes the place of process {child.pid}" in capfd.readouterr().err
        child.communicate(timeout=20)
    finally:
        other.communicate(b"\n")


def test_a_worker_that_has_hung_up_may_come_again(node: Node) -> None:
    first = node.attach()
    second = node.connect()
    second.sendall(encode(Attach(WORKER, 1)))
    first.close()
    node.turn()
    assert node.keeps(second)
    assert len(node.control.connections) == 1


def test_connections_that_say_nothing_are_bounded(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    worker = node.attach()
    before = open_fds()
    silent = [node.connect() for _ in range(control.MAX_STRANGERS + 30)]
    assert [node.keeps(link) for link in silent] == [False] * 30 + [True] * control.MAX_STRANGERS
    assert capfd.readouterr().err.count("have named no worker; the oldest are closed") == 1
    assert node.keeps(worker)
    assert node.keeps(node.attach("a/1#0"))
    assert open_fds() <= before + len(silent) + control.MAX_STRANGERS + 2


def test_a_connection_has_so_long_to_name_its_worker(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    worker, silent = node.attach(), node.connect()
    silent.sendall(b'{"v":1,')
    node.turn()
    assert node.keeps(silent)
    due_s = node.control.due_s
    assert due_s is not None
    node.control.on_time(due_s)
    assert not node.keeps(silent)
    assert node.keeps(worker)
    assert node.control.due_s is None


def test_the_end_closes_what_has_named_no_worker_too(node: Node) -> None:
    silent = node.connect()
    node.control.close()
    assert not node.keeps(silent)
    node.agent._control = control.ControlServer(node.agent._selector, node.agent._journal.say)


def send_fds(link: socket.socket, data: bytes, fds: list[int]) -> None:
    link.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])


@pytest.mark.parametrize("count", [1, 2, 3, 50])
def test_descriptors_that_are_no_heartbeat_are_closed(
    node: Node, count: int, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    link = node.connect()
    before = open_fds()
    send_fds(link, encode(Attach(WORKER, 1)), [read] * count)
    node.turn()
    assert open_fds() == before
    assert node.keeps(link)
    assert f"worker {WORKER} is not watched for hangs" in capfd.readouterr().err
    node.agent._act(node.agent._watches.check_hangs())
    os.close(read)
    os.close(write)


def test_only_the_first_message_brings_descriptors(node: Node, capfd: pytest.CaptureFixture[str]) -> None:
    worker = node.attach()
    before = open_fds()
    send_fds(worker, encode(Report("step", {})), [0, 1])
    node.turn()
    assert not node.keeps(worker)
    assert "only the first message brings some" in capfd.readouterr().err
    assert open_fds() == before - 1  # of the connection itself


def test_parts_of_a_first_message_bring_no_more_than_two(node: Node) -> None:
    link = node.connect()
    before = open_fds()
    for _ in range(2):
        send_fds(link, b" ", [0, 1])
        node.turn()
    assert open_fds() == before - 1
    assert not node.keeps(link)


@pytest.mark.parametrize("content", [b"", b"\xff" * FILE_BYTES, os.urandom(FILE_BYTES), bytes(FILE_BYTES)])
def test_a_heartbeat_of_any_content_is_looked_at(node: Node, content: bytes) -> None:
    fds = [os.memfd_create("elaunch-test") for _ in range(2)]
    os.write(fds[0], content)
    link = node.connect()
    send_fds(link, encode(Attach(WORKER, 1)), fds)
    node.turn()
    assert WORKER in node.agent._watches._hangs._watched
    node.agent._act(node.agent._watches.check_hangs())
    assert node.keeps(link)
    for fd in fds:
        os.close(fd)


class NoMore:
    """A listening socket for whose connections the system has no descriptors."""

    def __init__(self, listening: socket.socket) -> None:
        self._socket = listening
        self.short = True
        self.asked = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.asked += 1
        if self.short:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self._socket.accept()

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("which", ["control", "door"])
def test_without_descriptors_the_agent_pauses_and_then_accepts(
    node: Node, which: str, capfd: pytest.CaptureFixture[str]
) -> None:
    accepting = node.control._accepting if which == "control" else node.agent._liveness._accepting
    listening = NoMore(accepting._socket)
    accepting._socket = cast(socket.socket, listening)
    link = socket.socket(socket.AF_UNIX if which == "control" else socket.AF_INET)
    link.settimeout(20)
    link.connect(node.control.path if which == "control" else listening._socket.getsockname())
    node.turn(10)
    assert listening.asked == 1
    assert capfd.readouterr().err.count("new connections wait") == 1
    listening.short = False
    due_s = accepting.due_s
    assert due_s is not None
    assert due_s <= time.monotonic() + PAUSE_S
    accepting.on_time(due_s)
    node.turn()
    assert listening.asked > 1
    if which == "control":
        assert node.send(link, Attach(WORKER, 1))
    else:
        node.agent._participant._session.token = "token"
        address, challenge = f"127.0.0.1:{link.getpeername()[1]}", new_challenge()
        link.sendall(question_line("token", address, challenge))
        node.turn()
        told = b"".join(iter(lambda: link.recv(4096), b""))  # nobody is kept there
        assert read_answer(told, "token", address, challenge).node == "a"
    link.close()


def test_a_worker_that_reads_nothing_is_hung_up_on(
    node: Node, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(control, "MAX_UNSENT_BYTES", 1 << 20)
    link = node.attach()
    connection = node.control.connections[WORKER]
    for _ in range(40):
        connection.send(Report("x", {"text": "y" * 60_000}))
    assert connection.closed
    assert "does not read" in capfd.readouterr().err
    while link.recv(1 << 20):
        pass


def test_a_long_line_in_small_parts_costs_its_length(node: Node) -> None:
    """Each byte once: were all of it copied for each part, this would be a terabyte."""
    worker = node.attach()
    connection = node.control.connections[WORKER]
    for _ in range(1 << 18):
        connection._lines.feed(b"x" * 60)
    assert decode(connection._lines.feed(b"\n" + encode(Progress(1)))[1]) == Progress(1)
    assert node.keeps(worker)


@pytest.mark.parametrize("line", [b"nonsense\n", b"3\n", b'{"started": "a/0#0"}\n', b"[" * 5000 + b"\n"])
def test_a_fork_server_that_nobody_understands_ends_the_node_with_the_reason(tmp_path: Path, line: bytes) -> None:
    node = Node(tmp_path)
    supervisor = Supervisor.__new__(Supervisor)
    supervisor.link, supervisor._rest, supervisor._groups = node._forkserver.link, b"", set()
    node._forkserver._other.sendall(line)
    node.agent._serve(supervisor, 0)
    assert node.agent._exit is not None
    assert node.agent._exit.code == 1
    assert "says what nobody understands" in node.agent._exit.text
    node.close()
