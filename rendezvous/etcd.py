"""The store over etcd v3. The retries are here, connections, messages and watches in `cluster`.

Only this module and that package load h2. Clients of etcd for Python are not used: they put a failed
endpoint aside for minutes, do not renew their token, or cannot tell whether a request has reached the server.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.cluster.calls import ChannelClosed, Metadata, RpcError
from elaunch.rendezvous.cluster.connection import ServerConnection, own_context, parse_addresses, tls_context
from elaunch.rendezvous.cluster.http2 import DIAL_S
from elaunch.rendezvous.cluster.messages import EQUAL, MOD, message
from elaunch.rendezvous.cluster.watch import LOGIN_ATTEMPTS, RETRY_PAUSE_S, EtcdWatch, entry_of, prefix_range
from elaunch.rendezvous.etcd_trouble import TLS_FAILED, Trouble, advice_on, classify, tls_hint
from elaunch.rendezvous.security.authority import Pem
from elaunch.rendezvous.store import Entry, LeaseGone, Prefixes, WatchEvent, as_tuple

ALONE_PART = 0.75  # so others are asked while a lease that cannot be renewed still runs

_JOIN_S = 1.0
_SILENT_S = 0.7  # of a cluster's server: an election takes up to 0.6 s; each further attempt is given twice as long


class RequestLost(StoreUnavailable):
    """No answer came: the request may have been carried out or not."""


class EtcdStore:
    """The store over an etcd cluster; it connects at the first call.

    `endpoint` is `host:port`, or several with commas between them: another is tried where one cannot be reached.
    `timeout_s` bounds each call. `user` and `password` go together, `cert` and `key` too; the last three name PEM
    files, and any of them turns TLS on (without `ca_cert`, the server's certificate is checked against the roots of
    this machine).

    While etcd is away, a call waits for it up to its time-out; it goes on within about half a second of etcd's return.
    A caller that tries again by itself may set `first_contact_s`: so long a call waits for servers that cannot be
    reached as long as none of them has ever answered. One that looks for another store meanwhile may set `refused_s`:
    the same for a single server that has answered. Where that is silent, it waits for `ALONE_PART` of the time-out.

    Once it was told by `use` which servers the job's own cluster has, a request that gets no answer goes to another
    server within about a second, and so do watches; what was written meanwhile is neither lost nor written twice.

    `pem` is in the place of these files where the server is one that a node of this job has started; `newest` returns
    what it would be now. Where that is another one, a refusal may be due to the old one, and counts as an outage.
    `patience` is how many times `DIAL_S` one attempt to connect may take.

    Attributes:
        follows: whether it was told so.
        pem: see above.
    """

    def __init__(
        self,
        endpoint: str,
        timeout_s: float = 5.0,
        user: str | None = None,
        password: str | None = None,
        ca_cert: str | None = None,
        cert: str | None = None,
        key: str | None = None,
        *,
        pem: Pem | None = None,
        newest: Callable[[], Pem | None] | None = None,
        patience: int = 1,
    ) -> None:
        if (user is None) != (password is None):
            raise LaunchError("etcd: a user needs a password and a password needs a user; give both or neither")
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.first_contact_s = self.refused_s = math.inf
        self._user = user
        self._password = password
        self.pem = pem
        self._newest = newest
        self._is_of_job = pem is not None and pem.is_of_job
        self._uses_tls = pem is not None or any(path is not None for path in (ca_cert, cert, key))
        context, name = None, ""
        if pem is not None:
            context, name = own_context(pem)
        elif self._uses_tls:
            context = tls_context(ca_cert, cert, key)
        self._connect = partial(ServerConnection, context=context, name=name, dial_s=DIAL_S * patience)
        self._servers = [self._connect(address) for address in parse_addresses(endpoint)]
        self._current = self._servers[0]
        self._servers_lock = threading.Lock()
        self.follows = False
        self._login_lock = threading.Lock()
        self._login: Metadata | None = None if user is not None else ()
        self._watches: set[EtcdWatch] = set()
        self._watches_lock = threading.Lock()
        self._closed = threading.Event()

    def get(self, key: str) -> Entry | None:
        """Returns the entry, or None where the key is absent."""
        request = message("RangeRequest", key=key.encode())
        answer = self.call(f"get {key!r}", "Range", request, repeatable=True)
        return entry_of(answer.kvs[0]) if answer.kvs else None

    def range(self, prefix: Prefixes) -> tuple[list[Entry], int]:
        """Returns all entries under `prefix`, sorted by key, and the revision of the store at which they were read."""
        reads = []
        for one in as_tuple(prefix):
            first, end = prefix_range(one)
            # Without a sort order, etcd answers in the order of its index, which is that of the keys.
            reads.append(message("RequestOp", request_range=message("RangeRequest", key=first, range_end=end)))
        request = message("TxnRequest", success=reads)
        answer = self.call(f"range {prefix!r}", "Txn", request, repeatable=True)
        found = [kv for one in answer.responses for kv in one.response_range.kvs]
        return [entry_of(kv) for kv in found], int(answer.header.revision)

    def next_key(self, prefix: str, start: str) -> str | None:
        """Returns the first key under `prefix` that does not sort before `start`, or None where there is none."""
        first, end = prefix_range(prefix)
        request = message("RangeRequest", key=max(first, start.encode()), range_end=end, limit=1, keys_only=True)
        answer = self.call(f"range {prefix!r}", "Range", request, repeatable=True)
        return entry_of(answer.kvs[0]).key if answer.kvs else None

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes the key, bound to `lease` or to none, and returns the revision. Raises `LeaseGone`."""
        request = message("PutRequest", key=key.encode(), value=value, lease=lease or 0)
        answer = self.call(f"put {key!r}", "Put", request, repeatable=self.follows)
        return int(answer.header.revision)

    def create(self, key: str, value: bytes, lease: int | None = None) -> bool:
        """Writes the key if it is absent; returns whether it was. Raises `LeaseGone`."""
        put = message("PutRequest", key=key.encode(), value=value, lease=lease or 0)
        return self._put_if(f"create {key!r}", [put], 0)

    def replace(self, key: str, value: bytes, expected_revision: int, beside: tuple[str, bytes] | None = None) -> bool:
        """Writes the key if its last change was `expected_revision` (0: it is absent); returns whether it was."""
        puts = [message("PutRequest", key=key.encode(), value=value, ignore_lease=expected_revision != 0)]
        if beside is not None:
            puts.append(message("PutRequest", key=beside[0].encode(), value=beside[1]))
        return self._put_if(f"replace {key!r}", puts, expected_revision)

    def delete(self, key: str) -> bool:
        """Deletes the key; returns whether it was there."""
        request = message("DeleteRangeRequest", key=key.encode())
        answer = self.call(f"delete {key!r}", "DeleteRange", request, repeatable=self.follows)
        return bool(answer.deleted)

    def grant(self, ttl_s: float) -> int:
        """Returns a new lease of `ttl_s`, rounded up to whole seconds, at least 1."""
        request = message("LeaseGrantRequest", TTL=max(1, math.ceil(ttl_s)))
        # A lease granted twice is harmless: nobody keeps the first one alive.
        return int(self.call("grant a lease", "LeaseGrant", request, repeatable=True).ID)

    def keep_alive(self, lease: int, within_s: float | None = None) -> bool:
        """Renews the lease; returns whether it still existed."""
        request, what = message("LeaseKeepAliveRequest", ID=lease), f"keep lease {lease} alive"
        try:
            return bool(self.call(what, "LeaseKeepAlive", request, repeatable=True, within_s=within_s).TTL > 0)
        except LeaseGone:
            return False

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes what is bound to it. A lease that is gone already is no error."""
        request = message("LeaseRevokeRequest", ID=lease)
        with contextlib.suppress(LeaseGone):
            self.call(f"revoke lease {lease}", "LeaseRevoke", request, repeatable=True)

    def watch(
        self,
        prefix: Prefixes,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> EtcdWatch:
        """Delivers every event under `prefix` from `from_revision` on, from a thread of the watch's own.

        Raises:
            ValueError: `from_revision` is below 1.
            StoreUnavailable: the store is closed.
        """
        if from_revision < 1:
            raise ValueError(f"from_revision is {from_revision}; the first revision is 1")
        watch = EtcdWatch(self, prefix, from_revision, on_events, on_error)
        with self._watches_lock:
            if self._closed.is_set():
                raise StoreUnavailable(f"etcd at {self.endpoint}: watch {prefix!r} failed because the store is closed")
            self._watches.add(watch)
        watch.start()
        return watch

    def close(self) -> None:
        """Ends all watches without calling `on_error`, and hangs up. Later calls raise `StoreUnavailable`."""
        with self._watches_lock:
            self._closed.set()
            watches = list(self._watches)
        for watch in watches:
            watch.cancel()
        for server in self._servers:
            server.close()
        for watch in watches:
            watch.join(_JOIN_S)

    def use(self, endpoint: str) -> None:
        """Takes the servers of the job's own cluster as they are now, separated by commas."""
        addresses = parse_addresses(endpoint)
        with self._servers_lock:
            self.follows, self.endpoint = True, endpoint
            known = {server.address: server for server in self._servers}
            self._servers = [
                known.pop(address) if address in known else self._connect(address) for address in addresses
            ]
            if self._current not in self._servers:
                self._current = self._servers[0]
        for server in known.values():
            self._leave(server)
            server.close()

    def move_on(self, server: ServerConnection) -> None:
        """Goes over to the next server, and watches with it, unless another thread has left this one already."""
        with self._servers_lock:
            if self._current is not server:
                return
            index = self._servers.index(server)
            self._current = self._servers[(index + 1) % len(self._servers)]
        if self.follows and self._current is not server:
            self._leave(server)

    def _leave(self, server: ServerConnection) -> None:
        with self._watches_lock:
            watches = list(self._watches)
        for watch in watches:
            watch.leave(server)

    def _put_if(self, what: str, puts: list[Any], expected_revision: int) -> bool:
        """Makes these changes if the last change of the first one's key was this revision."""
        put = puts[0]
        request = message(
            "TxnRequest",
            compare=[
                message(
                    "Compare",
                    key=put.key,
                    target=MOD,
                    result=EQUAL,
                    mod_revision=expected_revision,
                )
            ],
            success=[message("RequestOp", request_put=each) for each in puts],
        )
        end_s = time.monotonic() + self.timeout_s
        while True:
            try:
                return bool(self.call(what, "Txn", request).succeeded)
            except RequestLost:
                if not self.follows or time.monotonic() >= end_s:
                    raise
            entry = self.get(put.key.decode())
            if entry is not None and entry.value == put.value and entry.revision != expected_revision:
                return True  # it was carried out; what was not may be sent again, for it is done once at most

    def call(
        self,
        what: str,
        method: str,
        request: Any,
        repeatable: bool = False,
        within_s: float | None = None,
    ) -> Any:
        """Sends one request until it is answered or the time is up, and returns the answer.

        A request that may have been carried out is sent again only where it is `repeatable`.
        """
        begin_s = time.monotonic()
        limit_s = self.timeout_s if within_s is None else within_s
        is_alone = self.refused_s < math.inf and len(self._servers) == 1
        deadline_s = begin_s + (ALONE_PART * limit_s if is_alone else limit_s)
        logins = 0
        reasons: dict[str, str] = {}
        server = self._current
        silent_s = _SILENT_S
        while (left_s := deadline_s - time.monotonic()) > 0:
            server = self._current
            # One silent server must not use up the time of a request that may be sent to another.
            attempt_s = left_s
            if self.follows:
                attempt_s, silent_s = min(left_s, silent_s), 2 * silent_s
            elif len(self._servers) > 1 and repeatable:
                attempt_s = left_s / 2
            attempt_ends_s = time.monotonic() + attempt_s
            may_repeat = True
            login: Metadata = ()
            try:
                login = self.login(server, attempt_s)
                may_repeat = repeatable
                answer = server.ask(method, request, max(0.001, attempt_ends_s - time.monotonic()), login)
                server.has_answered = True
                return answer
            except RpcError as error:
                reason, trouble = error.text, classify(error)
                # The last attempt often ends with the time that was left for it: the one before says why.
                if error.status != "DEADLINE_EXCEEDED" or server.address not in reasons:
                    reasons[server.address] = reason
            except ChannelClosed as error:
                if self._closed.is_set():
                    raise StoreUnavailable(self._describe(what, "the store is closed")) from error
                continue  # it is none of the cluster's any more
            if self._closed.is_set():
                raise StoreUnavailable(self._describe(what, "the store is closed"))
            if trouble is Trouble.LEASE_GONE:
                raise LeaseGone(self._describe(what, "the lease is gone; join again with a new one"))
            if (
                trouble in (Trouble.REFUSED, Trouble.TLS)
                and self._newest is not None
                and self._newest() is not self.pem
            ):
                raise StoreUnavailable(self._describe(what, f"the certificate was renewed: connect again ({reason})"))
            if trouble is Trouble.TLS and self._is_of_job:  # another job may be there, and about to end
                reasons[server.address] = f"{advice_on(reason, self._user, of_job=True)} ({reason})"
                trouble = Trouble.UNREACHED
            if trouble in (Trouble.REFUSED, Trouble.TLS):
                raise self.refusal(what, reason)
            if trouble is Trouble.TOKEN:
                logins += 1
                if self._user is None or logins >= LOGIN_ATTEMPTS:
                    raise self.refusal(what, reason)
                self.forget_login(login)
                continue
            self.move_on(server)
            if trouble is Trouble.LOST and not may_repeat:
                raise RequestLost(self._describe(what, f"{reason} (it may have been carried out or not)"))
            if trouble is Trouble.UNREACHED:
                deadline_s = min(deadline_s, self._unreached_until_s(begin_s))
            self._closed.wait(min(RETRY_PAUSE_S, max(0.0, deadline_s - time.monotonic())))
        reason = reasons.get(server.address, "no connection")
        hint = "" if server.has_answered else tls_hint(reason, self._uses_tls)
        question = "" if reason.startswith(TLS_FAILED) else f"; is etcd running there?{hint}"
        raise StoreUnavailable(self._describe(what, f"{reason}{question}", deadline_s - begin_s))

    def _unreached_until_s(self, begin_s: float) -> float:
        """Returns until when a call goes on that began then, as the server that it asks cannot be reached now."""
        with self._servers_lock:
            servers = list(self._servers)
        if not any(one.has_answered for one in servers):
            return begin_s + self.first_contact_s
        return time.monotonic() + self.refused_s if len(servers) == 1 else math.inf

    @property
    def server(self) -> ServerConnection:
        """Returns the server in use."""
        return self._current

    def login(self, server: ServerConnection, timeout_s: float) -> Metadata:
        """Returns the metadata that proves who we are, after authenticating where needed. Raises `RpcError`."""
        login = self._login
        if login is not None:
            return login
        deadline_s = time.monotonic() + timeout_s
        if not self._login_lock.acquire(timeout=timeout_s):
            return ()
        try:
            if self._login is None:
                request = message("AuthenticateRequest", name=self._user, password=self._password)
                try:
                    answer = server.ask("Authenticate", request, max(0.001, deadline_s - time.monotonic()))
                    self._login = (("token", str(answer.token)),)
                except RpcError as error:
                    if "authentication is not enabled" not in error.text:
                        raise
                    # As etcd's own client does: a server without authentication needs no login.
                    self._login = ()
            return self._login
        finally:
            self._login_lock.release()

    def forget_login(self, used: Metadata) -> None:
        """Authenticates again before the next request, unless another thread has done so since `used`."""
        with self._login_lock:
            if self._login == used and self._user is not None:
                self._login = None

    def can_login(self) -> bool:
        """Returns whether there is a user to authenticate as."""
        return self._user is not None

    def is_closed(self) -> bool:
        """Returns whether `close` was called."""
        return self._closed.is_set()

    def discard(self, watch: EtcdWatch) -> None:
        """Forgets a watch that has ended."""
        with self._watches_lock:
            self._watches.discard(watch)

    def refusal(self, what: str, reason: str) -> LaunchError:
        """Returns the error for a request that etcd will not carry out."""
        return LaunchError(
            f"etcd at {self.endpoint}: {what}: {advice_on(reason, self._user, self._is_of_job)} ({reason})"
        )

    def _describe(self, what: str, reason: str, limit_s: float | None = None) -> str:
        limit_s = self.timeout_s if limit_s is None else limit_s
        return f"etcd at {self.endpoint}: {what} was not answered (time-out {limit_s:.3g} s): {reason}"
