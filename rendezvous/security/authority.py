"""The certificate authority of a job, which every node derives from the job's secret. Pure but for random keys."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from elaunch.errors import UsageError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec

STORE_NAME = "store.elaunch"
"""Under this name clients expect the job's etcd: its address may be one of a router, or a name of many machines."""

SKEW_S = 24 * 3600.0
"""So far may clocks of machines differ."""

LIFE_S = 8 * 24 * 3600.0
"""So long a certificate of a node is valid."""

_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551  # of the curve P-256
_FIRST = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_LAST = datetime.datetime(2120, 1, 1, tzinfo=datetime.UTC)
_NO_SECRET = b"elaunch 1: a job without a secret"
_NAME_CHARACTERS = 64  # at most, in a certificate


@dataclass(frozen=True, slots=True)
class Pem:
    """A certificate, its key, and the authority that others are to be of, in PEM form.

    Attributes:
        is_of_job: the authority is one that `Authority` has derived.
    """

    authority: bytes
    certificate: bytes
    key: bytes = field(repr=False)
    is_of_job: bool = False


class Authority:
    """The authority of a job.

    Nodes make it, each for itself, with the same key. Its certificates differ in their signatures only, so what one
    node issues the others accept. P-256, because every library of TLS 1.3 has it.

    Args:
        secret: of the job; empty: it has none, and the authority comes from its id alone. Then it keeps out whoever
            does not know or guess the id, and nobody reads along who only listens; it stops nobody who knows the id.
        job: its id: jobs with the same secret do not accept each other.
    """

    def __init__(self, secret: bytes, job: str) -> None:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        self._key = ec.derive_private_key(derive_number(secret or _NO_SECRET, job), ec.SECP256R1())
        public = self._key.public_key()
        self._id = x509.SubjectKeyIdentifier.from_public_key(public)
        self._name = _name(f"elaunch job {self._id.digest.hex()[:16]}")
        builder = _builder(self._name, self._name, public, _FIRST, _LAST)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
        builder = builder.add_extension(self._id, critical=False)
        self.certificate = _signed(builder, self._key)

    def issue(self, name: str, hosts: Collection[str], now: datetime.datetime) -> Pem:
        """Returns a certificate with a new key, for both ends of connections.

        Args:
            name: of the node, for people.
            hosts: names and addresses under which it is a server; none: it is only asked whether it is of the job.
            now: from a day before, and for a week after, it is valid.
        """
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
        from cryptography.x509.oid import ExtendedKeyUsageOID

        key = ec.generate_private_key(ec.SECP256R1())
        first, last = now - datetime.timedelta(seconds=SKEW_S), now + datetime.timedelta(seconds=LIFE_S)
        builder = _builder(_name(name), self._name, key.public_key(), first, last)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(_usage(signs_certificates=False), critical=True)
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(both), critical=False)
        issuer = x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(self._id)
        builder = builder.add_extension(issuer, critical=False)
        if hosts:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False
            )
        key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Pem(self.certificate, _signed(builder, self._key), key_pem, is_of_job=True)


def derive_number(secret: bytes, job: str) -> int:
    """Returns the private number of a job's authority: HKDF (RFC 5869) with SHA-256, the job's id as its salt.

    384 bits are reduced to the 256 of the curve, so that each number is as likely as any other (FIPS 186-5, A.2.1).
    """
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    derived = HKDF(SHA256(), length=48, salt=job.encode(), info=b"elaunch 1: the authority of a job").derive(secret)
    return int.from_bytes(derived, "big") % (_ORDER - 1) + 1


def check_own(pem: Pem, where: str, now: datetime.datetime) -> float:
    """Checks a certificate of the user's; returns when it ends, in seconds since 1970.

    Args:
        pem: what its files hold.
        where: the files, for people.
        now: the time.

    Raises:
        UsageError: they are no PEM files, key and certificate do not go together, or it is not valid now.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_private_key

    try:
        x509.load_pem_x509_certificates(pem.authority)
        own = x509.load_pem_x509_certificates(pem.certificate)[0]
        key = load_pem_private_key(pem.key, None)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"{where}: expected PEM files of certificates and of a key without a password ({error})"
        ) from None
    form = Encoding.DER, PublicFormat.SubjectPublicKeyInfo
    if key.public_key().public_bytes(*form) != own.public_key().public_bytes(*form):
        raise UsageError(f"{where}: the key is not that of the certificate")
    if own.not_valid_after_utc < now:
        raise UsageError(f"{where}: the certificate ended at {own.not_valid_after_utc:%Y-%m-%d %H:%M} UTC; renew it")
    if own.not_valid_before_utc > now:
        raise UsageError(
            f"{where}: the certificate is valid from {own.not_valid_before_utc:%Y-%m-%d %H:%M} UTC on, and this "
            f"machine's clock shows {now:%Y-%m-%d %H:%M}"
        )
    return own.not_valid_after_utc.timestamp()


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public: ec.EllipticCurvePublicKey,
    first: datetime.datetime,
    last: datetime.datetime,
) -> x509.CertificateBuilder:
    from cryptography import x509

    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    builder = builder.not_valid_before(first).not_valid_after(last)
    return builder.serial_number(x509.random_serial_number())


def _signed(builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding

    return builder.sign(key, SHA256()).public_bytes(Encoding.PEM)


def _name(text: str) -> x509.Name:
    from cryptography import x509
    from cryptography.x509.oid import NameOID

    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:_NAME_CHARACTERS])])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _host(host: str) -> x509.GeneralName:
    from cryptography import x509

    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    return x509.DNSName(host)
