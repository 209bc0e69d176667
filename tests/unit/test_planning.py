"""The command `elaunch plan`."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from elaunch.cli import run as cli
from elaunch.plan import Plan, symmetric
from elaunch.policy.profile import LayerProfile, Profile

LAYER = LayerProfile(0.001, 0.002, 10**6, 12 * 10**6, 10**5, 10**4)
WORKERS = [f"n{number // 2}/{number % 2}#0" for number in range(8)]


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    profile, plan = tmp_path / "profile.json", tmp_path / "now.plan"
    profile.write_text(Profile("twelve", (LAYER,) * 12, 1, 1e9, 1e-5).to_json())
    plan.write_text(f"{symmetric(WORKERS, 12, 64, 2, dp=2, pp=4)}\n")
    return ["plan", f"--profile={profile}", f"--plan={plan}"]


def test_the_candidates_are_a_table(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*flags, "--lose", "n1/0"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("n1/0#0 left: ")
    header, before, best = out.splitlines()[2:5]
    assert header.split()[:3] == ["policy", "step", "s"]
    assert before.split()[0] == "(before)"
    assert best.startswith("*")
    for policy in ("reroute", "resize", "reparallelize"):
        assert any(policy in line.split() for line in out.splitlines()[4:7])
    assert "stay is not possible: n1/0#0 must be replaced" in out
    assert "expand is not possible: nobody is free" in out


def test_the_chosen_plan_is_written_and_all_are_drawn(flags: list[str], tmp_path: Path) -> None:
    file, svg = tmp_path / "next.plan", tmp_path / "plans.svg"
    assert cli.main([*flags, "--lose=n1", "--join=1x2", "--policy=resize", f"--write={file}", f"--svg={svg}"]) == 0
    plan = Plan.parse(file.read_text())
    plan.validate([*WORKERS[:2], *WORKERS[4:], "new0/0#0", "new0/1#0"])
    drawn = ElementTree.fromstring(svg.read_text())
    titles = [text.text or "" for text in drawn.findall("{http://www.w3.org/2000/svg}text")]
    assert titles[0] == "before"
    assert sum(title.endswith(", chosen") for title in titles) == 1
    assert len(drawn.findall("{http://www.w3.org/2000/svg}g")) == len(titles)


def test_the_decision_is_that_of_the_event_log(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*flags, "--slow=n2/1=0.5", "--policy=resize", "--json"]) == 0
    decision = json.loads(capsys.readouterr().out)
    assert decision["policy"] == "resize"
    assert {"policy", "step_s", "transition_s", "peak_bytes", "score", "rejected"} <= set(decision["candidates"][0])
    Plan.parse(decision["plan"]).validate(WORKERS)


def test_memory_degrees_and_the_expected_time_are_the_users(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*flags, "--lose=n1/0", "--memory=0.0001"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("elaunch plan: no plan for 7 members: stay: n1/0#0 must be replaced; ")
    assert "fits into 100,000 bytes of each worker" in err
    assert cli.main([*flags, "--lose=n1/0", "--policy=reparallelize", "--dp=1", "--pp=7:7", "--json"]) == 0
    plan = Plan.parse(json.loads(capsys.readouterr().out)["plan"])
    assert len(plan.tiles) == 7
    assert cli.main([*flags, "--lose=n1/0", "--next=0.001", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["candidates"][0]["score"] == 0


def test_newcomers_become_partners_if_tuples_may_be_wider(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # One micro-batch in a step: neither replicas nor stages make it faster.
    lone = tmp_path / "lone.plan"
    lone.write_text(f"{symmetric(WORKERS[:1], 12, 2, 2)}\nidle {WORKERS[1]}\n")
    widths = []
    for more in ([], ["--tp=2"]):
        assert cli.main([*flags, f"--plan={lone}", *more, "--json"]) == 0
        plan = Plan.parse(json.loads(capsys.readouterr().out)["plan"])
        widths.append({len(tile.workers) for tile in plan.tiles})
    assert widths == [{1}, {2}]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--lose=n7"], "--lose: no worker, slot or node 'n7' in the plan, which has n0/0#0, n0/1#0, "),
        (["--lose=n0,n1,n2,n3"], "--lose=n0,n1,n2,n3: nobody is left"),
        (["--join=many"], "--join=many: expected N, or NxM for N nodes of M workers"),
        (["--slow=n1/0"], "--slow n1/0: expected WORKER=SPEED with a number above 0"),
        (["--slow=n1/0=0"], "--slow n1/0=0: expected WORKER=SPEED with a number above 0"),
        (["--dp=4:2"], "--dp=4:2: expected N or MIN:MAX with 1 <= MIN <= MAX"),
        (["--tp=2,half"], "--tp=half: expected numbers of workers, 1 or more, with commas between them"),
        (["--memory=-1"], "--memory=-1: expected a number of 1e9 bytes above 0"),
        (["--next=0"], "--next=0: expected a number of seconds above 0"),
        (["--profile=/nowhere"], "No such file or directory: '/nowhere'"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    flags: list[str], more: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*flags, *more]) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("elaunch plan: error: ")
    assert message in err
    assert err.count("\n") == 1


def test_files_of_another_model_and_of_no_model_are_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = tmp_path / "other.json"
    other.write_text(Profile("four", (LAYER,) * 4, 1, 1e9, 0.0).to_json())
    assert cli.main([*flags, f"--profile={other}"]) == 2
    assert "the profile four has 4 layers and the plan 12" in capsys.readouterr().err
    other.write_text("{")
    assert cli.main([*flags, f"--profile={other}"]) == 2
    assert f"{other} is not JSON" in capsys.readouterr().err
    other.write_text("plan layers 12 batch 64 micro-batch 2 zero interleaved\nlayers 0:6 samples 0:64/2 workers a\n")
    assert cli.main([*flags, f"--plan={other}"]) == 2
    assert "not a plan: layers 6:12 samples 0:64 are done by nobody" in capsys.readouterr().err
