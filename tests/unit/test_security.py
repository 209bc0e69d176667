"""A job's secret, the authority that every node derives from it, and the files of one node."""

from __future__ import annotations

import datetime
import os
import shutil
import socket
import ssl
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from cryptography.x509 import load_pem_x509_certificate
from hypothesis import given
from hypothesis import strategies as st

from elaunch.errors import UsageError
from elaunch.rendezvous.conf import parse_conf
from elaunch.rendezvous.security.authority import STORE_NAME, Authority, Pem, check_own, derive_number
from elaunch.rendezvous.security.contexts import Contexts, client_of_store, explain, make_context
from elaunch.rendezvous.security.identity import RENEW_S, NodeIdentity, guest, warn_of_store
from elaunch.rendezvous.security.secret import NodeFiles, SecuritySettings, digest, read_security

SECRET = b"0123456789abcdef0123456789abcdef"
OTHER = b"another secret of sufficient length"
ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
NOW = datetime.datetime(2026, 11, 26, 12, tzinfo=datetime.UTC)
LIMIT_S = 10.0


@pytest.fixture
def private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders that are made for keys lie here."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


Made = Callable[..., NodeIdentity]


@pytest.fixture
def make(private: Path) -> Made:
    def one(
        secret: bytes = SECRET, job: str = "job", now: datetime.datetime | None = None, files: NodeFiles | None = None
    ) -> NodeIdentity:
        identity = NodeIdentity(SecuritySettings(secret, files or NodeFiles()), job, "node", True, guards_store=True)
        identity.make((now or datetime.datetime.now(datetime.UTC)).timestamp(), ("192.0.2.7", "node1"))
        return identity

    return one


