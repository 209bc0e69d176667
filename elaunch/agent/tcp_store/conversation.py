"""What one client of the store says and hears, pure: bytes in, bytes out."""

from __future__ import annotations

import struct
from collections.abc import Callable, Generator

from elaunch.agent.tcp_store.data import StoreData
from elaunch.errors import ProtocolError

MAGIC = 0x3C85F7CE
VALIDATE = 0  # the first command of a client, and of no later one
MOST_KEYS = 128 * 1024  # in one command, as with torch
MOST_KEY_BYTES = 64 * 1024
MOST_VALUE_BYTES = 64 << 20
_READY, _NOT_READY = b"\0", b"\1"
_STOP_WAITING, _WAIT_CANCELED = b"\0", b"\1"

Reading = Generator[None, None, None]


class Conversation:
    """One client's connection. Numbers are in the order of bytes of this machine, as torch sends them.

    Args:
        data: the store.
        talks: called when there are new answers, which may be due to another client's command.

    Attributes:
        answers: what is to be sent to the client; whoever sends it takes it away.
    """

    def __init__(self, data: StoreData, talks: Callable[[Conversation], object]) -> None:
        self.answers = bytearray()
        self._data = data
        self._talks = talks
        self._heard = bytearray()
        self._at = 0
        self._listening = self._listen()
        # By number, as torch's QueryType.
        self._commands = {
            1: self._set,
            2: self._compare_set,
            3: self._get,
            4: self._add,
            5: self._check,
            6: self._wait,
            7: self._count_keys,
            8: self._delete,
            9: self._append,
            10: self._multi_get,
            11: self._multi_set,
            12: self._cancel_wait,
            13: self._ping,
            14: self._queue_push,
            15: self._queue_pop,
            16: self._queue_length,
            17: self._list_keys,
            18: self._barrier,
        }

    def hear(self, heard: bytes) -> None:
        """Takes what the client has sent, whole commands or parts of them.

        Raises:
            ProtocolError: it is no client of a store, or asks for what makes no sense; the connection is to be closed.
        """
        self._heard += heard
        try:
            next(self._listening)
        except (ValueError, struct.error) as error:
            raise ProtocolError(f"the value is no number of 64 bits: {error}") from error
        if self._at:
            del self._heard[: self._at]
            self._at = 0

    def wake(self) -> None:
        """Tells the client that all keys for which it waited are there."""
        self._answer(_STOP_WAITING)

    def end(self) -> None:
        """Forgets the client, whose connection is closed."""
        self._data.cancel(self)

    # -- reading --------------------------------------------------------------------------------------------------

    def _listen(self) -> Reading:
        first = yield from self._number("B")
        if first != VALIDATE or (yield from self._number("I")) != MAGIC:
            raise ProtocolError("no client of a TCPStore")
        while True:
            command = yield from self._number("B")
            if command not in self._commands:
                raise ProtocolError(f"command {command} is not known")
            yield from self._commands[command]()

    def _bytes(self, size: int) -> Generator[None, None, bytes]:
        end = self._at + size
        while len(self._heard) < end:
            before = self._at
            yield
            end -= before - self._at  # what was read before has been dropped
        data = bytes(self._heard[self._at : end])
        self._at = end
        return data

    def _number(self, form: str) -> Generator[None, None, int]:
        data = yield from self._bytes(struct.calcsize(form))
        number: int = struct.unpack(form, data)[0]
        return number

    def _sized(self, most: int) -> Generator[None, None, bytes]:
        size = yield from self._number("Q")
        if size > most:
            raise ProtocolError(f"{size} bytes of a key or value, expected at most {most}")
        return (yield from self._bytes(size))

    def _key(self) -> Generator[None, None, bytes]:
        return (yield from self._sized(MOST_KEY_BYTES))

    def _value(self) -> Generator[None, None, bytes]:
        return (yield from self._sized(MOST_VALUE_BYTES))

    def _n_keys(self) -> Generator[None, None, int]:
        count = yield from self._number("Q")
        if count > MOST_KEYS:
            raise ProtocolError(f"{count} keys in one command, expected at most {MOST_KEYS}")
        return count

    def _keys(self) -> Generator[None, None, list[bytes]]:
        keys = []
        for _ in range((yield from self._n_keys())):
            keys.append((yield from self._key()))
        return keys

    # -- commands -------------------------------------------------------------------------------------------------

    def _answer(self, data: bytes) -> None:
        self.answers += data
        self._talks(self)

    def _answer_number(self, number: int) -> None:
        self._answer(struct.pack("q", number))

    def _answer_bytes(self, data: bytes) -> None:
        self._answer(struct.pack("Q", len(data)) + data)

    def _set(self) -> Reading:
        key = yield from self._key()
        self._data.put(key, (yield from self._value()))

    def _compare_set(self) -> Reading:
        key = yield from self._key()
        expected = yield from self._value()
        self._answer_bytes(self._data.compare_set(key, expected, (yield from self._value())))

    def _get(self) -> Reading:
        self._answer_bytes(self._data.get((yield from self._key())))

    def _add(self) -> Reading:
        key = yield from self._key()
        self._answer_number(self._data.add(key, (yield from self._number("q"))))

    def _check(self) -> Reading:
        self._answer(_READY if self._data.has((yield from self._keys())) else _NOT_READY)

    def _wait(self) -> Reading:
        if self._data.wait((yield from self._keys()), self):
            self.wake()

    def _count_keys(self) -> Reading:
        self._answer_number(len(self._data.values))
        yield from ()

    def _delete(self) -> Reading:
        self._answer_number(self._data.delete((yield from self._key())))

    def _append(self) -> Reading:
        key = yield from self._key()
        self._data.append(key, (yield from self._value()))

    def _multi_get(self) -> Reading:
        for key in (yield from self._keys()):
            self._answer_bytes(self._data.get(key))

    def _multi_set(self) -> Reading:
        for _ in range((yield from self._n_keys())):
            yield from self._set()

    def _cancel_wait(self) -> Reading:
        self._data.cancel(self)
        self._answer(_WAIT_CANCELED)
        yield from ()

    def _ping(self) -> Reading:
        self._answer((yield from self._bytes(4)))

    def _queue_push(self) -> Reading:
        key = yield from self._key()
        self._data.push(key, (yield from self._value()))

    def _queue_pop(self) -> Reading:
        length, value = self._data.pop((yield from self._key()))
        self._answer_number(length)
        if length:
            self._answer_bytes(value)

    def _queue_length(self) -> Reading:
        self._answer_number(self._data.length((yield from self._key())))

    def _list_keys(self) -> Reading:
        self._answer_number(len(self._data.values))
        for key in self._data.values:
            self._answer_bytes(key)
        yield from ()

    def _barrier(self) -> Reading:
        key = yield from self._key()
        if self._data.barrier(key, (yield from self._number("q")), self):
            self.wake()
