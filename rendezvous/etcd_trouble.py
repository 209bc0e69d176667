"""What it means when a call to etcd fails. Pure."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING

from elaunch.errors import LaunchError
from elaunch.rendezvous.security.secret import SECRET, USERS_FILE

if TYPE_CHECKING:
    from elaunch.rendezvous.cluster.calls import RpcError

NO_SERVER = "is an etcd v3 server running there, and reachable from this machine?"
HOST_IS_AWAY = (
    "the node that hosts the rendezvous there is lost, and the other nodes say at which address the job goes on; or it "
    "has not started it yet or cannot be reached from here, or the job has ended, and its rendezvous with it"
)


class Trouble(enum.Enum):
    """What a failed call means for the caller."""

    UNREACHED = "no server has seen the request: it may be sent again"
    LOST = "no answer: the request may have been carried out or not"
    TOKEN = "the login is missing or has ended"
    LEASE_GONE = "the lease has ended"
    REFUSED = "sending it again cannot help"
    TLS = "whoever answers there is not of this job, or of no etcd that is known"


_UNDONE_DETAILS = ("etcdserver: no leader", "etcdserver: not leader", "etcdserver: too many requests")
_TOKEN_DETAILS = ("invalid auth token", "user name is empty", "revision of auth store is old")
TLS_FAILED = "TLS failed"
_TLS_DETAIL = "tls handshake failed"
_WITHOUT_CONNECTION_DETAILS = (
    "connection refused",
    "no route to host",
    "network is unreachable",
    "dns resolution failed",
    "etcdserver:",
)
_RETRY_CODES = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN", "INTERNAL", "ABORTED")


def classify(error: RpcError) -> Trouble:
    """Returns what a failed call means; the texts are those of etcd 3.5."""
    text = error.text.lower()
    if error.is_tls:
        return Trouble.TLS
    if is_about_login(text):
        return Trouble.TOKEN
    if "requested lease not found" in text:
        return Trouble.LEASE_GONE
    if not error.is_sent or any(part in text for part in _UNDONE_DETAILS):
        return Trouble.UNREACHED
    return Trouble.LOST if error.status in _RETRY_CODES else Trouble.REFUSED


def is_about_login(reason: str) -> bool:
    """Returns whether etcd wants a login, or another one."""
    return any(part in reason.lower() for part in _TOKEN_DETAILS)


def advice_on(reason: str, user: str | None, of_job: bool = False) -> str:
    """Returns what is wrong with a request that etcd has refused, and what to do.

    Args:
        reason: the text of the error.
        user: as whom this node logs in; None: it does not.
        of_job: whether this node shows a certificate of its job.
    """
    text = reason.lower()
    if "wrong_version_number" in text and of_job:
        return (
            f"{TLS_FAILED}: what the server answers is not TLS: it is no etcd that this job has started (one that runs "
            "already is given with --rdzv-backend=etcd), or its node was given another --link-encryption"
        )
    if "wrong_version_number" in text:
        return f"{TLS_FAILED}: what the server answers is not TLS.{_question(uses_tls=True)}"
    if _TLS_DETAIL in text and of_job:
        return (
            f"{TLS_FAILED}: whoever answers there has another secret, or is of another job: give all nodes the same "
            f"--rdzv-id and the same secret ({SECRET}, secret_file, or the file {USERS_FILE}), or none"
        )
    if _TLS_DETAIL in text:
        return f"{TLS_FAILED}; check the CA, the client certificate and the host name in the server's certificate"
    if "invalid user id or password" in text:
        return f"wrong user or password (user {user!r})"
    if "permission denied" in text:
        return f"user {user!r} has no permission; grant it read and write of this prefix"
    if is_about_login(text) and user is None:
        return "etcd wants a user and a password"
    if "database space exceeded" in text:
        return "its space is used up; compact and defragment it, then run `etcdctl alarm disarm`"
    if "request is too large" in text or "larger than max" in text:
        return "the document is larger than it takes; start etcd with a greater --max-request-bytes"
    return "etcd refused the request"


def tls_hint(reason: str, uses_tls: bool) -> str:
    """Returns the question whether the other side uses TLS too, for a server that has never answered, or nothing.

    Where only one side speaks TLS, the other hears nothing that it understands, hangs up, or keeps waiting: `reason`
    differs with what comes first, so it is asked unless `reason` shows that there was no connection at all, or that
    etcd has answered.
    """
    text = reason.lower()
    return "" if any(part in text for part in _WITHOUT_CONNECTION_DETAILS) else _question(uses_tls)


def with_cause(error: Exception, hosted: bool) -> str:
    """Returns an error with what it may mean that nobody answers at the endpoint, or not in the way of this job.

    Args:
        error: of a node that is not in the job yet.
        hosted: a node of the job has the store.
    """
    if TLS_FAILED in str(error):
        return str(error)  # somebody has answered
    return f"{error}; {HOST_IS_AWAY if hosted else NO_SERVER}"


def gave_up(error: Exception, connect_s: float, hosted: bool) -> str:
    """Returns the last words of a node that could not reach the store within `connect_s` seconds."""
    given_up = f"gave up after {connect_s:g} s (--rdzv-conf connect_timeout=SECONDS gives it more time)"
    return with_cause(LaunchError(f"{error}; {given_up}"), hosted)


def _question(uses_tls: bool) -> str:
    if uses_tls:
        return " Does it use TLS? This side does."
    return " Does it want TLS? This side does not use it; one that a job of several machines has started does."
