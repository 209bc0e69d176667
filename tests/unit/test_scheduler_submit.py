"""Jobs as users describe them, what becomes of bad ones, and what `elaunch schedule status` shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elaunch.cli import schedule
from elaunch.errors import RequestRefused, UsageError
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.memory import MemoryStore
from elaunch.scheduler.model import ClusterNode
from elaunch.scheduler.service.documents import (
    AgentDoc,
    AgentStage,
    JobProgress,
    JobSpec,
    JobStage,
    NodeRow,
    PlacementDoc,
    ScheduleDoc,
)
from elaunch.scheduler.service.known import FRESH_S, KnownSpeeds
from elaunch.scheduler.service.reports import JobReport
from elaunch.scheduler.service.show import as_values, describe
from elaunch.scheduler.service.stored import read_all
from elaunch.scheduler.service.submit import cancel, job_spec, read_job, submit

PROFILE = Profile("net", (LayerProfile(0.01, 0.02, 1000, 2000, 100, 100),) * 2, 1, 1e9, 1e-5)
GOOD: dict[str, Any] = {"name": "a", "basic": 2, "command": ["train.py"]}
JOB = """
name = "gpt"
command = ["--checkpoint-dir=/c", "train.py", "--nnodes", "3"]
basic = 2
most = 8
start_s = 60
folder = "run"
[rates]
2 = 20.0
8 = 71
"""


def test_a_job_in_a_file_has_its_values_and_paths_count_from_there(tmp_path: Path) -> None:
    file = tmp_path / "gpt.toml"
    file.write_text(JOB)
    spec = job_spec(read_job(str(file)) | {"priority": 3}, 5.0)
    assert spec == JobSpec(
        "gpt",
        ("--checkpoint-dir=/c", "train.py", "--nnodes", "3"),
        str(tmp_path / "run"),
        2,
        8,
        start_s=60.0,
        priority=3,
        rates=((2, 20.0), (8, 71.0)),
        submitted_t=5.0,
    )


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"name": "a.b"}, "name 'a.b': expected 1 to 60 letters"),
        ({"name": ""}, "a job needs a name"),
        ({"basic": 0}, "a job needs a basic"),
        ({"basic": 3, "most": 2}, "basic 3, most 2: expected 1 <= basic <= most devices"),
        ({"command": []}, "a job needs a command"),
        ({"command": ["--nnodes=2", "train.py"]}, "--nnodes is given by the scheduler"),
        ({"command": ["--rdzv_id", "x", "train.py"]}, "--rdzv-id is given by the scheduler"),
        ({"rates": {"two": 1.0}}, "job a: invalid literal"),
        ({"rates": {"0": 1.0}}, "rates: expected samples per second"),
        ({"pp": 2, "basic": 3}, "basic 3, pp 2, tp 1: expected whole pipelines"),
        ({"global_batch_size": 8}, "global_batch_size and micro_batch_size go together"),
        ({"start_s": float("nan")}, "start and leave must be more than 0 seconds"),
        ({"profile": "/nowhere/profile.json"}, "profile /nowhere/profile.json: No such file"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_it_is_submitted(values: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError, match=told.replace("(", r"\(")):
        job_spec(GOOD | values, 0.0)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name = ", "Invalid value"),
        ("nnodes = 3", "nnodes is nothing that a job has"),
        ("basic = '2'", "basic is '2', expected a value of type int"),
        ("basic = true", "basic is True, expected a value of type int"),
        ("command = [1]", "command is [1], expected a list of strings"),
    ],
)
def test_a_file_that_is_no_job_is_refused(tmp_path: Path, text: str, told: str) -> None:
    file = tmp_path / "job.toml"
    file.write_text(text)
    with pytest.raises(UsageError) as error:
        read_job(str(file))
    assert told in str(error.value)


def test_a_name_is_taken_until_its_job_has_ended() -> None:
    store = MemoryStore()
    spec = job_spec(GOOD, 1.0)
    submit(store, "main", spec)
    with pytest.raises(RequestRefused, match="there is a job 'a' already, which is waiting"):
        submit(store, "main", spec)
    with pytest.raises(RequestRefused, match="there is no job 'b'"):
        cancel(store, "main", ["a", "b"], "ann")
    assert read_all(store, "main").cancelled == {}, "all or none"
    store.put("/elaunch-schedule/main/progress/a", to_json(JobProgress(JobStage.FAILED, attempt=4)))
    with pytest.raises(RequestRefused, match="job 'a' is failed already"):
        cancel(store, "main", ["a"], "ann")
    submit(store, "main", spec)
    stored = read_all(store, "main")
    assert stored.progress_of(stored.jobs[0]).attempt == 5


def test_the_command_line_makes_a_job_of_file_flags_and_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    store = MemoryStore()
    monkeypatch.setattr(schedule, "_open", lambda args: store.session())
    file = tmp_path / "gpt.toml"
    file.write_text(JOB)
    assert schedule.main(["submit", "--most=4", "--user=ann", str(file), "--", "train.py", "--", "x"]) == 0
    (spec,) = read_all(store, "main").jobs
    assert (spec.most, spec.user, spec.command) == (4, "ann", ("train.py", "--", "x"))
    assert schedule.main(["status"]) == 0
    assert "job gpt: waiting, of 2 to 4" in capsys.readouterr().out
    assert schedule.main(["cancel", "gpt"]) == 0
    assert schedule.main(["cancel", "no"]) == 1
    assert schedule.main(["submit", "--name=x", "--basic=1"]) == 2
    assert "a job needs a command" in capsys.readouterr().err


def test_status_says_what_jobs_have_and_why() -> None:
    store = MemoryStore()
    submit(store, "main", job_spec(GOOD | {"most": 4}, 1.0))
    submit(store, "main", job_spec(GOOD | {"name": "b"}, 2.0))
    agents = (AgentDoc(0, "n1", 2, AgentStage.JOINED, 1.0), AgentDoc(1, "n2", 1, AgentStage.QUEUED, 2.0))
    progress = JobProgress(JobStage.RUNNING, agents=agents, step=1240, frozen="does not shrink")
    store.put("/elaunch-schedule/main/progress/a", to_json(progress))
    placements = (
        PlacementDoc("a", 0, (("n1", 2),), action="grow", reason="marginal benefit 0.9"),
        PlacementDoc("b", action="wait", reason="waits for 2 devices"),
    )
    nodes = (NodeRow("n1", 2, "a100", "", True), NodeRow("n2", 2, "", "", False))
    store.put("/elaunch-schedule/main/schedule", to_json(ScheduleDoc("Suika", 3.0, placements, nodes)))
    store.put("/elaunch-schedule/main/leader", b"host-1")
    stored = read_all(store, "main")
    assert describe(stored).splitlines() == [
        "daemon host-1 leads",
        "node n1: 2 devices of kind a100: a 2",
        "node n2: 2 devices, not usable: a 1",
        "job a: running, 1 of 2 agents in on 3 devices (2 on n1, 1 on n2), of 2 to 4, step 1,240",
        "    does not grow: does not shrink; grow: marginal benefit 0.9",
        "job b: waiting, of 2",
        "    wait: waits for 2 devices",
    ]
    values = as_values(stored)
    assert json.loads(json.dumps(values))["jobs"][0]["holds"] == {"n1": 2, "n2": 1}
    assert values["jobs"][1]["why"] == "wait: waits for 2 devices"


def test_a_job_is_as_fast_as_its_rates_its_profile_or_what_it_has_measured_say() -> None:
    sizes = {"global_batch_size": 32, "micro_batch_size": 2, "most": 8}
    rated = job_spec(GOOD | {"rates": {"2": 20.0, "4": 39.0}}, 1.0)
    plain = job_spec(GOOD | {"name": "b"} | sizes, 1.0)
    known, nodes = KnownSpeeds(), [ClusterNode("n1", 8)]
    busy = KnownSpeeds()

    def speeds(text: str, now_t: float) -> dict[str, Any]:
        return known.of([(rated, JobReport()), (plain, JobReport(profile=text))], nodes, now_t)

    moving = Profile(PROFILE.name, PROFILE.layers, 1, 1e9, 1e-5, unstable=("layers[0]",))
    assert set(speeds(moving.to_json(), 0.0)) == {"a"}, "figures that still move tell nothing"
    late = busy.of([(plain, JobReport(profile=moving.to_json(), step=100))], nodes, 0.0)
    assert set(late) == {"b"}, "on a busy machine they always move"
    assert speeds("", 0.0)["a"].rate({"n1": 3}) == 29.5
    first = speeds(PROFILE.to_json(), 1.0)["b"]
    assert first.rate({"n1": 4}) > 1.5 * first.rate({"n1": 2}) > 0
    faster = PROFILE.scaled(0.5).to_json()
    assert speeds(faster, 2.0)["b"] is first, "answers do not waver"
    assert speeds("", 3.0)["b"] is first, "nor are they forgotten"
    later = speeds(faster, 2.0 + FRESH_S)["b"]
    assert later.rate({"n1": 2}) > 1.5 * first.rate({"n1": 2})
    assert known.of([(rated, JobReport())], nodes, 5.0).keys() == {"a"}


@pytest.mark.parametrize("text", ["tau = 3", "preempt = ", "horizon_s = -1"])
def test_settings_that_there_are_not_are_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(UsageError):
        schedule.read_policy("suika", str(file))
