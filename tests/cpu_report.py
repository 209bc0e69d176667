"""`pytest --cpu-report`: processor time by test file, with that of all processes that its tests started and waited for.

While several tests run at a time, wall-clock says who waited; what a run needs at least is its processor time divided
by the number of cores.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Generator
from typing import cast

import pytest

from tests import forks

Used = tuple[float, float]
"""Processor time and wall-clock, in seconds."""

_started = pytest.StashKey[Used]()

SLOWEST = 25
"""How many single tests are listed after the files."""


def used_s() -> float:
    """Returns the processor time, in seconds, of this process and of its descendants that were waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both) + forks.used_s()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Notes both clocks before the fixtures of a test are set up."""
    item.stash[_started] = used_s(), time.monotonic()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Adds what a test has used to the report of its teardown; pytest-xdist carries it to the controller."""
    report = yield
    if report.when == "teardown":
        cpu_s, wall_s = item.stash[_started]
        report.user_properties.append(("cpu", (used_s() - cpu_s, time.monotonic() - wall_s)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Prints the table: by file, then the tests that used most."""
    tests: dict[str, Used] = {}
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport) and report.when == "teardown":
                for name, value in report.user_properties:
                    if name == "cpu":
                        cpu_s, wall_s = cast(Used, value)
                        tests[report.nodeid] = cpu_s, wall_s
    files: dict[str, list[Used]] = defaultdict(list)
    for name, value in tests.items():
        files[name.partition("::")[0]].append(value)
    write = terminalreporter.write_line
    terminalreporter.section("processor time")
    write("  cpu s   wall s  tests")
    largest = sorted(files.items(), key=lambda entry: -sum(cpu_s for cpu_s, _ in entry[1]))
    for name, values in [*largest, ("together", list(tests.values()))]:
        cpu_s, wall_s = (sum(each) for each in zip(*values))
        write(f"{cpu_s:7.1f}  {wall_s:7.1f}  {len(values):5}  {name}")
    terminalreporter.section(f"the {SLOWEST} tests that used most")
    for name, (cpu_s, wall_s) in sorted(tests.items(), key=lambda entry: -entry[1][0])[:SLOWEST]:
        write(f"{cpu_s:7.1f}  {wall_s:7.1f}  {name}")
