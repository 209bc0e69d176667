"""What travels on a link: three handshake lines, then frames.

    dialler                                         acceptor
      elaunch/8 GENERATION PROOF {"from", "for"}  ->
                                                  <-  {"worker", "generation", "settled"} or {"error"}
      {"go": true}                                ->             only for a link or for mail, not for a probe
      frames                                     <->             frames

The proof is derived from the job's token and the newest generation that the dialler has heard of, so the token itself
does not travel, and what is overheard is of no use once a step has committed in a later generation (`Floors.settled`).

Anybody can reach a worker's port. So the acceptor compares the first line with the version and the proof it expects,
and reads the rest only where they match. A link exists once the dialler has confirmed it, so a dial that
was given up leaves nothing behind on the other side.
"""

from __future__ import annotations

import hmac
import json
import re
import struct
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from elaunch.errors import ProtocolError

VERSION = 8
LINE_BYTES = 4096
"""Upper bound of a handshake line, newline included."""

SEGMENT_BYTES = 4 << 20
"""A part is sent in frames of at most this size, which bounds what an interrupted operation still costs its links."""

MORE, LAST = 1, 2
"""Kinds of frame: further frames of this part follow, or not."""

OFFER_MORE, OFFER_LAST = 3, 4
"""The same, where the body says in which memory the bytes are, for the receiver to fetch them."""

FETCHED, REFUSED = 5, 6
"""Answers to an offer: the bytes are here; or they must be sent, as those of all further offers. In the place of the
operation's number stands that of the offer; there is no body."""

ENTERED = 7
"""The sender has entered this generation: what it has not sent for older ones never comes. There is no body."""

OFFERS = OFFER_MORE, OFFER_LAST
ANSWERS = FETCHED, REFUSED
BODILESS = (*ANSWERS, ENTERED)

_PROTOCOL = f"elaunch/{VERSION} ".encode()
_GENERATION = re.compile(rb"(0|[1-9][0-9]{0,18}) ")
_MAGIC = b"eL"
_HEADER = struct.Struct("<2sBBIQQQ")
_OFFER = struct.Struct("<QQQQQ")
HEADER_BYTES, OFFER_BYTES = _HEADER.size, _OFFER.size

Purpose = Literal["link", "probe", "mail"]


class Header(NamedTuple):
    """Announces `nbytes` of body that belong to (`generation`, `op`, `part`)."""

    kind: int
    part: int
    generation: int
    op: int
    nbytes: int


class Offer(NamedTuple):
    """Says where bytes are in the memory of the sender.

    Attributes:
        address: of the bytes.
        nbytes: how many there are.
        mark_address: where the sender's `OfferMark` is.
        secret: what stands there first.
        number: of the offer; it holds as long as the number that stands there second is not above it.
    """

    address: int
    nbytes: int
    mark_address: int
    secret: int
    number: int


@dataclass(frozen=True)
class Hello:
    """The dialler's first line.

    Attributes:
        worker: its identity.
        purpose: what it wants the connection for.
        generation: the newest that it has heard of; 0: of none.
    """

    worker: str
    purpose: Purpose
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Ack:
    """The acceptor's first line.

    Attributes:
        worker: its identity.
        generation: it takes part in nothing of older ones.
        settled: it makes no link to those who have heard of older ones only.
    """

    worker: str
    generation: int
    settled: int


def pack_header(header: Header) -> bytes:
    """Returns the header's 32 bytes."""
    return _HEADER.pack(_MAGIC, VERSION, *header)


def unpack_header(data: bytes | bytearray) -> Header:
    """Reads a header; raises `ProtocolError` when the bytes are not one."""
    magic, version, kind, part, generation, op, nbytes = _HEADER.unpack(data)
    most = OFFER_BYTES if kind in OFFERS else 0 if kind in BODILESS else SEGMENT_BYTES
    if magic != _MAGIC or version != VERSION or not MORE <= kind <= ENTERED or nbytes > most:
        raise ProtocolError(f"not a frame of version {VERSION}: {bytes(data).hex()}")
    return Header(kind, part, generation, op, nbytes)


