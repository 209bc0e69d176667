"""Which samples a step uses, in an order that does not depend on the membership."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import numpy as np

ORDER_VERSION = 2
"""Of the shuffled order: a job goes on in the order in which it began. Version 1 shuffled an array by numpy's PCG64."""

Uint64s = np.ndarray[Any, np.dtype[np.uint64]]

_BLOCK = 4096  # positions that are computed at once: a few calls of numpy for each of them would cost more
_SMALL = 1 << 16
_ROUNDS, _ROUNDS_OF_SMALL = 8, 24  # over a few bits a round mixes little: 8 favour some orders of 6 samples


class Permutation:
    """A keyed permutation of 0 … n - 1 that computes any part of itself, in constant memory and time for each index.

    It is a Feistel network over the smallest number of bits that holds n values, with a step of cycle walking: an index
    that leaves the range is enciphered again until it is back, twice on average at most (J. Black and P. Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002, sections 4 and 5). The two halves differ by a bit where the
    number of bits is odd. The round function is the finalizer of SplitMix64 (G. Steele, D. Lea and C. Flood, OOPSLA
    2014); it mixes well, and is no secret's keeper. All is integer arithmetic modulo 2^64, so every machine agrees.

    Args:
        n: how many values, 1 to 2^63.
        key: whatever the permutation depends on.
    """

    def __init__(self, n: int, key: tuple[int, ...]) -> None:
        assert 1 <= n <= 1 << 63, f"{n} values"
        bits = max(1, (n - 1).bit_length())
        self._n = np.uint64(n)
        self._n_low = np.uint64(bits - bits // 2)
        self._high_mask, self._low_mask = np.uint64((1 << bits // 2) - 1), np.uint64((1 << (bits - bits // 2)) - 1)
        n_rounds = _ROUNDS_OF_SMALL if n <= _SMALL else _ROUNDS
        digest = hashlib.shake_128(repr(key).encode()).digest(8 * n_rounds)
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def of(self, indices: Uint64s) -> Uint64s:
        """Returns what stands at each of these indices (m,), all below n."""
        values = self._encipher(indices)
        outside = np.flatnonzero(values >= self._n)
        while len(outside):
            again = self._encipher(values[outside])
            values[outside] = again
            outside = outside[again >= self._n]
        return values

    def _encipher(self, values: Uint64s) -> Uint64s:
        high, low = values >> self._n_low, values & self._low_mask
        for turn in range(0, len(self._keys), 2):
            high ^= _mixed(low + self._keys[turn]) & self._high_mask
            low ^= _mixed(high + self._keys[turn + 1]) & self._low_mask
        whole: Uint64s = (high << self._n_low) | low
        return whole


def _mixed(z: Uint64s) -> Uint64s:
    z ^= z >> np.uint64(30)
    z *= np.uint64(0xBF58476D1CE4E5B9)
    z ^= z >> np.uint64(27)
    z *= np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return z


class SampleOrder:
    """The endless stream of passes over a data set: position q belongs to pass q // n_samples.

    Every pass holds each sample exactly once, in the order of a `Permutation` whose key is (seed, pass). Any worker
    computes any part of the stream without the rest, and keeps no more than two blocks of it, whatever the data set.

    Args:
        n_samples: size of the data set.
        seed: 0 or more.
        shuffle: False gives each pass in the order of the data set.
    """

    def __init__(self, n_samples: int, seed: int, shuffle: bool = True) -> None:
        if n_samples < 1:
            raise ValueError(f"the data set must hold at least one sample, got {n_samples}")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, got {seed}")
        self.n_samples = n_samples
        self.seed = seed
        self.shuffle = shuffle
        self._blocks: dict[tuple[int, int], Uint64s] = {}

    def described(self) -> dict[str, Any]:
        """Returns what decides which samples a step uses, beside the size of its batch; a checkpoint records it."""
        about = {"samples in the data set": self.n_samples, "seed": self.seed, "shuffle": self.shuffle}
        # Without shuffling all versions agree, and so do checkpoints that do not record one.
        return {**about, "version of the shuffled order": ORDER_VERSION} if self.shuffle else about

    def ids(self, start: int, count: int) -> list[int]:
        """Returns the sample ids at positions start, …, start + count - 1 of the stream, which may span passes."""
        if start < 0 or count < 0:
            raise ValueError(f"start and count must be 0 or more, got start {start} and count {count}")
        found: list[int] = []
        while len(found) < count:
            number, offset = divmod(start + len(found), self.n_samples)
            wanted = min(count - len(found), self.n_samples - offset)
            if self.shuffle:
                block, first = divmod(offset, _BLOCK)
                found.extend(self._block(number, block)[first : first + wanted].tolist())
            else:
                found.extend(range(offset, offset + wanted))
        return found

    def _block(self, number: int, block: int) -> Uint64s:
        key = number, block
        if key not in self._blocks:
            indices = np.arange(block * _BLOCK, min((block + 1) * _BLOCK, self.n_samples), dtype=np.uint64)
            newest = list(self._blocks.items())[-1:]
            self._blocks = {**dict(newest), key: Permutation(self.n_samples, (self.seed, number)).of(indices)}
        return self._blocks[key]


def digest(ids: Iterable[int]) -> str:
    """Returns SHA-256 (hex) of the sorted ids, each as 8 bytes little-endian: the event log names samples by it."""
    return hashlib.sha256(np.sort(np.fromiter(ids, dtype="<i8")).tobytes()).hexdigest()
