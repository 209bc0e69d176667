"""An etcd that a job starts with a secret: who has none can read and change nothing, at any port of any server."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.cli.commands import open_store
from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.cluster.calls import RpcError
from elaunch.rendezvous.cluster.connection import ServerConnection, tls_context
from elaunch.rendezvous.cluster.members import ClusterMembers
from elaunch.rendezvous.cluster.messages import message
from elaunch.rendezvous.cluster.plain import speaks_tls
from elaunch.rendezvous.conf import parse_conf
from elaunch.rendezvous.embedded import EmbeddedEtcd, free_address
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.security.authority import Authority
from elaunch.rendezvous.security.contexts import client_of_store
from elaunch.rendezvous.security.identity import RENEW_S, NodeIdentity, guest
from elaunch.rendezvous.security.secret import NodeFiles, SecuritySettings
from tests.helpers import find_free_port, wait_until

LIMIT_S = 20.0
SHORT_S = 1.0
SETTINGS = SecuritySettings(b"a secret of some length")


class SecuredCluster:
    """Servers of one job, each with files of its own, and a client of all of them."""

    def __init__(self, folder: Path, settings: SecuritySettings) -> None:
        self._folder, self._settings = folder, settings
        self.nodes: list[NodeIdentity] = []
        self.servers: dict[str, EmbeddedEtcd] = {}

    def begin(self) -> None:
        peer, first = self._make()
        self.servers[peer] = first
        first.start()
        first.wait_ready(LIMIT_S)
        self.store = EtcdStore(first.endpoint, timeout_s=LIMIT_S, pem=self.nodes[0].store_pem)
        self.members = ClusterMembers(self.store)

    def _make(self) -> tuple[str, EmbeddedEtcd]:
        node = NodeIdentity(self._settings, "job", f"n{len(self.nodes)}", encrypts=False, guards_store=True)
        node.make(time.time() - 60, ("127.0.0.1",))
        self.nodes.append(node)
        peer = free_address("127.0.0.1")
        return peer, EmbeddedEtcd(str(self._folder / f"etcd{len(self.nodes)}"), peer=peer, tls=node.files)

    def grow(self) -> None:
        peer, server = self._make()
        self.members.add(peer)
        self.servers[peer] = server
        server.join(one.peer for one in self.members.list())
        (learner,) = [one for one in self.members.list() if one.peer == peer]
        wait_until(lambda: self.members.promote(learner.id), LIMIT_S, f"the server to catch up; {server.last_line()}")
        wait_until(lambda: all(one.client for one in self.members.list()), LIMIT_S, "it to say where clients reach it")
        self.store.use(",".join(one.client for one in self.members.list()))

    def close(self) -> None:
        if len(self.servers) > 1:
            self.store.close()
        for server in self.servers.values():
            if server.pid is not None:
                server.stop(0.0)
        for node in self.nodes:
            node.remove()


@pytest.fixture(params=["secret", "id"])
def settings(request: pytest.FixtureRequest) -> SecuritySettings:
    """Of a job with a secret, and of one whose certificates come from its id."""
    return SETTINGS if request.param == "secret" else SecuritySettings()


@pytest.fixture
def cluster(tmp_path: Path, settings: SecuritySettings) -> Iterator[SecuredCluster]:
    made = SecuredCluster(tmp_path, settings)
    try:
        made.begin()
        made.grow()
        made.grow()
        yield made
    finally:
        made.close()


def refused(address: str, secret: bytes, job: str = "job") -> LaunchError:
    """Why a client with another secret, or of another job, is not served."""
    pem = guest(SecuritySettings(secret), job, time.time())
    store = EtcdStore(address, timeout_s=SHORT_S, pem=pem)
    try:
        with pytest.raises(LaunchError) as raised:
            store.get("/elaunch/job/config")
        return raised.value
    finally:
        store.close()


def assert_closed(cluster: SecuredCluster, address: str) -> None:
    """Who has no certificate of the job is not served at this port: reads, writes, members, other servers' requests."""
    plain = EtcdStore(address, timeout_s=SHORT_S)
    try:
        for call in (
            lambda: plain.get("/elaunch/job/config"),
            lambda: plain.put("/elaunch/job/x", b"1"),
            lambda: plain.delete("/elaunch/job/config"),
            lambda: ClusterMembers(plain).list(),
        ):
            with pytest.raises(StoreUnavailable, match="Does it want TLS\\?"):
                call()
    finally:
        plain.close()
    # With TLS, and any name taken for right, but nothing to show.
    stranger = ServerConnection(address, tls_context(cluster.nodes[0].files.authority, None, None), "store.elaunch")
    try:
        for method, fields in (
            ("Range", {"key": b"\0", "range_end": b"\0"}),
            ("Put", {"key": b"/elaunch/job/x", "value": b"1"}),
            ("Status", {}),
        ):
            with pytest.raises(RpcError) as raised:
                stranger.ask(method, message(f"{method}Request", **fields), SHORT_S)
            assert not raised.value.is_sent
    finally:
        stranger.close()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    for path in (b"/health", b"/metrics", b"/version", b"/members", b"/raft/probing"):
        heard = b""
        with socket.create_connection(split_address(address), LIMIT_S) as sock:
            try:
                with context.wrap_socket(sock) as end:
                    end.sendall(b"GET %s HTTP/1.0\r\n\r\n" % path)
                    heard = end.recv(1000)
            except OSError:
                pass
        assert heard == b""
    with socket.create_connection(split_address(address), LIMIT_S) as sock:
        sock.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        heard = b""
        with contextlib.suppress(ConnectionResetError):
            heard = sock.recv(1000)
        assert b"200" not in heard


