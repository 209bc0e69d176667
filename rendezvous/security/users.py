"""The secret that a user has for all jobs: a file in the home folder, made where all machines share that."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from elaunch.rendezvous.security.secret import USERS_FILE, read_secret_file

_MOUNTS = "/proc/self/mountinfo"
_SHARED = {
    *("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "afs", "panfs", "wekafs", "glusterfs"),
    *("pvfs2", "ocfs2", "gfs2", "fuse.ceph", "fuse.ceph-fuse", "fuse.glusterfs", "fuse.juicefs", "fuse.sshfs"),
}
"""File systems, as the kernel names them, that many machines see alike."""


def find(environment: Mapping[str, str], say: Callable[[str], None] | None = None) -> bytes:
    """Returns the secret of this user; empty: there is none.

    Args:
        environment: says where the home folder is, and that of settings.
        say: is told where a file is made, once, in a home folder that many machines share; None: none is made.

    Raises:
        UsageError: the file cannot be read, holds nothing, or may be read by others.
    """
    path = _path(environment)
    if not path:
        return b""
    if say is not None and not os.path.exists(path) and _is_shared(os.path.dirname(path)) and _make(path):
        say(f"made {path}, a secret by which the nodes of this user's jobs know each other; all nodes need the same")
    try:
        owner = os.stat(path).st_uid
    except OSError:
        return b""
    return read_secret_file(path) if owner == os.geteuid() else b""  # as for root with the home of another user


def _path(environment: Mapping[str, str]) -> str:
    home = environment.get("HOME", "")
    settings = environment.get("XDG_CONFIG_HOME", "") or (home and os.path.join(home, ".config"))
    return os.path.join(settings, *USERS_FILE.split("/")[-2:]) if os.path.isabs(settings) else ""


def _make(path: str) -> bool:
    """Makes the file, unless another node is quicker; returns whether this one has."""
    own = f"{path}.{secrets.token_hex(4)}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        with open(os.open(own, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(f"{secrets.token_hex(32)}\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(own, path)  # whole, and never over another one
    except OSError:
        return False
    finally:
        with suppress(OSError):
            os.remove(own)
    return True


def _is_shared(folder: str) -> bool:
    try:
        with open(_MOUNTS, encoding="utf-8", errors="surrogateescape") as file:
            return file_system_of(os.path.realpath(folder), file) in _SHARED
    except OSError:
        return False


def file_system_of(path: str, mounts: Iterable[str]) -> str:
    """Returns the kind of file system on which an absolute path lies; empty: it is not known.

    Args:
        path: without links.
        mounts: lines as in /proc/PID/mountinfo (proc(5)).
    """
    found, kind = "", ""
    for line in mounts:
        fields, dash, rest = line.partition(" - ")
        parts = fields.split()
        if not dash or len(parts) < 5 or not rest.split():
            continue
        folder = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), parts[4]).rstrip("/")
        is_above = path == folder or path.startswith(f"{folder}/")
        if is_above and len(folder) >= len(found):  # of two at one place, the later one lies over the other
            found, kind = folder, rest.split()[0]
    return kind
