"""The machine below the workers: what is read of it, and what that means before something fails."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.detect.health import Finding, HealthVerdict
from elaunch.detect.host import (
    SOON_S,
    Disk,
    Files,
    HostHealth,
    Memory,
    family,
    growth,
    read_disks,
    read_files,
    read_memory,
    read_own_bytes,
    size,
)

GB = 10**9
MIB = 1 << 20


# -- reading ----------------------------------------------------------------------------------------------------------


class Host:
    """Files as the kernel shows them."""

    def __init__(self, root: Path, available_mib: int = 60 << 10, total_mib: int = 64 << 10) -> None:
        self.proc, self.cgroup = root / "proc", root / "cgroup"
        self.put(self.proc / "meminfo", f"MemTotal: {total_mib << 10} kB\nMemAvailable:  {available_mib << 10} kB\n")
        self.put(self.proc / "self/cgroup", "0::/\n")

    def put(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def second(self, path: str, limit: str, current: int, **stat: int) -> None:
        folder = self.cgroup / path
        self.put(folder / "memory.max", f"{limit}\n")
        self.put(folder / "memory.current", f"{current}\n")
        self.put(folder / "memory.stat", "".join(f"{name} {value}\n" for name, value in stat.items()))
        self.put(folder / "memory.pressure", "some avg10=9.00 total=5\nfull avg10=3.50 avg60=0.00 total=1\n")

    def first(self, path: str, limit: int, current: int, **stat: int) -> None:
        folder = self.cgroup / "memory" / path
        self.put(folder / "memory.limit_in_bytes", f"{limit}\n")
        self.put(folder / "memory.usage_in_bytes", f"{current}\n")
        self.put(folder / "memory.stat", "".join(f"{name} {value}\n" for name, value in stat.items()))

    def memory(self) -> Memory:
        return read_memory(self.proc, self.cgroup)


def test_without_a_control_group_memory_is_the_machines(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.put(host.proc / "pressure/memory", "some avg10=1.00\nfull avg10=0.25 avg60=0.00\n")
    assert host.memory() == Memory("this machine", 64 << 30, 4 << 30, 0.25)
    assert host.memory().left_bytes == 60 << 30


def test_the_tightest_group_above_counts_without_what_the_kernel_can_take_back(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.put(host.proc / "self/cgroup", "0::/jobs/run/agent\n")
    host.second("jobs", str(8 << 30), 7 << 30, anon=1, inactive_file=5 << 30, active_file=0, slab_reclaimable=0)
    host.second("jobs/run", str(4 << 30), 3 << 30, inactive_file=512 * MIB, active_file=256 * MIB, slab_reclaimable=MIB)
    host.second("jobs/run/agent", "max", 1 << 30)
    assert host.memory() == Memory("control group /jobs/run", 4 << 30, (3 << 30) - 769 * MIB, 3.5)


def test_groups_of_the_first_version_are_read(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.put(host.proc / "self/cgroup", "9:name=systemd:/x\n4:memory:/a/b\n2:cpu,cpuacct:/\n0::/\n")
    host.first("a/b", 2 << 30, 1 << 30, inactive_file=1, total_inactive_file=100 * MIB, total_active_file=28 * MIB)
    host.first("a", 0x7FFFFFFFFFFFF000, 9 << 30)
    assert host.memory() == Memory("control group /a/b", 2 << 30, (1 << 30) - 128 * MIB, None)


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    host = Host(tmp_path)
    host.put(host.proc / "self/cgroup", "0::/seen/from/outside\n")
    host.second("", str(1 << 30), 512 * MIB)
    assert host.memory() == Memory("control group /", 1 << 30, 512 * MIB, 3.5)


def test_a_full_machine_comes_before_a_group_with_more_left(tmp_path: Path) -> None:
    host = Host(tmp_path, available_mib=100)
    host.put(host.proc / "self/cgroup", "0::/a\n")
    host.second("a", str(8 << 30), 1 << 30)
    assert host.memory().where == "this machine"


def test_the_memory_and_the_files_of_a_family_are_read(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for pid, children, anon in ((10, "11 12", 100), (11, "", 20), (12, "13", 3), (13, "", 1), (14, "", 9999)):
        host.put(host.proc / f"{pid}/task/{pid}/children", children)
        host.put(host.proc / f"{pid}/status", f"VmRSS: 7 kB\nRssAnon:\t{anon} kB\nRssShmem: 1000 kB\nVmSwap: 10 kB\n")
    assert sorted(family(10, host.proc)) == [10, 11, 12, 13]
    assert read_own_bytes(10, host.proc) == (124 + 4 * 1010) << 10
    host.put(host.proc / "10/limits", "Limit  Soft Limit  Hard Limit\nMax open files            7      9      files\n")
    for fd in range(5):
        host.put(host.proc / f"10/fd/{fd}", "")
    assert read_files(10, host.proc) == Files(5, 7)
    assert (read_own_bytes(99, host.proc), read_files(99, host.proc)) == (0, None)


def test_this_machine_can_be_read(tmp_path: Path) -> None:
    memory = read_memory()
    assert 0 < memory.used_bytes < memory.limit_bytes
    assert read_own_bytes(os.getpid()) > 1 << 20
    files = read_files(os.getpid())
    assert files is not None
    assert 3 <= files.used <= files.limit == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    disks = read_disks([str(tmp_path), str(tmp_path.parent), str(tmp_path / "nothing")])
    (disk,) = disks.values()
    assert 0 < disk.free_bytes <= disk.total_bytes


# -- judging ----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.lists(st.floats(0.5, 2), min_size=7, max_size=16), st.data())
def test_growth_is_that_of_most_readings_whatever_a_few_say(
    per_s: float, pauses_s: list[float], data: st.DataObject
) -> None:
    times, now_s = [], 0.0
    for pause_s in pauses_s:
        now_s += pause_s
        times.append(now_s)
    odd = data.draw(st.integers(0, len(times) - 1))
    jump = data.draw(st.floats(-1e9, 1e9))
    points = [(t, 5.0 + per_s * t + (jump if index == odd else 0.0)) for index, t in enumerate(times)]
    assert growth(points) == pytest.approx(per_s, rel=1e-6, abs=1e-3)


def test_growth_of_too_few_points_is_none() -> None:
    assert growth([]) == growth([(1.0, 5.0)]) == growth([(1.0, 5.0), (1.0, 9.0)]) == 0.0


class Watched:
    """A node whose memory is read once a second."""

    def __init__(self, limit: float = 16 * GB) -> None:
        self.health = HostHealth("a")
        self.limit = int(limit)
        self.now_s = 10.0

    def reads(self, used: float, stalled: float | None = None, **workers: float) -> list[Finding]:
        self.now_s += 1
        memory = Memory("control group /x", self.limit, int(used), stalled)
        return self.health.on_memory(self.now_s, memory, {name: int(value) for name, value in workers.items()})


def test_a_worker_that_fills_the_memory_is_named_before_it_is_full() -> None:
    node = Watched()
    for second in range(100):
        used = 4 * GB + second * 0.5 * GB
        assert used < node.limit, "nothing was said before the memory was full"
        found = node.reads(used, leaks=1 * GB + second * 0.5 * GB, steady=3 * GB)
        if found:
            break
    (one,) = found
    assert (one.verdict, one.subject, one.what) == (HealthVerdict.WATCH, "node a", "memory")
    assert one.evidence["worker"] == "leaks"
    assert one.evidence["worker_grows_bytes_per_s"] == GB // 2
    left_s = (node.limit - used) / (0.5 * GB)
    assert 0.5 * SOON_S <= left_s <= SOON_S
    assert one.evidence["full_in_s"] == pytest.approx(left_s, abs=0.1)
    assert one.text == (
        f"{size(node.limit - int(used))} of 16 GB of memory are left (control group /x); leaks has "
        f"{size(used - 3 * GB)}, grows by 500 MB/s, and it is full in {left_s:.0f} s"
    )


def test_a_slow_leak_is_told_of_when_little_is_left() -> None:
    node, found = Watched(), []
    for second in range(3600):
        used = 10 * GB + second * 0.01 * GB
        found += node.reads(used, leaks=used)
        if found:
            break
    assert node.limit - used == pytest.approx(0.1 * node.limit, rel=0.03)
    assert found[0].evidence["worker"] == "leaks"


def test_what_grows_outside_the_job_is_not_blamed_on_a_worker() -> None:
    node, found = Watched(), []
    for second in range(12):
        found += node.reads(4 * GB + second * GB, first=GB, second=GB + second)
    assert [one.evidence["worker"] for one in found] == [None]
    assert "no worker of this job is what grows" in found[0].text


def test_memory_that_is_used_and_given_back_or_full_but_steady_is_nothing() -> None:
    node = Watched()
    for step in range(500):
        assert node.reads((6 if step % 4 else 9) * GB, worker=GB) == []
    node = Watched()
    for _ in range(500):
        assert node.reads(15 * GB, worker=14 * GB) == []


def test_memory_that_may_be_full_in_seconds_is_looked_at_more_often_until_it_is_not() -> None:
    node = Watched()
    assert not node.health.hurries
    for used, hurries in ((12.0, False), (12.1, False), (12.9, True), (13.7, True), (13.7, False), (9.0, False)):
        node.reads(int(used * GB), worker=GB)
        assert node.health.hurries is hurries, used


def test_almost_no_memory_is_told_of_however_steady_and_the_end_of_it() -> None:
    node, found = Watched(), []
    for _ in range(10):
        found += node.reads(15.9 * GB)
    for _ in range(30):
        found += node.reads(8 * GB)
    assert [one.verdict for one in found] == [HealthVerdict.WATCH, HealthVerdict.HEALTHY]
    assert "the kernel is about to kill a process" in found[0].text


def test_waiting_for_memory_counts_when_it_lasts() -> None:
    node, found = Watched(), []
    for second in range(60):
        found += node.reads(8 * GB, stalled=50.0 if second % 20 < 4 else 0.0)
    assert found == []
    for _ in range(20):
        found += node.reads(8 * GB, stalled=50.0)
    assert [one.what for one in found] == ["memory stall"]


def test_a_disk_is_told_of_when_it_is_almost_full_or_soon_will_be() -> None:
    health, tb = HostHealth("a"), 10**12
    found = []
    for look in range(20):
        disks = {"/big": Disk(5 * GB, 100 * tb), "/small": Disk(3 * GB, 100 * GB, 10, 10**6)}
        assert [one.subject for one in health.on_disks(10.0 * look, disks) if one.subject != "disk of /small"] == []
    health = HostHealth("a")
    for look in range(40):
        found += health.on_disks(10.0 * look, {"/logs": Disk(50 * GB - look * GB, 100 * GB)})
        if found:
            break
    assert (found[0].subject, found[0].what) == ("disk of /logs", "disk")
    assert found[0].evidence["full_in_s"] == pytest.approx(10 * (50 - look), abs=0.2)
    health = HostHealth("a")
    assert health.on_disks(0.0, {"/logs": Disk(GB, 100 * GB)}) == []
    (full,) = health.on_disks(10.0, {"/logs": Disk(GB, 100 * GB)})
    assert full.text == "1 GB of 100 GB are free"


def test_inodes_count_where_the_file_system_counts_them() -> None:
    health, few, none = HostHealth("a"), Disk(50 * GB, 100 * GB, 10, 10**6), Disk(50 * GB, 100 * GB)
    found = [one for look in range(3) for one in health.on_disks(10.0 * look, {"/logs": few, "/tmp": none})]
    assert [one.text for one in found] == ["10 of 1000000 inodes are free"]


def test_descriptors_are_told_of_near_their_limit() -> None:
    health = HostHealth("a")
    usual = {"the agent": Files(899, 1000)}
    assert [health.on_files(10.0 * look, usual) for look in range(3)] == [[], [], []]
    found = [one for look in range(3, 9) for one in health.on_files(10.0 * look, {"worker a/0#0": Files(900, 1000)})]
    assert [(one.subject, one.evidence) for one in found] == [("worker a/0#0", {"used": 900, "limit": 1000})]


def test_sizes_are_written_for_people() -> None:
    assert [size(count) for count in (0, 999, 1500, 2.5e6, 16 * GB, 3e13)] == [
        "0 B",
        "999 B",
        "1.5 kB",
        "2.5 MB",
        "16 GB",
        "30 TB",
    ]


def test_the_family_of_a_process_has_what_any_of_its_threads_has_started() -> None:
    started: Queue[subprocess.Popen[bytes]] = Queue()
    done = threading.Event()

    def start() -> None:
        started.put(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        done.wait(60)  # with the thread its children would go over to another one

    thread = threading.Thread(target=start)
    thread.start()
    child = started.get(timeout=60)
    try:
        assert child.pid in family(os.getpid())
    finally:
        child.communicate(b"\n", timeout=60)
        done.set()
        thread.join()
