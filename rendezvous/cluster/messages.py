"""The messages of etcd's gRPC interface that are used here: its fields of `rpc.proto` and `kv.proto`, as of etcd 3.4.

They are read and written by this table, as https://protobuf.dev/programming-guides/encoding/ says. Not by protobuf's
library: scripts bring versions of it that do not go together, and it would take 4 MiB of each agent.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

from elaunch.errors import ProtocolError

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_SIZES = {_FIXED_64: 8, _FIXED_32: 4}
_DEFAULTS: dict[str, Any] = {"bool": False, "bytes": b"", "string": ""}

# The fields of each message: its name, its number, its kind, and a `*` where it is repeated.
_TABLE = """
ResponseHeader: cluster_id 1 uint64, member_id 2 uint64, revision 3 int64, raft_term 4 uint64
KeyValue: key 1 bytes, create_revision 2 int64, mod_revision 3 int64, version 4 int64, value 5 bytes, lease 6 int64
Event: type 1 int32, kv 2 KeyValue, prev_kv 3 KeyValue

RangeRequest: key 1 bytes, range_end 2 bytes, limit 3 int64, revision 4 int64, keys_only 8 bool
RangeResponse: header 1 ResponseHeader, kvs 2 *KeyValue, more 3 bool, count 4 int64
PutRequest: key 1 bytes, value 2 bytes, lease 3 int64, ignore_lease 6 bool
PutResponse: header 1 ResponseHeader
DeleteRangeRequest: key 1 bytes, range_end 2 bytes
DeleteRangeResponse: header 1 ResponseHeader, deleted 2 int64
Compare: result 1 int32, target 2 int32, key 3 bytes, mod_revision 6 int64
RequestOp: request_range 1 RangeRequest, request_put 2 PutRequest
ResponseOp: response_range 1 RangeResponse, response_put 2 PutResponse
TxnRequest: compare 1 *Compare, success 2 *RequestOp, failure 3 *RequestOp
TxnResponse: header 1 ResponseHeader, succeeded 2 bool, responses 3 *ResponseOp

WatchCreateRequest: key 1 bytes, range_end 2 bytes, start_revision 3 int64
WatchRequest: create_request 1 WatchCreateRequest
WatchResponse: header 1 ResponseHeader, watch_id 2 int64, created 3 bool, canceled 4 bool, compact_revision 5 int64, \
cancel_reason 6 string, events 11 *Event

LeaseGrantRequest: TTL 1 int64, ID 2 int64
LeaseGrantResponse: header 1 ResponseHeader, ID 2 int64, TTL 3 int64
LeaseRevokeRequest: ID 1 int64
LeaseRevokeResponse: header 1 ResponseHeader
LeaseKeepAliveRequest: ID 1 int64
LeaseKeepAliveResponse: header 1 ResponseHeader, ID 2 int64, TTL 3 int64

AuthenticateRequest: name 1 string, password 2 string
AuthenticateResponse: header 1 ResponseHeader, token 2 string
StatusRequest:
StatusResponse: header 1 ResponseHeader, version 2 string, dbSize 3 int64, leader 4 uint64
AlarmRequest: action 1 int32, memberID 2 uint64, alarm 3 int32
AlarmResponse: header 1 ResponseHeader

