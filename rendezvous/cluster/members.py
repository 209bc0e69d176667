"""etcd's own calls to change its cluster, with their messages: pyetcd's are of a time before learners."""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from pyetcd import etcdrpc

from elaunch.errors import LaunchError
from elaunch.rendezvous.cluster.connection import ServerConnection
from elaunch.rendezvous.cluster.servers import EtcdMember
from elaunch.rendezvous.membership import split_address

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd import EtcdStore

_IS_VOTER = "can only promote a learner member"
_NOT_READY = "in sync with leader"
_UNKNOWN = "member not found"

ANSWER_S = 0.3
"""How long a server may take to accept a connection."""

_Field = descriptor_pb2.FieldDescriptorProto
_MESSAGES = {
    # Name, number, type and whether it is repeated, as in etcd's rpc.proto.
    "Member": (
        ("ID", 1, _Field.TYPE_UINT64, False),
        ("name", 2, _Field.TYPE_STRING, False),
        ("peerURLs", 3, _Field.TYPE_STRING, True),
        ("clientURLs", 4, _Field.TYPE_STRING, True),
        ("isLearner", 5, _Field.TYPE_BOOL, False),
    ),
    "MemberListRequest": (("linearizable", 1, _Field.TYPE_BOOL, False),),
    "MemberAddRequest": (
        ("peerURLs", 1, _Field.TYPE_STRING, True),
        ("isLearner", 2, _Field.TYPE_BOOL, False),
    ),
    "MemberRequest": (("ID", 1, _Field.TYPE_UINT64, False),),
    "MemberListResponse": (("members", 2, _Field.TYPE_MESSAGE, True),),
}


class ClusterMembers:
    """The members of the cluster that a store connects to. All methods raise `StoreUnavailable` and `LaunchError`."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store

    def list(self) -> tuple[EtcdMember, ...]:
        """Returns all of them, those that do not live any more included."""
        request = _message("MemberListRequest")(linearizable=True)
        answer = self._call("list the servers", "MemberList", request)
        status = self._store.call(
            "ask which server leads",
            lambda server: etcdrpc.MaintenanceStub(server.channel).Status,
            etcdrpc.StatusRequest(),
            repeatable=True,
        )
        return tuple(
            EtcdMember(
                f"{one.ID:x}",
                one.peerURLs[0].rpartition("/")[2],
                one.clientURLs[0].rpartition("/")[2] if one.clientURLs else "",
                not one.isLearner,
                status.leader == one.ID,
            )
            for one in answer.members
        )

    def answers(self, client: str) -> bool:
        """Returns whether somebody listens at a server's address for agents."""
        try:
            host, port = split_address(client)
            with socket.create_connection((host, port), ANSWER_S):
                return True
        except (OSError, ValueError):
            return False

    def add(self, peer: str) -> None:
        """Adds a learner that listens for other servers at `peer`; does nothing if it is there."""
        if not any(one.peer == peer for one in self.list()):
            scheme = "https" if self._store.pem is not None else "http"
            request = _message("MemberAddRequest")(peerURLs=[f"{scheme}://{peer}"], isLearner=True)
            self._call(f"add the server at {peer}", "MemberAdd", request)

    def promote(self, member: str) -> bool:
        """Gives a learner a vote; returns False as long as it lacks too much of what the others hold."""
        try:
            self._call("promote a server", "MemberPromote", _message("MemberRequest")(ID=int(member, 16)))
        except LaunchError as error:
            if _NOT_READY not in str(error) and _IS_VOTER not in str(error):
                raise
            return _NOT_READY not in str(error)
        return True

    def remove(self, member: str) -> None:
        """Removes a server, whose process ends by itself; does nothing if it is none any more."""
        try:
            self._call("remove a server", "MemberRemove", _message("MemberRequest")(ID=int(member, 16)))
        except LaunchError as error:
            if _UNKNOWN not in str(error):
                raise

    def _call(self, what: str, name: str, request: Any) -> Any:
        # What was carried out before its answer was lost is noticed above.
        return self._store.call(what, lambda server: _stub(server, name), request, repeatable=True)


def _stub(server: ServerConnection, name: str) -> Callable[..., Any]:
    stub: Callable[..., Any] = server.channel.unary_unary(
        f"/etcdserverpb.Cluster/{name}",
        request_serializer=lambda request: request.SerializeToString(),
        response_deserializer=_message("MemberListResponse").FromString,
    )
    return stub


def _message(name: str) -> Any:
    return _messages()[name]


@cache
def _messages() -> dict[str, Any]:
    """Makes the classes of the messages; on the wire they are etcd's."""
    file = descriptor_pb2.FileDescriptorProto(name="elaunch/members.proto", package="elaunch.members", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
            one = message.field.add(name=field, number=number, type=kind, label=label)
            if kind == _Field.TYPE_MESSAGE:
                one.type_name = ".elaunch.members.Member"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"elaunch.members.{name}"))
        for name in _MESSAGES
    }
