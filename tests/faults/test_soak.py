"""A short part of `make soak`: jobs that meet some faults one after the other, and lose nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import once_a_session, soak
from tests.soak.run import Findings, run_round, undisturbed
from tests.soak.schedule import KINDS, make_round

STEPS = 240
FAULTS = 3
OF_SOME_MACHINES = {"memory limit", "clock step"}
"""Kinds of faults that need cgroups that can be written, or a compiler."""


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("setting", "store", "seed"),
    [
        ("init", "first node", 6),
        ("hybrid native", "three nodes, secret", 16),
        soak("init native", "first node, secret", 13),
        soak("hybrid", "etcd", 14),
        soak("attach", "three nodes", 9),
        soak("attach native", "first node", 26),
    ],
)
def test_a_job_meets_one_fault_after_the_other_and_loses_nothing(
    tmp_path: Path, setting: str, store: str, seed: int
) -> None:
    kinds = [kind for kind in KINDS if kind not in OF_SOME_MACHINES]
    round_ = make_round(seed, 0, FAULTS, [setting], kinds, [store], STEPS)
    key = ("soak", round_.api, STEPS)
    expected = once_a_session(key, lambda: undisturbed(tmp_path / "undisturbed", round_.api, STEPS))
    findings = Findings()
    run_round(tmp_path / "job", round_, expected, findings)
    assert [one.fault for one in findings.met] == list(round_.faults)
