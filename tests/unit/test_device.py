"""The memory of a worker that computes on the CPU, and of the state that moves; what a device loads."""

from __future__ import annotations

import platform
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from elaunch.workers.comm.native import warm_up
from elaunch.workers.comm.native.warm_up import WarmUp
from elaunch.workers.device import keep_freed_memory, load_kernels
from tests.devices import DEVICES

LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")

NEW_MEMORY = """
import resource, torch
from elaunch.workers.device import use_large_pages

def faults(advise):
    new = [torch.empty(size, dtype=torch.uint8) for size in (33 << 20, 100, 7 << 20)]
    if advise:
        use_large_pages(new)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for one in new:
        one.fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(faults(False), faults(True))
"""

FAULTS = """
import resource, torch
from elaunch.workers.device import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.ones(10 << 20)  # 40 MiB: more than glibc's own threshold ever grows to
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

first, kept = faults(), keep_freed_memory({})
print(first, kept, min(faults() for _ in range(10)))  # the heap grows at first, as blocks are aligned
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the memory of glibc's malloc")
def test_blocks_that_each_step_frees_are_not_mapped_anew() -> None:
    told = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60, check=True)
    before, kept, after = told.stdout.split()
    assert kept == "True"
    assert int(before) > 5 * 20, "the first blocks were not mapped by the kernel: the test shows nothing"
    assert int(after) < 10


@pytest.mark.skipif(
    not LARGE_PAGES.exists() or "[never]" in LARGE_PAGES.read_text(), reason="this kernel gives no large pages"
)
def test_new_memory_for_state_is_mapped_in_large_pages() -> None:
    told = subprocess.run([sys.executable, "-c", NEW_MEMORY], capture_output=True, text=True, timeout=60, check=True)
    before, after = map(int, told.stdout.split())
    if "[madvise]" in LARGE_PAGES.read_text():
        assert before > 40 * 200, "it has large pages without being asked: the test shows nothing"
    assert after < 40 * 100


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD"])
def test_what_the_user_has_chosen_stays(name: str) -> None:
    assert not keep_freed_memory({name: "1"})


@pytest.mark.parametrize("kind", DEVICES)
def test_what_a_joiner_loads_draws_no_random_numbers(kind: str) -> None:
    device = torch.device(kind)
    drawn_from = torch.cuda.get_rng_state if kind == "cuda" else torch.get_rng_state
    before = drawn_from()
    load_kernels(device)
    assert torch.equal(drawn_from(), before)


class TestWarmUp:
    """`meta` stands for an accelerator: nothing is computed on it."""

    def test_a_device_is_loaded_while_the_script_goes_on(self, monkeypatch: pytest.MonkeyPatch) -> None:
        may_end, loaded = threading.Event(), []

        def load(device: torch.device) -> None:
            assert may_end.wait(20)
            loaded.append(device.type)

        monkeypatch.setattr(warm_up, "load_kernels", load)
        loading = WarmUp(torch.device("meta"), "")
        assert loaded == []
        may_end.set()
        loading.wait()
        assert loaded == ["meta"]

    def test_what_fails_is_raised_where_the_script_waits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def load(device: torch.device) -> None:
            raise RuntimeError("out of memory")

        monkeypatch.setattr(warm_up, "load_kernels", load)
        loading = WarmUp(torch.device("meta"), "")
        loading.end()
        with pytest.raises(RuntimeError, match="out of memory"):
            loading.wait()

    def test_on_the_cpu_there_is_nothing_to_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(warm_up, "load_kernels", lambda device: pytest.fail("it loads"))
        WarmUp(torch.device("cpu"), "gloo").wait()
