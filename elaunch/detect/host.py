"""The machine below the workers: memory, disks, descriptors. Reading, and pure decisions on what was read.

Memory is that of the tightest control group above this process (v2 or v1) or of the whole machine, whichever is full
first. What the kernel can take back, file pages and reclaimable slabs, does not count as used. How fast it grows is the
median of the slopes between all pairs of readings (Theil and Sen), which single jumps do not move.

The roots of procfs and of the cgroup file system are arguments, so that tests bring their own.
"""

from __future__ import annotations

import os
import re
import statistics
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from elaunch.detect.health import Condition, Finding, HealthVerdict, Tracker

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")


# -- what is read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Memory:
    """What there is, and how much of it is used and cannot be taken back.

    `where` is the control group's path, or "this machine". `stalled` is the part of the last 10 s in which everybody
    waited for memory, in percent (PSI); None where the kernel does not say.
    """

    where: str
    limit_bytes: int
    used_bytes: int
    stalled: float | None = None

    @property
    def left_bytes(self) -> int:
        """Returns how many bytes can still be taken before the limit; never less than 0."""
        return max(0, self.limit_bytes - self.used_bytes)


@dataclass(frozen=True, slots=True)
class Disk:
    """A file system, as an unprivileged process may use it. No inodes: it does not count them."""

    free_bytes: int
    total_bytes: int
    free_inodes: int = 0
    total_inodes: int = 0


@dataclass(frozen=True, slots=True)
class Files:
    """Open file descriptors of a process, and how many it may have."""

    used: int
    limit: int


def read_memory(proc: Path = PROC, cgroup: Path = CGROUP) -> Memory:
    """Returns the memory that is full first.

    Raises:
        OSError: procfs does not tell.
        ValueError: likewise.
    """
    info = _table(proc / "meminfo", r"(\w+):\s+(\d+) kB")
    total, available = info["MemTotal"] << 10, info["MemAvailable"] << 10
    stalled = _stalled(proc / "pressure/memory")
    found = [Memory("this machine", total, total - available, stalled)]
    for folder, root in _memory_groups(proc, cgroup):
        with suppress(OSError, ValueError, KeyError):
            group = _group_memory(folder, root)
            if group is not None and group.limit_bytes < total:
                found.append(group)
    return min(found, key=lambda memory: memory.left_bytes)


def _memory_groups(proc: Path, cgroup: Path) -> Iterator[tuple[Path, Path]]:
    """The groups that bound this process, each with the root of its hierarchy; in a container these may be one."""
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root = cgroup
        elif "memory" in controllers.split(","):
            root = cgroup / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        while not folder.is_dir() and folder != root:
            folder = folder.parent
        yield folder, root
        while folder != root:
            folder = folder.parent
            yield folder, root


def _group_memory(folder: Path, root: Path) -> Memory | None:
    """None: it has no limit, or does not count memory."""
    second = (folder / "memory.max").exists()
    limit = (folder / ("memory.max" if second else "memory.limit_in_bytes")).read_text().strip()
    if limit == "max":
        return None
    used = int((folder / ("memory.current" if second else "memory.usage_in_bytes")).read_text())
    stat = _table(folder / "memory.stat", r"(\w+) (\d+)")
    names = ("active_file", "inactive_file", "slab_reclaimable")
    # In v1 a line without the prefix is for this group alone.
    kept = sum(stat.get(name if second else f"total_{name}", 0) for name in names)
    where = f"control group /{folder.relative_to(root)}" if folder != root else "control group /"
    return Memory(where, int(limit), max(0, used - kept), _stalled(folder / "memory.pressure"))


def _stalled(path: Path) -> float | None:
    with suppress(OSError):
        found = re.search(r"^full avg10=([\d.]+)", path.read_text(), re.MULTILINE)
        return float(found[1]) if found else None
    return None


def _table(path: Path, pattern: str) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(pattern, path.read_text())}


def read_own_bytes(pid: int, proc: Path = PROC) -> int:
    """Returns the bytes of a process and of all that it has started, without pages of files; 0 when it is gone."""
    total = 0
    for each in family(pid, proc):
        with suppress(OSError):
            status = _table(proc / str(each) / "status", r"(\w+):\s+(\d+) kB")
            total += (status.get("RssAnon", 0) + status.get("RssShmem", 0) + status.get("VmSwap", 0)) << 10
    return total


