"""`elaunch ctl`: which job is meant, what may be asked of it, and what the user is told."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent.local_jobs import LocalJob
from elaunch.cli import ctl
from elaunch.cli import run as cli
from elaunch.cli.ctl import find_job, read_plan
from elaunch.cli.request_plan import RequestState, able, change_plan, fitted, standing
from elaunch.cli.status import ago_text, as_values, describe
from elaunch.errors import LaunchError, RequestRefused, UsageError
from elaunch.plan import Plan, symmetric
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import (
    Cut,
    Generation,
    GenerationStage,
    JobConfig,
    NodeDoc,
    NodeWorker,
    PlanRequest,
    RequestedPlan,
    Result,
    Stalled,
    Worker,
    WorkerState,
)
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.observer import Documents, find_jobs
from elaunch.rendezvous.status import LastRecovery, TrainingStatus
from elaunch.rendezvous.store import WatchEvent
from tests.unit.documents import changed_report

STARTING, READY, MEMBER, DONE = WorkerState
GENERATION = Generation(
    5,
    GenerationStage.TRAIN,
    (Worker("a/0#0", "a", 0, "a:1"), Worker("b/0#3", "b", 0, "b:1")),
    cause="b/0#3 joins",
)
NOW_T = 1000.0
PHASES = {"detect": 0.0163, "connect": 0.0, "agree": 0.1286, "plan": 0.0001, "transfer": 0.0036, "resume": 0.8142}
STATUS = TrainingStatus(
    generation=5,
    step=1240,
    t=999.5,
    members=2,
    steps_per_s=3.412,
    loss=2.896144,
    recovery=LastRecovery("worker a/0#0 was killed by SIGKILL", 800.0, 0.9628, tuple(PHASES.items())),
)
REQUEST = PlanRequest("r1", 5, "plan layers 4", 1.0)
TWO = symmetric(["w0", "w1"], 4, 8, 2, dp=1, pp=2)


def node(name: str, incarnation: int, state: WorkerState = MEMBER, **fields: Any) -> NodeDoc:
    worker = NodeWorker(f"{name}/0#{incarnation}", 0, state, f"{name}:1")
    return changed_report(NodeDoc(name, name, 1, (worker,)), **{"elastic": True, "takes_plans": True, **fields})


A, B = node("a", 0), node("b", 3)
TRAINING = Documents((A, B), GENERATION)


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "ELAUNCH_ETCD_")):
            monkeypatch.delenv(name)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets jobs run on this machine: pairs of id and port."""

    def run(*pairs: tuple[str, int]) -> None:
        found = [LocalJob(job, f"127.0.0.1:{port}", port) for job, port in pairs]
        monkeypatch.setattr("elaunch.agent.local_jobs.running", lambda: found)

    return run


