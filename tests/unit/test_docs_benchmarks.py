"""The benchmarks that the docs name can be started as they are written there."""

from __future__ import annotations

import re

import pytest

from benchmarks.agents import Figures, ask
from benchmarks.report import Report
from tests.helpers import ROOT

PAGE = (ROOT / "docs" / "benchmarks.md").read_text()
NAMED = sorted(set(re.findall(r"python benchmarks/(\w+\.py)", PAGE)))


@pytest.mark.parametrize("name", NAMED)
def test_a_benchmark_finds_the_modules_beside_it(name: str) -> None:
    """Python puts the folder of a script first, not the root of the repository."""
    text = (ROOT / "benchmarks" / name).read_text()
    at = text.find("\nfrom benchmarks")
    assert at < 0 or "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))" in text[:at]


def test_many_agents_are_held_to_the_targets_of_the_page() -> None:
    report = Report("agents")
    ask(report, Figures(1000, {"rendezvous": [40.0], "death": [0.2, 0.3, 4.0]}), resident_mb=44.4)
    asked = [(target.target, target.unit, target.met) for target in report.targets]
    assert asked == [("< 5", "s", False), ("< 0.5", "s", True), ("< 45", "MB", True)]
    assert "| target, 1,000 | < 5 s: missed | | < 0.5 s: missed |" in PAGE
    assert set(re.findall(r"agent, resident \| [\d.]+ MB \| (< \d+ MB)", PAGE)) == {"< 45 MB"}
    assert set(re.findall(r"of its own, between machines \|.*target: (< \d+ MB)", PAGE)) == {"< 45 MB"}