def family(pid: int, proc: Path = PROC) -> list[int]:
    """Returns a process and its descendants, whichever of its threads has started them."""
    found, new = [], [pid]
    while new:
        each = new.pop()
        found.append(each)
        with suppress(OSError):
            for task in (proc / f"{each}/task").iterdir():
                with suppress(OSError):  # this thread has ended
                    new.extend(map(int, (task / "children").read_text().split()))
    return found


def ancestors(pid: int, proc: Path = PROC) -> list[int]:
    """Returns the parent of a process, the parent of that, and so on, as far as this process can see them."""
    found: list[int] = []
    with suppress(OSError, IndexError, ValueError):
        while pid > 1 and pid not in found[:-1]:
            pid = int((proc / f"{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            found.append(pid)
    return found


def read_files(pid: int, proc: Path = PROC) -> Files | None:
    """Returns the descriptors of a process; None when it is gone, or has no limit."""
    try:
        limits = (proc / str(pid) / "limits").read_text()
        used = len(os.listdir(proc / str(pid) / "fd"))
    except OSError:
        return None
    found = re.search(r"^Max open files\s+(\d+)", limits, re.MULTILINE)
    return Files(used, int(found[1])) if found else None


def read_disks(folders: Collection[str]) -> dict[str, Disk]:
    """Returns the file systems of these folders, each under the first that lies on it, without those that are not
    there.

    May block as long as a network file system does not answer.
    """
    found: dict[str, Disk] = {}
    seen = set()
    for folder in folders:
        with suppress(OSError):
            device = os.stat(folder).st_dev
            if device in seen:
                continue
            seen.add(device)
            at = os.statvfs(folder)
            found[folder] = Disk(at.f_bavail * at.f_frsize, at.f_blocks * at.f_frsize, at.f_favail, at.f_files)
    return found


# -- what it means: pure ----------------------------------------------------------------------------------------------

READINGS = 16  # from which growth is judged
LEAST_READINGS = 4

SOON_S = 20.0  # until memory is full, as it grows: worth a line however much is left
HURRY_S = 5.0  # until it is full, by the last two readings: then it is read more often
LITTLE = 0.10  # of the limit is left: worth a line if it grows on
LITTLE_SOON_S = 300.0
NOTHING = 0.03  # of the limit is left
CONFIRM_S = 0.5
STALLED = 20.0  # percent
STALLED_S = 10.0
WORTH_BLAMING = 0.2  # of the growth

FULL = 0.02  # of a disk is left, or
FULL_BYTES = 2 << 30  # this, whichever is less
DISK_SOON_S = 120.0
FEW_INODES = 0.01
OPEN = 0.9  # of the descriptors that a process may have


def growth(points: Sequence[tuple[float, float]]) -> float:
    """Returns how fast a value grows, per second: the median of the slopes between all pairs of (seconds, value)."""
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in combinations(points, 2) if b[0] > a[0]]
    return statistics.median(slopes) if slopes else 0.0


class GrowthHistory:
    """The newest values of something that may run full."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float]] = deque(maxlen=READINGS)

    def add(self, now_s: float, value: float) -> float:
        """Adds one, and tells how fast they grow by now, per second; 0 until there are enough."""
        self._points.append((now_s, value))
        return growth(tuple(self._points)) if len(self._points) >= LEAST_READINGS else 0.0


class HostHealth:
    """Judges a machine by what is read of it over time. Nothing here makes a node leave: other nodes are not emptier.

    Args:
        node: its name.
    """

    def __init__(self, node: str) -> None:
        self._node = node
        self._memory = Tracker()
        self._disks = Tracker()
        self._files = Tracker()
        self._used = GrowthHistory()
        self._last: tuple[float, float] | None = None
        self.hurries = False
        """Whether memory may be full so soon that it is to be looked at more often."""
        self._of_worker: dict[str, GrowthHistory] = {}
        self._of_disk: dict[str, GrowthHistory] = {}

    def on_memory(self, now_s: float, memory: Memory, workers: Mapping[str, int]) -> list[Finding]:
        """Returns what is news after a reading of the memory, and of how many bytes each worker has."""
        per_s = self._used.add(now_s, memory.used_bytes)
        self._of_worker = {worker: self._of_worker.get(worker, GrowthHistory()) for worker in workers}
        grows = {worker: self._of_worker[worker].add(now_s, used) for worker, used in workers.items()}
        conditions = []
        left = memory.left_bytes
        before, self._last = self._last, (now_s, memory.used_bytes)
        newest_per_s = growth((before, self._last)) if before is not None else 0.0
        self.hurries = newest_per_s > 0 and left <= HURRY_S * newest_per_s
        left_s = left / per_s if per_s > 0 else float("inf")
        near = left <= LITTLE * memory.limit_bytes
        if left_s <= SOON_S or (near and left_s <= LITTLE_SOON_S) or left <= NOTHING * memory.limit_bytes:
            worker, its = max(grows.items(), key=lambda item: item[1], default=("", 0.0))
            if its < WORTH_BLAMING * per_s or its <= 0:
                worker = ""
            of = f"{size(left)} of {size(memory.limit_bytes)} of memory are left ({memory.where})"
            if worker:
                when = f"and it is full in {left_s:.0f} s" if left_s < LITTLE_SOON_S else "and little is left"
                text = f"{of}; {worker} has {size(workers[worker])}, grows by {size(its)}/s, {when}"
            elif left_s <= LITTLE_SOON_S:
                text = f"{of}, full in {left_s:.0f} s; no worker of this job is what grows"
            else:
                text = f"{of}: the kernel is about to kill a process"
            evidence = {
                "left_bytes": left,
                "limit_bytes": memory.limit_bytes,
                "grows_bytes_per_s": round(per_s),
                "full_in_s": round(left_s, 1) if per_s > 0 else None,
                "worker": worker or None,
                "worker_bytes": workers.get(worker),
                "worker_grows_bytes_per_s": round(its) if worker else None,
            }
            finding = Finding(HealthVerdict.WATCH, f"node {self._node}", "memory", text, evidence)
            conditions.append(Condition(finding, CONFIRM_S, looks=2))
        if memory.stalled is not None and memory.stalled >= STALLED:
            text = f"everybody waits for memory, {memory.stalled:.0f} % of the last 10 s ({memory.where})"
            finding = Finding(
                HealthVerdict.WATCH, f"node {self._node}", "memory stall", text, {"stalled_percent": memory.stalled}
            )
            conditions.append(Condition(finding, STALLED_S))
        return self._memory.take(now_s, conditions)

    def on_disks(self, now_s: float, disks: Mapping[str, Disk]) -> list[Finding]:
        """Returns what is news after a reading of the disks that this job writes to, by folder."""
        conditions = []
        self._of_disk = {folder: self._of_disk.get(folder, GrowthHistory()) for folder in disks}
        for folder, disk in disks.items():
            per_s = self._of_disk[folder].add(now_s, -disk.free_bytes)
            full_s = disk.free_bytes / per_s if per_s > 0 else float("inf")
            texts = []
            if disk.free_bytes <= min(FULL * disk.total_bytes, FULL_BYTES) or full_s <= DISK_SOON_S:
                soon = f", full in {full_s:.0f} s" if full_s <= DISK_SOON_S else ""
                texts.append(f"{size(disk.free_bytes)} of {size(disk.total_bytes)} are free{soon}")
            if disk.total_inodes and disk.free_inodes <= FEW_INODES * disk.total_inodes:
                texts.append(f"{disk.free_inodes} of {disk.total_inodes} inodes are free")
            if texts:
                evidence = {
                    "free_bytes": disk.free_bytes,
                    "total_bytes": disk.total_bytes,
                    "full_in_s": round(full_s, 1) if per_s > 0 else None,
                    "free_inodes": disk.free_inodes,
                }
                finding = Finding(HealthVerdict.WATCH, f"disk of {folder}", "disk", "; ".join(texts), evidence)
                conditions.append(Condition(finding, CONFIRM_S, looks=2))
        return self._disks.take(now_s, conditions)

    def on_files(self, now_s: float, processes: Mapping[str, Files]) -> list[Finding]:
        """Returns what is news after a reading of the descriptors of the agent and the workers, by their names."""
        conditions = []
        for who, files in processes.items():
            if files.used >= OPEN * files.limit:
                text = f"{files.used} of {files.limit} file descriptors are in use; raise `ulimit -n`, or close some"
                finding = Finding(
                    HealthVerdict.WATCH, who, "file descriptors", text, {"used": files.used, "limit": files.limit}
                )
                conditions.append(Condition(finding, CONFIRM_S, looks=2))
        return self._files.take(now_s, conditions)


def size(count: float) -> str:
    """Returns bytes as the user reads them: 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
