"""Links and groups between real processes: what remains when one of them is killed or stopped.

The processes come from a *fork server*: it has imported torch and forks on request, so that many are cheap.
Each worker obeys JSON lines on a socket: `interrupt` at once, everything else one after the other.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from elaunch.errors import GenerationChanged, LinkLost
from elaunch.workers.comm.group import Group, even_counts, neighbours
from elaunch.workers.comm.transport import Transport
from tests.helpers import ROOT, child_environment

PATIENCE_S = 60.0
BIG = 8 << 20


def contribution(member: str, length: int, dtype: str = "float32") -> torch.Tensor:
    """What a worker brings to an all-reduce; everybody can work it out."""
    generator = torch.Generator().manual_seed(sum(member.encode()) * 7919 + length)
    return torch.randn(length, generator=generator, dtype=torch.float64).mul(8).to(getattr(torch, dtype))


def expected_digest(members: Sequence[str], length: int, dtype: str = "float32") -> str:
    """The sum added up in the documented order."""
    size = len(members)
    chunks = []
    counts = even_counts(length, size)
    for owner, pieces in enumerate(zip(*[contribution(m, length, dtype).split(counts) for m in members], strict=True)):
        first = 0 if size <= 16 else owner + 1
        total = pieces[first % size].clone()
        for step in range(1, size):
            total = total + pieces[(first + step) % size]
        chunks.append(total)
    return digest(torch.cat(chunks))


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.view(torch.uint8).numpy().tobytes()).hexdigest()


# The processes' side.


def forkserver() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        worker, port = line.split()
        if os.fork() == 0:
            serve(worker, int(port))


def serve(worker: str, port: int) -> None:
    """One worker's life; ends with the control connection."""
    control = socket.create_connection(("127.0.0.1", port)).makefile("rw")
    transport = Transport(worker, "secret")
    orders: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def listen() -> None:
        for line in control:
            order = json.loads(line)
            if order["do"] == "interrupt":
                transport.interrupt(order["generation"])
            else:
                orders.put(order)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    answer: dict[str, Any] = {"worker": worker, "pid": os.getpid(), "address": transport.address}
    groups: dict[int, Group] = {}
    while True:
        control.write(json.dumps(answer) + "\n")
        control.flush()
        order = orders.get()
        try:
            answer = obey(transport, groups, order)
        except GenerationChanged as error:
            answer = {"interrupted": error.generation}
        except LinkLost as error:
            answer = {"lost": error.peer}
        except BaseException as error:
            answer = {"error": repr(error)}


def obey(transport: Transport, groups: dict[int, Group], order: dict[str, Any]) -> dict[str, Any]:
    generation, members = order["generation"], order["members"]
    if order["do"] == "connect":
        near = {transport.worker, *neighbours(list(members), transport.worker)}
        transport.connect({m: a for m, a in members.items() if m in near}, generation=generation, timeout_s=PATIENCE_S)
        return {"peers": transport.peers}
    if order["do"] == "prepare":
        transport.prepare(members)
        return {}
    group = groups.setdefault(generation, Group(transport, generation, list(members)))
    if order["do"] == "all_reduce":
        tensor = contribution(transport.worker, order["length"], order["dtype"])
        group.all_reduce(tensor)
        return {"digest": digest(tensor)}
    if order["do"] == "all_reduce_forever":
        tensor = torch.zeros(order["length"])
        while True:
            group.all_reduce(tensor)
    raise ValueError(order["do"])


# The test's side.


class Worker:
    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(PATIENCE_S)
        self._connection = connection
        self._lines = connection.makefile("rw")
        hello = self.answer()
        self.name, self.pid, self.address = hello["worker"], hello["pid"], hello["address"]

    def tell(self, do: str, generation: int, members: Sequence[Worker] = (), **more: Any) -> None:
        order = {
            "do": do,
            "generation": generation,
            "members": {member.name: member.address for member in members},
            **more,
        }
        self._lines.write(json.dumps(order) + "\n")
        self._lines.flush()

    def answer(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self._lines.readline())
        return found

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            self._lines.close()
        self._connection.close()