Member: ID 1 uint64, name 2 string, peerURLs 3 *string, clientURLs 4 *string, isLearner 5 bool
MemberListRequest: linearizable 1 bool
MemberListResponse: header 1 ResponseHeader, members 2 *Member
MemberAddRequest: peerURLs 1 *string, isLearner 2 bool
MemberAddResponse: header 1 ResponseHeader, member 2 Member, members 3 *Member
MemberRemoveRequest: ID 1 uint64
MemberRemoveResponse: header 1 ResponseHeader, members 2 *Member
MemberPromoteRequest: ID 1 uint64
MemberPromoteResponse: header 1 ResponseHeader, members 2 *Member
"""

MOD, EQUAL = 2, 0
"""Of `Compare`: the revision of the last change is what is compared; it has to be the same."""

DELETE = 1
"""The type of an event."""

PATHS = {
    "Range": "/etcdserverpb.KV/Range",
    "Put": "/etcdserverpb.KV/Put",
    "DeleteRange": "/etcdserverpb.KV/DeleteRange",
    "Txn": "/etcdserverpb.KV/Txn",
    "Watch": "/etcdserverpb.Watch/Watch",
    "LeaseGrant": "/etcdserverpb.Lease/LeaseGrant",
    "LeaseRevoke": "/etcdserverpb.Lease/LeaseRevoke",
    "LeaseKeepAlive": "/etcdserverpb.Lease/LeaseKeepAlive",
    "Authenticate": "/etcdserverpb.Auth/Authenticate",
    "Status": "/etcdserverpb.Maintenance/Status",
    "Alarm": "/etcdserverpb.Maintenance/Alarm",
    "MemberList": "/etcdserverpb.Cluster/MemberList",
    "MemberAdd": "/etcdserverpb.Cluster/MemberAdd",
    "MemberRemove": "/etcdserverpb.Cluster/MemberRemove",
    "MemberPromote": "/etcdserverpb.Cluster/MemberPromote",
}
"""Where each method is; its messages are called after it."""


@dataclass(frozen=True, slots=True)
class _Field:
    name: str
    number: int
    kind: str
    is_repeated: bool
    is_message: bool
    wire: int


@cache
def _fields() -> dict[str, dict[str, _Field]]:
    """Returns the fields of each message, by name."""
    found: dict[str, dict[str, _Field]] = {}
    for line in filter(None, _TABLE.replace("\\\n", "").splitlines()):
        message_name, _, rest = line.partition(":")
        fields = [part.split() for part in rest.split(",") if part.strip()]
        found[message_name] = {name: _field(name, int(number), kind) for name, number, kind in fields}
    return found


def _field(name: str, number: int, text: str) -> _Field:
    kind = text.removeprefix("*")
    is_message = kind[0].isupper()
    wire = _BYTES if is_message or kind in ("bytes", "string") else _VARINT
    return _Field(name, number, kind, text != kind, is_message, wire)


@cache
def _by_number(name: str) -> dict[int, _Field]:
    return {field.number: field for field in _fields()[name].values()}


class EtcdMessage:
    """A message: its fields are attributes. One that was not set has the default of its kind, as in proto3."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self._name, self._values = name, values

    def __getattr__(self, name: str) -> Any:
        if name in self._values:
            return self._values[name]
        field = _fields()[self._name].get(name)
        if field is None:
            raise AttributeError(f"{self._name} has no {name}")
        if field.is_repeated:
            return []
        return EtcdMessage(field.kind, {}) if field.is_message else _DEFAULTS.get(field.kind, 0)

    def to_bytes(self) -> bytes:
        """Returns its bytes."""
        out = bytearray()
        for field in _fields()[self._name].values():
            value = self._values.get(field.name)
            if field.is_repeated:
                for one in value or ():
                    _write(out, field, one)
            elif value or (field.is_message and value is not None):  # a message counts although it is empty
                _write(out, field, value)
        return bytes(out)


def message(name: str, /, **fields: Any) -> EtcdMessage:
    """Returns a message with these fields."""
    unknown = fields.keys() - _fields()[name].keys()
    if unknown:
        raise TypeError(f"{name} has no {', '.join(sorted(unknown))}")
    return EtcdMessage(name, fields)


def read(name: str, data: bytes) -> EtcdMessage:
    """Reads a message; what is not known of it is passed over. Raises `ProtocolError`."""
    fields, values, at = _by_number(name), dict[str, Any](), 0
    value: int | bytes
    while at < len(data):
        key, at = _read_varint(data, at)
        wire, field = key & 7, fields.get(key >> 3)
        if wire == _VARINT:
            value, at = _read_varint(data, at)
        else:
            size = _SIZES.get(wire)
            if wire == _BYTES:
                size, at = _read_varint(data, at)
            if size is None or at + size > len(data):
                raise ProtocolError(f"{name}: a field of kind {wire} ends beyond the message")
            value, at = data[at : at + size], at + size
        if field is None:
            continue
        if wire != field.wire:
            raise ProtocolError(f"{name}.{field.name} is of kind {wire}, expected {field.wire}")
        known = _known(field, value)
        if field.is_repeated:
            values.setdefault(field.name, []).append(known)
        else:
            values[field.name] = known
    return EtcdMessage(name, values)


def _known(field: _Field, value: Any) -> Any:
    """Returns what a value on the wire stands for."""
    if field.is_message:
        return read(field.kind, value)
    match field.kind:
        case "bytes" | "uint64":
            return value
        case "string":
            try:
                return value.decode()
            except UnicodeDecodeError as error:
                raise ProtocolError(f"{field.name} is no text: {error}") from error
        case "bool":
            return value != 0
        case _:
            return value - 2**64 if value >= 2**63 else value


def _write(out: bytearray, field: _Field, value: Any) -> None:
    _write_varint(out, field.number << 3 | field.wire)
    if field.wire == _VARINT:
        _write_varint(out, int(value) % 2**64)
        return
    data = value.to_bytes() if field.is_message else value.encode() if field.kind == "string" else value
    _write_varint(out, len(data))
    out += data


def _write_varint(out: bytearray, value: int) -> None:
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns the number that begins there, of 64 bits, and where it ends."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise ProtocolError("a message ends within a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % 2**64, at
    raise ProtocolError("a number has more than ten bytes")
