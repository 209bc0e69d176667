"""What members tell each other beside the record of the commit barrier.

A note has two parts: what the policy selector tells, as JSON, and bytes of the framework.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_LENGTH = struct.Struct("<I")


@dataclass(frozen=True, slots=True)
class Notes:
    """What the members have noted at one barrier.

    Attributes:
        packed: by rank, as `pack` returns them; those that noted nothing are left out.
    """

    packed: Mapping[int, bytes] = field(default_factory=dict)

    def of_frameworks(self, size: int) -> list[bytes]:
        """Returns what the framework of each of `size` members noted, by rank; empty where it noted nothing."""
        return [_unpacked(self.packed.get(rank, b""))[1] for rank in range(size)]

    def of_selectors(self, members: Sequence[str]) -> dict[str, dict[str, Any]]:
        """Returns what the selector of each member told, by the member's name; empty where it told nothing."""
        if not self.packed:
            return {member: {} for member in members}
        texts = (_unpacked(self.packed.get(rank, b""))[0] for rank in range(len(members)))
        return {member: json.loads(text or b"{}") for member, text in zip(members, texts, strict=True)}


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


def _unpacked(packed: bytes) -> tuple[bytes, bytes]:
    """Returns both parts of a note; they are empty where there is none."""
    if not packed:
        return b"", b""
    end = _LENGTH.size + _LENGTH.unpack_from(packed)[0]
    return packed[_LENGTH.size : end], packed[end:]