class Crew:
    """Starts workers, and ends all it started."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._forkserver = process
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(PATIENCE_S)
        self._started = 0
        self._all: list[Worker] = []
        self.number = 0

    def start(self, count: int) -> list[Worker]:
        assert self._forkserver.stdin is not None
        for _ in range(count):
            self._forkserver.stdin.write(f"a/{self._started}#0 {self._listener.getsockname()[1]}\n")
            self._started += 1
        self._forkserver.stdin.flush()
        fresh = sorted((Worker(self._listener.accept()[0]) for _ in range(count)), key=lambda one: one.pid)
        self._all += fresh
        return fresh

    def generation(self, members: Sequence[Worker]) -> list[Worker]:
        """Announces the next number to the members and connects them."""
        self.number += 1
        for member in members:
            member.tell("interrupt", self.number)
        for answer in self.ask(members, "connect"):
            assert "peers" in answer, answer
        return list(members)

    def ask(self, members: Sequence[Worker], do: str, **more: Any) -> list[dict[str, Any]]:
        for member in members:
            member.tell(do, self.number, members, **more)
        return [member.answer() for member in members]

    def check_sum(self, members: Sequence[Worker], length: int, dtype: str = "float32") -> None:
        answers = self.ask(members, "all_reduce", length=length, dtype=dtype)
        wanted = expected_digest([member.name for member in members], length, dtype)
        assert answers == [{"digest": wanted}] * len(members)

    def end(self) -> None:
        for worker in self._all:
            worker.end()
        self._listener.close()


@pytest.fixture(scope="module")
def forkserver_process() -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.integration.test_comm_processes"],
        stdin=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=child_environment(),
    )
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def crew(forkserver_process: subprocess.Popen[str]) -> Iterator[Crew]:
    made = Crew(forkserver_process)
    try:
        yield made
    finally:
        made.end()


def test_all_reduce_equals_the_reference_for_one_to_nine_members(crew: Crew) -> None:
    workers = crew.start(9)
    for size in range(1, 10):
        members = crew.generation(workers[:size])
        for length in (0, 1, size - 1, size + 1, 1000, 300_007):
            crew.check_sum(members, length)


def test_all_reduce_equals_the_reference_in_a_ring_of_seventeen(crew: Crew) -> None:
    members = crew.generation(crew.start(17))
    for length in (0, 5, 18, 300_007):
        crew.check_sum(members, length)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int64"])
def test_all_reduce_of_other_types(crew: Crew, dtype: str) -> None:
    members = crew.generation(crew.start(3))
    for length in (2, 100_003):
        crew.check_sum(members, length, dtype)


@pytest.mark.parametrize("length", [10, BIG])
def test_survivors_of_a_killed_worker_go_on_over_the_same_links(crew: Crew, length: int) -> None:
    workers = crew.generation(crew.start(4))
    for worker in workers:
        worker.tell("all_reduce_forever", crew.number, workers, length=length)
    victim = workers[1]
    survivors = [worker for worker in workers if worker is not victim]
    os.kill(victim.pid, signal.SIGKILL)
    # Nobody told them: every survivor waits for the victim itself.
    assert [worker.answer() for worker in survivors] == [{"lost": victim.name}] * 3
    crew.generation(survivors)
    crew.check_sum(survivors, 100_003)


def test_a_stopped_worker_holds_the_others_until_they_are_interrupted(crew: Crew) -> None:
    workers = crew.generation(crew.start(4))
    stopped, rest = workers[0], workers[1:]
    os.kill(stopped.pid, signal.SIGSTOP)
    for worker in rest:
        worker.tell("all_reduce", crew.number, workers, length=BIG, dtype="float32")
    for worker in rest:
        worker.tell("interrupt", crew.number + 1)
    assert [worker.answer() for worker in rest] == [{"interrupted": crew.number + 1}] * 3
    crew.generation(rest)
    crew.check_sum(rest, 100_003)

    probing = Transport("test/0#0", "secret")
    try:
        assert probing.probe(stopped.address, 0.05) == "busy"
        assert probing.probe(rest[0].address, PATIENCE_S) == "alive"
        os.kill(stopped.pid, signal.SIGCONT)
        assert probing.probe(stopped.address, PATIENCE_S) == "alive"
    finally:
        probing.close()


def test_sums_are_right_after_any_interruption(crew: Crew) -> None:
    workers = crew.start(4)
    chance = random.Random(5)
    for _ in range(60):
        members = crew.generation(chance.sample(workers, chance.randrange(2, 5)))
        for worker in members:
            worker.tell("all_reduce_forever", crew.number, members, length=BIG // 8)
        for _ in range(chance.randrange(100_000)):
            pass
        chance.shuffle(members)
        for worker in members:
            worker.tell("interrupt", crew.number + 1)
        assert [worker.answer() for worker in members] == [{"interrupted": crew.number + 1}] * len(members)
        crew.check_sum(crew.generation(members), 20_011)


def test_a_joiner_is_linked_while_the_others_work(crew: Crew) -> None:
    workers = crew.start(4)
    old, joiner = crew.generation(workers[:3]), workers[3]
    for worker in old:
        worker.tell("all_reduce_forever", crew.number, old, length=1000)
    # The joiner comes last in the order, so it dials, and the others need not know.
    joiner.tell("connect", crew.number, workers)
    assert joiner.answer() == {"peers": sorted(worker.name for worker in old)}
    crew.number += 1
    for worker in workers:
        worker.tell("interrupt", crew.number)
    assert [worker.answer() for worker in old] == [{"interrupted": crew.number}] * 3
    crew.check_sum(crew.generation(workers), 100_003)


if __name__ == "__main__":
    forkserver()
