"""What is a job's own, what is damaged, and how often the user hears of it."""

from __future__ import annotations

import pytest

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.intake import (
    MOST_LINES,
    Intake,
    is_known,
    is_ours,
    read_generation,
    read_name,
    read_node,
    read_size,
    read_text,
)
from elaunch.rendezvous.membership import Generation, GenerationStage, JobSize, NodeDoc, NodeWorker, Worker, WorkerState
from elaunch.rendezvous.node.setbacks import Setbacks

GENERATION = Generation(3, GenerationStage.TRAIN, (Worker("a/0#0", "a", 0), Worker("b/1#2", "b", 1)))
STARTS = Generation(1, GenerationStage.START, (Worker("a/0", "a", 0),))


def report(*workers: tuple[str, int], node: str = "a") -> bytes:
    return to_json(NodeDoc(node, "h", 2, tuple(NodeWorker(name, slot, WorkerState.MEMBER) for name, slot in workers)))


class TestReading:
    def test_a_report_is_that_of_the_node_in_its_key(self) -> None:
        doc = read_node("a", report(("a/0#0", 0), ("a/1#12", 1)), 7)
        assert (doc.node, doc.order) == ("a", 7)
        with pytest.raises(ProtocolError, match="it is the report of a node 'b'"):
            read_node("a", report(node="b"), 7)

    @pytest.mark.parametrize("worker", ["b/0#0", "a/0", "a/1#0", "a/0#x", "a/0#-1", "a/0#0\n", "a/0#" + "9" * 20, ""])
    def test_its_workers_are_of_that_node_and_their_slots(self, worker: str) -> None:
        with pytest.raises(ProtocolError, match="is no worker of local rank 0"):
            read_node("a", report((worker, 0)), 7)

    def test_nobody_is_named_twice(self) -> None:
        with pytest.raises(ProtocolError, match="it names a worker twice"):
            read_node("a", report(("a/0#0", 0), ("a/0#0", 0)), 7)
        with pytest.raises(ProtocolError, match="it names a worker twice"):
            read_generation(to_json(Generation(1, GenerationStage.TRAIN, (GENERATION.workers[0],) * 2)))

    @pytest.mark.parametrize("generation", [GENERATION, STARTS])
    def test_a_generation_names_slots_or_workers(self, generation: Generation) -> None:
        assert read_generation(to_json(generation)) == generation

    @pytest.mark.parametrize("worker", [Worker("a/0#0", "b", 0), Worker("a/0#0", "a", 1), Worker("a/01", "a", 0)])
    def test_names_in_a_generation_agree(self, worker: Worker) -> None:
        with pytest.raises(ProtocolError, match="is no worker of"):
            read_generation(to_json(Generation(1, GenerationStage.TRAIN, (worker,))))

    @pytest.mark.parametrize("name", [b"", b"\xff", b"a b", b"a/b", b"a\n", b"a" * 300])
    def test_the_name_of_a_node(self, name: bytes) -> None:
        assert read_name(b"node-1.x_y") == "node-1.x_y"
        with pytest.raises(ProtocolError, match="expected the name of a node"):
            read_name(name)

    @pytest.mark.parametrize("limits", [(0, 1), (2, 1), (-1, -1)])
    def test_a_size_is_one_that_a_job_can_have(self, limits: tuple[int, int]) -> None:
        with pytest.raises(ProtocolError, match="are no size of a job"):
            read_size(to_json(JobSize("1", *limits, 0.0)))

    def test_text_that_is_shown_is_one_line(self) -> None:
        assert read_text(b"a\nb\x1b[2J\xff") == "a?b?[2J\ufffd"


def test_which_keys_are_the_jobs() -> None:
    for name in ("generation", "leader", "size", "result", "config", "nodes/a", "nodes/b", "nodes/c", "nodes/me"):
        assert is_ours(name, "me", {"c"}, GENERATION), name
    for name in ("nodes/x", "nodes/", "nodes/a/b", "requests/plan", "checks/a", "what"):
        assert not is_ours(name, "me", {"c"}, GENERATION), name
    assert not is_ours("nodes/a", "me", (), None)
    assert is_known("requests/drain/a")
    assert not is_known("requests/what")


class TestTelling:
    def test_a_line_comes_once_for_each_revision(self) -> None:
        intake = Intake("/j/")
        assert intake.ignore("nodes/x", 5, "odd") == "/j/nodes/x is ignored: odd"
        assert intake.ignore("nodes/x", 5, "odd") == ""
        assert intake.ignore("nodes/x", 6, "odd") != ""
        assert not intake.damaged

    def test_changes_go_on_when_all_is_in_order(self) -> None:
        intake = Intake("/j/")
        assert "/j/size is damaged: odd" in intake.freeze("size", 5, "odd")
        assert intake.freeze("size", 5, "odd") == ""
        intake.freeze("result", 6, "odd")
        assert intake.accept("size") == "/j/size is in order again; still damaged: result"
        assert intake.accept("size") == ""
        assert intake.accept("result") == "/j/result is in order again; changes of the job go on"

    def test_who_writes_without_end_is_not_told_of_without_end(self) -> None:
        intake = Intake("/j/")
        lines = [intake.ignore(f"nodes/{number}", number, "odd") for number in range(1, 3 * MOST_LINES)]
        assert len([line for line in lines if line]) == MOST_LINES
        assert lines[MOST_LINES - 1].endswith("further ones are ignored without a line")
        assert intake.freeze("size", 5, "odd"), "what freezes the job is told"


class TestSetbacks:
    def test_pauses_grow_and_end(self) -> None:
        setbacks = Setbacks(2.0)
        assert [setbacks.meet(now_s) for now_s in range(6)] == [0.2, 0.4, 0.8, 1.6, 2.0, 2.0]
        assert setbacks.end(10.9) is None
        assert setbacks.end(11.0) == 11.0
        assert setbacks.end(12.0) is None
        assert setbacks.meet(20.0) == 0.2

    def test_each_text_is_told_once(self) -> None:
        setbacks = Setbacks(2.0)
        assert [setbacks.is_new(text) for text in "aba"] == [True, True, False]