class TestTheCommandLine:
    @pytest.mark.parametrize(
        ("arguments", "complaint"),
        [
            ((), "the following arguments are required: COMMAND"),
            (("stop",), "invalid choice: 'stop'"),
            (("plan", "--timeout=soon"), "--timeout: expected a number of seconds, found 'soon'"),
            (("plan", "--timeout=0"), "--timeout: expected a number of seconds, found '0'"),
            (("status", "--set=x"), "unrecognized arguments: --set=x"),
        ],
    )
    def test_one_that_cannot_be_read_exits_with_2(
        self, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            cli.main(["ctl", *arguments])
        assert ended.value.code == 2
        assert complaint in capsys.readouterr().err

    def test_values_that_cannot_be_used_exit_with_2_too(self, capsys: pytest.CaptureFixture[str]) -> None:
        for flag in ("--rdzv-endpoint=:x", "--rdzv-conf=user=me"):
            assert cli.main(["ctl", "status", flag]) == 2
        hint = "  `elaunch ctl --help` shows what can be given, with examples\n"
        assert capsys.readouterr().err == (
            f"elaunch ctl: error: --rdzv-endpoint=:x: expected HOST:PORT\n{hint}"
            f"elaunch ctl: error: --rdzv-conf: user and password go together\n{hint}"
        )

    def test_flags_take_their_defaults_from_the_variables_of_the_agents(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PET_RDZV_ENDPOINT", "etcd:2379")
        monkeypatch.setenv("PET_RDZV_ID", "run-17")
        monkeypatch.setenv("PET_RDZV_CONF", "connect_timeout=3")
        args = ctl.parser().parse_args(["plan", "--rdzv_id=run-18"])
        assert (args.rdzv_endpoint, args.rdzv_id, args.rdzv_conf) == ("etcd:2379", "run-18", "connect_timeout=3")
        assert (args.file, args.timeout) == (None, 120.0)

    def test_a_script_named_ctl_is_run_where_it_is_named_otherwise(self) -> None:
        assert cli.parse(["./ctl", "status"]).program.script == "./ctl"
        assert cli.parse(["--standalone", "ctl", "status"]).program.script == "ctl"


class TestWhichJob:
    def test_the_one_that_is_named(self, local: Callable[..., None]) -> None:
        local(("x", 1))
        assert find_job("etcd:2379", "run-17") == ("etcd:2379", "run-17")
        assert find_job("e1:2379,e2:2379", "") == ("e1:2379,e2:2379", "none")

    def test_else_the_only_one_here(self, local: Callable[..., None]) -> None:
        local(("x", 1))
        assert find_job("", "") == ("127.0.0.1:1", "x")

    def test_or_the_only_one_of_that_id(self, local: Callable[..., None]) -> None:
        local(("x", 1), ("y", 2))
        assert find_job("", "y") == ("127.0.0.1:2", "y")

    def test_none_is_an_error_that_says_what_to_give(self, local: Callable[..., None]) -> None:
        local()
        with pytest.raises(
            UsageError, match=r"^no job of this user .* give --rdzv-endpoint=HOST:PORT and --rdzv-id=ID"
        ):
            find_job("", "")
        local(("x", 1))
        with pytest.raises(
            UsageError, match=r"^no job 'y' of this user .* machine, but x at 127\.0\.0\.1:1 \(pid 1\); give"
        ):
            find_job("", "y")

    def test_several_are_listed(self, local: Callable[..., None]) -> None:
        local(("x", 1), ("y", 2))
        with pytest.raises(UsageError) as caught:
            find_job("", "")
        assert str(caught.value) == (
            "2 jobs run here: x at 127.0.0.1:1 (pid 1), y at 127.0.0.1:2 (pid 2); give --rdzv-id of one of them"
        )
        local(("x", 1), ("x", 2))
        with pytest.raises(UsageError, match="give --rdzv-endpoint and --rdzv-id of one of them"):
            find_job("", "x")


class TestTheCommands:
    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
        """What stands at every endpoint; who connects must have the password."""
        store = MemoryStore()

        def connect(endpoint: str, **settings: object) -> MemoryStore:
            assert settings == {
                "timeout_s": 3.0,
                "user": "me",
                "password": "secret",
                "ca_cert": None,
                "cert": None,
                "key": None,
            }
            return store.session()

        monkeypatch.setattr("elaunch.rendezvous.etcd.EtcdStore", connect)
        monkeypatch.setenv("PET_RDZV_ENDPOINT", "etcd:2379")
        monkeypatch.setenv("PET_RDZV_ID", "x")
        monkeypatch.setenv("PET_RDZV_CONF", "connect_timeout=3")
        monkeypatch.setenv("ELAUNCH_ETCD_USER", "me")
        monkeypatch.setenv("ELAUNCH_ETCD_PASSWORD", "secret")
        return store

    def test_they_reach_etcd_with_the_settings_of_the_agents(
        self, store: MemoryStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Leader(store, lambda leader, request: None)
        assert cli.main(["ctl", "status"]) == 0
        assert capsys.readouterr().out.startswith("job x at etcd:2379: trains\ngeneration 5, attempt 0: b/0#3 joins\n")

    def test_a_line_names_what_is_no_document_of_the_job(
        self, store: MemoryStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        Leader(store, lambda leader, request: None)
        store.put("/elaunch/x/nodes/ghost", b"[" * 100_000)
        store.put("/elaunch/x/size", b"\xff")
        assert cli.main(["ctl", "status"]) == 0
        ghost, size = capsys.readouterr().out.splitlines()[-2:]
        assert ghost.startswith("/elaunch/x/nodes/ghost is no document of this job, it is ignored: expected a NodeDoc")
        assert size.startswith("/elaunch/x/size is no document of this job, nothing changes until it is mended: ")

    @pytest.mark.parametrize("command", ["status", "plan", "profile"])
    def test_a_job_that_is_not_there_is_an_error_with_those_that_are(
        self, command: str, store: MemoryStore, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["ctl", command]) == 1
        assert capsys.readouterr().err == (
            "elaunch ctl: error: there is no job 'x' at etcd:2379, nor any other: check --rdzv-endpoint\n"
        )
        for key in ("run", "run-17", "my%2Fjob", "run.1"):
            for name in ("config", "nodes/a"):
                store.put(f"/elaunch/{key}/{name}", b"")
        store.put("/elaunch/run-1", b"a stranger's")
        assert cli.main(["ctl", command]) == 1
        assert capsys.readouterr().err == (
            "elaunch ctl: error: there is no job 'x' at etcd:2379; the jobs there are my/job, run, run-17, run.1: "
            "give --rdzv-id\n"
        )

    def test_what_strangers_have_left_is_no_job(self, store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
        store.put("/elaunch/x/notes", b"")
        assert cli.main(["ctl", "status"]) == 1
        assert "there is no job 'x' at etcd:2379, nor any other: " in capsys.readouterr().err

    def test_who_may_not_look_at_other_jobs_is_told_no_more(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def next_key(self: MemoryStore, prefix: str, start: str) -> str | None:
            if prefix == "/elaunch/":
                raise LaunchError("permission denied")
            return None

        monkeypatch.setattr(MemoryStore, "next_key", next_key)
        assert cli.main(["ctl", "status"]) == 1
        assert capsys.readouterr().err == (
            "elaunch ctl: error: there is no job 'x' at etcd:2379: check --rdzv-endpoint and --rdzv-id\n"
        )

    def test_of_very_many_jobs_some_are_named(self, store: MemoryStore) -> None:
        for number in range(60):
            store.put(f"/elaunch/job{number:02}/config", b"")
        assert find_jobs(store, 50) == [f"job{number:02}" for number in range(50)]

    def test_status_is_also_for_programs(self, store: MemoryStore, capsys: pytest.CaptureFixture[str]) -> None:
        Leader(store, lambda leader, request: None).put("status", STATUS)
        assert cli.main(["ctl", "status", "--json"]) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["job"], shown["state"], shown["training"]["step"]) == ("x", "training", 1240)

    def test_a_plan_is_set_and_then_shown(
        self, store: MemoryStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def answer(leader: Leader, request: PlanRequest) -> None:
            leader.carry(request)
            leader.settle(request)

        Leader(store, answer)
        assert cli.main(["ctl", "plan"]) == 0
        shown = capsys.readouterr()
        assert (shown.out, shown.err) == ("", "no plan was asked for in job x at etcd:2379\n")
        file = tmp_path / "my.plan"
        file.write_text(str(TWO))
        assert cli.main(["ctl", "plan", "--set", str(file)]) == 0
        assert capsys.readouterr().out.startswith("generation 9: all 2 members have changed over, ")
        assert cli.main(["ctl", "plan"]) == 0
        assert Plan.parse(capsys.readouterr().out) == fitted(TWO, GENERATION.ids)


class TestHowFarTheTrainingIs:
    def test_step_rate_loss_and_the_last_recovery(self) -> None:
        lines = describe(replace(TRAINING, status=STATUS), NOW_T).splitlines()
        assert lines[:4] == [
            "trains",
            "step 1,240 committed 0.5 s ago, 3.41 steps/s, loss 2.89614",
            "last recovery 3 min ago, in 0.963 s: worker a/0#0 was killed by SIGKILL",
            "generation 5, attempt 0: b/0#3 joins",
        ]

    def test_what_is_not_known_is_left_out(self) -> None:
        status = TrainingStatus(generation=5, step=0, t=NOW_T + 3.0)
        assert describe(replace(TRAINING, status=status), NOW_T).splitlines()[1:3] == [
            "step 0 committed 0.0 s ago",
            "generation 5, attempt 0: b/0#3 joins",
        ]

    def test_a_loss_that_is_no_number_is_told(self) -> None:
        status = replace(STATUS, loss=None, has_diverged=True)
        assert "steps/s, loss is not a finite number\n" in describe(replace(TRAINING, status=status), NOW_T)

    @pytest.mark.parametrize(
        ("seconds", "text"),
        [
            (-1.0, "0.0 s"),
            (9.94, "9.9 s"),
            (9.96, "10 s"),
            (119.0, "119 s"),
            (150.0, "2 min"),
            (7300.0, "2 h 2 min"),
            (200_000.0, "2 days 7 h"),
        ],
    )
    def test_how_long_ago_it_was(self, seconds: float, text: str) -> None:
        assert ago_text(seconds) == text

    def test_programs_get_the_same_as_values(self) -> None:
        profile = json.dumps({"workers": {"a/0": {"speed": 0.5}}})
        documents = replace(TRAINING, status=STATUS, profile=profile)
        values = as_values(documents, "x", "etcd:2379", NOW_T)
        assert json.loads(json.dumps(values, allow_nan=False)) == {
            "job": "x",
            "endpoint": "etcd:2379",
            "state": "training",
            "message": None,
            "generation": 5,
            "attempt": 0,
            "cause": "b/0#3 joins",
            "training": {
                "generation": 5,
                "step": 1240,
                "t": 999.5,
                "ago_s": 0.5,
                "members": 2,
                "steps_per_s": 3.412,
                "loss": 2.896144,
                "has_diverged": False,
                "recovery": {
                    "cause": "worker a/0#0 was killed by SIGKILL",
                    "t": 800.0,
                    "seconds": 0.9628,
                    "phases": PHASES,
                },
                "copy_lag": None,
            },
            "slow": {"a/0": 2.0},
            "nodes": [{"node": "a", "host": "a", "remark": ""}, {"node": "b", "host": "b", "remark": ""}],
            "workers": [
                {"rank": 0, "worker": "a/0#0", "state": "member", "address": "a:1", "times_as_long": 2.0},
                {"rank": 1, "worker": "b/0#3", "state": "member", "address": "b:1", "times_as_long": 1.0},
            ],
            "spares": {"wanted": 0, "nodes": [], "ready": []},
            "unreadable": [],
        }

    def test_a_job_that_has_ended_has_no_figures(self) -> None:
        documents = Documents((), None, Result(False, "it died"), status=STATUS)
        values = as_values(documents, "x", "etcd:2379", NOW_T)
        assert (values["state"], values["message"], values["training"]) == ("failed", "it died", None)


class TestStatus:
    def test_slow_workers_are_marked(self) -> None:
        profile = json.dumps({"workers": {"a/0": {"speed": 0.5}, "b/0": {"speed": 1.4}, "b/1": {"memory_bytes": 7}}})
        lines = describe(Documents((A, B), GENERATION, profile=profile), NOW_T).splitlines()
        assert [line for line in lines if "slow" in line] == [
            "slow: a/0 (2.00 times as long as others)",
            next(line for line in lines if " a/0#" in line),
        ]
        assert lines[-len(GENERATION.workers)].endswith("  slow: 2.00 times as long as others")
        for damaged in ("", "{", "[]", '{"workers": 3}', '{"workers": {"a/0": {"speed": "x"}}}'):
            assert "slow" not in describe(Documents((A, B), GENERATION, profile=damaged), NOW_T)

    def test_a_training_job_has_a_line_for_each_worker(self) -> None:
        spare = node("c", 0, STARTING)
        assert describe(Documents((A, changed_report(B, draining=True), spare), GENERATION), NOW_T).splitlines() == [
            "trains",
            "generation 5, attempt 0: b/0#3 joins",
            "nodes: a, b (leaves), c (waits)",
            "rank 0   a/0#0  member    a:1",
            "rank 1   b/0#3  member    b:1",
            "no rank  c/0#0  starting  c:1",
        ]

    def test_spares_are_told_from_nodes_that_wait(self) -> None:
        config = JobConfig(2, 2, None, spares=2)
        docs = A, B, node("c", 0, READY), node("d", 0, STARTING), node("e", 0)
        found = Documents(docs, GENERATION, config=config, spares=("c", "d"))
        lines = describe(found, NOW_T).splitlines()
        assert lines[2:4] == ["spares: 1 of 2 ready", "nodes: a, b, c (spare, ready), d (spare, starts), e (waits)"]
        values = as_values(found, "x", "h:1", NOW_T)
        assert values["spares"] == {"wanted": 2, "nodes": ["c", "d"], "ready": ["c"]}
        assert [one["remark"] for one in values["nodes"]] == ["", "", "spare, ready", "spare, starts", "waits"]

    def test_spares_that_hold_the_state_are_told_from_those_that_get_it(self) -> None:
        config, workers = JobConfig(2, 2, None, spares=2), (*GENERATION.workers, Worker("c/0#0", "c", 0))
        generation = replace(GENERATION, workers=workers, standby=("c/0#0",))
        for state, remark, ready in ((READY, "spare, gets the state", []), (MEMBER, "spare, holds the state", ["c"])):
            found = Documents((A, B, node("c", 0, state)), generation, config=config, spares=("c",))
            assert f"spares: {len(ready)} of 2 ready" in describe(found, NOW_T)
            values = as_values(found, "x", "h:1", NOW_T)
            assert values["spares"] == {"wanted": 2, "nodes": ["c"], "ready": ready}
            assert [one["remark"] for one in values["nodes"]] == ["", "", remark]

    def test_copies_that_are_behind_are_told(self) -> None:
        told = [describe(replace(TRAINING, status=replace(STATUS, copy_lag=lag)), NOW_T) for lag in (None, 0, 1, 12)]
        found = [re.findall("copies of the state: (.*)", one) for one in told]
        assert found == [[], [], ["1 step behind"], ["12 steps behind"]]

    def test_who_does_not_reach_whom_is_told(self) -> None:
        cut = changed_report(A, cut=(Cut("b", "host-b"), Cut("c", "host-c")))
        assert "nodes: a (does not reach b, c), b" in describe(Documents((cut, B), GENERATION), NOW_T)

    def test_a_node_whose_workers_all_wait(self) -> None:
        waits = changed_report(A, stalled=(Stalled("a/0#0", 7, "in step 7", 4, 12, ("b/0#0",)),))
        assert "nodes: a (all its workers wait for others), b" in describe(Documents((waits, B), GENERATION), NOW_T)

    def test_a_plan_that_was_asked_for_is_mentioned(self) -> None:
        carrying = replace(GENERATION, requested_plan=RequestedPlan("plan layers 4", "r1"))
        settled = changed_report(A, plan_request="r1")
        assert "plan: asked for; still to change over: b" in describe(Documents((settled, B), carrying), NOW_T)
        both = Documents((settled, changed_report(B, plan_request="r1")), carrying)
        assert "plan: asked for; all have changed over" in describe(both, NOW_T)

    def test_a_member_that_no_node_reports_is_not_here(self) -> None:
        assert "rank 1  b/0#3  not here  b:1" in describe(Documents((A,), GENERATION), NOW_T)

    def test_before_training_the_workers_of_the_slots_are_shown(self) -> None:
        start = Generation(1, GenerationStage.START, (Worker("a/0", "a", 0), Worker("b/0", "b", 0)), cause="start")
        docs = node("a", 0, STARTING, elastic=False), NodeDoc("b", "b", 1)
        assert describe(Documents(docs, start), NOW_T).splitlines() == [
            "runs, but no worker has called elaunch.init() or elaunch.hybrid()",
            "generation 1, attempt 0: start",
            "nodes: a, b",
            "rank 0  a/0#0  starting",
            "rank 1  b/0    not here",
        ]
        assert describe(Documents((node("a", 0, READY),), start), NOW_T).startswith("its workers start\n")

    @pytest.mark.parametrize(
        ("documents", "first"),
        [
            (Documents((A,), replace(GENERATION, hold=True)), "waits for nodes"),
            (Documents((A,), Generation(6, GenerationStage.ASSEMBLE, attempt=1)), "its nodes meet again"),
            (Documents((A,)), "its nodes meet"),
            (Documents((), GENERATION), "none of its nodes is here"),
            (Documents((A,), None, Result(True, "all have finished")), "ended well: all have finished"),
            (Documents((), None, Result(False, "it died")), "ended with a failure: it died"),
        ],
    )
    def test_other_states_have_words_of_their_own(self, documents: Documents, first: str) -> None:
        assert describe(documents, NOW_T).splitlines()[0] == first


class TestThePlan:
    def test_a_valid_one_is_read(self, tmp_path: Path) -> None:
        file = tmp_path / "my.plan"
        file.write_text(f"{TWO}\n")
        assert read_plan(str(file)) == TWO

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            (b"", r"line 1 of the plan: expected 'plan layers L .*'; mend the file and ask again"),
            (b"\xff", "expected the text of a plan, found bytes that are no UTF-8"),
            (
                b"plan layers 2 batch 4 micro-batch 2 zero interleaved\nlayers 0:1 samples 0:4/2 workers a",
                "not a plan: layers 1:2 samples 0:4 are done by nobody; mend the file and ask again",
            ),
        ],
    )
    def test_another_is_refused_in_one_line(self, text: bytes, complaint: str, tmp_path: Path) -> None:
        file = tmp_path / "my.plan"
        file.write_bytes(text)
        with pytest.raises(RequestRefused, match=f"^--set .*my.plan: {complaint}") as caught:
            read_plan(str(file))
        assert "\n" not in str(caught.value)

    def test_a_file_that_is_not_there_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["ctl", "plan", "--set=none.plan"]) == 1
        assert capsys.readouterr().err == "elaunch ctl: error: --set none.plan: No such file or directory\n"

    def test_any_names_are_those_of_the_members_by_rank(self) -> None:
        assert fitted(TWO, ("a/0#0", "b/0#3")).workers == ("a/0#0", "b/0#3")

    def test_names_of_members_keep_their_place_and_the_others_fill_the_rest(self) -> None:
        plan = symmetric(["b/0#3", "a/0#0"], 4, 8, 2, dp=1, pp=2)
        assert fitted(plan, ("a/0#0", "b/0#3")) == plan
        # One that was replaced since the plan was written.
        assert fitted(plan, ("b/0#3", "a/0#1")).workers == ("b/0#3", "a/0#1")

    def test_one_for_another_number_of_workers_is_refused_with_the_names(self) -> None:
        with pytest.raises(RequestRefused) as caught:
            fitted(TWO, ("a/0#0",))
        assert str(caught.value) == (
            "the plan is for 2 workers (w0, w1) and the job has 1 (a/0#0); give one for 1; its line 'idle ...' names "
            "those without a tile"
        )

    def test_long_lists_are_cut(self) -> None:
        with pytest.raises(RequestRefused, match=r"\(w0, .*, w7 and 8 more\) and the job has 1 "):
            fitted(symmetric([f"w{number}" for number in range(16)], 4, 32, 2, dp=4, pp=4), ("a/0#0",))


class TestWhetherTheJobCan:
    def test_a_training_one_can(self) -> None:
        assert able("x", TRAINING) is GENERATION

    @pytest.mark.parametrize(
        ("documents", "why"),
        [
            (Documents((A,), None, Result(True, "all have finished")), "job 'x' has ended: all have finished"),
            (Documents(), "no node of job 'x' is here: check --rdzv-endpoint and --rdzv-id"),
            (Documents((A,)), "job 'x' has not begun to train"),
            (Documents((A,), Generation(6, GenerationStage.ASSEMBLE, attempt=1)), "job 'x' has not begun to train"),
            (Documents((node("a", 0, READY),), Generation(1, GenerationStage.START)), "job 'x' has not begun to train"),
            (
                Documents((changed_report(A, takes_plans=False), changed_report(B, takes_plans=False)), GENERATION),
                "job 'x' takes no plan: its workers call elaunch.init(), not elaunch.hybrid()",
            ),
            (
                Documents((node("a", 0, STARTING, elastic=False),), Generation(1, GenerationStage.START)),
                "no worker of job 'x' has called elaunch.hybrid(): a plain script takes no plan",
            ),
            (Documents((A, B), replace(GENERATION, hold=True)), "job 'x' waits for nodes"),
            (Documents((A, node("b", 3, DONE)), GENERATION), "job 'x' has done its last step"),
            (Documents((A, node("b", 3, READY)), GENERATION), "b/0#3 of job 'x' do not hold the state yet"),
            (Documents((A,), GENERATION), "b/0#3 of job 'x' do not hold the state yet"),
        ],
    )
    def test_others_are_refused_with_the_reason(self, documents: Documents, why: str) -> None:
        with pytest.raises(RequestRefused) as caught:
            able("x", documents)
        assert str(caught.value).startswith(why)


class TestHowFarItIs:
    def test_open_until_the_generation_changes(self) -> None:
        assert standing(TRAINING, REQUEST) is RequestState.OPEN
        assert standing(Documents((A, B), replace(GENERATION, number=6)), REQUEST) is RequestState.VOID
        assert standing(Documents((A, B)), REQUEST) is RequestState.VOID

    def test_settled_when_every_node_with_a_member_says_so(self) -> None:
        carrying = replace(GENERATION, number=7, requested_plan=RequestedPlan(request="r1"))
        said = changed_report(A, plan_request="r1")
        assert standing(Documents((said, B), carrying), REQUEST) is RequestState.CARRIED
        assert standing(Documents((said,), carrying), REQUEST) is RequestState.CARRIED
        spare = node("c", 0, STARTING)
        assert (
            standing(Documents((said, changed_report(B, plan_request="r1"), spare), carrying), REQUEST)
            is RequestState.SETTLED
        )

    def test_not_where_nobody_is_left(self) -> None:
        assert (
            standing(
                Documents((A,), replace(GENERATION, workers=(), requested_plan=RequestedPlan(request="r1"))), REQUEST
            )
            is RequestState.CARRIED
        )


class Leader:
    """Answers what is put into a store, as a job's leader and agents would."""

    def __init__(self, store: MemoryStore, answer: Callable[[Leader, PlanRequest], None]) -> None:
        self.store, self.answer = store, answer
        self.requests: list[PlanRequest] = []
        self.put("config", JobConfig(1, 2, None))
        self.put("generation", GENERATION)
        self.put("nodes/a", A)
        self.put("nodes/b", B)
        store.watch("/elaunch/x/requests/", 1, self.heard, lambda error: None)

    def put(self, name: str, document: Any) -> None:
        self.store.put(f"/elaunch/x/{name}", to_json(document))

    def heard(self, events: list[WatchEvent]) -> None:
        for event in events:
            if event.value is not None:
                self.requests.append(from_json(PlanRequest, event.value))
                self.answer(self, self.requests[-1])

    def carry(self, request: PlanRequest, **fields: Any) -> None:
        carried = RequestedPlan(request.plan, request.id)
        self.put("generation", replace(GENERATION, number=9, requested_plan=carried, **fields))

    def settle(self, request: PlanRequest) -> None:
        for doc in (A, B):
            self.put(f"nodes/{doc.node}", changed_report(doc, plan_request=request.id))


class TestAsking:
    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    def ask(self, store: MemoryStore, timeout_s: float = 20.0, plan: Plan = TWO) -> str:
        try:
            return change_plan(store.session(), "x", plan, timeout_s)
        finally:
            assert store.get("/elaunch/x/requests/plan") is None, "no request outlives the one who asked"

    def test_the_request_names_the_members_and_their_generation_and_is_answered(self, store: MemoryStore) -> None:
        def answer(leader: Leader, request: PlanRequest) -> None:
            leader.carry(request)
            leader.settle(request)

        leader = Leader(store, answer)
        line = self.ask(store)
        assert line.startswith("generation 9: all 2 members have changed over, ")
        assert line.endswith(" s after the plan was asked for")
        (request,) = leader.requests
        assert (request.generation, Plan.parse(request.plan).workers) == (5, ("a/0#0", "b/0#3"))

    def test_it_is_asked_anew_for_members_that_came_instead(self, store: MemoryStore) -> None:
        others = replace(GENERATION, number=6, workers=(GENERATION.workers[0], Worker("b/0#4", "b", 0)))

        def answer(leader: Leader, request: PlanRequest) -> None:
            if request.generation == 5:
                leader.put("nodes/b", node("b", 4))
                leader.put("generation", others)
            else:
                leader.carry(request, workers=others.workers)
                leader.settle(request)

        leader = Leader(store, answer)
        self.ask(store)
        first, second = leader.requests
        assert (first.id, first.t, second.generation) == (second.id, second.t, 6)
        assert Plan.parse(second.plan).workers == ("a/0#0", "b/0#4")

    def test_and_refused_where_they_have_become_fewer(self, store: MemoryStore) -> None:
        fewer = replace(GENERATION, number=6, workers=GENERATION.workers[:1])
        Leader(store, lambda leader, request: leader.put("generation", fewer))
        with pytest.raises(RequestRefused, match="the plan is for 2 workers"):
            self.ask(store)

    def test_a_request_that_nobody_takes_up_is_withdrawn(self, store: MemoryStore) -> None:
        Leader(store, lambda leader, request: None)
        with pytest.raises(RequestRefused) as caught:
            self.ask(store, timeout_s=0.05)
        assert str(caught.value) == "no agent of job 'x' has taken up the request within 0.05 s; it is withdrawn"

    def test_members_that_have_not_settled_in_time_are_named(self, store: MemoryStore) -> None:
        Leader(store, lambda leader, request: leader.carry(request))
        with pytest.raises(
            RequestRefused, match="generation 9 of job 'x' carries the plan, but the members on a, b have not"
        ):
            self.ask(store, timeout_s=0.05)

    @pytest.mark.parametrize(
        ("after", "why"),
        [
            (
                {"requested_plan": RequestedPlan(request="r9")},
                "another plan was asked for before the members of job 'x' had gone over",
            ),
            (
                {"attempt": 1, "stage": GenerationStage.ASSEMBLE},
                "job 'x' was started again from the top, which drops the plan",
            ),
        ],
    )
    def test_what_takes_its_place_is_told(self, store: MemoryStore, after: dict[str, Any], why: str) -> None:
        def answer(leader: Leader, request: PlanRequest) -> None:
            leader.carry(request)
            leader.put("generation", replace(GENERATION, number=10, **after))

        Leader(store, answer)
        with pytest.raises(RequestRefused, match=why):
            self.ask(store)

    def test_the_end_of_the_job_is_told(self, store: MemoryStore) -> None:
        def answer(leader: Leader, request: PlanRequest) -> None:
            leader.carry(request)
            leader.put("result", Result(False, "it died"))

        Leader(store, answer)
        with pytest.raises(RequestRefused, match="job 'x' ended while its members changed over: it died"):
            self.ask(store)

    def test_a_plan_too_long_for_etcd_is_refused_before_it_ends_the_leader(
        self, store: MemoryStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("elaunch.cli.request_plan.MOST_BYTES", 400)
        leader = Leader(store, lambda leader, request: None)
        with pytest.raises(
            RequestRefused, match=r"a generation has \d+ bytes, and etcd takes 400; give one with fewer"
        ):
            self.ask(store)
        assert leader.requests == []


def test_a_job_whose_store_was_founded_just_now_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The nodes have not written into it yet what they know (seen in tests.soak)."""
    looks: list[str] = []

    def get(key: str) -> object:
        looks.append(key)
        return object() if len(looks) == 3 else None

    monkeypatch.setattr(ctl, "LOOK_S", 0.001)
    store: Any = SimpleNamespace(get=get)
    ctl._await_settings(store, "run7")
    assert looks == ["/elaunch/run7/config"] * 3
    monkeypatch.setattr(ctl, "FOUNDED_S", 0.0)
    looks.append("more")
    ctl._await_settings(store, "run7")  # it does not wait for ever