def pack_offer(offer: Offer) -> bytes:
    """Returns the body of an offer."""
    return _OFFER.pack(*offer)


def unpack_offer(body: bytes) -> Offer:
    """Reads the body of an offer; raises `ProtocolError` when the bytes are not one."""
    if len(body) != OFFER_BYTES:
        raise ProtocolError(f"not an offer: {body.hex()}")
    offer = Offer(*_OFFER.unpack(body))
    if not 0 < offer.nbytes <= SEGMENT_BYTES:
        raise ProtocolError(f"an offer of {offer.nbytes} bytes, expected 1 to {SEGMENT_BYTES}")
    return offer


def hello_line(token: str, hello: Hello) -> bytes:
    """Returns the dialler's first line."""
    return _credentials(token, hello.generation) + _line({"from": hello.worker, "for": hello.purpose})


def read_hello(line: bytes, token: str) -> Hello:
    """Reads a dialler's first line.

    Raises:
        ProtocolError: it has another version or no proof of the token, or names no worker. The text is fit for the
            dialler.
    """
    if not line.startswith(_PROTOCOL):
        raise ProtocolError(f"not a worker: this one speaks {_PROTOCOL.decode().strip()}")
    digits = _GENERATION.match(line, len(_PROTOCOL))
    generation = int(digits[1]) if digits else 0
    expected = _credentials(token, generation)
    if not hmac.compare_digest(line[: len(expected)], expected):
        raise ProtocolError("wrong token: this worker belongs to another job")
    message = _object(line[len(expected) :])
    worker, purpose = message.get("from"), message.get("for")
    if not isinstance(worker, str) or not worker.isprintable() or purpose not in get_args(Purpose):
        raise ProtocolError(f"hello without a worker or purpose: from={worker!r} for={purpose!r}")
    return Hello(worker, purpose, generation)  # type: ignore[arg-type]  # it is one of them


def ack_line(ack: Ack) -> bytes:
    """Returns the acceptor's answer to a dialler that knows the token."""
    return _line({"worker": ack.worker, "generation": ack.generation, "settled": ack.settled})


def refusal_line(why: str) -> bytes:
    """Returns the acceptor's answer when it does not want the connection."""
    return _line({"error": why[:1000]})


def read_ack(line: bytes) -> Ack:
    """Reads the acceptor's answer; raises `ProtocolError` with its reason when it refused."""
    message = _object(line)
    if "error" in message:
        why = str(message["error"])
        raise ProtocolError(why if why.isprintable() else repr(why))
    worker, generation, settled = message.get("worker"), message.get("generation"), message.get("settled")
    if (
        not isinstance(worker, str)
        or not worker.isprintable()
        or type(generation) is not int
        or type(settled) is not int
    ):
        raise ProtocolError(f"acknowledgement without a worker or its generations: {message!r}")
    return Ack(worker, generation, settled)


def go_line() -> bytes:
    """Returns the dialler's confirmation."""
    return _line({"go": True})


def read_go(line: bytes) -> None:
    """Raises `ProtocolError` unless the line confirms the link."""
    if _object(line).get("go") is not True:
        raise ProtocolError("expected the confirmation of a link")


def _credentials(token: str, generation: int) -> bytes:
    return _PROTOCOL + b"%d %s " % (generation, derive_proof(token, generation).encode())


def derive_proof(token: str, generation: int) -> str:
    """Returns what a worker shows of the job's token in a generation: 128 bits of HMAC-SHA256 (RFC 2104), in hex."""
    return hmac.digest(token.encode(), b"elaunch link, generation %d" % generation, "sha256").hex()[:32]


def _line(message: dict[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _object(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"not a handshake line: {line[:80]!r}") from error
    if not isinstance(message, dict):
        raise ProtocolError(f"not a handshake line: {line[:80]!r}")
    return message
