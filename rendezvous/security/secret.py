"""The secret of a job, or a node's own certificate, as the user gives them. Pure but for reading files."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from elaunch.errors import UsageError

SECRET = "ELAUNCH_SECRET"
SECRET_FILE = "ELAUNCH_SECRET_FILE"
USERS_FILE = "~/.config/elaunch/secret"
NO_SECRET = "none"
"""As the file of the secret: this job has none, not even the user's own."""

LEAST_BYTES = 16
MOST_BYTES = 4096
MAKE_ONE = "`openssl rand -hex 32` prints a good one"

LinkEncryption = Literal["auto", "on", "off"]
LINK_ENCRYPTION = "ELAUNCH_LINK_ENCRYPTION"


@dataclass(frozen=True, slots=True)
class NodeFiles:
    """How this node proves who it is: the keys of `--rdzv-conf` for it.

    Attributes:
        secret_file: holds the job's secret; also ELAUNCH_SECRET_FILE.
        node_ca, node_cert, node_key: PEM files of an authority of the user's, and of this node's own certificate; also
            ELAUNCH_NODE_CA, ELAUNCH_NODE_CERT and ELAUNCH_NODE_KEY.
    """

    secret_file: str = field(default="", repr=False)
    node_ca: str = ""
    node_cert: str = ""
    node_key: str = ""

    @property
    def has_own(self) -> bool:
        """Returns whether the user has given a certificate."""
        return bool(self.node_cert)

    def check(self) -> None:
        """Raises `UsageError` where one of three is missing, or a file is not there."""
        own = {"node_ca": self.node_ca, "node_cert": self.node_cert, "node_key": self.node_key}
        if any(own.values()) and not all(own.values()):
            raise UsageError("--rdzv-conf: node_ca, node_cert and node_key go together")
        for name, path in own.items():
            if path and not os.path.isfile(path):
                raise UsageError(f"--rdzv-conf {name}={path}: no such file")


@dataclass(frozen=True, slots=True)
class SecuritySettings:
    """How nodes of a job know each other, and which connections between workers are encrypted.

    Attributes:
        secret: of the job; empty: there is none.
        is_users: the secret is the one that the user has for all jobs.
        files: the user's own certificate.
        links: `auto`: those between machines; `on`: all that are TCP; `off`: none.
    """

    secret: bytes = field(default=b"", repr=False)
    files: NodeFiles = field(default_factory=NodeFiles)
    links: LinkEncryption = "auto"
    is_users: bool = False

    @property
    def has_proof(self) -> bool:
        """Returns whether nodes can prove that they are of the job, by what nobody else can know."""
        return bool(self.secret) or self.files.has_own

    def for_all(self) -> tuple[tuple[str, str], ...]:
        """Returns what all nodes must have alike, by name: of the secret, only a digest from which it cannot be found.

        Own certificates differ from node to node.
        """
        found: dict[str, str] = {}
        if self.links != "auto":
            found["--link-encryption"] = self.links
        if self.secret and not self.files.has_own:
            found[SECRET] = f"(digest {digest(self.secret)})"
        return tuple(sorted(found.items()))


def digest(secret: bytes) -> str:
    """Returns eight digits by which people tell secrets apart."""
    return hmac.new(secret, b"elaunch secret, shown to people", hashlib.sha256).hexdigest()[:8]


def read_security(
    files: NodeFiles,
    environment: Mapping[str, str],
    links: str = "auto",
    of_user: Callable[[], bytes] = bytes,
) -> SecuritySettings:
    """Reads the secret that the user has given, in a variable or in a file.

    Args:
        files: as given.
        environment: with the variable.
        links: which links are encrypted.
        of_user: returns the secret that the user has for all jobs, which counts where none is given for this one.

    Raises:
        UsageError: it is too short or too long, given twice, or its file may be read by others.
    """
    if links not in get_args(LinkEncryption):
        raise UsageError(f"--link-encryption={links}: expected {', '.join(get_args(LinkEncryption))}")
    given, path = environment.get(SECRET, ""), files.secret_file
    has_none = path == NO_SECRET
    path = "" if has_none else path
    if given and path:
        raise UsageError(f"{SECRET} and secret_file={path} are both given: give one of them")
    secret = read_secret_file(path) if path else given.strip().encode()
    is_users = False
    if not (path or given or has_none or files.has_own or links == "off"):
        secret, path = of_user(), USERS_FILE
        is_users = bool(secret)
    if secret or given:
        source = f"the secret in {path}" if path else SECRET
        if not LEAST_BYTES <= len(secret) <= MOST_BYTES:
            raise UsageError(
                f"{source} has {len(secret)} bytes, expected {LEAST_BYTES} to {MOST_BYTES} that nobody can guess: "
                f"{MAKE_ONE}"
            )
    return SecuritySettings(secret, files, links, is_users)  # type: ignore[arg-type]  # it is one of them


def read_secret_file(path: str) -> bytes:
    """Returns what a file holds, without blanks at its ends.

    Raises:
        UsageError: it cannot be read, is empty, belongs to another user, or may be read by others.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            content = file.read(MOST_BYTES + 2)
    except OSError as error:
        raise UsageError(f"the file of the secret, {path}, cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"the file of the secret, {path}, is no regular file")
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"the file of the secret, {path}, belongs to user {found.st_uid}, who knows it then: expected this user's"
        )
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UsageError(
            f"the file of the secret, {path}, has mode {stat.S_IMODE(found.st_mode):04o}, so others may use it: "
            f"chmod 600 {path}"
        )
    if not content.strip():
        raise UsageError(f"the file of the secret, {path}, is empty: {MAKE_ONE}")
    return content.strip()