def test_who_has_no_certificate_of_the_job_can_read_and_change_nothing(cluster: SecuredCluster) -> None:
    cluster.store.put("/elaunch/job/config", b"kept")
    before = cluster.store.range("")
    ports = [*cluster.servers, *(one.endpoint for one in cluster.servers.values())]
    assert len(ports) == 6
    for address in ports:
        assert_closed(cluster, address)
    client = cluster.store.server.address
    for error in (refused(client, b"quite another secret"), refused(client, b"a secret of some length", "another job")):
        assert "has another secret" in str(error)
        assert "ELAUNCH_SECRET" in str(error)
        assert "secret of" not in str(error)
        assert "\n" not in str(error)
    assert cluster.store.range("") == before
    for server in cluster.servers.values():
        log = Path(server.log_path).read_text()
        assert "PRIVATE" not in log


def test_a_cluster_of_a_job_with_a_secret_outlives_a_server(cluster: SecuredCluster) -> None:
    cluster.store.put("/elaunch/job/config", b"kept")
    for pid in [one.pid for one in cluster.servers.values()][:1]:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    entry = cluster.store.get("/elaunch/job/config")
    assert entry is not None
    assert entry.value == b"kept"
    cluster.store.put("/elaunch/job/config", b"changed")


def test_a_certificate_that_is_renewed_is_taken_without_a_new_start(cluster: SecuredCluster) -> None:
    server = next(iter(cluster.servers.values()))
    before = shown(cluster)
    for node in cluster.nodes:
        assert node.look(time.time() - 30 + RENEW_S) == ""
    assert shown(cluster) != before
    fresh = EtcdStore(server.endpoint, timeout_s=LIMIT_S, pem=cluster.nodes[1].store_pem)
    try:
        fresh.put("/elaunch/job/config", b"written")
    finally:
        fresh.close()


def test_a_client_whose_certificate_has_ended_is_to_connect_again_with_a_newer_one(
    cluster: SecuredCluster, settings: SecuritySettings
) -> None:
    address, old = cluster.store.server.address, guest(settings, "job", time.time() - 30 * 24 * 3600)
    outdated = EtcdStore(address, timeout_s=LIMIT_S, pem=old, newest=lambda: cluster.nodes[0].store_pem)
    final = EtcdStore(address, timeout_s=SHORT_S, pem=old, newest=lambda: old)
    try:
        with pytest.raises(StoreUnavailable, match="the certificate was renewed: connect again"):
            outdated.get("/elaunch/job/config")
        with pytest.raises(LaunchError, match="TLS failed"):
            final.get("/elaunch/job/config")
    finally:
        outdated.close()
        final.close()


def test_certificates_of_a_users_own_authority_do_as_well(tmp_path: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    pem = Authority(b"not known to elaunch", "of a user").issue("n", ("127.0.0.1",), now)
    for name, content in (("ca", pem.authority), ("cert", pem.certificate), ("key", pem.key)):
        (tmp_path / name).write_bytes(content)
    files = NodeFiles("", *(str(tmp_path / name) for name in ("ca", "cert", "key")))
    node = NodeIdentity(SecuritySettings(files=files), "job", "n", encrypts=False, guards_store=True)
    node.make(time.time())
    server = EmbeddedEtcd(str(tmp_path / "etcd"), tls=node.files)
    store: EtcdStore | None = None
    try:
        server.start()
        server.wait_ready(LIMIT_S)
        store = EtcdStore(server.endpoint, timeout_s=LIMIT_S, pem=node.pem)
        store.put("/elaunch/job/config", b"1")
        refused(server.endpoint, b"a secret of some length")
    finally:
        if store is not None:
            store.close()
        server.stop()
        node.remove()


def shown(cluster: SecuredCluster) -> bytes | None:
    """The certificate that the first server shows."""
    files, server = cluster.nodes[0].files, next(iter(cluster.servers.values()))
    context = client_of_store(files.authority, files.node)
    with socket.create_connection(split_address(server.endpoint), LIMIT_S) as sock, context.wrap_socket(sock) as end:
        return end.getpeercert(True)


def test_a_client_with_a_secret_is_told_that_a_server_has_none(etcd: EmbeddedEtcd) -> None:
    pem = guest(SETTINGS, "job", time.time())
    store = EtcdStore(etcd.endpoint, timeout_s=SHORT_S, pem=pem)
    try:
        with pytest.raises(StoreUnavailable, match="Does it use TLS\\? This side does"):
            store.get("/elaunch/job/config")
    finally:
        store.close()


def test_a_command_finds_out_whether_a_server_speaks_tls(
    cluster: SecuredCluster, etcd: EmbeddedEtcd, settings: SecuritySettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    secured = next(iter(cluster.servers.values())).endpoint
    assert speaks_tls([secured], LIMIT_S)
    assert not speaks_tls([etcd.endpoint], LIMIT_S)
    nobody = f"127.0.0.1:{find_free_port()}"
    assert speaks_tls([nobody, secured], LIMIT_S)
    assert not speaks_tls([nobody], LIMIT_S)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert not speaks_tls([f"127.0.0.1:{silent.getsockname()[1]}"], 0.2)
    cluster.store.put("/elaunch/job/config", b"kept")
    monkeypatch.setattr("elaunch.rendezvous.security.users.find", lambda *_: settings.secret)
    for endpoint, found in ((secured, b"kept"), (etcd.endpoint, None)):
        store = open_store(endpoint, parse_conf(""), "job")
        try:
            entry = store.get("/elaunch/job/config")
            assert (entry.value if entry is not None else None) == found
        finally:
            store.close()
