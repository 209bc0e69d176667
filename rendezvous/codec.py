"""The JSON form of a job's documents: any frozen dataclass, with its kind and a version. Nothing is unpickled."""

from __future__ import annotations

import enum
import functools
import json
import math
import reprlib
import types
from dataclasses import asdict, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from elaunch.errors import ProtocolError

VERSION = 6
MOST_BYTES = 4 << 20  # of a document that is read; etcd by default takes 1.5 MiB
MOST = 2**53  # of a number
LIMITS = {
    "slots": (1, 4096),
    "local_rank": (0, 4095),
    "port": (0, 65535),
    "attempt": (0, 2**48),
    "generation": (0, 2**48),
    "number": (0, 2**48),
    "reset_generation": (0, 2**48),
    "joined": (0, 2**48),
    "logged": (0, 2**48),
    "aborts_step_before": (0, 2**48),
}
"""Fields whose numbers have narrower bounds, in whichever document."""

Document = TypeVar("Document")


def to_json(document: Any) -> bytes:
    """Writes a document with its kind and version. Half of a surrogate pair, as in names of odd files, becomes `?`."""
    body = asdict(document)
    body.pop("order", None)
    text = json.dumps(
        {"kind": type(document).__name__, "v": VERSION, **body}, separators=(",", ":"), ensure_ascii=False
    )
    return text.encode(errors="replace")


def from_json(kind: type[Document], data: bytes) -> Document:
    """Reads a document of the given kind.

    Raises:
        ProtocolError: it is damaged, of another kind or of another version. No bytes raise anything else.
    """
    try:
        body = read_json(data)
        found, version = body.pop("kind"), body.pop("v")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"expected a {kind.__name__} document, found {data[:80]!r} ({_plain(error)})") from error
    if found != kind.__name__ or version != VERSION:
        raise ProtocolError(
            f"expected {kind.__name__} version {VERSION}, found {_shown(found)} version {_shown(version)}: "
            "all nodes of a job must run the same version of elaunch"
        )
    try:
        document: Document = _build(kind, body)
    except (TypeError, ValueError, KeyError, OverflowError) as error:
        raise ProtocolError(f"damaged {kind.__name__} document: {_plain(error)}") from error
    return document


def read_json(data: str | bytes) -> Any:
    """Reads JSON of unknown origin; raises `ValueError` for whatever is none, is too large, nested or no UTF-8."""
    if len(data) > MOST_BYTES:
        raise ValueError(f"{len(data)} bytes; at most {MOST_BYTES} are expected")
    try:
        return json.loads(data if isinstance(data, str) else data.decode(), parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number of JSON")


def _shown(value: Any) -> str:
    """Shows the beginning of a value of unknown origin, in ASCII: it is for people, and may hold anything."""
    return ascii(value) if value is None or isinstance(value, bool) else _plain(reprlib.repr(value)).strip("'")


def _plain(value: object) -> str:
    return str(value).encode("ascii", "backslashreplace").decode()[:200]


@functools.cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Returns the types of a document's fields. Finding them for each of thousands of workers would take seconds."""
    return get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    """Checks a JSON value against a type and builds that type: dataclasses, enums, tuples, unions and plain scalars."""
    if is_dataclass(kind) and isinstance(kind, type):
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is {_shown(value)}")
        hints = _hints(kind)
        unknown = set(value) - set(hints)
        if unknown:
            raise ValueError(f"unknown fields {_shown(sorted(unknown))}")
        return kind(**{name: _bounded(name, _build(hints[name], item)) for name, item in value.items()})
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if not isinstance(value, str):
            raise TypeError(f"expected {kind.__name__}, found {_shown(value)}")
        return kind(value)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise TypeError(f"expected a list, found {_shown(value)}")
        kinds = get_args(kind)
        if len(kinds) == 2 and kinds[1] is not ...:
            if len(value) != 2:
                raise ValueError(f"expected a pair, found {_shown(value)}")
            return _build(kinds[0], value[0]), _build(kinds[1], value[1])
        return tuple(_build(kinds[0], item) for item in value)
    if get_origin(kind) is types.UnionType:
        if value is None:
            return None
        return _build(next(arg for arg in get_args(kind) if arg is not type(None)), value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise TypeError(f"expected {kind.__name__}, found {_shown(value)}")
    if kind is str:
        value.encode()  # half of a surrogate pair cannot be written again
    elif kind is float and not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value


def _bounded(name: str, value: Any) -> Any:
    """Refuses a number that would hurt: one makes a list of so many, or counts on from it."""
    if isinstance(value, int) and not isinstance(value, bool):
        least, most = LIMITS.get(name, (-MOST, MOST))
        if not least <= value <= most:
            raise ValueError(f"{name} is {_shown(value)}, expected {least} to {most}")
    return value
