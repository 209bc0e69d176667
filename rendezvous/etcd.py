"""The store over etcd v3, on the generated stubs of `pyetcd` (the `etcd-sdk-python` distribution).

Only this module loads grpc. pyetcd's own client is not used: it puts a failed endpoint aside for 300 s, never renews
its token, and its calls cannot be told apart by whether they reached the server. The connections, the retries and the
watches are here.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from pyetcd import etcdrpc

from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.etcd_trouble import Trouble, advice_on, classify, tls_hint
from elaunch.rendezvous.store import Entry, LeaseGone, WatchEvent

_Metadata = tuple[tuple[str, str], ...]

_RETRY_PAUSE_S = 0.02
_JOIN_S = 1.0
_LOGIN_ATTEMPTS = 3

# Asks etcd to end a watch on a member that has lost its quorum, instead of leaving it silent.
_REQUIRE_LEADER = ("hasleader", "true")

_CHANNEL_OPTIONS = [
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # Despite its name: the least time that one attempt to connect, with its TLS handshake, is given.
    ("grpc.min_reconnect_backoff_ms", 2000),
    # Silence is noticed within 9 s; etcd by default ends connections that ping more often than every 5 s. grpc takes
    # the longer of the two time-outs (the second is 60 s by default) and would stop pinging after two without data.
    ("grpc.keepalive_time_ms", 6000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.dns_min_time_between_resolutions_ms", 1000),
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A proxy for the web does not lead to etcd.
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class _Server:
    """The connection to one member of the cluster."""

    def __init__(self, address: str, credentials: Any) -> None:
        self.address = address
        self.has_answered = False
        if credentials is None:
            self.channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        else:
            self.channel = grpc.secure_channel(address, credentials, options=_CHANNEL_OPTIONS)
        self.kv = etcdrpc.KVStub(self.channel)
        self.lease = etcdrpc.LeaseStub(self.channel)
        self.watch = etcdrpc.WatchStub(self.channel)
        self.auth = etcdrpc.AuthStub(self.channel)

    def renew(self, request: Any, timeout_s: float, metadata: _Metadata) -> float:
        """Renews a lease on a stream of one request; returns the seconds that it has left, 0 where it is gone."""
        return sum(
            int(answer.TTL) for answer in self.lease.LeaseKeepAlive(iter((request,)), timeout_s, metadata=metadata)
        )


class EtcdStore:
    """The store over an etcd cluster; it connects at the first call.

    `endpoint` is `host:port`, or several with commas between them: another is tried where one cannot be reached.
    `timeout_s` bounds each call. `user` and `password` go together, `cert` and `key` too; the last three name PEM
    files, and any of them turns TLS on (without `ca_cert`, the server's certificate is checked against the roots that
    grpc ships).

    While etcd is away, a call waits for it up to its time-out; it goes on within about half a second of etcd's return.
    A caller that tries again by itself may set `first_contact_s`: so long a call waits for servers that cannot be
    reached as long as none of them has ever answered.
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
    ) -> None:
        if (user is None) != (password is None):
            raise LaunchError("etcd: a user needs a password and a password needs a user; give both or neither")
        self.endpoint = endpoint
        self.timeout_s = timeout_s
        self.first_contact_s = math.inf
        self._user = user
        self._password = password
        self._uses_tls = any(path is not None for path in (ca_cert, cert, key))
        credentials = _tls_credentials(ca_cert, cert, key) if self._uses_tls else None
        self._servers = [_Server(address, credentials) for address in _addresses(endpoint)]
        self._current = 0
        self._login_lock = threading.Lock()
        self._login: _Metadata | None = None if user is not None else ()
        self._watches: set[_EtcdWatch] = set()
        self._watches_lock = threading.Lock()
        self._closed = threading.Event()

    def get(self, key: str) -> Entry | None:
        """Returns the entry, or None where the key is absent."""
        request = etcdrpc.RangeRequest(key=key.encode())
        answer = self._call(f"get {key!r}", lambda server: server.kv.Range, request, repeatable=True)
        return _entry(answer.kvs[0]) if answer.kvs else None

    def range(self, prefix: str) -> tuple[list[Entry], int]:
        """Returns all entries under `prefix`, sorted by key, and the revision of the store at which they were read."""
        first, end = _prefix_range(prefix)
        # Without a sort order, etcd answers in the order of its index, which is that of the keys.
        request = etcdrpc.RangeRequest(key=first, range_end=end)
        answer = self._call(f"range {prefix!r}", lambda server: server.kv.Range, request, repeatable=True)
        return [_entry(kv) for kv in answer.kvs], int(answer.header.revision)

    def next_key(self, prefix: str, start: str) -> str | None:
        """Returns the first key under `prefix` that does not sort before `start`, or None where there is none."""
        first, end = _prefix_range(prefix)
        request = etcdrpc.RangeRequest(key=max(first, start.encode()), range_end=end, limit=1, keys_only=True)
        answer = self._call(f"range {prefix!r}", lambda server: server.kv.Range, request, repeatable=True)
        return _entry(answer.kvs[0]).key if answer.kvs else None

    def put(self, key: str, value: bytes, lease: int | None = None) -> int:
        """Writes the key, bound to `lease` or to none, and returns the revision. Raises `LeaseGone`."""
        request = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease or 0)
        return int(self._call(f"put {key!r}", lambda server: server.kv.Put, request).header.revision)

    def create(self, key: str, value: bytes, lease: int | None = None) -> bool:
        """Writes the key if it is absent; returns whether it was. Raises `LeaseGone`."""
        put = etcdrpc.PutRequest(key=key.encode(), value=value, lease=lease or 0)
        return self._put_if(f"create {key!r}", put, 0)

    def replace(self, key: str, value: bytes, expected_revision: int) -> bool:
        """Writes the key if its last change was `expected_revision` (0: it is absent); returns whether it was."""
        put = etcdrpc.PutRequest(key=key.encode(), value=value, ignore_lease=expected_revision != 0)
        return self._put_if(f"replace {key!r}", put, expected_revision)

    def delete(self, key: str) -> bool:
        """Deletes the key; returns whether it was there."""
        request = etcdrpc.DeleteRangeRequest(key=key.encode())
        return bool(self._call(f"delete {key!r}", lambda server: server.kv.DeleteRange, request).deleted)

    def grant(self, ttl_s: float) -> int:
        """Returns a new lease of `ttl_s`, rounded up to whole seconds, at least 1."""
        request = etcdrpc.LeaseGrantRequest(TTL=max(1, math.ceil(ttl_s)))
        # A lease granted twice is harmless: nobody keeps the first one alive.
        return int(self._call("grant a lease", lambda server: server.lease.LeaseGrant, request, repeatable=True).ID)

    def keep_alive(self, lease: int) -> bool:
        """Renews the lease; returns whether it still existed."""
        request = etcdrpc.LeaseKeepAliveRequest(ID=lease)
        try:
            return bool(self._call(f"keep lease {lease} alive", lambda server: server.renew, request, repeatable=True))
        except LeaseGone:
            return False

    def revoke(self, lease: int) -> None:
        """Ends the lease and deletes what is bound to it. A lease that is gone already is no error."""
        request = etcdrpc.LeaseRevokeRequest(ID=lease)
        with contextlib.suppress(LeaseGone):
            self._call(f"revoke lease {lease}", lambda server: server.lease.LeaseRevoke, request, repeatable=True)

    def watch(
        self,
        prefix: str,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> _EtcdWatch:
        """Delivers every event under `prefix` from `from_revision` on, from a thread of the watch's own.

        Raises:
            ValueError: `from_revision` is below 1.
            StoreUnavailable: the store is closed.
        """
        if from_revision < 1:
            raise ValueError(f"from_revision is {from_revision}; the first revision is 1")
        watch = _EtcdWatch(self, prefix, from_revision, on_events, on_error)
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
            server.channel.close()
        for watch in watches:
            watch.join(_JOIN_S)

    def _put_if(self, what: str, put: Any, expected_revision: int) -> bool:
        request = etcdrpc.TxnRequest(
            compare=[
                etcdrpc.Compare(
                    key=put.key,
                    target=etcdrpc.Compare.MOD,
                    result=etcdrpc.Compare.EQUAL,
                    mod_revision=expected_revision,
                )
            ],
            success=[etcdrpc.RequestOp(request_put=put)],
        )
        return bool(self._call(what, lambda server: server.kv.Txn, request).succeeded)

    def _call(self, what: str, method: Callable[[_Server], Any], request: Any, repeatable: bool = False) -> Any:
        """Sends one request until it is answered or the time is up, and returns the answer.

        A request that may have been carried out is sent again only where it is `repeatable`.
        """
        begin_s = time.monotonic()
        deadline_s = begin_s + self.timeout_s
        logins = 0
        reasons: dict[int, str] = {}
        index = self._current
        while (left_s := deadline_s - time.monotonic()) > 0:
            index = self._current
            server = self._servers[index]
            # One silent member must not use up the time of a request that may be sent to another.
            attempt_s = left_s / 2 if repeatable and len(self._servers) > 1 else left_s
            attempt_ends_s = time.monotonic() + attempt_s
            may_repeat = True
            login: _Metadata = ()
            try:
                login = self.login(server, attempt_s)
                may_repeat = repeatable
                answer = method(server)(request, max(0.001, attempt_ends_s - time.monotonic()), metadata=login)
                server.has_answered = True
                return answer
            except grpc.RpcError as error:
                code, reason = _status(error)
                trouble = classify(code, reason)
                # The last attempt often ends with the time that was left for it: the one before says why.
                if code != "DEADLINE_EXCEEDED" or index not in reasons:
                    reasons[index] = reason
            except ValueError as error:
                if not self._closed.is_set():
                    raise
                raise StoreUnavailable(self._describe(what, "the store is closed")) from error
            if self._closed.is_set():
                raise StoreUnavailable(self._describe(what, "the store is closed"))
            if trouble is Trouble.LEASE_GONE:
                raise LeaseGone(self._describe(what, "the lease is gone; join again with a new one"))
            if trouble is Trouble.REFUSED:
                raise self.refusal(what, reason)
            if trouble is Trouble.TOKEN:
                logins += 1
                if self._user is None or logins >= _LOGIN_ATTEMPTS:
                    raise self.refusal(what, reason)
                self.forget_login(login)
                continue
            if self._current == index:
                self._current = (index + 1) % len(self._servers)
            if trouble is Trouble.LOST and not may_repeat:
                raise StoreUnavailable(self._describe(what, f"{reason} (it may have been carried out or not)"))
            if trouble is Trouble.UNREACHED and not any(one.has_answered for one in self._servers):
                deadline_s = min(deadline_s, begin_s + self.first_contact_s)
            self._closed.wait(min(_RETRY_PAUSE_S, max(0.0, deadline_s - time.monotonic())))
        reason = reasons.get(index, "no connection")
        hint = "" if self._servers[index].has_answered else tls_hint(reason, self._uses_tls)
        limit_s = deadline_s - begin_s
        raise StoreUnavailable(self._describe(what, f"{reason}; is etcd running there?{hint}", limit_s))

    @property
    def server(self) -> _Server:
        """Returns the member in use."""
        return self._servers[self._current]

    def login(self, server: _Server, timeout_s: float) -> _Metadata:
        """Returns the metadata that proves who we are, after authenticating where needed. Raises `grpc.RpcError`."""
        login = self._login
        if login is not None:
            return login
        deadline_s = time.monotonic() + timeout_s
        if not self._login_lock.acquire(timeout=timeout_s):
            return ()
        try:
            if self._login is None:
                request = etcdrpc.AuthenticateRequest(name=self._user, password=self._password)
                try:
                    answer = server.auth.Authenticate(request, max(0.001, deadline_s - time.monotonic()))
                    self._login = (("token", str(answer.token)),)
                except grpc.RpcError as error:
                    if "authentication is not enabled" not in _status(error)[1]:
                        raise
                    # As etcd's own client does: a server without authentication needs no login.
                    self._login = ()
            return self._login
        finally:
            self._login_lock.release()

    def forget_login(self, used: _Metadata) -> None:
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

    def discard(self, watch: _EtcdWatch) -> None:
        """Forgets a watch that has ended."""
        with self._watches_lock:
            self._watches.discard(watch)

    def refusal(self, what: str, reason: str) -> LaunchError:
        """Returns the error for a request that etcd will not carry out."""
        return LaunchError(f"etcd at {self.endpoint}: {what}: {advice_on(reason, self._user)} ({reason})")

    def _describe(self, what: str, reason: str, limit_s: float | None = None) -> str:
        limit_s = self.timeout_s if limit_s is None else limit_s
        return f"etcd at {self.endpoint}: {what} was not answered (time-out {limit_s:.3g} s): {reason}"


class _EtcdWatch:
    """One watch: a stream of its own and the daemon thread that reads it."""

    def __init__(
        self,
        store: EtcdStore,
        prefix: str,
        from_revision: int,
        on_events: Callable[[list[WatchEvent]], None],
        on_error: Callable[[StoreUnavailable], None],
    ) -> None:
        self._store = store
        self._prefix = prefix
        self._next_revision = from_revision
        self._on_events = on_events
        self._on_error = on_error
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._thread = threading.Thread(target=self._run, name=f"elaunch-watch {prefix}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            call = self._call
        if call is not None:
            call.cancel()

    def join(self, timeout_s: float) -> None:
        if self._thread is not threading.current_thread() and self._thread.is_alive():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        try:
            problem = self._read()
        except Exception as error:
            # Without this the owner would wait for events that never come.
            self._fail(f"the callback raised {error!r}")
            raise
        finally:
            self._store.discard(self)
        self._fail(problem)

    def _fail(self, problem: str) -> None:
        if not self._cancelled.is_set() and not self._store.is_closed():
            self._on_error(StoreUnavailable(f"etcd at {self._store.endpoint}: watch {self._prefix!r} ended: {problem}"))

    def _read(self) -> str:
        """Delivers events until the stream ends; returns why it did."""
        for _ in range(_LOGIN_ATTEMPTS):
            login: _Metadata = ()
            ended = threading.Event()
            try:
                server = self._store.server
                login = self._store.login(server, self._store.timeout_s)
                with self._lock:
                    if self._cancelled.is_set():
                        return "cancelled"
                    self._call = server.watch.Watch(self._requests(ended), metadata=(*login, _REQUIRE_LEADER))
                problem = self._deliver_all(self._call)
            except grpc.RpcError as error:
                _, problem = _status(error)
            except ValueError:
                if not self._store.is_closed():
                    raise
                return "the store is closed"
            finally:
                ended.set()
            # For a watch, etcd calls a login that has ended "permission denied" too.
            ended_login = classify("", problem) is Trouble.TOKEN or "permission denied" in problem
            if not ended_login or not self._store.can_login():
                return problem
            self._store.forget_login(login)
        return problem

    def _requests(self, ended: threading.Event) -> Iterator[Any]:
        """Sends the one request, then keeps our half of the stream open until it has ended."""
        first, end = _prefix_range(self._prefix)
        create = etcdrpc.WatchCreateRequest(key=first, range_end=end, start_revision=self._next_revision)
        yield etcdrpc.WatchRequest(create_request=create)
        ended.wait()

    def _deliver_all(self, answers: Any) -> str:
        for answer in answers:
            if self._cancelled.is_set():
                return "cancelled"
            if answer.compact_revision:
                return f"revision {self._next_revision} was compacted (at {answer.compact_revision}); read again"
            if answer.canceled:
                return str(answer.cancel_reason) or "etcd cancelled it"
            events = [_event(event) for event in answer.events]
            if events:
                self._next_revision = events[-1].revision + 1
                self._on_events(events)
        return "etcd ended the stream"


def _status(error: Any) -> tuple[str, str]:
    """Returns the name of the status and its text; not every `grpc.RpcError` has them."""
    code = error.code() if hasattr(error, "code") else None
    details = error.details() if hasattr(error, "details") else str(error)
    return getattr(code, "name", "UNKNOWN"), str(details or code)


def _entry(kv: Any) -> Entry:
    return Entry(_key(kv.key), kv.value, kv.mod_revision, kv.create_revision)


def _event(event: Any) -> WatchEvent:
    kv = event.kv
    deleted = event.type == event.DELETE
    return WatchEvent(
        _key(kv.key), None if deleted else kv.value, kv.mod_revision, 0 if deleted else kv.create_revision
    )


def _key(key: bytes) -> str:
    """Returns a key as text. A stranger's may be no UTF-8: odd bytes are shown, as \\xff, and never written back."""
    return key.decode(errors="backslashreplace")


def _prefix_range(prefix: str) -> tuple[bytes, bytes]:
    """Returns etcd's half-open range of the keys that start with `prefix` (UTF-8 has no 0xff: adding 1 is safe)."""
    first = prefix.encode()
    return (first, first[:-1] + bytes((first[-1] + 1,))) if first else (b"\0", b"\0")


def _addresses(endpoint: str) -> list[str]:
    addresses = [part.strip() for part in endpoint.split(",")]
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal() or "/" in host:
            raise LaunchError(f"etcd: {address!r} is not host:port (endpoint {endpoint!r})")
    return addresses


def _tls_credentials(ca_cert: str | None, cert: str | None, key: str | None) -> Any:
    if (cert is None) != (key is None):
        raise LaunchError("etcd: a client certificate needs its key and a key its certificate; give both or neither")
    ca_pem, cert_pem, key_pem = (
        _pem("CA certificate", ca_cert),
        _pem("client certificate", cert),
        _pem("client key", key),
    )
    return grpc.ssl_channel_credentials(ca_pem, key_pem, cert_pem)


def _pem(what: str, path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise LaunchError(f"etcd: cannot read the {what} {path!r}: {error.strerror}") from error
    if b"-----BEGIN " not in text:
        raise LaunchError(f"etcd: the {what} {path!r} is not a PEM file")
    return text
