"""The files by which one node proves who it is: written, renewed, and removed with the folder that holds them."""

from __future__ import annotations

import datetime
import ipaddress
import os
import shutil
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from math import inf

from elaunch.errors import UsageError
from elaunch.rendezvous.security.authority import STORE_NAME, Authority, Pem
from elaunch.rendezvous.security.issuing import check, issue
from elaunch.rendezvous.security.secret import SECRET, SecuritySettings

RENEW_S = 24 * 3600.0
"""How long files that this node has made are used; it is a clock's error less than they are valid."""

LOOK_S = 10.0
"""How often it is looked whether the user's files have changed."""

AUTHORITY, NODE = "ca.pem", "node.pem"
"""The authority that workers and agents must be of; this node's certificate of it, with its key."""

STORE_AUTHORITY, STORE, STORE_NODE = "store-ca.pem", "store.pem", "store-node.pem"
"""The authority that servers and clients of the job's etcd must be of; the certificate of this node's etcd, with its
names and its key; the one without names that it shows other servers."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for the etcd of a node. A certificate and its key stand in one file, so that both change at once.

    Attributes:
        authority: of all that may connect.
        store: what it shows its clients.
        node: what it shows other servers.
    """

    authority: str
    store: str
    node: str


class NodeIdentity:
    """Makes the files of a node, and renews them.

    They are made from the user's own files, or from the job's secret. Where the user has given neither, those for the
    job's etcd are made from its id, and those for links from the token that the etcd then shows.

    Args:
        settings: what the user has given.
        job: its id.
        node: its name.
        encrypts: whether workers need the files for their links.
        guards_store: whether an etcd that the job starts asks for certificates.

    Attributes:
        encrypts: see above; false where others reach this node at a loopback address, unless the user wants it.
        folder: of the files, of mode 0700; empty: none are needed.
        pem: what they hold for links and for other agents; None: they are not there yet.
        store_pem: what this node shows the job's etcd; None: nothing.
    """

    def __init__(
        self, settings: SecuritySettings, job: str, node: str, encrypts: bool, guards_store: bool = False
    ) -> None:
        self.encrypts = encrypts
        self.folder = tempfile.mkdtemp(prefix="elaunch-tls-") if encrypts or guards_store else ""
        self.pem: Pem | None = None
        self.store_pem: Pem | None = None
        self._guards_store = guards_store
        self._settings, self._job, self._node = settings, job, node
        self._hosts: tuple[str, ...] = ()
        self._secret = settings.secret
        self._due_s = inf
        self._seen: tuple[tuple[int, int], ...] = ()

    @property
    def settings(self) -> SecuritySettings:
        """Returns what the user has given."""
        return self._settings

    @property
    def files(self) -> TlsFiles:
        """Returns the files for this node's etcd; they are there where it asks for certificates."""
        return TlsFiles(*(os.path.join(self.folder, name) for name in (STORE_AUTHORITY, STORE, STORE_NODE)))

    def make(self, now_s: float, hosts: Collection[str] = ()) -> None:
        """Writes the files, if there is something to make them of.

        Args:
            now_s: the time, in seconds since 1970.
            hosts: names and addresses of this node, for the certificate of its etcd.

        Raises:
            UsageError: a file of the user's is of no use.
        """
        if hosts:
            self._hosts = tuple(dict.fromkeys((STORE_NAME, "localhost", "127.0.0.1", "::1", *hosts)))
        can_link = self.pem is None and (self._secret or self._settings.files.has_own)
        if self.folder and (can_link or (self.store_pem is None and self._guards_store)):
            self._write(now_s)

    def note_host(self, host: str) -> None:
        """Takes the address at which others reach this node: links to a loopback address stay within the machine."""
        if self._settings.links == "auto" and is_loopback(host):
            self.encrypts = False

    def make_of_token(self, token: str, now_s: float) -> None:
        """Writes the files of a job without a secret: whoever can read its documents in etcd can do the same.

        A node may begin with a token of its own, and then find the job, which has another one, in another store.
        """
        if not self.encrypts:
            return
        if not self._settings.secret and not self._settings.files.has_own and self._secret != token.encode():
            self._secret, self.pem = token.encode(), None
        self.make(now_s)

    def remove(self) -> None:
        """Removes the files."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)

    def look(self, now_s: float) -> str:
        """Renews the files when it is time to; returns what is wrong with the user's, and then leaves the old ones."""
        if now_s < self._due_s:
            return ""
        try:
            self._write(now_s)
        except (UsageError, OSError) as error:
            self._due_s = now_s + LOOK_S
            return f"the certificate of this node is not renewed: {error}"
        return ""

    def _write(self, now_s: float) -> None:
        if self._settings.files.has_own:
            self._due_s = now_s + LOOK_S
            seen = self._stamps()
            if seen == self._seen:
                return
            pem = self._read_own(now_s)
            self._seen = seen
            for name in (AUTHORITY, STORE_AUTHORITY):
                self._put(name, pem.authority)
            for name in (NODE, STORE, STORE_NODE):
                self._put(name, pem.certificate + b"\n" + pem.key)
            self.pem = self.store_pem = pem
            return
        if self._guards_store:
            wanted = (self._node, self._hosts), (self._node, ())
            served, self.store_pem = issue(self._settings.secret, self._job, wanted, now_s)
            self._put(STORE_AUTHORITY, served.authority)
            self._put(STORE, served.certificate + served.key)
            self._put(STORE_NODE, self.store_pem.certificate + self.store_pem.key)
        if self._secret:
            of_store = self.store_pem if self._secret == self._settings.secret else None
            self.pem = of_store or issue(self._secret, self._job, [(self._node, ())], now_s)[0]
            self._put(AUTHORITY, self.pem.authority)
            self._put(NODE, self.pem.certificate + self.pem.key)
        self._due_s = now_s + RENEW_S

    def _stamps(self) -> tuple[tuple[int, int], ...]:
        files = self._settings.files
        found = [os.stat(path) for path in (files.node_ca, files.node_cert, files.node_key)]
        return tuple((one.st_mtime_ns, one.st_ino) for one in found)

    def _read_own(self, now_s: float) -> Pem:
        files = self._settings.files
        pem = read_own(files.node_ca, files.node_cert, files.node_key)
        check(pem, f"node_cert={files.node_cert}", now_s)
        return pem

    def _put(self, name: str, content: bytes) -> None:
        """Writes a file that nobody else may read, whole or not at all."""
        path = os.path.join(self.folder, name)
        with open(os.open(f"{path}.new", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        os.replace(f"{path}.new", path)


def is_loopback(host: str) -> bool:
    """Returns whether an address, or the name of one, is of this machine alone."""
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def warn_of_store(addresses: Sequence[str], is_guarded: bool) -> str:
    """Returns what the user is told of an etcd of a job without a secret; empty where it listens on loopback only.

    Args:
        addresses: with ports, at which it listens.
        is_guarded: whether it asks for certificates, which are made from the job's id then.
    """
    reached = [one for one in addresses if not is_loopback(one.rpartition(":")[0].strip("[]"))]
    if not reached:
        return ""
    who = "takes whoever knows the job's id" if is_guarded else "is open"
    whoever = "they" if is_guarded else "whoever reaches it"
    return (
        f"warning: the etcd of this job, at {' and '.join(reached)}, {who}: {whoever} can read and change "
        f"the job. A secret closes it: --rdzv-conf=secret_file=PATH or {SECRET}, the same on all nodes"
    )


def read_own(authority: str, certificate: str, key: str) -> Pem:
    """Returns what the user's files hold; raises `UsageError` where one cannot be read."""
    contents = []
    for path in (authority, certificate, key):
        try:
            with open(path, "rb") as file:
                contents.append(file.read())
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    ca, own, private = contents
    return Pem(ca, own, private)


def guest(settings: SecuritySettings, job: str, now_s: float) -> Pem:
    """Returns by what a command proves to the etcd of a job, where that asks for it, that it may look at it."""
    if settings.files.has_own:
        files = settings.files
        return read_own(files.node_ca, files.node_cert, files.node_key)
    now = datetime.datetime.fromtimestamp(now_s, datetime.UTC)
    return Authority(settings.secret, job).issue("elaunch ctl", (), now)
