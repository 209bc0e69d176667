"""Jobs of this user that host their rendezvous on this machine: a file beside the data of each says where it is.

The folder of those data is private and goes with the agent, and so does the file. The agent holds a lock on it as long
as it lives: a file that was left behind is told from the others even where the pid in it was given out anew.
"""

from __future__ import annotations

import fcntl
import glob
import json
import os
import stat
import tempfile
from dataclasses import asdict, dataclass
from typing import BinaryIO

FOLDER_PREFIX = "elaunch-etcd-"
_FILE = "job.json"


@dataclass(frozen=True, slots=True)
class LocalJob:
    """Where the job `id` has its rendezvous, and the agent that hosts it."""

    id: str
    endpoint: str
    pid: int

    def __str__(self) -> str:
        return f"{self.id} at {self.endpoint} (pid {self.pid})"


def make_folder() -> str:
    """Returns a folder for the data of a rendezvous, in which `running` looks."""
    return tempfile.mkdtemp(prefix=FOLDER_PREFIX)


def register(folder: str, job: LocalJob) -> BinaryIO:
    """Writes the file of a job; it counts until what is returned is closed, or this process ends."""
    hidden = os.path.join(folder, f".{_FILE}")
    file = open(hidden, "wb")  # noqa: SIM115 (it stays open)
    fcntl.flock(file, fcntl.LOCK_EX)
    file.write(json.dumps(asdict(job)).encode())
    file.flush()
    os.rename(hidden, os.path.join(folder, _FILE))  # complete and locked: else it could be taken for one left behind
    return file


def running() -> list[LocalJob]:
    """Returns this user's jobs whose agents live, by id, and removes files that were left behind."""
    folders = glob.glob(os.path.join(glob.escape(tempfile.gettempdir()), f"{FOLDER_PREFIX}*"))
    found = [_read(os.path.join(folder, _FILE)) for folder in folders if _is_ours(folder)]
    return sorted((job for job in found if job is not None), key=lambda job: (job.id, job.endpoint))


def _is_ours(folder: str) -> bool:
    """Anybody may make a folder of such a name."""
    try:
        found = os.lstat(folder)
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def _read(path: str) -> LocalJob | None:
    try:
        with open(path, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return LocalJob(**json.load(file))
            os.unlink(path)
    except (OSError, ValueError, TypeError):
        pass  # it has just been removed, or is of another version
    return None
