"""Certificates as SPIFFE issues them: a URI and no host name, signed below a bundle of authorities."""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from elaunch.errors import LinkLost
from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.security.secret import NodeFiles, SecuritySettings
from elaunch.workers.comm.here import LINKS
from elaunch.workers.comm.secure.security import LinkSecurity
from elaunch.workers.comm.transport import Transport
from tests.unit.comm_crew import PATIENCE_S, addresses, connect_all

LIFE = datetime.timedelta(hours=1)


@dataclass(frozen=True)
class Issuer:
    """An authority of a trust domain, which carries the URI of the domain."""

    domain: str
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def root(cls, domain: str) -> Issuer:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "SPIFFE")])
        return cls(domain, _sign(name, name, key, key, f"spiffe://{domain}", is_authority=True), key)

    def below(self) -> Issuer:
        """Makes one that this one has signed, as a server of a cluster has it."""
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "server")])
        signed = _sign(name, self.certificate.subject, key, self.key, f"spiffe://{self.domain}", is_authority=True)
        return Issuer(self.domain, signed, key)

    def identity(self, path: str, chain: tuple[x509.Certificate, ...] = ()) -> tuple[bytes, bytes]:
        """Returns the certificate of a workload, with those between it and the bundle, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        uri = f"spiffe://{self.domain}{path}"
        own = _sign(x509.Name([]), self.certificate.subject, key, self.key, uri, is_authority=False)
        shown = b"".join(one.public_bytes(Encoding.PEM) for one in (own, *chain))
        return shown, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _sign(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    uri: str,
    is_authority: bool,
) -> x509.Certificate:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    builder = builder.not_valid_before(now - LIFE).not_valid_after(now + LIFE)
    # By these a bundle may hold an older and a newer authority of one name.
    own_id = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    signers_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key())
    builder = builder.add_extension(own_id, critical=False).add_extension(signers_id, critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
    others = "content_commitment key_encipherment data_encipherment key_agreement encipher_only decipher_only"
    signs = {"digital_signature": not is_authority, "key_cert_sign": is_authority, "crl_sign": is_authority}
    usage = x509.KeyUsage(**signs, **dict.fromkeys(others.split(), False))
    builder = builder.add_extension(usage, critical=True)
    if not is_authority:
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
    uris = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
    return builder.add_extension(uris, critical=not is_authority).sign(signer, SHA256())


class Machines:
    """Nodes with files of their own in folders of their own, and a worker of each."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack

    def worker(self, name: str, files: tuple[bytes, bytes], *bundle: Issuer) -> Transport:
        """Starts a worker of a node that was given a certificate and its key, and a bundle of authorities."""
        folder = self._folder / name
        folder.mkdir()
        contents = b"".join(one.certificate.public_bytes(Encoding.PEM) for one in bundle), *files
        paths = [folder / file for file in ("bundle.pem", "svid.pem", "svid_key.pem")]
        for path, content in zip(paths, contents, strict=True):
            path.write_bytes(content)
        settings = SecuritySettings(files=NodeFiles("", *map(str, paths)))
        node = NodeIdentity(settings, "job", name, encrypts=True)
        self._stack.callback(node.remove)
        node.make(time.time(), ("192.0.2.7",))
        made = Transport(f"{name}/0#0", "token of the job", security=LinkSecurity(node.folder, always=True))
        self._stack.callback(made.close)
        self._stack.callback(made.interrupt, 1 << 60)
        return made


@pytest.fixture
def machines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machines]:
    monkeypatch.setenv(LINKS, "tcp")
    with ExitStack() as stack:
        yield Machines(tmp_path, stack)


def test_workers_of_a_bundle_link_whatever_their_uris_and_whoever_of_it_has_signed(machines: Machines) -> None:
    old, new = Issuer.root("train.example"), Issuer.root("train.example")
    server = old.below()
    crew = [
        machines.worker("a", old.identity("/ns/train/sa/gpt"), old, new),
        machines.worker("b", new.identity("/ns/train/sa/other"), old, new),
        machines.worker("c", server.identity("/ns/train/sa/gpt", (server.certificate,)), old, new),
    ]
    connect_all(crew)
    for one in crew:
        assert set(one.peers) == {other.worker for other in crew} - {one.worker}


@pytest.mark.parametrize("dials", ["the stranger", "the worker"])
def test_a_worker_whose_uri_is_right_and_whose_authority_is_not_in_the_bundle_gets_no_link(
    machines: Machines, dials: str
) -> None:
    ours, theirs = Issuer.root("train.example"), Issuer.root("train.example")
    worker = machines.worker("a", ours.identity("/ns/train/sa/gpt"), ours)
    stranger = machines.worker("b", theirs.identity("/ns/train/sa/gpt"), ours, theirs)
    one = stranger if dials == "the stranger" else worker
    with pytest.raises(LinkLost, match="its certificate is not of this job"):
        one.connect(addresses([worker, stranger]), generation=1, timeout_s=PATIENCE_S)
    assert (worker.peers, stranger.peers) == ((), ())


def test_a_server_between_is_no_authority_where_the_bundle_lacks_its_own(machines: Machines) -> None:
    ours, server = Issuer.root("train.example"), Issuer.root("train.example").below()
    worker = machines.worker("a", ours.identity("/a"), ours)
    stranger = machines.worker("b", server.identity("/a", (server.certificate,)), ours)
    with pytest.raises(LinkLost, match="its certificate is not of this job"):
        worker.connect(addresses([worker, stranger]), generation=1, timeout_s=PATIENCE_S)
    assert worker.peers == ()
