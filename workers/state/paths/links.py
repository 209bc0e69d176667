"""State over links, through host memory: one message of each direction of a link at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from elaunch.errors import StateError
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.paths import Parcel, Parcels
from elaunch.workers.comm.stream import Messages
from elaunch.workers.state.paths.codes import CODE_BYTES, code_of_bytes
from elaunch.workers.state.staging import Buffer, CopyEngine, Staging

MESSAGE_BYTES = 4 << 20

Hold = Callable[[int], None]


class LinkPath:
    """The links of a group.

    Args:
        group: of the members.
        copies: between the state and host memory.
    """

    name = "links"
    message_bytes = MESSAGE_BYTES

    def __init__(self, group: Group, copies: CopyEngine) -> None:
        self._group, self._copies = group, copies

    def move(self, outgoing: Parcels, incoming: Parcels, checksum: bool, hold: Hold) -> None:
        """Moves messages; all links work at the same time."""
        self._group.stream(
            {rank: self._send(parcels, checksum, hold) for rank, parcels in outgoing.items()},
            {rank: self._receive(rank, parcels, checksum, hold) for rank, parcels in incoming.items()},
        )

    def finish(self) -> None:
        """Does nothing: all that has come over links is there."""

    def close(self) -> None:
        """Does nothing: links stay."""

    def _send(self, parcels: Iterator[Parcel], checksum: bool, hold: Hold) -> Messages:
        codes = bytearray()
        with self._staging(hold) as staging:
            for buffer in staging.leaving(parcel.views for parcel in parcels):
                if checksum:
                    codes += _code(buffer)
                yield buffer.bytes
        if checksum:
            yield memoryview(codes)

    def _receive(self, rank: int, parcels: Iterator[Parcel], checksum: bool, hold: Hold) -> Messages:
        codes: list[tuple[bytes, str]] = []
        with self._staging(hold) as staging:
            for parcel in parcels:
                with staging.coming(parcel.views) as buffer:
                    yield buffer.bytes
                    if checksum:
                        codes.append((_code(buffer), parcel.name))
            staging.end()
        if checksum:
            told = bytearray(CODE_BYTES * len(codes))
            yield memoryview(told)
            for number, (code, name) in enumerate(codes):
                if code != told[CODE_BYTES * number : CODE_BYTES * (number + 1)]:
                    raise damaged(name, self._group.members[rank])

    @contextmanager
    def _staging(self, hold: Hold) -> Iterator[Staging]:
        staging = Staging(self._copies, hold)
        try:
            yield staging
        finally:
            staging.close()


def _code(buffer: Buffer) -> bytes:
    return code_of_bytes(buffer.bytes)


def damaged(name: str, source: str) -> StateError:
    """Returns the error of a message that is not what was sent.

    Args:
        name: what it has first.
        source: the worker that sent it.
    """
    return StateError(
        f"{name} arrived damaged from {source}; if that happens again, look for errors of this machine's or that "
        "machine's memory or network card"
    )
