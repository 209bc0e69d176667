"""A short part of `make soak`: jobs that meet some faults one after the other, and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import once_a_session, soak
from tests.soak.run import Met, run_round, undisturbed
from tests.soak.schedule import Fault, Round

FAULTS = (
    Fault("SEGV", "b", 0, 1.0, 0.0),
    Fault("host cut off", "a", 0, 3.0, 0.1),
    Fault("store killed", "c", 1, 0.5, 0.0),
    Fault("drain", "c", 0, 1.0, 0.2),
)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("setting", ["init", soak("init native"), soak("hybrid"), soak("attach")])
def test_a_job_meets_one_fault_after_the_other_and_loses_nothing(tmp_path: Path, setting: str) -> None:
    round_ = Round(0, setting, False, FAULTS)
    expected = once_a_session(("soak", round_.api), lambda: undisturbed(tmp_path / "undisturbed", round_.api))
    found: list[Met] = []
    run_round(tmp_path / "job", round_, expected, found.append)
    assert [one.fault for one in found] == list(FAULTS)
