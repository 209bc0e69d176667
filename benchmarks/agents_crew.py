"""The workers' ends of many agents in one process: what each agent tells its worker, and when; without torch or Python.

A worker (`agents_member.c`) hands its connection to its agent over to this process, which speaks the control protocol
on all of them: it attaches, is ready, and enters each generation as soon as it hears of it.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from elaunch.rendezvous.codec import from_json
from elaunch.rendezvous.membership import Generation, node_of
from elaunch.rendezvous.rules.edit import GenerationEdit, follow
from elaunch.wire import (
    Announce,
    AnnounceEdit,
    Attach,
    Joined,
    Leaving,
    LineBuffer,
    Message,
    Ready,
    Unreachable,
    decode,
    encode,
)

SOURCE = Path(__file__).with_suffix("").parent / "agents_member.c"
HEAD = re.compile(rb'\\"number\\":(\d+),\\"stage\\":\\"(\w+)\\"')
MARK = b'"kind":"' + Announce.__name__.encode()


def compile_member(folder: Path) -> Path:
    """Makes the program that the agents start as their worker; raises `CalledProcessError` without a C compiler."""
    program = folder / "member"
    subprocess.run(["cc", "-O1", "-o", program, SOURCE], check=True)
    return program


class Member:
    """One worker: what its agent has told it so far.

    Attributes:
        name: its identity.
        generation: the newest training generation that it has heard of.
        heard_s: when, by the monotonic clock.
        leaves: whether it is to leave when it hears of a generation next.
    """

    def __init__(self, link: socket.socket) -> None:
        self.link = link
        self.control: socket.socket | None = None
        self.name = ""
        self.pid = 0
        self.generation = 0
        self.heard_s = 0.0
        self.begun_s = time.monotonic()
        self.leaves = False
        self.lines = LineBuffer()

    def say(self, message: Message) -> None:
        if self.control is not None:
            self.control.setblocking(True)
            self.control.sendall(encode(message))
            self.control.setblocking(False)


class Crew:
    """All workers, served by one thread.

    Args:
        path: of the socket at which new workers hand over their connections.
    """

    def __init__(self, path: Path) -> None:
        self.members: dict[str, Member] = {}  # by node
        self.begun = 0
        self.ended = 0
        self._generations: dict[int, Generation] = {}
        self._is_closing = False
        self.changed = threading.Condition()
        self._selector = selectors.DefaultSelector()
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listening.bind(str(path))
        self._listening.listen(4096)
        self._selector.register(self._listening, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._run, name="crew", daemon=True)
        self._thread.start()

    def wait(self, condition: Callable[[dict[str, Member]], bool], limit_s: float) -> bool:
        """Waits until something is true of the workers, by node; returns whether it came to be in time."""
        with self.changed:
            return self.changed.wait_for(lambda: condition(self.members), limit_s)

    def close(self) -> None:
        """Ends the thread; workers end with their agents."""
        self._is_closing = True
        self._thread.join(5.0)

    def _run(self) -> None:
        while not self._is_closing:
            found = self._selector.select(0.1)
            if not found:
                continue
            with self.changed:
                for key, _ in found:
                    if key.data is None:
                        self._accept()
                    else:
                        member, is_control = key.data
                        self._hear(member) if is_control else self._meet(member)
                self.changed.notify_all()

    def _accept(self) -> None:
        link, _ = self._listening.accept()
        self._selector.register(link, selectors.EVENT_READ, (Member(link), False))

    def _meet(self, member: Member) -> None:
        """Takes a worker's connection, or its end."""
        try:
            data, fds, _, _ = socket.recv_fds(member.link, 512, 1)
        except OSError:
            data, fds = b"", []
        if not data:
            self._forget(member)
            return
        member.name = data.decode()
        self.members[node_of(member.name)] = member
        self.begun += 1
        if not fds:
            return  # of torchrun
        member.control = socket.socket(fileno=fds[0])
        self._selector.register(member.control, selectors.EVENT_READ, (member, True))
        member.say(Attach(member.name, 0))
        member.say(Ready(f"127.0.0.1:{1 + len(self.members)}"))

    def _hear(self, member: Member) -> None:
        if member.control is None:
            return  # it ended in the same round
        try:
            data = member.control.recv(1 << 20)
        except OSError:
            data = b""
        if not data:
            self._selector.unregister(member.control)
            member.control.close()
            member.control = None
            return
        for line in member.lines.feed(data):
            found = HEAD.search(line, 0, 400) if MARK in line[:80] else None
            if found is None or found[2] != b"train" or int(found[1]) <= member.generation:
                continue
            member.generation, member.heard_s = int(found[1]), time.monotonic()
            if member.leaves:
                member.say(Leaving(0))
                member.link.send(b"\0")
            elif member.name in self._ids(member.generation, line):
                member.say(Joined(member.generation))

    def _ids(self, number: int, line: bytes) -> Collection[str]:
        """Returns the workers of a generation; read once for all."""
        if number not in self._generations:
            message = decode(line)
            if isinstance(message, Announce):
                generation = from_json(Generation, message.generation.encode())
            else:
                assert isinstance(message, AnnounceEdit)
                edit = from_json(GenerationEdit, message.edit.encode())
                found = follow(self._generations.get(edit.former), edit)
                assert found is not None
                generation = found
            self._generations[number] = generation
        return self._generations[number].ranks.keys()

    def _forget(self, member: Member) -> None:
        self._selector.unregister(member.link)
        member.link.close()
        if member.control is not None:
            self._selector.unregister(member.control)
            member.control.close()
            member.control = None
        if self.members.get(node_of(member.name)) is member:
            del self.members[node_of(member.name)]
        self.ended += 1


def find_dead(teller: Member, lost: Member) -> None:
    """Has a worker find out that a peer's process is dead, as it would by their link."""
    teller.say(Unreachable(teller.generation, lost.name, refused=True))


def cpu_s(pids: Iterable[int]) -> float:
    """Returns the processor seconds of processes, by the clocks that the kernel keeps of them."""
    total = 0.0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += time.clock_gettime((~pid) << 3 | 2)
    return total


def wait_calm(pids: list[int], limit_s: float) -> None:
    """Waits until agents have done what they can do without etcd: they hardly use processor time any more."""
    end_s, last_s = time.monotonic() + limit_s, cpu_s(pids)
    while time.monotonic() < end_s:
        time.sleep(1.0)
        now_s = cpu_s(pids)
        if now_s - last_s < 0.2 + 0.008 * len(pids):
            return
        last_s = now_s
