"""Sums of float64 numbers without rounding, so that neither order nor grouping changes the result."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

_UNIT_BITS = 1074
"""The least positive float64 is 2**-1074; every finite float64 is a whole multiple of it."""

_MANTISSA_BITS = 53
_HALF_BITS = 27
_FIRST_EXPONENT = -1073
_N_EXPONENTS = 1024 - _FIRST_EXPONENT + 1

_UNITS_BYTES = 272
"""Holds the units of 2**63 numbers of any size: 1024 + 1074 + 63 bits and a sign."""

_SPECIAL = struct.Struct("<d")

N_BYTES = _UNITS_BYTES + 8
"""Size of a packed sum."""


@dataclass(frozen=True, slots=True)
class ExactSum:
    """A sum as a whole number of units of 2**-1074, as in Kulisch's long accumulator.

    Attributes:
        units: the sum of the finite terms.
        special: the sum of the terms that are infinite or no number; 0.0 when there are none.
    """

    units: int = 0
    special: float = 0.0

    @classmethod
    def of(cls, terms: Iterable[float]) -> ExactSum:
        """Returns the sum of some numbers."""
        units, special = 0, 0.0
        for term in terms:
            if math.isfinite(term):
                numerator, denominator = term.as_integer_ratio()
                units += numerator << (_UNIT_BITS + 1 - denominator.bit_length())
            else:
                special += term
        return cls(units, special)

    @classmethod
    def of_tensor(cls, values: Tensor) -> ExactSum:
        """Returns the sum of the elements of a float64 tensor, which may be on any device and of any shape."""
        values = values.detach().reshape(-1).cpu()
        finite = torch.isfinite(values)
        if not bool(finite.all()):
            return cls.of(values.tolist())
        mantissas, exponents = torch.frexp(values)
        # Each half of a mantissa has 27 bits, so the sums of 2**36 of them still fit 64 bits.
        whole = (mantissas * 2.0**_MANTISSA_BITS).to(torch.int64)
        places = exponents.to(torch.int64) - _FIRST_EXPONENT
        high, low = whole >> _HALF_BITS, whole & ((1 << _HALF_BITS) - 1)
        sums = torch.zeros(2, _N_EXPONENTS, dtype=torch.int64)
        sums[0].scatter_add_(0, places, high)
        sums[1].scatter_add_(0, places, low)
        units = 0
        for place in torch.nonzero(sums.any(0)).flatten().tolist():
            part = (int(sums[0, place]) << _HALF_BITS) + int(sums[1, place])
            shift = place + _FIRST_EXPONENT - _MANTISSA_BITS + _UNIT_BITS
            units += part << shift if shift >= 0 else part >> -shift  # what is shifted out of a subnormal is zero
        return cls(units)

    def __add__(self, other: ExactSum) -> ExactSum:
        return ExactSum(self.units + other.units, self.special + other.special)

    @property
    def value(self) -> float:
        """Returns the float64 nearest to the sum."""
        if self.special:  # NaN is true too
            return self.special
        try:
            return self.units / (1 << _UNIT_BITS)  # Python rounds the quotient of two whole numbers correctly
        except OverflowError:
            return math.inf if self.units > 0 else -math.inf

    def pack(self) -> bytes:
        """Returns the sum as `N_BYTES` bytes."""
        return _SPECIAL.pack(self.special) + self.units.to_bytes(_UNITS_BYTES, "little", signed=True)

    @classmethod
    def unpack(cls, packed: bytes) -> ExactSum:
        """Returns the sum that `pack` wrote."""
        return cls(int.from_bytes(packed[8:N_BYTES], "little", signed=True), _SPECIAL.unpack_from(packed)[0])


NOTHING = ExactSum()
"""The sum of no numbers."""