def shake(server: ssl.SSLContext, client: ssl.SSLContext, name: str = STORE_NAME) -> str:
    """Lets two ends agree; returns the version, or raises what the first of them finds wrong."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    theirs.settimeout(LIMIT_S)
    found: list[Exception] = []

    def serve() -> None:
        try:
            with server.wrap_socket(theirs, True) as end:
                end.sendall(b"x")
        except OSError as error:
            found.append(error)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with client.wrap_socket(ours, server_hostname=name) as end:
            assert end.recv(1) == b"x"
            version = end.version()
    finally:
        thread.join(LIMIT_S)
    assert not found
    return str(version)


def ends(server: NodeIdentity, client: NodeIdentity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    return Contexts(server.folder).get(True), Contexts(client.folder).get(False)


# -- the secret ---------------------------------------------------------------------------------------------------


def secret_file(folder: Path, content: bytes = SECRET + b"\n", mode: int = 0o600) -> Path:
    path = folder / "secret"
    path.write_bytes(content)
    path.chmod(mode)
    return path


def test_the_secret_is_read_from_a_variable_or_a_file(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    assert read_security(NodeFiles(), {"ELAUNCH_SECRET": SECRET.decode()}).secret == SECRET
    assert read_security(parse_conf(f"secret_file={path}").etcd.node, {}).secret == SECRET
    assert read_security(NodeFiles(), {}).secret == b""


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o666])
def test_a_secret_that_others_may_read_or_write_is_refused(tmp_path: Path, mode: int) -> None:
    path = secret_file(tmp_path, mode=mode)
    with pytest.raises(UsageError, match=rf"has mode 0{mode:o}, so others may use it: chmod 600 {path}"):
        read_security(NodeFiles(str(path)), {})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")
def test_a_secret_that_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    os.chown(path, 12345, 12345)
    with pytest.raises(UsageError, match="belongs to user 12345, who knows it then"):
        read_security(NodeFiles(str(path)), {})


@pytest.mark.parametrize(
    ("content", "says"),
    [(b"", "is empty"), (b"short", "has 5 bytes, expected 16 to 4096"), (b"x" * 5000, "expected 16 to 4096")],
)
def test_a_secret_that_is_none_is_refused(tmp_path: Path, content: bytes, says: str) -> None:
    path = secret_file(tmp_path, content)
    with pytest.raises(UsageError, match=says):
        read_security(NodeFiles(str(path)), {})


def test_other_mistakes_with_the_secret_are_told(tmp_path: Path) -> None:
    path = secret_file(tmp_path)
    for files, environment, says in [
        (NodeFiles(str(tmp_path / "none")), {}, "cannot be read: No such file"),
        (NodeFiles(str(tmp_path)), {}, "cannot be read|no regular file"),
        (NodeFiles(str(path)), {"ELAUNCH_SECRET": SECRET.decode()}, "are both given"),
        (NodeFiles(), {"ELAUNCH_SECRET": "12345"}, "ELAUNCH_SECRET has 5 bytes"),
    ]:
        with pytest.raises(UsageError, match=says):
            read_security(files, environment)
    with pytest.raises(UsageError, match="--link-encryption=always: expected auto, on, off"):
        read_security(NodeFiles(), {}, "always")
    with pytest.raises(UsageError, match="go together"):
        parse_conf(f"node_cert={path}")


def test_nothing_that_people_or_other_nodes_see_has_the_secret() -> None:
    settings = SecuritySettings(SECRET)
    assert SECRET.decode() not in f"{settings!r} {settings.for_all()}"
    assert dict(settings.for_all()) != dict(SecuritySettings(OTHER).for_all())
    assert digest(SECRET) == digest(SECRET) != digest(OTHER)
    assert SecuritySettings().for_all() == ()


# -- the authority ------------------------------------------------------------------------------------------------


@given(st.binary(min_size=16, max_size=64), st.text(max_size=20))
def test_the_number_of_an_authority_is_one_of_the_curve_and_depends_on_nothing_else(secret: bytes, job: str) -> None:
    number = derive_number(secret, job.encode(errors="replace").decode())
    assert 1 <= number < ORDER
    assert number == derive_number(secret, job.encode(errors="replace").decode())
    assert number != derive_number(secret + b"x", "job")


def test_the_derivation_stays_as_it_is() -> None:
    """Nodes of one job may run different versions of what derives it."""
    assert derive_number(SECRET, "job") == DERIVED


DERIVED = 1660494191681617370570122271884959522271900198336192754505096424439463626928


def test_nodes_that_never_met_accept_each_other_and_nobody_else(make: Made) -> None:
    one, other = make(), make()
    assert shake(*ends(one, other)) == "TLSv1.3"
    for stranger in (make(OTHER), make(job="another")):
        for pair in ((one, stranger), (stranger, one)):
            with pytest.raises(ssl.SSLError) as raised:
                shake(*ends(*pair))
            assert "its certificate is not of this job" in explain(raised.value)


def test_whoever_shows_no_certificate_is_refused(make: Made) -> None:
    node = make()
    client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    client.check_hostname, client.verify_mode = False, ssl.CERT_NONE
    with pytest.raises(ssl.SSLError, match="certificate required"):
        shake(Contexts(node.folder).get(True), client)


def test_an_older_tls_is_refused(make: Made) -> None:
    node = make()
    client = make_context(node.files.authority, node.files.node, is_server=False)
    client.minimum_version, client.maximum_version = ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        shake(Contexts(node.folder).get(True), client)


@pytest.mark.parametrize(("days", "is_accepted"), [(-7, True), (-9, False), (0.9, True), (2, False)])
def test_clocks_may_differ_by_a_day_and_a_certificate_is_good_for_a_week(
    make: Made, days: float, is_accepted: bool
) -> None:
    now = datetime.datetime.now(datetime.UTC)
    one, other = make(), make(now=now + datetime.timedelta(days=days))
    if is_accepted:
        assert shake(*ends(one, other)) == "TLSv1.3"
        return
    with pytest.raises(ssl.SSLError) as raised:
        shake(*ends(other, one))
    assert "compare the clocks of both machines" in explain(raised.value)


def test_the_certificate_of_a_store_has_its_addresses_and_no_other_has(make: Made) -> None:
    node = make()
    client = make_context(node.files.authority, node.files.node, is_server=False)
    client.check_hostname = True
    store = make_context(node.files.authority, node.files.store, is_server=True)
    for name in (STORE_NAME, "192.0.2.7", "node1", "127.0.0.1"):
        assert shake(store, client, name) == "TLSv1.3"
    with pytest.raises(ssl.SSLError, match="not valid for 'elsewhere'"):
        shake(store, client, "elsewhere")
    with pytest.raises(ssl.SSLError):
        shake(make_context(node.files.authority, node.files.node, is_server=True), client, STORE_NAME)


# -- the files ----------------------------------------------------------------------------------------------------


def test_keys_are_for_this_user_alone_and_go_with_the_node(make: Made) -> None:
    node = make()
    assert stat.S_IMODE(os.stat(node.folder).st_mode) == 0o700
    for path in Path(node.folder).iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    own, of_store = {"ca.pem", "node.pem"}, {"store-ca.pem", "store.pem", "store-node.pem"}
    assert {path.name for path in Path(node.folder).iterdir()} == own | of_store
    assert all(SECRET not in path.read_bytes() for path in Path(node.folder).iterdir())
    node.remove()
    assert not os.path.exists(node.folder)


def test_certificates_are_renewed_in_time_and_links_take_the_new_ones(make: Made) -> None:
    now_s = datetime.datetime.now(datetime.UTC).timestamp()
    node = make(now=datetime.datetime.fromtimestamp(now_s - RENEW_S, datetime.UTC))
    contexts, before = Contexts(node.folder), Path(node.files.node).read_bytes()
    first = contexts.get(True)
    assert node.look(now_s - RENEW_S / 2) == ""
    assert contexts.get(True) is first
    assert Path(node.files.node).read_bytes() == before
    assert node.look(now_s + 60) == ""
    assert Path(node.files.node).read_bytes() != before
    assert contexts.get(True) is not first
    assert shake(contexts.get(True), Contexts(make().folder).get(False)) == "TLSv1.3"


def test_a_job_without_a_secret_has_its_keys_from_its_token(private: Path) -> None:
    now_s = NOW.timestamp()
    nodes = [NodeIdentity(SecuritySettings(), "job", name, encrypts=True) for name in "ab"]
    for node in nodes:
        node.make(now_s)
        assert node.pem is None
        node.make_of_token("token", now_s)
    first, second = [node.pem for node in nodes]
    assert first is not None
    assert second is not None
    assert first.certificate != second.certificate
    nodes[0].make_of_token("another, of the store in which it finds the job", now_s)
    third = nodes[0].pem
    assert third is not None
    keys = [load_pem_x509_certificate(pem.authority).public_key() for pem in (first, second, third)]
    assert keys[0] == keys[1] != keys[2]
    secured = NodeIdentity(SecuritySettings(SECRET), "job", "a", encrypts=True)
    secured.make(now_s)
    before = secured.pem
    secured.make_of_token("token", now_s)
    assert secured.pem is before


def test_a_node_at_a_loopback_address_needs_no_keys_for_links_unless_it_is_told_to(private: Path) -> None:
    now_s = NOW.timestamp()
    cases: list[tuple[Literal["auto", "on"], str, bool]] = [
        ("auto", "127.0.0.1", False),
        ("auto", "127.8.0.1", False),
        ("auto", "::1", False),
        ("auto", "localhost", False),
        ("auto", "10.0.0.1", True),
        ("auto", "127.example", True),
        ("on", "127.0.0.1", True),
    ]
    for links, host, encrypts in cases:
        node = NodeIdentity(SecuritySettings(links=links), "job", "a", encrypts=True)
        node.note_host(host)
        node.make_of_token("token", now_s)
        assert (node.encrypts, node.pem is not None) == (encrypts, encrypts), (links, host)
    secured = NodeIdentity(SecuritySettings(SECRET), "job", "a", encrypts=True)
    secured.note_host("127.0.0.1")
    secured.make(now_s)
    assert secured.pem is not None, "etcd asks for a certificate at each address"


def test_only_an_etcd_that_asks_for_certificates_is_given_one(private: Path) -> None:
    for guards in (False, True):
        node = NodeIdentity(SecuritySettings(), "job", "a", encrypts=True, guards_store=guards)
        node.make(NOW.timestamp(), ("192.0.2.7",))
        assert (node.pem is not None, node.store_pem is not None) == (False, guards)
        node.make_of_token("token", NOW.timestamp())
        assert (node.pem is not None, node.store_pem is not None) == (True, guards)
        assert Path(node.files.store).exists() is guards


def store_ends(server: NodeIdentity, client: NodeIdentity) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Returns the contexts of an etcd and of a client of it."""
    files = server.files
    return make_context(files.authority, files.store, True), client_of_store(client.files.authority, client.files.node)


