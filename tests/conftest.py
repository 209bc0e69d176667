"""Fixtures that every test has. None lets a process outlive its test, whether the test passed or not."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests import cpu_report, forks, helpers
from tests.helpers import TEST_ID, Spawner, end_processes_left, find_free_port, own_children
from tests.jobs.plain_etcd import serving

# Several tests run at a time. Threads of OpenMP that wait for each other by spinning would then take minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Nor do replacements need torch's compiler in their warm parent (tests/jobs/eager.py).
os.environ.setdefault("ELAUNCH_PRELOAD", "torch,elaunch.workers.data_parallel.job")

# Without its bytecode on the disk, elaunch is compiled again by each of the thousands of processes: 0.2 s each time.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A shell ignores SIGINT for what runs in its background, and tests would hand that on to what they start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Time for what is ending to be gone: workers whose agent was killed learn of it from the kernel.
GRACE_S = 5.0

# Looking at every process of the machine after each of thousands of tests takes a minute in all.
CHILDREN_ARE_SHOWN = os.path.exists("/proc/thread-self/children")

# Where whole jobs are tested, for seconds each.
LONG = {"conformance", "faults", "integration"}

_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--soak", action="store_true", help="tests marked `soak` too, and all others with more examples")
    parser.addoption("--cpu-report", action="store_true", help="processor time by test file (tests/cpu_report.py)")


def pytest_configure(config: pytest.Config) -> None:
    helpers.SOAK = config.getoption("--soak")
    # Examples have no time limit: beside other tests any of them may wait for a processor.
    hypothesis.settings.register_profile("elaunch", deadline=None, max_examples=helpers.scaled(50, 100))
    hypothesis.settings.load_profile("elaunch")
    if config.getoption("--cpu-report"):
        config.pluginmanager.register(cpu_report)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not helpers.SOAK:
        left_out = [item for item in items if item.get_closest_marker("soak")]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("soak")]
    items[:] = dealt(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))


def dealt(items: list[pytest.Item], workers: int) -> list[pytest.Item]:
    """Returns the tests so that each of pytest's processes has its share of the whole jobs, and begins with them.

    pytest-xdist gives each process as many tests in a row, and later what another has not begun yet: at the end those
    should be short.
    """
    jobs = [item for item in items if item.path.parent.name in LONG]
    others = [item for item in items if item.path.parent.name not in LONG]
    return [
        item
        for worker in range(workers)
        for some in (jobs, others)
        for item in some[len(some) * worker // workers : len(some) * (worker + 1) // workers]
    ]


@pytest.fixture(scope="session", autouse=True)
def session_id(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Marks what fixtures of a module or of the session start, and fails the run if any of it is left at its end."""
    own = tmp_path_factory.getbasetemp()
    helpers.SHARED = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "shared"
    helpers.SHARED.mkdir(exist_ok=True)
    token = uuid.uuid4().hex
    before = os.environ.get(TEST_ID)
    os.environ[TEST_ID] = f"{token}/shared"
    yield token
    if before is None:
        del os.environ[TEST_ID]
    else:
        os.environ[TEST_ID] = before
    forks.close_all()
    left = end_processes_left(token, frozenset(), GRACE_S)
    if left:
        pytest.fail("left behind by fixtures of a module or of the session, now killed:\n" + "\n".join(left))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EmbeddedEtcd]:
    """A server of this test's own."""
    with serving(tmp_path / "etcd") as server:
        yield server


@pytest.fixture(autouse=True)
def no_process_left_behind(session_id: str) -> Iterator[str]:
    """Kills what the test left running, orphans included, and fails it; gives the test's mark."""
    token = f"{session_id}/{next(_numbers)}"
    before = own_children()
    known = frozenset(child.pid for child in psutil.Process().children(recursive=True)) if before[0] else frozenset()
    shared = os.environ[TEST_ID]
    os.environ[TEST_ID] = token
    yield token
    os.environ[TEST_ID] = shared
    if own_children() == before and CHILDREN_ARE_SHOWN:
        return
    left = end_processes_left(token, known, GRACE_S)
    if left:
        pytest.fail("the test left these processes behind, now killed:\n" + "\n".join(left))


@pytest.fixture(autouse=True)
def rank_is_taken_back() -> Iterator[None]:
    """Takes the rank that a job of this process has put into the environment out again: later scripts would read it."""
    before = {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture
def spawn(tmp_path: Path, no_process_left_behind: str) -> Iterator[Spawner]:
    """Starts processes, each in its own session with its log in `tmp_path`, and ends them after the test."""
    spawner = Spawner(tmp_path)
    yield spawner
    spawner.end_all()


@pytest.fixture
def free_port() -> int:
    """A TCP port of the loopback interface that nothing listens on; `tests.helpers.find_free_port` gives more."""
    return find_free_port()
