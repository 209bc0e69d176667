"""What may be asked of the nodes of a job: who may leave, and how many there may be."""

from __future__ import annotations

import pytest

from elaunch.cli.resize import leavers, limits_of
from elaunch.errors import RequestRefused, UsageError
from elaunch.rendezvous.membership import Generation, GenerationStage, JobConfig, JobSize, NodeDoc, Result, Worker
from elaunch.rendezvous.observer import Documents


def documents(*nodes: str, working: int | None = None, **fields: object) -> Documents:
    docs = tuple(NodeDoc(name, f"host-{name}", 1) for name in nodes)
    workers = tuple(Worker(f"{name}/0#0", name, 0) for name in nodes[:working])
    generation = Generation(5, GenerationStage.TRAIN, workers)
    return Documents(docs, generation, config=JobConfig(2, 4, None), **fields)  # type: ignore[arg-type]


def test_nodes_leave_as_long_as_somebody_goes_on() -> None:
    here = documents("a", "b", "c")
    assert leavers("job", here, ["c", "a", "c"], False) == ("c", "a")
    with pytest.raises(RequestRefused, match=r"a, b, c would leave nobody to go on with job 'job'.*--all"):
        leavers("job", here, ["a", "b", "c"], False)
    assert leavers("job", here, [], True) == ("a", "b", "c")


def test_a_node_that_only_waits_is_nobody_to_go_on() -> None:
    with pytest.raises(RequestRefused, match="a would leave nobody"):
        leavers("job", documents("a", "spare", working=1), ["a"], False)


def test_while_nodes_meet_again_each_that_waits_may_go_on() -> None:
    assert leavers("job", documents("a", "b", working=0), ["a"], False) == ("a",)
    with pytest.raises(RequestRefused, match="a, b would leave nobody"):
        leavers("job", documents("a", "b", working=0), ["a", "b"], False)


def test_a_node_that_is_not_here_is_named_with_those_that_are() -> None:
    with pytest.raises(RequestRefused, match="job 'job' has no node d; here are a, b"):
        leavers("job", documents("a", "b"), ["b", "d"], False)


def test_of_a_job_that_has_ended_nothing_can_be_asked() -> None:
    ended = documents("a", result=Result(True, "all workers have finished"))
    for ask in (lambda: leavers("job", ended, ["a"], False), lambda: limits_of("job", ended, "1")):
        with pytest.raises(RequestRefused, match="job 'job' has ended: all workers have finished"):
            ask()
    with pytest.raises(RequestRefused, match="no node of job 'job' is here"):
        leavers("job", Documents(), ["a"], False)


@pytest.mark.parametrize(
    ("text", "limits"), [("3", (2, 3)), ("1", (1, 1)), ("8", (2, 8)), ("1:2", (1, 2)), ("3:3", (3, 3))]
)
def test_a_number_alone_leaves_the_minimum_as_far_as_it_can(text: str, limits: tuple[int, int]) -> None:
    assert limits_of("job", documents("a", "b"), text) == limits


def test_the_size_that_was_asked_for_last_counts() -> None:
    assert limits_of("job", documents("a", size=JobSize("x", 1, 6, 7.0)), "5") == (1, 5)


@pytest.mark.parametrize("text", ["0", "3:2", "many", "1:2:3", ""])
def test_what_is_no_number_of_nodes_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"elaunch ctl resize={text}: expected N or MIN:MAX with 1 <= MIN <= MAX"):
        limits_of("job", documents("a"), text)
