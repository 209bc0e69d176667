"""The page of a job: what it shows of the events, how logs are read on, and what the server answers to whom."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.agent.config import LOOPBACK, parse_address
from elaunch.cli import run
from elaunch.errors import LaunchError, UsageError
from elaunch.plan import symmetric
from elaunch.telemetry.log import read_events
from elaunch.telemetry.ui.from_status import beside_events, events_of
from elaunch.telemetry.ui.history import (
    LATE_S,
    MOST_CHANGES,
    MOST_HANGS,
    MOST_NOTES,
    JobHistory,
    history_of,
)
from elaunch.telemetry.ui.logs import LogFollower
from elaunch.telemetry.ui.plans import plan_document
from elaunch.telemetry.ui.server import HEADERS, JobPage, UiListener, encoded, is_own_host
from elaunch.telemetry.ui.steps import MOST_POINTS
from elaunch.telemetry.ui.texts import MOST_TEXT

LOG = Path(__file__).parent.parent / "data" / "kill.jsonl"
"""The event log of a job of four workers in two stages, one of which was killed and replaced."""

Document = dict[str, Any]


def event(kind: str, t: float = 0.0, generation: int = 1, /, node: str = "n", **fields: Any) -> dict[str, Any]:
    return {"v": 2, "t": t, "kind": kind, "node": node, "generation": generation, **fields}


def document_of(*events: Mapping[str, Any]) -> Document:
    """As the page reads it."""
    document: Document = json.loads(encoded(history_of(events).document()))
    return document


def slots(document: Document) -> dict[str, Document]:
    return {one["slot"]: one for one in document["slots"]}


# -- what became of a job ---------------------------------------------------------------------------------------------


def test_a_killed_worker_its_recovery_and_its_replacement_are_shown() -> None:
    history = history_of(read_events([str(LOG)]))
    document = history.document()
    assert (document["state"], document["generation"], document["recoveries"]) == ("over", 4, 1)
    assert (document["step"], document["steps"]["count"], document["steps"]["per_point"]) == (79, 80, 1)
    assert [one["generation"] for one in document["changes"]] == [1, 2, 3, 4]
    killed = document["changes"][2]
    assert killed["cause"] == "worker node0/1#0 was killed by SIGKILL"
    assert killed["members"] == 3
    assert killed["recovery"]["interrupted"]
    assert sum(killed["recovery"]["phases"].values()) == pytest.approx(killed["recovery"]["total_s"], abs=1e-5)
    assert killed["decision"]["policy"] == "reparallelize"
    assert {one["policy"]: one["rejected"] for one in killed["decision"]["candidates"]}["expand"] == "nobody is free"
    before, after = (plan_document(history.plan_of(killed[key])) for key in ("plan_before", "plan"))
    assert before["workers"] == ("node0/0#0", "node0/1#0", "node0/2#0", "node0/3#0")
    assert after["workers"] == ("node0/0#0", "node0/2#0", "node0/3#0")
    for plan in (before, after):
        drawn = [(l1 - l0) * (s1 - s0) for l0, l1, s0, s1, _, _ in plan["rectangles"]]
        assert sum(drawn) == plan["layers"] * plan["samples"] == 4 * 24
    workers = slots(document)
    assert workers["node0/1"]["worker"] == "node0/1#1"
    assert workers["node0/1"]["restarts"] == 1
    assert {one["state"] for one in workers.values()} == {"done"}
    assert document["notes"][0]["kind"] == "profile_doubtful"


def test_at_each_moment_workers_have_the_state_that_the_events_tell() -> None:
    history = JobHistory()
    seen: list[tuple[str, ...]] = []
    for one in read_events([str(LOG)]):
        history.take(one)
        states = tuple(worker["state"] for worker in slots(history.document()).values())
        if not seen or seen[-1] != states:
            seen.append(states)
    assert ("member",) * 4 in seen
    dead = seen.index(("member", "failed", "member", "member"))
    assert seen[dead + 1 : dead + 3] == [("member", "starting", "member", "member"), ("member",) * 4]
    assert seen[-1] == ("done",) * 4


def test_the_document_of_a_long_job_of_400_workers_stays_small() -> None:
    workers = [f"node{place // 8}/{place % 8}#0" for place in range(400)]
    plan = str(symmetric(workers, 48, 1600, 4, dp=50, pp=8))
    candidates = [{"policy": "stay", "score": 1.0, "rejected": "x" * 100}] * 5
    history, n_steps = JobHistory(), 5 * MOST_POINTS
    for step in range(n_steps):
        if step % 25 == 0:
            number = step // 25
            history.take(event("generation", step, number, workers=workers, cause="x" * 3 * MOST_TEXT, stage="train"))
            history.take(event("decision", step, number, policy="stay", reason="", candidates=candidates, plan=plan))
            history.take(event("transition", step, number, cause="", interrupted=True, total_s=1.0, phases={}))
            history.take(event("hang", step, number, worker=workers[0], place="x" * 3 * MOST_TEXT))
            history.take(event("slow", step, number, state="slow", worker=workers[1], factor=2.0, action="report"))
        took_s = 50.0 if step == 4321 else 0.5
        history.take(event("step", step, step // 25, step=step, seconds=took_s, loss=2.0, samples=8, members=400))
    document = history.document()
    assert len(encoded(document)) < 2_000_000
    assert len(encoded(plan_document(history.plan_of(document["changes"][-1]["plan"])))) < 100_000
    points = document["steps"]["points"]
    assert MOST_POINTS // 2 <= len(points) <= MOST_POINTS
    assert [points[0][0], points[-1][1]] == [0, n_steps - 1]
    assert all(before[1] + 1 == after[0] for before, after in pairwise(points)), "no step is left out"
    sizes = [last - first + 1 for first, last, *_ in points]
    assert sum(n * point[3] for n, point in zip(sizes, points)) == pytest.approx(n_steps * 0.5 + 49.5)
    assert max(point[4] for point in points) == 50.0, "a single slow step can still be seen"
    assert {point[5] for point in points} == {2.0}
    assert [len(document[name]) for name in ("changes", "hangs", "notes")] == [MOST_CHANGES, MOST_HANGS, MOST_NOTES]
    assert document["left_off"] == {"changes": n_steps // 25 - MOST_CHANGES, "hangs": n_steps // 25 - MOST_HANGS}
    first = document["changes"][0]["number"]
    assert history.plan_of(first) == plan
    assert history.plan_of(first - 1) == history.plan_of(10**6) == ""


def test_a_plan_of_very_many_micro_batches_is_drawn_with_one_rectangle_a_tile() -> None:
    workers = [f"a/{place}#0" for place in range(8)]
    plan = plan_document(str(symmetric(workers, 4, 40_000, 1, dp=8, pp=1)))
    areas = [(l1 - l0) * (s1 - s0) for l0, l1, s0, s1, _, _ in plan["rectangles"]]
    assert (len(areas), sum(areas)) == (8, 160_000)
    assert plan_document("no plan") == {"problem": plan_document("no plan")["problem"]}


def test_a_step_that_two_logs_have_counts_once_and_one_that_is_repeated_again() -> None:
    steps = [event("step", t, step=step, seconds=1.0) for t, step in ((1, 7), (2, 8), (3, 8))]
    assert document_of(*steps)["steps"]["count"] == 2
    back = [event("resume", 4, step=7, again=2), event("step", 5, step=8, seconds=1.0)]
    assert document_of(*steps, *back)["steps"]["count"] == 3


def test_what_all_nodes_tell_of_a_generation_is_one_change() -> None:
    told = [
        event("generation", t, number, node=node, workers=["a/0#0", "b/0#0"], cause="start", stage="train")
        for t, number, node in ((1, 2, "a"), (2, 3, "a"), (2.5, 2, "b"), (2.6, 3, "b"))
    ]
    document = document_of(*told)
    assert [one["generation"] for one in document["changes"]] == [2, 3]
    assert [one["node"] for one in document["nodes"]] == ["a", "b"]
    assert [one["rank"] for one in document["slots"]] == [0, 1]


def test_a_job_that_begins_anew_in_the_same_log_is_shown_after_the_one_before() -> None:
    def job(t: float, step: int) -> list[dict[str, Any]]:
        return [
            event("generation", t, 1, workers=["n/0"], cause="start", stage="start"),
            event("worker_started", t, 1, worker="n/0#0", pid=int(t), local_rank=0),
            event("generation", t + 1, 2, workers=["n/0#0"], cause="start", stage="train"),
            event("step", t + 2, 2, step=step, seconds=1.0),
        ]

    after = LATE_S + 10  # it was lost without a word
    document = document_of(*job(0, 5), *job(after, 5))
    assert [one["generation"] for one in document["changes"]] == [1, 2, 1, 2]
    assert document["steps"]["count"] == 2
    assert slots(document)["n/0"]["pid"] == after
    ended = event("worker_exited", 3, 2, worker="n/0#0", pid=0, exitcode=1)
    document = document_of(*job(0, 5), ended)
    assert document["state"] == "over, with workers that failed"
    document = document_of(*job(0, 5), ended, *job(4, 5))
    assert document["state"] == "training"
    assert slots(document)["n/0"]["state"] == "member"


def test_what_is_known_against_workers_and_nodes_is_shown_until_it_is_over() -> None:
    train = event("generation", 1, 2, workers=["n/0#0", "n/1#0"], cause="start", stage="train")
    slow = event("slow", 2, 2, state="slow", worker="n/1#0", factor=3.808, action="exclude")
    sick = event("health", 3, 2, worker="n/1#0", subject="GPU 1", verdict="drain", text="XID 95")
    cut = event("cut", 4, 2, nodes=["m"])
    document = document_of(train, slow, sick, cut)
    remarks = slots(document)["n/1"]["remarks"]
    assert remarks == ["n/1#0 is slow: 3.81 times as long as usual; exclude", "GPU 1: XID 95 (drain)"]
    assert document["nodes"] == [{"node": "n", "remark": "cannot reach m"}]
    better = [
        event("slow", 5, 2, state="recovered", worker="n/1#0"),
        event("health", 6, 2, worker="n/1#0", subject="GPU 1", verdict="healthy", text="as it should be"),
        event("cut", 7, 2, nodes=[]),
    ]
    document = document_of(train, slow, sick, cut, *better)
    assert slots(document)["n/1"]["remarks"] == []
    assert document["nodes"] == [{"node": "n", "remark": ""}]
    assert len(document["notes"]) == 6


def test_without_events_all_is_empty_and_nothing_fails() -> None:
    document = document_of()
    assert [document[name] for name in ("slots", "changes", "hangs", "notes")] == [[], [], [], []]
    assert (document["state"], document["step"], document["steps"]["points"]) == ("", None, [])


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
KINDS = ("step", "generation", "worker_started", "worker_exited", "decision", "transition", "hang", "slow", "health")
FIELDS = ("worker", "workers", "stage", "cause", "step", "seconds", "loss", "samples", "phases", "candidates", "plan")
MORE = ("reason", "total_s", "signal", "exitcode", "nodes", "evidence", "stacks", "waits", "state", "factor", "subject")


@settings(deadline=None, derandomize=True, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([*KINDS, "cut", "checkpoint", "resume", "profile_doubtful", "collectives", "?"]),
            st.floats(0, 1e9),
            st.integers(0, 5),
            st.dictionaries(st.sampled_from([*FIELDS, *MORE]), values, max_size=8),
        ),
        max_size=12,
    )
)
def test_whatever_an_event_holds_the_page_can_be_drawn(
    given_events: list[tuple[str, float, int, dict[str, Any]]],
) -> None:
    history = history_of(event(kind, t, number) | fields for kind, t, number, fields in given_events)
    document = json.loads(encoded(history.document()))
    for change in document["changes"]:
        if change["plan"] is not None:
            encoded(plan_document(history.plan_of(change["plan"])))


# -- a job that runs ---------------------------------------------------------------------------------------------------


def test_documents_of_a_running_job_make_events_where_they_change() -> None:
    worker = {"rank": 0, "worker": "n/0#0", "state": "member", "address": "", "times_as_long": 2.0}
    other = worker | {"rank": None, "worker": "n/1#1", "state": "ready", "times_as_long": 1.0}
    training = {
        "generation": 3,
        "step": 40,
        "t": 9.0,
        "members": 1,
        "steps_per_s": 4.0,
        "loss": 1.5,
        "recovery": None,
        "copy_lag": 2,
    }
    now: Document = {
        "state": "training",
        "message": None,
        "endpoint": "e:1",
        "generation": 3,
        "cause": "start",
        "training": training,
        "nodes": [{"node": "n", "remark": "leaves"}],
        "workers": [worker, other, worker | {"rank": None, "worker": "s/0#1", "state": "ready"}],
        "spares": {"wanted": 1, "nodes": ["s"], "ready": ["s"]},
        "unreadable": [],
    }
    assert [one["kind"] for one in events_of(now, {}, 10.0)] == ["generation", "step"]
    assert list(events_of(now, now, 11.0)) == []
    recovery = {"cause": "n/2#0 was lost", "t": 12.0, "seconds": 0.5, "phases": {"detect": 0.1, "resume": 0.4}}
    later = now | {"training": training | {"step": 44, "t": 12.0, "recovery": recovery}}
    history = history_of([*events_of(now, {}, 10.0), *events_of(later, now, 13.0)], "run-17", "status")
    document: Document = json.loads(encoded(history.document() | beside_events(later, "trains")))
    assert [one["cause"] for one in document["changes"]] == ["start", "n/2#0 was lost"]
    assert document["changes"][1]["recovery"]["phases"] == {"detect": 0.1, "resume": 0.4}
    assert document["copy_lag"] == 2
    assert [point[0] for point in document["steps"]["points"]] == [40, 44]
    assert {one["worker"]: one["state"] for one in document["slots"]} == {
        "n/0#0": "member",
        "n/1#1": "starting",
        "s/0#1": "spare",
    }
    assert document["slots"][0]["remarks"] == ["takes 2.00 times as long as others"]
    assert document["nodes"] == [{"node": "n", "remark": "leaves"}]
    assert (document["state"], document["members"], document["recoveries"]) == ("trains", 1, 1)


# -- logs that grow ----------------------------------------------------------------------------------------------------


def test_logs_are_read_on_as_they_grow_and_from_the_start_when_they_are_others(tmp_path: Path) -> None:
    def line(t: float, node: str = "n") -> str:
        return json.dumps(event("step", t, node=node)) + "\n"

    first, second = tmp_path / "a", tmp_path / "b"
    first.write_text(line(1) + line(3) + line(4)[:20])
    second.write_text(line(2, "m") + "no event\n\n")
    follower = LogFollower([str(first), str(second)])

    def times() -> list[float]:
        return [one["t"] for one in follower.new_events()]

    assert times() == [1, 2, 3], "in the order of the times; the line that is not whole waits"
    assert follower.n_wrong == 1
    assert times() == []
    with first.open("a") as file:
        file.write(line(4)[20:] + line(5))
    assert times() == [4, 5]
    first.write_text(line(6))
    assert times() == [6], "it was emptied"
    (tmp_path / "new").write_text(line(7) * 30)
    os.replace(tmp_path / "new", first)
    assert times() == [7] * 30, "another file has its place"
    first.unlink()
    with second.open("a") as file:
        file.write(line(8))
    assert times() == [8], "one that has gone is no error"
    with pytest.raises(UsageError, match="none: No such file or directory"):
        LogFollower([str(tmp_path / "none")])


# -- the server --------------------------------------------------------------------------------------------------------


@pytest.fixture
def page(tmp_path: Path) -> JobPage:
    (tmp_path / "stacks.0.txt").write_text("Thread 0x1: <b>\n")
    (tmp_path / "secret.txt").write_text("secret")
    os.symlink(tmp_path / "secret.txt", tmp_path / "stacks.1.txt")
    os.mkfifo(tmp_path / "stacks.2.txt")
    paths = ["stacks.0.txt", "secret.txt", "stacks.1.txt", "stacks.2.txt", "stacks.3.txt", "../x/stacks.4.txt"]
    hangs = [event("hang", 99, worker="n/0#0", stacks=str(tmp_path / name)) for name in paths]
    return JobPage(history_of([*read_events([str(LOG)]), *hangs, event("hang", 99, worker="n/0#0", stacks="stacks\0")]))


@pytest.fixture
def listener(page: JobPage) -> Iterator[UiListener]:
    listener = UiListener(page, "127.0.0.1", 0, "--port")
    yield listener
    listener.close()


Answer = tuple[int, Mapping[str, str], bytes]


def ask(listener: UiListener, path: str, method: str = "GET", **headers: str) -> Answer:
    connection = http.client.HTTPConnection(listener.url.split("/")[2], timeout=10)
    with contextlib.closing(connection):
        connection.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        reply = connection.getresponse()
        return reply.status, dict(reply.getheaders()), reply.read()


def test_the_page_and_its_documents_are_served_with_a_strict_policy(listener: UiListener) -> None:
    kinds = {"/": "text/html", "/page.css": "text/css", "/page.js": "text/javascript", "/job.json": "application/json"}
    for path, kind in kinds.items():
        status, headers, body = ask(listener, path)
        assert status == 200, path
        assert headers["Content-Type"].startswith(kind)
        assert {name: headers[name] for name in HEADERS} == HEADERS
        assert body
    assert "default-src 'none'" in HEADERS["Content-Security-Policy"]
    assert "unsafe" not in HEADERS["Content-Security-Policy"]
    status, headers, body = ask(listener, "/job.json")
    assert json.loads(body)["step"] == 79
    assert ask(listener, "/job.json", If_None_Match=headers["ETag"])[::2] == (304, b"")
    assert json.loads(ask(listener, "/plan/2.json")[2])["layers"] == 4
    for path in ("/plan/0.json", "/plan/99.json", "/page.py", "/../server.py", "/static/page.js", "/job.json/"):
        assert ask(listener, path)[0] == 404, path


def test_the_page_is_read_only(listener: UiListener) -> None:
    for method in ("POST", "PUT", "DELETE", "OPTIONS"):
        assert ask(listener, "/job.json", method)[0] == 501, method


def test_stacks_are_shown_and_no_other_file_that_an_event_names(listener: UiListener) -> None:
    status, headers, body = ask(listener, "/stacks/0.txt")
    assert (status, body) == (200, b"Thread 0x1: <b>\n")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"
    for number in range(1, 8):
        assert ask(listener, f"/stacks/{number}.txt")[0] == 404, number


def test_a_name_that_somebody_else_made_lead_here_is_refused(listener: UiListener) -> None:
    port = listener.url.rstrip("/").rpartition(":")[2]
    for host in (f"localhost:{port}", "127.0.0.1", f"[::1]:{port}", "10.1.2.3:80", socket.gethostname()):
        assert ask(listener, "/job.json", Host=host)[0] == 200, host
    for host in (f"evil.example:{port}", "127.0.0.1.evil.example", "localhost.evil.example", "", "a:b:c", "[::1", "@"):
        status, _, body = ask(listener, "/job.json", Host=host)
        assert status == 421, host
        assert b"{" not in body
    assert is_own_host("gpu-17.cluster:80", {"gpu-17.cluster"})


def test_a_port_that_is_taken_is_told_and_the_page_is_of_this_machine_only(page: JobPage, listener: UiListener) -> None:
    port = int(listener.url.rstrip("/").rpartition(":")[2])
    with pytest.raises(LaunchError, match=f"--ui-port: cannot listen at port {port} of 127.0.0.1: "):
        UiListener(page, "127.0.0.1", port, "--ui-port")
    assert run.parse(["--ui-port=80", "train.py"]).output.ui == (LOOPBACK, 80)
    assert run.parse(["train.py"]).output.ui is None
    assert parse_address("[::]:80", "--ui-port", LOOPBACK) == ("::", 80)


def test_logs_and_a_running_job_are_not_asked_for_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["ui", str(LOG), "--rdzv-id=run-17"]) == 2
    assert run.main(["ui", str(tmp_path / "none")]) == 2
    assert run.main(["ui", str(LOG), "--port=x"]) == 2
    assert "none: No such file or directory" in capsys.readouterr().err