def test_the_store_of_a_job_without_a_secret_takes_those_who_know_its_id(make: Made) -> None:
    first, second, stranger, secured = make(b""), make(b""), make(b"", job="other"), make(SECRET)
    assert shake(*store_ends(first, second)) == "TLSv1.3"
    for other in (stranger, secured):
        with pytest.raises(ssl.SSLError):
            shake(*store_ends(first, other))
        with pytest.raises(ssl.SSLError):
            shake(*store_ends(other, first))
    for node in (first, second):
        node.make_of_token("token", NOW.timestamp())
    of_token = Contexts(second.folder).get(False)
    with pytest.raises(ssl.SSLError):
        shake(store_ends(first, first)[0], of_token)  # links know each other by the token, which the id does not tell
    assert shake(Contexts(first.folder).get(True), of_token) == "TLSv1.3"


def test_a_node_that_needs_no_files_makes_none(private: Path) -> None:
    node = NodeIdentity(SecuritySettings(), "job", "a", encrypts=False)
    node.make_of_token("token", NOW.timestamp())
    assert node.folder == ""
    assert list(private.iterdir()) == []


def own_files(folder: Path, secret: bytes = SECRET, now: datetime.datetime | None = None) -> NodeFiles:
    """Files as a user's own authority makes them."""
    pem = Authority(secret, "of a user").issue("n", (), now or datetime.datetime.now(datetime.UTC))
    for name, content in (("ca", pem.authority), ("cert", pem.certificate), ("key", pem.key)):
        (folder / name).write_bytes(content)
    return NodeFiles("", *(str(folder / name) for name in ("ca", "cert", "key")))


