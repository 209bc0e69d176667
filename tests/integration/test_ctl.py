"""`elaunch ctl` and whole jobs: they are found, shown, and asked to go on by another plan."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from elaunch.plan import Plan, symmetric
from tests.helpers import ROOT, Spawned, Spawner, find_free_port
from tests.jobs.watch import START_S, Node, elaunch, wait_for

SCRIPT = ROOT / "tests" / "jobs" / "plans.py"
TRAIN = ROOT / "tests" / "jobs" / "train.py"
LIMIT_S = 60.0
TWO = ("--standalone", "--nproc-per-node=2")
SLEEP = ("--no-python", "sleep", "600")

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def a_machine_without_other_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))


def ctl(spawn: Spawner, *words: str | Path, code: int = 0) -> list[str]:
    """What the command says; it must exit with `code`."""
    ended: Spawned = spawn.elaunch("ctl", *words, name="ctl")
    assert ended.wait(LIMIT_S) == code, ended.tail()
    return ended.text().splitlines()


def wait_for_members(spawn: Spawner, node: Node, *members: str) -> None:
    """Wait until these, and they alone, hold the state."""

    def there() -> bool:
        shown = ctl(spawn, "status")
        return [line.split()[2:4] for line in shown if line.startswith("rank ")] == [[one, "member"] for one in members]

    wait_for(node, there, START_S, f"the members {members}")


def test_a_plan_that_is_asked_for_reaches_all_members_and_those_that_come_later(spawn: Spawner, tmp_path: Path) -> None:
    end, file = tmp_path / "end", tmp_path / "my.plan"
    node = elaunch(spawn, tmp_path, *TWO, script=(SCRIPT, end))
    wait_for(node, lambda: node.events("generation"), START_S, "the job to start")
    wait_for_members(spawn, node, "node0/0#0", "node0/1#0")
    first = ctl(spawn, "status")
    assert re.fullmatch(r"job \S+ at 127\.0\.0\.1:\d+: trains", first[0])
    assert [one for one in first if one.startswith(("gen", "nodes"))] == [
        "generation 2, attempt 0: start",
        "nodes: node0",
    ]
    assert ctl(spawn, "plan")[0].startswith("no plan was asked for in job ")

    plan = symmetric(["first", "second"], 4, 8, 2, dp=1, pp=2)
    file.write_text(str(symmetric(["a", "b", "c"], 3, 6, 2, dp=1, pp=3)))
    assert (
        "the plan is for 3 workers (a, b, c) and the job has 2 (node0/0#0, node0/1#0); give one for 2"
        in (ctl(spawn, "plan", "--set", file, code=1)[0])
    )
    file.write_text(str(plan))
    (line,) = ctl(spawn, "plan", "--set", file)
    assert re.fullmatch(r"generation 3: all 2 members have changed over, [\d.]+ s after the plan was asked for", line)
    here = plan.renamed({"first": "node0/0#0", "second": "node0/1#0"})
    assert Plan.parse("\n".join(ctl(spawn, "plan"))) == here
    assert "plan: asked for; all have changed over" in ctl(spawn, "status")
    for worker in here.workers:
        assert f"{worker} goes by {str(here)!r}" in node.agent.text()
    asked = node.events("generation")[-1]
    assert (asked["generation"], asked["workers"], asked["stage"]) == (3, list(here.workers), "train")
    assert asked["cause"] == "a new plan was asked for"

    os.kill(node.pids()["node0/1#0"], signal.SIGKILL)
    wait_for_members(spawn, node, "node0/0#0", "node0/1#1")
    assert Plan.parse("\n".join(ctl(spawn, "plan"))) == here
    end.touch()
    assert node.agent.wait(LIMIT_S) == 0, node.agent.tail()
    said = re.findall(r"^(\S+) goes by", node.agent.text(), re.MULTILINE)
    assert sorted(said) == ["node0/0#0", "node0/1#0", "node0/1#1"], "each acts once on one request"
    assert "no job of this user with an etcd of its own runs on this machine" in ctl(spawn, "status", code=2)[0]


def test_jobs_with_an_etcd_of_their_own_are_found_until_they_end(spawn: Spawner, tmp_path: Path) -> None:
    file = tmp_path / "my.plan"
    file.write_text(str(symmetric(["w0"], 1, 2, 1, dp=1, pp=1)))
    alone = elaunch(spawn, tmp_path, "--standalone", "--rdzv-id=run-16", script=SLEEP, name="alone")
    wait_for(alone, alone.all_pids, START_S, "the job to start")
    assert ctl(spawn, "status")[0].startswith("job run-16 at ")
    assert ctl(spawn, "status")[0].endswith(": runs, but no worker has called elaunch.init() or elaunch.hybrid()")
    assert "a plain script takes no plan" in ctl(spawn, "plan", "--set", file, code=1)[0]

    endpoint = f"127.0.0.1:{find_free_port()}"
    first = elaunch(
        spawn, tmp_path, "--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}", "--rdzv-id=run-17", script=SLEEP
    )
    wait_for(first, first.all_pids, START_S, "the other job to start")
    line, hint = ctl(spawn, "status", code=2)
    assert hint == "  `elaunch ctl --help` shows what can be given, with examples"
    assert "2 jobs run here: " in line
    assert f"run-17 at {endpoint} (pid {first.agent.pid})" in line
    assert line.endswith("give --rdzv-id of one of them")
    assert ctl(spawn, "status", "--rdzv-id=run-17")[0].startswith(f"job run-17 at {endpoint}: ")

    alone.agent.signal(signal.SIGKILL)
    alone.agent.wait(LIMIT_S)
    assert ctl(spawn, "status")[0].startswith("job run-17 ")
    first.agent.signal(signal.SIGINT)
    assert first.agent.wait(LIMIT_S) == 1, first.agent.tail()
    ctl(spawn, "status", code=2)


def test_status_follows_the_training(spawn: Spawner, tmp_path: Path) -> None:
    script = (TRAIN, "--steps", "100000", "--sleep", "0.01", "--die", "1:20:reduce")
    # A worker found slow on busy cores would have a change of its own.
    flags = ("--standalone", "--nproc-per-node=3", "--slow-policy=report")
    node = elaunch(spawn, tmp_path, *flags, script=script)

    def training() -> dict[str, Any]:
        return json.loads("\n".join(ctl(spawn, "status", "--json")))["training"] or {"generation": 0, "step": -1}

    wait_for(node, lambda: len(node.events("transition")) >= 3, START_S, "the replacement to join")
    wait_for(node, lambda: training()["generation"] >= 4, START_S, "the status to follow the job")
    shown = training()
    recovery = next(event for event in node.events("transition") if event["interrupted"])
    assert recovery["cause"] == shown["recovery"]["cause"] == "worker node0/1#0 was killed by SIGKILL"
    assert (shown["recovery"]["seconds"], shown["members"]) == (recovery["total_s"], 3)
    assert [event["interrupted"] for event in node.events("transition")[-2:]] == [True, False], "then one joins"
    losses = {event["step"]: event["loss"] for event in node.events("step")}
    assert shown["loss"] == losses[shown["step"]]
    assert shown["steps_per_s"] > 0
    lines = ctl(spawn, "status")
    assert re.fullmatch(r"step [\d,]+ committed .* s ago, .* steps/s, loss .*", lines[1])
    assert re.fullmatch(r"last recovery .* s ago, in .* s: worker node0/1#0 was killed by SIGKILL", lines[2])
    wait_for(node, lambda: training()["step"] > shown["step"], START_S, "the status to follow the steps")

    other, _ = ctl(spawn, "status", "--rdzv-id=other", code=2)
    assert "no job 'other' of this user with an etcd of its own runs on this machine, but " in other
    _, job, _, endpoint, _ = lines[0].split()
    endpoint = endpoint.rstrip(":")
    (other,) = ctl(spawn, "status", f"--rdzv-endpoint={endpoint}", "--rdzv-id=other", code=1)
    assert other.endswith(f"there is no job 'other' at {endpoint}; the jobs there are {job}: give --rdzv-id")
    node.agent.signal(signal.SIGINT)
    assert node.agent.wait(LIMIT_S) == 1, node.agent.tail()
