"""Checksums of messages: XXH3 with 64 bits in host memory, which is ten times as fast as a CRC; sums on a device."""

from __future__ import annotations

import torch
from torch import Tensor

from elaunch.workers.comm.group import memory

CODE_BYTES = 8
_COLUMNS = 1024
_OF_ROWS, _OF_REST = 0x9E3779B0, 0x85EBCA77
"""Even and odd: so a word's weight, that of its column and its row together, is odd, and no change is lost in it."""


def code_of_bytes(view: memoryview) -> bytes:
    """Returns the checksum of bytes."""
    import xxhash  # no job loads it before it has something to move

    return xxhash.xxh3_64_digest(view)


def code_of(flat: Tensor) -> Tensor:
    """Returns the checksum of a flat tensor of bytes, as a tensor of 8 bytes where that is; the host does not wait."""
    if flat.device.type == "cpu":
        return torch.frombuffer(bytearray(code_of_bytes(memory(flat))), dtype=torch.uint8)
    return device_code(flat)


def device_code(flat: Tensor) -> Tensor:
    """Returns a checksum that a device finds by sums: of rows and of columns of words, each with a weight of its own.

    Any change of one word changes it.
    """
    rest = -flat.numel() % CODE_BYTES
    if rest or flat.storage_offset() % CODE_BYTES:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    words = flat.view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    table, last = words[:whole].view(-1, _COLUMNS), words[whole:]
    total = (table.sum(0) * _weights(_COLUMNS, flat)).sum()
    total = total + _OF_ROWS * (table.sum(1) * _weights(len(table), flat)).sum()
    total = total + _OF_REST * (last * _weights(len(last), flat)).sum()
    return total.view(1).view(torch.uint8)


def _weights(count: int, like: Tensor) -> Tensor:
    return torch.arange(1, 2 * count + 1, 2, dtype=torch.int64, device=like.device)
