"""The messages of etcd's gRPC interface that are used here: its fields of `rpc.proto` and `kv.proto`, as of etcd 3.4.

They are made of this table, so that no generated code is needed, which would be bound to a version of protobuf's
library that the script may not want.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_Field = descriptor_pb2.FieldDescriptorProto

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


def _make() -> dict[str, Any]:
    lines = [line.partition(":") for line in _TABLE.replace("\\\n", "").splitlines() if line]
    file = descriptor_pb2.FileDescriptorProto(name="elaunch/etcd.proto", package="elaunch.etcd", syntax="proto3")
    for name, _, fields in lines:
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(",")):
            field_name, number, kind = field.split()
            label = _Field.LABEL_REPEATED if kind.startswith("*") else _Field.LABEL_OPTIONAL
            one = message.field.add(name=field_name, number=int(number), label=label)
            kind = kind.removeprefix("*")
            if kind[0].isupper():
                one.type, one.type_name = _Field.TYPE_MESSAGE, f".elaunch.etcd.{kind}"
            else:
                one.type = _Field.Type.Value(f"TYPE_{kind.upper()}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"elaunch.etcd.{name}"))
        for name, _, _ in lines
    }


_CLASSES = _make()


def message(name: str, /, **fields: Any) -> Any:
    """Returns a message with these fields."""
    return _CLASSES[name](**fields)


def read(name: str, data: bytes) -> Any:
    """Reads a message; raises `google.protobuf.message.DecodeError`."""
    return _CLASSES[name].FromString(data)
