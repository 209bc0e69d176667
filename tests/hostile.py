"""Hostile input: valid messages, mutated. For `tests/unit/test_fuzz.py`, and for tests that say it to real threads."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

Mutation = tuple[str, float, bytes]
"""What is done, where (as a part of the length), and the piece that is put in."""

KINDS = ["insert", "replace", "cut", "repeat", "flip", "value"]

PIECES = [
    b"[" * 4000,
    b'{"a":' * 1500,
    b"9" * 5000,
    b"999999999999*1 0:999999999999/1",
    b"-1",
    b"1e999",
    b"NaN",
    b"18446744073709551616",
    b"\\ud800",
    b"\xed\xa0\x80",
    b"\xff",
    b"\0",
    b"\n",
    b'"',
    b"null",
    b"true",
    b"{}",
    b"[]",
    b",",
    b":",
    b"..",
    b"/",
    b"#",
    "\N{ARABIC-INDIC DIGIT TWO}".encode(),
]
"""Deep nesting, huge integers and lengths, surrogates, what is no text, and what has a meaning in some format."""


def mutated(data: bytes, mutations: Sequence[Mutation]) -> bytes:
    """The data with these mutations, one after the other."""
    for kind, where, piece in mutations:
        place = int(where * len(data))
        if kind == "insert":
            data = data[:place] + piece + data[place:]
        elif kind == "replace":
            data = data[:place] + piece + data[place + len(piece) :]
        elif kind == "cut":
            data = data[:place]
        elif kind == "repeat":
            data = data[:place] + data
        elif kind == "flip" and place < len(data):
            data = data[:place] + bytes([data[place] ^ (1 + piece[0] % 255)]) + data[place + 1 :]
        elif kind == "value":  # what stands between two separators, so that the form stays whole
            begin = data.rfind(b":", 0, place) + 1
            end = min((at for at in (data.find(b",", place), data.find(b"}", place)) if at >= 0), default=len(data))
            data = data[:begin] + piece + data[max(begin, end) :]
    return data


def hostile(seed: int, valid: Sequence[bytes], count: int) -> Iterator[bytes]:
    """So many mutations of these, the same for each seed."""
    chance = random.Random(seed)
    for _ in range(count):
        mutations = [
            (chance.choice(KINDS), chance.random(), chance.choice(PIECES)) for _ in range(chance.randint(1, 3))
        ]
        yield mutated(chance.choice(valid), mutations)
