"""etcd's messages by elaunch's table and by protobuf's library, from the same table."""

from __future__ import annotations

import contextlib
from functools import cache
from typing import Any

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.errors import ProtocolError
from elaunch.rendezvous.cluster import messages
from elaunch.rendezvous.cluster.messages import EtcdMessage, message, read

FIELDS = messages._fields()
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "int32": st.integers(-(2**31), 2**31 - 1),
    "int64": st.integers(-(2**63), 2**63 - 1),
    "uint64": st.integers(0, 2**64 - 1),
    "bool": st.booleans(),
    "bytes": st.binary(max_size=300),
    "string": st.text(max_size=20),
}


@cache
def library() -> dict[str, Any]:
    """The classes that protobuf makes."""
    proto = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="twin.proto", package="twin", syntax="proto3")
    for name, fields in FIELDS.items():
        made = file.message_type.add(name=name)
        for field in fields.values():
            label = proto.LABEL_REPEATED if field.is_repeated else proto.LABEL_OPTIONAL
            one = made.field.add(name=field.name, number=field.number, label=label)
            if field.is_message:
                one.type, one.type_name = proto.TYPE_MESSAGE, f".twin.{field.kind}"
            else:
                one.type = proto.Type.Value(f"TYPE_{field.kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"twin.{name}")) for name in FIELDS}


def contents(name: str) -> st.SearchStrategy[dict[str, Any]]:
    """Values of some fields of a message; those of messages are dictionaries, too."""
    parts = {}
    for field in FIELDS[name].values():
        one = st.deferred(lambda kind=field.kind: contents(kind)) if field.is_message else VALUES[field.kind]  # type: ignore[misc]
        parts[field.name] = st.lists(one, max_size=3) if field.is_repeated else one
    return st.fixed_dictionaries({}, optional=parts)


def ours(name: str, values: dict[str, Any]) -> EtcdMessage:
    def one(field: messages._Field, value: Any) -> Any:
        return ours(field.kind, value) if field.is_message else value

    made = {}
    for key, value in values.items():
        field = FIELDS[name][key]
        made[key] = [one(field, each) for each in value] if field.is_repeated else one(field, value)
    return message(name, **made)


def theirs(name: str, values: dict[str, Any]) -> Any:
    return library()[name](
        **{
            key: (
                [theirs(FIELDS[name][key].kind, each) for each in value]
                if isinstance(value, list)
                else theirs(FIELDS[name][key].kind, value)
            )
            if FIELDS[name][key].is_message
            else value
            for key, value in values.items()
        }
    )


def agree(name: str, mine: EtcdMessage, other: Any) -> bool:
    """Whether all fields are the same, those that were not set included."""
    for field in FIELDS[name].values():
        one, two = getattr(mine, field.name), getattr(other, field.name)
        pairs = zip(one, two, strict=True) if field.is_repeated else [(one, two)]
        for left, right in pairs:
            if not (agree(field.kind, left, right) if field.is_message else left == right):
                return False
    return True


@pytest.mark.parametrize("name", FIELDS)
@given(data=st.data())
@settings(max_examples=40, deadline=None, derandomize=True)
def test_it_writes_and_reads_what_the_library_does(name: str, data: st.DataObject) -> None:
    values = data.draw(contents(name))
    mine, other = ours(name, values), theirs(name, values)
    written = mine.to_bytes()
    assert library()[name].FromString(written) == other
    assert agree(name, read(name, written), other)
    assert agree(name, read(name, other.SerializeToString()), other)


@given(st.sampled_from(sorted(FIELDS)), st.binary(max_size=60))
@settings(max_examples=1000, deadline=None, derandomize=True)
def test_bytes_of_any_kind_are_a_message_or_are_refused(name: str, data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        read(name, data).to_bytes()


def test_what_is_not_known_is_passed_over() -> None:
    """As what a newer etcd says."""
    data = b"".join(
        [
            bytes([15 << 3 | 0, 0xFF, 0x01]),
            bytes([15 << 3 | 1]) + bytes(8),
            bytes([15 << 3 | 2, 3]) + b"abc",
            bytes([15 << 3 | 5]) + bytes(4),
        ]
    )
    one = read("KeyValue", data + message("KeyValue", key=b"k").to_bytes())
    assert (one.key, one.value, one.lease) == (b"k", b"", 0)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x0a", "ends within a number"),
        (b"\x0a\x05ab", "ends beyond the message"),
        (b"\x08\x01", "is of kind 0, expected 2"),
        (b"\x10" + b"\xff" * 10, "more than ten bytes"),
        (b"\x0b", "of kind 3"),
    ],
)
def test_what_is_wrong_with_a_message_is_told(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        read("KeyValue", data)


def test_a_field_that_a_message_has_not_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="KeyValue has no version_number"):
        message("KeyValue", version_number=1)
    with pytest.raises(AttributeError, match="KeyValue has no nothing"):
        _ = message("KeyValue").nothing