def test_a_users_own_certificate_is_used_and_followed(make: Made, private: Path) -> None:
    now = datetime.datetime.now(datetime.UTC)
    files = own_files(private)
    node, another = make(b"", files=files), make(b"", files=files)
    assert shake(*ends(node, another)) == "TLSv1.3"
    before = Path(node.files.node).read_bytes()
    assert node.look(now.timestamp() + 60) == ""
    assert Path(node.files.node).read_bytes() == before
    own_files(private)
    assert node.look(now.timestamp() + 120) == ""
    assert Path(node.files.node).read_bytes() != before
    assert shake(*ends(node, another)) == "TLSv1.3"
    shutil.copy(files.node_ca, files.node_key)
    assert "is not renewed: node_cert=" in node.look(now.timestamp() + 180)
    assert shake(*ends(node, another)) == "TLSv1.3"


@pytest.mark.parametrize(
    ("days", "says"), [(-30, "the certificate ended at "), (30, "is valid from .* and this machine's clock shows")]
)
def test_a_users_own_certificate_that_is_not_valid_now_is_told(private: Path, days: int, says: str) -> None:
    now = datetime.datetime.now(datetime.UTC)
    files = own_files(private, now=now + datetime.timedelta(days=days))
    node = NodeIdentity(SecuritySettings(files=files), "job", "a", encrypts=True)
    with pytest.raises(UsageError, match=says):
        node.make(now.timestamp())


def test_a_key_of_another_certificate_is_told() -> None:
    authority = Authority(SECRET, "job")
    one, other = (authority.issue("n", (), NOW) for _ in range(2))
    with pytest.raises(UsageError, match="here: the key is not that of the certificate"):
        check_own(Pem(one.authority, one.certificate, other.key), "here", NOW)


def test_a_command_shows_a_certificate_of_the_jobs() -> None:
    keys = []
    for secret, job in ((b"", "job"), (b"", "other"), (SECRET, "job"), (b"", "job")):
        found = guest(SecuritySettings(secret), job, NOW.timestamp())
        assert found.is_of_job
        keys.append(load_pem_x509_certificate(found.authority).public_key())
    assert keys[0] == keys[3]
    assert keys[0] not in keys[1:3]


@pytest.mark.parametrize(
    ("addresses", "open_at"),
    [
        (["127.0.0.1:1"], ""),
        (["[::1]:1", "127.0.0.9:2", "localhost:3"], ""),
        (["10.0.0.1:29400"], "10.0.0.1:29400"),
        (["127.0.0.1:1", "[fd00::1]:2"], "[fd00::1]:2"),
        (["0.0.0.0:1", "10.0.0.1:2"], "0.0.0.0:1 and 10.0.0.1:2"),
    ],
)
def test_the_user_is_told_of_a_store_that_others_than_this_machine_reach(addresses: list[str], open_at: str) -> None:
    for is_guarded, says in ((False, "is open: whoever reaches it"), (True, "takes whoever knows the job's id: they")):
        told = warn_of_store(addresses, is_guarded)
        assert bool(told) == bool(open_at)
        assert told.startswith(f"warning: the etcd of this job, at {open_at}, {says} can read and change") or not told
        assert "--rdzv-conf=secret_file=PATH or ELAUNCH_SECRET" in told or not told
