"""`elaunch simulate`: what it prints and writes, and what a wrong command line or file gets."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from elaunch.cli.simulate import main
from elaunch.policy.profile import LayerProfile, Profile
from tests.helpers import ROOT

TRACE = str(ROOT / "benchmarks" / "traces" / "trace_0304.txt")
JOBS = str(ROOT / "benchmarks" / "traces" / "philly_8h.csv")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "model.json"
    layer = LayerProfile(0.01, 0.02, 1000, 6000, 10, 10)
    path.write_text(Profile("small", (layer,) * 4, 1, 1e9, 0.0).to_json())
    return str(path)


def test_a_job_over_a_trace_has_a_line_for_each_strategy_and_one_for_each_change(
    profile: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.json"
    flags = ["job", f"--profile={profile}", "--batch=24", f"--trace={TRACE}", "--strategies=auto,restart", "--changes"]
    assert main([*flags, f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    head, auto, restart = printed.splitlines()[:3]
    assert head.split()[:2] == ["strategy", "samples/s"]
    assert (auto.split()[0], restart.split()[0]) == ("auto", "restart")
    assert "node-8/0#0 left" in printed
    document = json.loads(file.read_text())
    runs = {run["strategy"]: run for run in document["runs"]}
    assert document["model"] == "small"
    assert runs["auto"]["samples"] > runs["restart"]["samples"] > 0
    assert runs["auto"]["spans"][-1][1] == runs["auto"]["until_s"] == 1320.0
    assert main([*flags, "--json=-"]) == 0
    assert json.loads(capsys.readouterr().out) == document
    assert main([*flags, "--decide=measured", "--json=-"]) == 0
    auto = json.loads(capsys.readouterr().out)["runs"][0]
    assert 0.0 < auto["seconds"]["decide"] != runs["auto"]["seconds"]["decide"]


@pytest.mark.parametrize("flags", [["--nodes=4", "--mtbf=2", "--repair=0.2", "--slow-per-hour=1", "--hours=3"], []])
def test_nodes_may_be_made_up_or_follow_a_schedule(
    profile: str, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = flags or [f"--sizes={ROOT / 'benchmarks' / 'traces' / 'tenplex-schedule.json'}", "--hours=2"]
    assert main(["job", f"--profile={profile}", "--batch=24", *given, "--strategies=resize,morph,templates"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4


def test_a_cluster_has_a_line_for_each_policy_and_one_for_each_job(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "runs.json"
    assert main(["cluster", f"--jobs={JOBS}", "--nodes=16x8", "--changes", f"--json={file}"]) == 0
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:3]] == ["policy", "none", "suika"]
    assert len([line for line in printed.splitlines() if line.startswith("job14")]) == 2
    none, suika = json.loads(file.read_text())["runs"]
    assert suika["jct_s"] < none["jct_s"]
    assert len(none["jobs"]) == 15
    file.unlink()
    trace = tmp_path / "nodes.csv"
    trace.write_text("900000,drain,n2\n1800000,add,n2\n")
    flags = ["--interval=2", "--start=9", "--join=8", "--leave=3", "--change=1", "--state=0", f"--trace={trace}"]
    assert (
        main(["cluster", f"--jobs={JOBS}", "--nodes=16x8", "--policies=suika", "--changes", f"--json={file}", *flags])
        == 0
    )
    assert "is to have" in capsys.readouterr().out
    (slower,) = json.loads(file.read_text())["runs"]
    assert suika["jct_s"] < slower["jct_s"] < none["jct_s"]
    assert not any("n2" in one["allocation"] for one in slower["decided"] if 900.0 <= one["at_s"] < 1800.0)
    flags = ["cluster", "--arrivals=30", "--nodes=4x8", "--load=0.5", "--hours=4", "--mtbf=20", "--queue=sjf"]
    assert main(flags) == 0
    assert "30" in capsys.readouterr().out.splitlines()[1].split()


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--nodes=2", f"--trace={TRACE}"], "expected one of --trace, --sizes and --nodes, found --trace and --nodes"),
        ([], "expected one of --trace, --sizes and --nodes, found none of them"),
        (["--nodes=2", "--strategies=fast"], "--strategies=fast: expected some of auto, reroute"),
        (["--nodes=2", "--strategies="], "--strategies=: expected some of auto"),
        (["--nodes=2", "--mtbf=0"], "--mtbf=0: expected a number above 0"),
        (["--nodes=2", "--detect=-1"], "--detect=-1: expected a number of 0 or more"),
        (["--nodes=2", "--decide=soon"], "--decide=soon: expected a number of 0 or more, or `measured`"),
        (["--nodes=2", "--micro-batch=25"], "--micro-batch=25 is more than --batch=24"),
        (["--nodes=2", "--dp=0"], "--dp=0: expected a whole number of 1 or more"),
        (["--nodes=2", "--slow-per-hour=1", "--slow-speed=2:1"], "--slow-speed=2:1: expected MIN:MAX"),
        ([f"--trace={TRACE}", "--mtbf=5"], "--mtbf is for nodes that are made up: give --nodes"),
        (["--trace=nowhere.csv"], "nowhere.csv"),
    ],
)
def test_what_a_job_cannot_be_simulated_with_is_said_in_a_line(
    profile: str, flags: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["job", f"--profile={profile}", "--batch=24", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("elaunch simulate: error: ")
    assert found in line


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (["--nodes=4x8"], "expected one of --jobs and --arrivals"),
        (["--nodes=4", "--arrivals=3"], "--nodes=4: expected NxD, for N nodes of D devices"),
        (["--nodes=4x8", "--arrivals=3", "--policies=best"], "--policies=best: expected some of none"),
        (["--nodes=4x8", "--arrivals=3", "--scaling=2"], "--scaling=2: expected a number from 0.5"),
        (["--nodes=4x8", "--arrivals=3", "--load=0"], "--load=0: expected a number above 0"),
        (["--nodes=4x8", f"--jobs={TRACE}"], "trace_0304.txt:1: column submit_s is missing"),
        (["--nodes=1x8", "--arrivals=3", f"--trace={TRACE}"], "there is no node 'node-0' in this cluster; it has n1"),
        (["--nodes=4x8", "--arrivals=3", "--join=-1"], "--join=-1: expected a number of 0 or more"),
    ],
)
def test_what_a_cluster_cannot_be_simulated_with_is_said_in_a_line(
    flags: list[str], found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cluster", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert found in line


def test_without_matplotlib_a_plot_is_refused_in_a_line(
    profile: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["job", f"--profile={profile}", "--batch=24", "--nodes=2", "--hours=1", "--plot=a.png"]) == 2
    assert "pip install 'elaunch[plots]'" in capsys.readouterr().err
