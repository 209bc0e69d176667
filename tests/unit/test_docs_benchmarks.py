"""The benchmarks that the docs name can be started as they are written there."""

from __future__ import annotations

import re

import pytest

from tests.helpers import ROOT

NAMED = sorted(set(re.findall(r"python benchmarks/(\w+\.py)", (ROOT / "docs" / "benchmarks.md").read_text())))


@pytest.mark.parametrize("name", NAMED)
def test_a_benchmark_finds_the_modules_beside_it(name: str) -> None:
    """Python puts the folder of a script first, not the root of the repository."""
    text = (ROOT / "benchmarks" / name).read_text()
    at = text.find("\nfrom benchmarks")
    assert at < 0 or "sys.path.insert(0, str(Path(__file__).resolve().parent.parent))" in text[:at]
