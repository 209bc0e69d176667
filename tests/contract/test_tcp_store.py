"""What torch's own client of a TCPStore hears from torch's server, and from the one that the agent runs."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch.distributed as dist

from elaunch.agent.tcp_store.server import DONE, EMPTY, SERVE
from tests.helpers import ROOT

SHORT = timedelta(milliseconds=200)
LONG = timedelta(seconds=30)

Client = Callable[[], Any]  # torch's stubs lack half of a store's methods


# A process of its own: some methods of torch's client hold the interpreter's lock while they wait for the server.
SERVER = """
import socket, sys
from elaunch.agent.tcp_store.server import StoreServer
StoreServer(socket.socket(fileno=int(sys.argv[1]))).run()
"""


@dataclass
class Server:
    """The agent's server of a store, and the agent's end of its link."""

    link: socket.socket
    port: int = 0

    def tell(self, order: bytes, *descriptors: int) -> None:
        socket.send_fds(self.link, [order], list(descriptors))
        assert self.link.recv(1) == DONE

    def serve(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            self.tell(SERVE, listener.fileno())


@contextmanager
def own_server() -> Iterator[Server]:
    ours, theirs = socket.socketpair()
    ours.settimeout(30)
    number = theirs.fileno()
    with theirs:
        process = subprocess.Popen([sys.executable, "-c", SERVER, str(number)], pass_fds=[number], cwd=ROOT)
    try:
        server = Server(ours)
        server.serve()
        yield server
    finally:
        ours.close()
        assert process.wait(30) == 0


def connect(port: int) -> Any:
    return dist.TCPStore("127.0.0.1", port, None, False, LONG, wait_for_workers=False)


@pytest.fixture(params=["torch", "agent"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    """Makes another client of one store."""
    if request.param == "torch":
        server = dist.TCPStore("127.0.0.1", 0, None, True, LONG, wait_for_workers=False)
        yield lambda: connect(server.port)
        return
    with own_server() as own:
        yield lambda: connect(own.port)


def later(action: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=action)
    thread.start()
    return thread


def test_what_one_sets_another_gets(client: Client) -> None:
    a, b = client(), client()
    a.set("key", "\0\xff value")
    assert b.get("key") == "\0\xff value".encode()
    a.set("key", "")
    assert b.get("key") == b""


def test_large_values_arrive_whole(client: Client) -> None:
    value = "".join(map(chr, range(128))) * (7 << 12)
    client().set("large", value)
    assert client().get("large") == value.encode()


def test_a_get_waits_for_the_value(client: Client) -> None:
    a, b = client(), client()
    got: list[bytes] = []
    thread = later(lambda: got.append(a.get("later")))
    with pytest.raises(dist.DistStoreError):
        b.wait(["never"], SHORT)
    assert not got
    b.set("later", "here")
    thread.join(30)
    assert got == [b"here"]


def test_a_wait_for_several_keys_ends_with_the_last(client: Client) -> None:
    a, b = client(), client()
    b.set("one", "1")
    over = threading.Event()

    def wait() -> None:
        a.wait(["one", "two", "three", "three"], LONG)
        over.set()

    thread = later(wait)
    b.add("two", 2)
    assert not over.wait(0.1)
    b.append("three", "3")
    thread.join(30)
    assert over.is_set()


def test_a_wait_that_has_timed_out_leaves_nothing_behind(client: Client) -> None:
    a, b = client(), client()
    for _ in range(3):
        with pytest.raises(dist.DistStoreError):
            a.wait(["x", "y"], SHORT)
    b.set("x", "1")
    b.set("y", "2")
    assert a.get("x") == b"1"
    assert a.add("z", 1) == 1


def test_numbers_are_added(client: Client) -> None:
    a, b = client(), client()
    assert (a.add("n", 5), b.add("n", -7), a.get("n")) == (5, -2, b"-2")
    a.set("n", "40")
    assert b.add("n", 2) == 42


def test_a_value_is_set_if_it_is_what_was_expected(client: Client) -> None:
    a = client()
    assert a.compare_set("key", "something", "new") == b"something"
    assert not a.check(["key"])
    assert a.compare_set("key", "", "first") == b"first"
    assert a.compare_set("key", "other", "second") == b"first"
    assert a.compare_set("key", "first", "second") == b"second"
    assert a.get("key") == b"second"


def test_keys_are_counted_checked_listed_and_deleted(client: Client) -> None:
    a = client()
    before = a.num_keys()
    a.set("a", "1")
    a.set("b", "2")
    assert a.num_keys() == before + 2
    assert a.check(["a", "b"])
    assert not a.check(["a", "c"])
    assert {"a", "b"} <= set(a.list_keys())
    assert a.delete_key("a")
    assert not a.delete_key("a")
    assert not a.check(["a"])


def test_several_values_are_set_and_got_at_once(client: Client) -> None:
    a, b = client(), client()
    keys = [f"key {number}" for number in range(200)]
    values = [f"value {number}" * number for number in range(200)]
    a.multi_set(keys, values)
    assert b.multi_get(keys) == [value.encode() for value in values]


def test_queues_hand_each_value_to_one(client: Client) -> None:
    a, b = client(), client()
    a.queue_push("queue", "1")
    a.queue_push("queue", "2")
    assert a.queue_len("queue") == 2
    assert b.check(["queue"])
    assert (a.queue_pop("queue"), b.queue_pop("queue")) == (b"1", b"2")
    assert b.queue_len("queue") == 0
    got: list[bytes] = []
    thread = later(lambda: got.append(a.queue_pop("queue")))
    b.queue_push("queue", "3")
    thread.join(30)
    assert got == [b"3"]
    with pytest.raises(dist.QueueEmptyError):
        b.queue_pop("queue", block=False)


def test_a_barrier_lets_all_go_when_the_last_has_come(client: Client) -> None:
    stores = [client() for _ in range(3)]
    over = [threading.Event() for _ in stores[:2]]

    def come(number: int) -> None:
        stores[number].barrier("b", 3, LONG)
        over[number].set()

    threads = [later(partial(come, number)) for number in range(2)]
    assert not over[0].wait(0.1)
    stores[2].barrier("b", 3, LONG)
    for thread in threads:
        thread.join(30)
    assert all(event.is_set() for event in over)
    with pytest.raises(dist.DistStoreError):
        stores[0].barrier("alone", 2, SHORT)
    assert stores[0].add("n", 1) == 1


def test_prefixes_and_clones_work(client: Client) -> None:
    a = client()
    dist.PrefixStore("attempt", a).set("key", "1")
    assert a.clone().get("attempt/key") == b"1"


def test_a_client_that_is_gone_wakes_nobody(client: Client) -> None:
    a, b = client(), client()
    with socket.socket() as raw:
        raw.connect(("127.0.0.1", b.port))
        # VALIDATE, then WAIT for the key "k"
        raw.sendall(b"\0\xce\xf7\x85\x3c" + b"\6" + (1).to_bytes(8, "little") * 2 + b"k")
    a.set("k", "1")
    assert b.get("k") == b"1"


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"\0\0\0\0\0",
        b"\0\xce\xf7\x85\x3c\xff",
        b"\0\xce\xf7\x85\x3c\1" + b"\xff" * 8,
        b"\0\xce\xf7\x85\x3c\6" + b"\xff" * 8,
        b"\0\xce\xf7\x85\x3c\4" + (5).to_bytes(8, "little") + b"/text" + (1).to_bytes(8, "little"),
    ],
    ids=["http", "other magic", "unknown command", "long key", "many keys", "no number"],
)
def test_a_client_that_makes_no_sense_is_dropped_and_the_others_stay(noise: bytes) -> None:
    with own_server() as server:
        store = connect(server.port)
        store.set("text", "no number")
        with socket.create_connection(("127.0.0.1", server.port), 30) as raw:
            raw.sendall(noise)
            assert raw.recv(1) == b""
        assert store.get("text") == b"no number"


def test_commands_may_come_byte_by_byte() -> None:
    with own_server() as server, socket.create_connection(("127.0.0.1", server.port), 30) as raw:
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        key = (3).to_bytes(8, "little") + b"key"
        said = b"\0\xce\xf7\x85\x3c" + b"\1" + key + (5).to_bytes(8, "little") + b"value" + b"\3" + key + b"\x0dping"
        for byte in said:
            raw.sendall(bytes([byte]))
        expected = (5).to_bytes(8, "little") + b"value" + b"ping"
        heard = b""
        while len(heard) < len(expected):
            heard += raw.recv(64)
        assert heard == expected


def test_an_emptied_store_has_no_values_and_no_clients() -> None:
    with own_server() as server:
        store = connect(server.port)
        store.set("key", "of the attempt before")
        assert store.get("key")
        server.tell(EMPTY)
        with pytest.raises(dist.DistNetworkError):
            store.get("key")
        assert connect(server.port).num_keys() == 0


def test_a_store_that_moved_listens_only_at_its_new_port() -> None:
    with own_server() as server:
        former = server.port
        connect(former).set("key", "1")
        server.serve()
        assert connect(server.port).num_keys() == 0
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", former), 30)
