"""The JSON form of a job's documents: any frozen dataclass, with its kind and a version. Nothing is unpickled."""

from __future__ import annotations

import enum
import functools
import json
import math
import reprlib
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from elaunch.errors import ProtocolError

VERSION = 7
MOST_BYTES = 4 << 20  # of a document that is read; etcd by default takes 1.5 MiB
MOST = 2**53  # of a number
LIMITS = {
    "slots": (1, 4096),
    "local_rank": (0, 4095),
    "port": (0, 65535),
    "attempt": (0, 2**48),
    "generation": (0, 2**48),
    "number": (0, 2**48),
    "former": (0, 2**48),
    "reset_generation": (0, 2**48),
    "joined": (0, 2**48),
    "logged": (0, 2**48),
    "aborts_step_before": (0, 2**48),
}
"""Fields whose numbers have narrower bounds, in whichever document."""

Document = TypeVar("Document")


def to_json(document: Any) -> bytes:
    """Writes a document with its kind and version. Half of a surrogate pair, as in names of odd files, becomes `?`."""
    body = _plain_form(document)
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
        wanted: Any = kind
        document: Document = _reader(wanted)(body)
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


def _plain_form(value: Any) -> Any:
    """Returns a document as dictionaries, lists and scalars; its parts may be shared, for nobody changes them."""
    if isinstance(value, tuple):
        return [_plain_form(item) for item in value]
    kind: Any = type(value)
    names = _names(kind)
    return value if names is None else {name: _plain_form(getattr(value, name)) for name in names}


@functools.cache
def _names(kind: Any) -> tuple[str, ...] | None:
    """Returns the names of a dataclass's fields; None where the type is none."""
    return tuple(each.name for each in fields(kind)) if is_dataclass(kind) else None


Read = Callable[[Any], Any]
"""Checks a JSON value and makes what it stands for; raises `TypeError` or `ValueError`."""


@functools.cache
def _reader(kind: Any) -> Read:
    """Returns what reads a type: dataclasses, enums, tuples, unions and plain scalars.

    It is put together once. To look at the type of each field of each of thousands of workers would take seconds.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        return _document_reader(kind)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return functools.partial(_read_enum, kind)
    if get_origin(kind) is tuple:
        kinds = get_args(kind)
        if len(kinds) == 2 and kinds[1] is not ...:
            return functools.partial(_read_pair, _reader(kinds[0]), _reader(kinds[1]))
        return functools.partial(_read_list, _reader(kinds[0]))
    if get_origin(kind) is types.UnionType:
        read = _reader(next(arg for arg in get_args(kind) if arg is not type(None)))
        return lambda value: None if value is None else read(value)
    return {str: _read_text, int: _read_whole, float: _read_number, bool: _read_bool}[kind]


def _document_reader(kind: type[Any]) -> Read:
    hints = get_type_hints(kind)
    readers = {each.name: _field_reader(each.name, hints[each.name]) for each in fields(kind)}

    def read(value: Any) -> Any:
        if not isinstance(value, dict):
            raise TypeError(f"{kind.__name__} is {_shown(value)}")
        if not value.keys() <= readers.keys():
            raise ValueError(f"unknown fields {_shown(sorted(value.keys() - readers.keys()))}")
        return kind(**{name: readers[name](item) for name, item in value.items()})

    return read


def _field_reader(name: str, kind: Any) -> Read:
    """Returns what reads a field: a number that would hurt is refused, for one makes a list of so many, or counts on.

    Numbers are bounded where they are a field, or may be left out of one; not in lists.
    """
    if not {int, float}.intersection((kind, *get_args(kind))) or get_origin(kind) is tuple:
        return _reader(kind)
    read, (least, most) = _reader(kind), LIMITS.get(name, (-MOST, MOST))

    def read_bounded(value: Any) -> Any:
        number = read(value)
        if isinstance(number, int) and not least <= number <= most:
            raise ValueError(f"{name} is {_shown(number)}, expected {least} to {most}")
        return number

    return read_bounded


def _read_enum(kind: type[enum.Enum], value: Any) -> enum.Enum:
    if not isinstance(value, str):
        raise TypeError(f"expected {kind.__name__}, found {_shown(value)}")
    return kind(value)


def _read_list(read: Read, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {_shown(value)}")
    return tuple(map(read, value))


def _read_pair(first: Read, second: Read, value: Any) -> tuple[Any, Any]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {_shown(value)}")
    if len(value) != 2:
        raise ValueError(f"expected a pair, found {_shown(value)}")
    return first(value[0]), second(value[1])


def _read_text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected str, found {_shown(value)}")
    if not value.isascii():
        value.encode()  # half of a surrogate pair cannot be written again
    return value


def _read_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"expected bool, found {_shown(value)}")
    return value


def _read_whole(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"expected int, found {_shown(value)}")
    return value


def _read_number(value: Any) -> float:
    if isinstance(value, int) and not isinstance(value, bool):
        value = float(value)
    if not isinstance(value, float):
        raise TypeError(f"expected float, found {_shown(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{value} is no time")
    return value
