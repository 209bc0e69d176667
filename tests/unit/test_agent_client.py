"""A worker's end of the channel to its agent: a worker that would never hear of another generation ends."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from elaunch.failures import ERROR_FILE, summary
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import Generation, GenerationStage
from elaunch.rendezvous.rules.edit import edit_between
from elaunch.wire import Announce, AnnounceEdit, Attach, LineBuffer, Message, Progress, Report, Welcome, decode, encode
from elaunch.workers.agent_client import AgentClient
from tests.helpers import ROOT, child_environment

LIMIT_S = 60.0
TRAIN = encode(Announce(to_json(Generation(2, GenerationStage.TRAIN)).decode()))
EDIT = encode(
    AnnounceEdit(
        to_json(edit_between(Generation(2, GenerationStage.TRAIN), Generation(3, GenerationStage.TRAIN))).decode()
    )
)

WORKER = """
import sys, time
from elaunch.wire import Progress
from elaunch.workers import agent_client

agent_client.GONE_S = 0.2
client = agent_client.AgentClient(sys.argv[1], "a/0#1")

def hear(generation):
    raise RecursionError("nested too deeply")

if sys.argv[2] == "hear":
    client.listen(hear)
print("there", flush=True)
if sys.argv[2] == "close":
    sys.stdin.read(1)
    client.send(Progress(1))
    client.close()
    print("closed", flush=True)
    time.sleep(1)
    sys.exit(7)
if sys.argv[2] == "wait":
    client.wait_beyond(0, 60)
time.sleep(60)
"""


class Worker:
    """A process with a client, and this process as its agent."""

    def __init__(self, folder: Path, what: str) -> None:
        self.error_file = folder / "error.json"
        with socket.socket(socket.AF_UNIX) as server:
            path = str(folder / "agent")
            server.bind(path)
            server.listen()
            server.settimeout(LIMIT_S)
            self.process = subprocess.Popen(
                [sys.executable, "-c", WORKER, path, what],
                cwd=ROOT,
                env=child_environment({ERROR_FILE: str(self.error_file), "ELAUNCH_WORKER": "a/0#1"}),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            self.link, _ = server.accept()
        self.link.settimeout(LIMIT_S)
        message = decode(LineBuffer().feed(self.link.recv(1 << 16))[0])
        assert message == Attach("a/0#1", self.process.pid)
        self.link.sendall(encode(Welcome("token", "127.0.0.1", "a", 0, 1)))
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "there\n"

    def end(self) -> tuple[int, str]:
        _, said = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, said

    def close(self) -> None:
        self.link.close()
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Worker]]:
    started: list[Worker] = []

    def start(what: str) -> Worker:
        started.append(Worker(tmp_path, what))
        return started[-1]

    yield start
    for worker in started:
        worker.close()


def check(worker: Worker, reason: str) -> None:
    code, said = worker.end()
    assert code == 1
    assert f"[elaunch] worker a/0#1 ends: its connection to its agent failed: {reason}" in said
    assert "Traceback" in said
    assert summary(str(worker.error_file)).startswith(
        f"PartFailed: the worker's connection to its agent failed: {reason}"
    )


def test_a_worker_whose_agent_has_hung_up_ends(start: Callable[[str], Worker]) -> None:
    worker = start("train")
    worker.link.close()
    check(worker, "ConnectionError: the agent has hung up")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"nonsense\n", "ProtocolError: not a message"),
        (b"[" * 100_000 + b"\n", "ProtocolError: not a message"),
        (encode(Announce("{}")), "ProtocolError: expected a Generation document"),
        (encode(Announce("[" * 900 + "]" * 900)), "ProtocolError: expected a Generation document"),
        (encode(AnnounceEdit("{}")), "ProtocolError: expected a GenerationEdit document"),
        (EDIT, "ProtocolError: the agent has announced what does not follow from generation none"),
    ],
    ids=range(6),
)
def test_a_worker_that_does_not_understand_its_agent_ends(
    start: Callable[[str], Worker], line: bytes, reason: str
) -> None:
    worker = start("train")
    worker.link.sendall(line)
    check(worker, reason)


def test_a_worker_that_fails_to_hear_of_a_generation_ends(start: Callable[[str], Worker]) -> None:
    worker = start("hear")
    worker.link.sendall(TRAIN)
    check(worker, "RecursionError: nested too deeply")


def test_a_script_that_waits_for_a_generation_is_told(start: Callable[[str], Worker]) -> None:
    worker = start("wait")
    worker.link.close()
    code, said = worker.end()
    assert code == 1
    assert "JobFailed: the agent of this worker has gone" in said


def test_a_client_that_was_closed_ends_nothing(start: Callable[[str], Worker]) -> None:
    worker = start("close")
    assert worker.process.stdin is not None
    worker.process.stdin.write("x")
    worker.process.stdin.flush()
    lines = LineBuffer()
    found = [decode(line) for line in lines.feed(worker.link.recv(1 << 16))]
    assert found == [Progress(1)]
    assert worker.link.recv(1) == b""
    worker.link.close()
    code, said = worker.end()
    assert (code, said) == (7, "")
    assert not os.path.exists(worker.error_file)


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[tuple[AgentClient, socket.socket]]:
    """A client of this process, and the end of its agent."""
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "agent"))
        server.listen()
        with ThreadPoolExecutor(1) as pool:
            making = pool.submit(AgentClient, str(tmp_path / "agent"), "a/0#1")
            link, _ = server.accept()
            link.settimeout(LIMIT_S)
            link.sendall(encode(Welcome("token", "127.0.0.1", "a", 0, 1)))
            client = making.result(LIMIT_S)
        with link:
            link.recv(1 << 16)
            yield client, link
            client.close()


def test_what_is_sent_is_with_the_agent_when_the_call_returns(attached: tuple[AgentClient, socket.socket]) -> None:
    client, link = attached
    link.setblocking(False)
    for number in range(200):
        client.send(Progress(number))
        assert link.recv(1 << 16) == encode(Progress(number))


def test_what_the_socket_does_not_take_follows_in_order(attached: tuple[AgentClient, socket.socket]) -> None:
    client, link = attached
    sent = [Report("step", {"step": number, "text": "x" * 10_000}) for number in range(300)]
    for message in sent:
        client.send(message)
    lines, found = LineBuffer(), list[Message]()
    while len(found) < len(sent):
        found += [decode(line) for line in lines.feed(link.recv(1 << 16))]
    assert found == sent
