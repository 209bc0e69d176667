"""What members tell each other beside the record of the commit barrier.

A note has two parts: what the policy selector tells, as JSON, and bytes of the framework.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from elaunch.errors import ProtocolError

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Notes:
    """What the members have noted at one barrier.

    Attributes:
        packed: by rank, as `pack` returns them; those that noted nothing are left out.
    """

    packed: Mapping[int, bytes] = field(default_factory=dict)

    def of_frameworks(self, size: int) -> list[bytes]:
        """Returns what the framework of each of `size` members noted, by rank; empty where it noted nothing.

        Raises:
            ProtocolError: the note of a member is damaged.
        """
        return [_unpacked(self.packed.get(rank, b""))[1] for rank in range(size)]

    def of_selectors(self, members: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Returns what the selector of each member told, by the member's name; empty where it told nothing.

        Raises:
            ProtocolError: the note of a member is damaged.
        """
        if not self.packed:
            return {member: {} for member in members}
        return {member: _told(self.packed.get(rank, b"")) for rank, member in enumerate(members)}


def pack(told: Mapping[str, Any], note: bytes) -> bytes:
    """Returns the note of one member; empty if there is nothing to tell.

    Args:
        told: by its selector, as JSON values.
        note: of its framework.
    """
    if not told and not note:
        return b""
    text = json.dumps(told).encode() if told else b""
    return _LENGTH.pack(len(text)) + text + note


def _told(packed: bytes) -> dict[str, Any]:
    try:
        found = json.loads(_unpacked(packed)[0] or b"{}")
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the note of a member is damaged: {packed[:80]!r} ({error})") from error
    if not isinstance(found, dict):
        raise ProtocolError(f"the note of a member is damaged: {packed[:80]!r}")
    return found


def _unpacked(packed: bytes) -> tuple[bytes, bytes]:
    """Returns both parts of a note; they are empty where there is none."""
    if not packed:
        return b"", b""
    end = _LENGTH.size + _LENGTH.unpack_from(packed)[0] if len(packed) >= _LENGTH.size else len(packed) + 1
    if end > len(packed):
        raise ProtocolError(f"the note of a member is cut off: {packed[:80]!r}")
    return packed[_LENGTH.size : end], packed[end:]
