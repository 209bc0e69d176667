"""Traces of nodes and jobs: what is read, what is refused and how, and what is made up."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from elaunch.errors import UsageError
from elaunch.scheduler.speeds import MoveCost
from elaunch.simulator.arrivals import philly_like, scaled_to
from elaunch.simulator.clock import EventQueue
from elaunch.simulator.faults import exponential, rate_of, stragglers
from elaunch.simulator.jobs import scaling_jobs
from elaunch.simulator.traces import NodeChange, merged, read_jobs, read_nodes, read_sizes, sized
from tests.helpers import ROOT

TRACES = ROOT / "benchmarks" / "traces"


def written(folder: Path, text: str) -> Path:
    path = folder / "trace"
    path.write_text(text)
    return path


def test_events_come_by_time_and_those_of_one_time_in_the_order_in_which_they_were_added() -> None:
    queue: EventQueue[str] = EventQueue()
    for at_s, event in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        queue.add(at_s, event)
    assert queue.next_s == 1.0
    assert queue.take_all() == ["a", "b"]
    queue.add(2.0, "e")
    assert [queue.take_all(), queue.now_s, bool(queue), queue.next_s] == [["c", "d", "e"], 2.0, False, math.inf]


def test_both_forms_of_a_spot_trace_say_the_same(tmp_path: Path) -> None:
    lines = read_nodes(written(tmp_path, "# spot\n0,add,a\n0,add,b\n\n1500,remove,a\n"))
    lists = read_nodes(
        written(
            tmp_path,
            '[0, "add", {"nodes": ["a", "b"]}]\n[700, "no-op", {}]\n[1500, "remove", {"nodes": ["a"]}]\n'
            '[2000, "DONE", {}]\n',
        )
    )
    assert lines == [NodeChange(0.0, ("a", "b")), NodeChange(1.5, left=("a",))]
    assert [one for one in lists if one.joined or one.left] == lines
    assert lists[-1].at_s == 2.0


@pytest.mark.parametrize(
    "name", ["p3-trace.csv", "g4dn-trace.csv", "spotserve-g4dn.csv", "trace_0203.txt", "trace_0304.txt"]
)
def test_the_published_traces_can_be_read(name: str) -> None:
    changes = read_nodes(TRACES / name)
    here: set[str] = set()
    for change in changes:
        assert here.issuperset(change.left)
        assert here.isdisjoint(change.joined)
        here = (here - set(change.left)) | set(change.joined)
    assert len(changes) > 5


def test_nodes_of_a_cluster_are_there_and_may_be_drained(tmp_path: Path) -> None:
    path = written(tmp_path, '5,drain,n2\n[9, "remove", {"nodes": ["n1"]}]\n9,add,n2\n')
    assert read_nodes(path, ["n1", "n2"]) == [
        NodeChange(0.005, drained=("n2",)),
        NodeChange(0.009, joined=("n2",), left=("n1",)),
    ]
    for text, found in (
        ("5,drain,n2\n6,drain,n2\n", ":2: drain 'n2', but that node is not there"),
        ("5,add,n9\n", ":1: there is no node 'n9' in this cluster; it has n1, n2"),
        ("5,close,n1\n", ":1: expected 'MILLISECONDS,add|remove|drain,NODE'"),
    ):
        with pytest.raises(UsageError) as caught:
            read_nodes(written(tmp_path, text), ["n1", "n2"])
        assert found in str(caught.value)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", ": no changes of nodes; expected"),
        ("0,add\n", ":1: expected 'MILLISECONDS,add|remove,NODE'"),
        ("0,add,a\n5,lose,a\n", ":2: expected 'MILLISECONDS,add|remove,NODE'"),
        ("soon,add,a\n", ":1: milliseconds must be a number of 0 or more, found 'soon'"),
        ("-1,add,a\n", ":1: milliseconds must be a number of 0 or more, found '-1'"),
        ("nan,add,a\n", ":1: milliseconds must be a number of 0 or more, found 'nan'"),
        ("0,add,a\n1,add,a\n", ":2: add 'a', but that node is there already"),
        ("0,remove,a\n", ":1: remove 'a', but that node is not there"),
        ("5,add,a\n4,add,b\n", ":2: 4 ms comes after 5 ms; sort the lines by time"),
        ('[0, "add"]\n', ":1: expected 'MILLISECONDS,add|remove,NODE' or"),
        ('[0, "sell", {"nodes": ["a"]}]\n', ":1: expected one of add, remove, no-op, DONE, found 'sell'"),
        ('[0, "add", {"nodes": "a"}]\n', ":1: nodes must be a list of names, found 'a'"),
        ('[true, "add", {"nodes": ["a"]}]\n', ":1: milliseconds must be a number of 0 or more, found True"),
    ],
)
def test_a_trace_of_nodes_that_is_wrong_is_refused_with_its_line_and_value(
    tmp_path: Path, text: str, found: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_nodes(path)
    assert f"{path}{found}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_jobs_are_read_by_the_names_of_their_columns(tmp_path: Path) -> None:
    text = "num_gpus,submit_s,duration_s,vc,most_gpus,model,priority,other\n8,20,60,a,16,gpt,2,x\n1,10,5.5,b,,,,y\n"
    first, second = read_jobs(written(tmp_path, text))
    assert (first.at_s, first.duration_s, first.devices, first.most, first.user) == (10.0, 5.5, 1, None, "b")
    assert (second.name, second.most, second.model, second.priority) == ("job0", 16, "gpt", 2)
    text = "submit_s,duration_s,num_gpus,unit,rates\n0,10,2,1,1=10 2=19.5\n"
    (measured,) = read_jobs(written(tmp_path, text))
    assert (measured.unit, measured.rates) == (1, {1: 10.0, 2: 19.5})
    (job,) = scaling_jobs([measured], 8, 8, 0.9, MoveCost(fixed_s=3.0))
    assert job.told is not None
    assert (job.samples, job.state.unit, job.speed.rate({"n1": 2})) == (195.0, 1, 19.5)
    assert [one.change_s({"n1": 1}, {"n1": 2}) for one in (job.speed, job.told)] == [3.0, 0.0]
    assert len(read_jobs(TRACES / "philly_8h.csv")) == 15


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("submit_s,num_gpus\n", ":1: column duration_s is missing; expected submit_s,duration_s,num_gpus"),
        ("submit_s,duration_s,num_gpus\n", ": no jobs"),
        ("submit_s,duration_s,num_gpus\n0,10,1\n0,,1\n", ":3: duration_s must be a number above 0, found ''"),
        ("submit_s,duration_s,num_gpus\n0,0,1\n", ":2: duration_s must be a number above 0, found '0'"),
        ("submit_s,duration_s,num_gpus\n0,1,two\n", ":2: num_gpus must be a whole number of 1 or more, found 'two'"),
        ("submit_s,duration_s,num_gpus,most_gpus\n0,1,4,2\n", ":2: most_gpus must be a whole number of 4 or more"),
        ("submit_s,duration_s,num_gpus,rates\n0,1,1,10\n", ":2: rates must be DEVICES=SAMPLES_PER_S, with blanks"),
        ("submit_s,duration_s,num_gpus,rates\n0,1,1,2=5\n", ":2: rates say nothing of 1 devices, which num_gpus asks"),
        ("submit_s,duration_s,num_gpus,name\n0,1,1,a\n0,1,1,a\n", ": two jobs are named 'a'; names must be unique"),
    ],
)
def test_a_trace_of_jobs_that_is_wrong_is_refused_with_its_line_and_value(
    tmp_path: Path, text: str, found: str
) -> None:
    path = written(tmp_path, text)
    with pytest.raises(UsageError) as caught:
        read_jobs(path)
    assert f"{path}{found}" in str(caught.value)


def test_a_schedule_of_sizes_becomes_nodes(tmp_path: Path) -> None:
    path = written(tmp_path, json.dumps([{"time": 1, "size": 4}, {"time": 2, "size": 2}, {"time": 1, "size": 3}]))
    assert sized(read_sizes(path), per_node=2) == [
        NodeChange(0.0, ("node0", "node1")),
        NodeChange(60.0, (), ("node1",)),
        NodeChange(180.0, ("node1",)),
    ]
    with pytest.raises(UsageError, match=r"entry 0: time must be a number of 0 or more, found 'x'"):
        read_sizes(written(tmp_path, '[{"time": "x", "size": 1}]'))
    with pytest.raises(UsageError, match="entry 0: expected"):
        read_sizes(written(tmp_path, "[3]"))
    with pytest.raises(UsageError, match="trace: "):
        read_sizes(written(tmp_path, "{"))


def test_a_node_that_comes_and_goes_at_once_is_no_change() -> None:
    given = [
        NodeChange(2.0, left=("b",)),
        NodeChange(1.0, ("a",)),
        NodeChange(1.0, left=("a",)),
        NodeChange(2.0, ("c",)),
    ]
    assert merged(given) == [NodeChange(1.0), NodeChange(2.0, ("c",), ("b",))]


def test_failures_have_the_rate_that_was_asked_for_and_depend_on_the_seed_alone() -> None:
    nodes = [f"n{number}" for number in range(400)]
    found = exponential(nodes, 1 / rate_of(0.1), 9 * 3600.0, seed=3)
    lost = sum(len(change.left) for change in found)
    # 400 x (1 - 0.9^9) = 245, with a deviation of 10.
    assert abs(lost - 400 * (1 - 0.9**9)) < 40
    assert found == exponential(nodes, 1 / rate_of(0.1), 9 * 3600.0, seed=3)
    assert found != exponential(nodes, 1 / rate_of(0.1), 9 * 3600.0, seed=4)
    # What happens to a node does not depend on the others.
    alone = exponential(nodes[:1], 1 / rate_of(0.1), 9 * 3600.0, seed=3)
    assert [change.at_s for change in found if nodes[0] in change.left] == [change.at_s for change in alone]


def test_a_node_that_is_repaired_leaves_and_comes_in_turn() -> None:
    found = exponential(["a"], 100.0, 10_000.0, seed=0, repair_s=50.0)
    assert len(found) > 20
    for lost, back in zip(found[::2], found[1::2]):
        assert (lost.left, back.joined) == (("a",), ("a",))
        assert back.at_s == pytest.approx(lost.at_s + 50.0)


def test_slow_spells_begin_and_end() -> None:
    found = stragglers(["a", "b"], 10.0, (0.5, 0.9), 60.0, 36_000.0, seed=1)
    speeds = [change.speeds["a"] for change in found if "a" in change.speeds]
    assert len(speeds) > 50
    assert all(0.5 <= speed <= 0.9 for speed in speeds[::2])
    assert set(speeds[1::2]) == {1.0}
    assert stragglers(["a"], 0.0, (0.5, 0.9), 60.0, 3600.0, seed=1) == []


def test_jobs_that_are_made_up_are_the_same_for_a_seed_and_can_be_scaled_to_a_load() -> None:
    found = philly_like(300, 86_400.0, seed=5)
    assert found == philly_like(300, 86_400.0, seed=5)
    assert [one.at_s for one in found] == sorted(one.at_s for one in found)
    assert all(0 <= one.at_s < 86_400 and 1 <= one.duration_s <= 6 * 3600 for one in found)
    assert sum(one.devices == 1 for one in found) > 100
    scaled = scaled_to(found, 1e6)
    assert sum(one.duration_s * one.devices for one in scaled) == pytest.approx(1e6)
    assert [one.devices for one in scaled] == [one.devices for one in found]
