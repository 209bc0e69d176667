"""etcd's own calls to change its cluster."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Any

from elaunch.errors import LaunchError
from elaunch.rendezvous.cluster.messages import message
from elaunch.rendezvous.cluster.servers import EtcdMember
from elaunch.rendezvous.membership import split_address

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd import EtcdStore

_IS_VOTER = "can only promote a learner member"
_NOT_READY = "in sync with leader"
_UNKNOWN = "member not found"

ANSWER_S = 0.3
"""How long a server may take to accept a connection."""


class ClusterMembers:
    """The members of the cluster that a store connects to. All methods raise `StoreUnavailable` and `LaunchError`."""

    def __init__(self, store: EtcdStore) -> None:
        self._store = store

    def list(self) -> tuple[EtcdMember, ...]:
        """Returns all of them, those that do not live any more included."""
        answer = self._call("list the servers", "MemberList", linearizable=True)
        status = self._call("ask which server leads", "Status")
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
            self._call(f"add the server at {peer}", "MemberAdd", peerURLs=[f"{scheme}://{peer}"], isLearner=True)

    def promote(self, member: str) -> bool:
        """Gives a learner a vote; returns False as long as it lacks too much of what the others hold."""
        try:
            self._call("promote a server", "MemberPromote", ID=int(member, 16))
        except LaunchError as error:
            if _NOT_READY not in str(error) and _IS_VOTER not in str(error):
                raise
            return _NOT_READY not in str(error)
        return True

    def remove(self, member: str) -> None:
        """Removes a server, whose process ends by itself; does nothing if it is none any more."""
        try:
            self._call("remove a server", "MemberRemove", ID=int(member, 16))
        except LaunchError as error:
            if _UNKNOWN not in str(error):
                raise

    def _call(self, what: str, method: str, **fields: Any) -> Any:
        # What was carried out before its answer was lost is noticed above.
        return self._store.call(what, method, message(f"{method}Request", **fields), repeatable=True)
