"""The fields of a profile's JSON form: what each must be, and how one that is not is reported."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from elaunch.errors import ProtocolError

VERSION = 1


def checked(given: Any, expected: Mapping[str, Expected], where: str) -> dict[str, Any]:
    """Returns the fields of a JSON object after checking them; `where` says in errors what it is.

    Raises:
        ProtocolError: names the field that is wrong, missing or unknown, and what was expected there.
    """
    if not isinstance(given, dict):
        raise ProtocolError(f"{where} must be an object, got {given!r}")
    dot = "." if where.endswith("]") else ": "
    for name, one in expected.items():
        if name in given and not one.fits(given[name]):
            raise ProtocolError(f"{where}{dot}{name} must be {one.what}, got {given[name]!r}")
        if name not in given and not one.optional:
            raise ProtocolError(f"{where}{dot}{name} is missing; it must be {one.what}")
    if unknown := sorted(set(given) - set(expected)):
        raise ProtocolError(f"{where}{dot}{unknown[0]} is unknown; expected {', '.join(expected)}")
    return given


@dataclass(frozen=True)
class Expected:
    """What a field must be, in words, and the test for it."""

    what: str
    fits: Callable[[Any], bool]
    optional: bool = False


def is_whole(value: Any) -> bool:
    """Returns whether a JSON value is a whole number of at most 63 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63


def is_number(value: Any) -> bool:
    """Returns whether a JSON value is a finite number, of at most 63 bits where it is whole."""
    return is_whole(value) or (isinstance(value, float) and math.isfinite(value))


def are_texts(value: Any) -> bool:
    """Returns whether a value is a list of texts."""
    return isinstance(value, list | tuple) and all(isinstance(text, str) for text in value)


_SECONDS = Expected("a number of 0 or more", lambda value: is_number(value) and value >= 0)
_FIXED_SECONDS = dataclasses.replace(_SECONDS, optional=True)
_BYTES = Expected("a whole number of 0 or more", lambda value: is_whole(value) and value >= 0)
_LAYERS = Expected("a number of layers, 1 to 100000", lambda value: is_whole(value) and 1 <= value <= 100_000, True)
_COUNT = Expected("a whole number of 1 or more", lambda value: is_whole(value) and value >= 1)
_SPEED = Expected("a number above 0", lambda value: is_number(value) and value > 0)
_MEMORY = Expected("a whole number of 1 or more", _COUNT.fits, optional=True)
_PART = Expected("a number from 0 to 1", lambda value: is_number(value) and 0 <= value <= 1, True)
_TEXT = Expected("a text", lambda value: isinstance(value, str))
_TEXTS = Expected("a list of texts", are_texts, optional=True)
DOCUMENT = {
    "version": Expected(f"{VERSION}, or the profile has to be written again", lambda value: value == VERSION),
    "name": _TEXT,
    "layers": Expected("a list with an entry or more", lambda value: isinstance(value, list) and bool(value)),
    "tensor_parallel": _COUNT,
    "bandwidth_bytes_per_s": _SPEED,
    "latency_s": _SECONDS,
    "notes": _TEXTS,
    "width": dataclasses.replace(_COUNT, optional=True),
    "memory_bytes": _MEMORY,
    "overlap": Expected("a number of 1 or more", lambda value: is_number(value) and value >= 1, optional=True),
    "memory_bound": _PART,
    "step_s": _FIXED_SECONDS,
    "action_s": _FIXED_SECONDS,
    "send_s": _FIXED_SECONDS,
    "load_s_per_row": _FIXED_SECONDS,
    "hop_s": _FIXED_SECONDS,
    "change_s": _FIXED_SECONDS,
    "workers": Expected("an object", lambda value: isinstance(value, dict), optional=True),
    "links": Expected("a list", lambda value: isinstance(value, list), optional=True),
    "unstable": _TEXTS,
    "contradictions": _TEXTS,
}
WORKER = {"speed": dataclasses.replace(_SPEED, optional=True), "memory_bytes": _MEMORY}
LINK = {"source": _TEXT, "target": _TEXT, "bandwidth_bytes_per_s": _SPEED, "latency_s": _SECONDS}
LAYER = {
    "count": _LAYERS,
    "forward_s_per_row": _SECONDS,
    "backward_s_per_row": _SECONDS,
    "parameter_bytes": _BYTES,
    "optimizer_bytes": _BYTES,
    "activation_bytes_per_row": _BYTES,
    "output_bytes_per_row": _BYTES,
    "fixed_forward_s": _FIXED_SECONDS,
    "fixed_backward_s": _FIXED_SECONDS,
    "update_s": _FIXED_SECONDS,
    "weight_share": _PART,
    "weight_bytes_per_row": dataclasses.replace(_BYTES, optional=True),
    "gradient_bytes": dataclasses.replace(_BYTES, optional=True),
    "summed_in_tree": Expected("true or false", lambda value: isinstance(value, bool), optional=True),
}
