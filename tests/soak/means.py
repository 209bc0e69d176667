"""What faults are made of that need the machine's help: memory limits, small disks, and clocks that can be stepped."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

MB = 1_000_000
CGROUPS = Path("/sys/fs/cgroup")
DISK_MB = 8
LIMIT_S = 60.0


def missing() -> dict[str, str]:
    """Returns why this machine cannot have some kinds of faults; empty: it can have all."""
    found = {}
    if os.geteuid() != 0:
        found["memory limit"] = found["disk full"] = "only root can make cgroups and mount a small disk"
    elif _memory_root() is None:
        found["memory limit"] = f"no memory controller that can be written below {CGROUPS}"
    if shutil.which("gcc") is None:
        found["clock step"] = "needs gcc, for the library that moves a program's clock: apt-get install gcc"
    return found


def _memory_root() -> Path | None:
    """The folder in which groups with a memory limit are made: of version 1, else of version 2."""
    old = CGROUPS / "memory"
    if (old / "memory.limit_in_bytes").exists():
        return old if os.access(old, os.W_OK) else None
    controllers = CGROUPS / "cgroup.subtree_control"
    with contextlib.suppress(OSError):
        if "memory" not in controllers.read_text():
            controllers.write_text("+memory")
        return CGROUPS
    return None


@contextlib.contextmanager
def memory_limit(pid: int, megabytes: int) -> Iterator[None]:
    """Lets a process take only so much more memory; within the block."""
    root = _memory_root()
    assert root is not None
    group = root / f"soak-{pid}"
    group.mkdir()
    try:
        old = group / "memory.limit_in_bytes"
        (old if old.exists() else group / "memory.max").write_text(str(megabytes * MB))
        (group / "cgroup.procs").write_text(str(pid))
        yield
    finally:
        # Empty once its process is gone.
        group.rmdir()


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mounts a disk of `DISK_MB` in memory there; within the block."""
    folder.mkdir()
    if os.geteuid() != 0:
        yield folder
        return
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "soak", folder], check=True, timeout=LIMIT_S)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, timeout=LIMIT_S)


class Clock:
    """The clock of the day of the programs of one host.

    Args:
        folder: where its library and its file are made.
        host: the name of the host.
    """

    def __init__(self, folder: Path, host: str) -> None:
        self._library = folder / "clock.so"
        self._file = folder / f"clock-{host}"
        self._file.write_bytes(struct.pack("q", 0))
        if not self._library.exists():
            source = Path(__file__).with_name("clock.c")
            command = ["gcc", "-shared", "-fPIC", "-O2", "-o", str(self._library), str(source), "-ldl"]
            subprocess.run(command, check=True, timeout=LIMIT_S)

    @property
    def environment(self) -> dict[str, str]:
        """What the programs of the host are started with."""
        return {"LD_PRELOAD": str(self._library), "SOAK_CLOCK": str(self._file)}

    def step(self, seconds: int) -> None:
        """Moves the clock by so much, from what it shows."""
        with self._file.open("r+b") as file:
            (before,) = struct.unpack("q", file.read(8))
            file.seek(0)
            file.write(struct.pack("q", before + seconds))
