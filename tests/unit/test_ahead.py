"""Plans that are made ahead of their events: which events, which plan is found for whom, and the process that makes
them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject

from elaunch.errors import ProtocolError
from elaunch.plan import Plan, symmetric
from elaunch.policy.ahead import Ahead, events
from elaunch.policy.ahead_process import NICE, Answer, MembershipChange, PlanningRequest, Process, answers
from elaunch.policy.candidates.reparallelize import Degrees
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.profile import LayerProfile, Profile, WorkerProfile
from elaunch.policy.select import Choice, SelectorSettings, choose
from elaunch.rendezvous.membership import slot_of
from tests.helpers import Spawner, is_running, scaled, wait_until
from tests.unit.plan_strategies import valid_plans

LAYER = LayerProfile(1.0, 2.0, 100, 1200, 10, 50)
PROFILE = Profile("six", (LAYER,) * 6, 1, 1e9, 0.0)
WORKERS = ("n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0")
HOME = symmetric(WORKERS, 6, 16, 1, dp=2, pp=2)
MANY = [f"n{number // 8}/{number % 8}#0" for number in range(64)]
LARGE = symmetric(MANY, 32, 128, 1, dp=8, pp=8)
ALL_S = 60.0


class Inline:
    """Makes the plans at once, in this thread."""

    ended = False

    def __init__(self, took: Callable[[bytes], None]) -> None:
        self._took = took
        self.jobs: list[PlanningRequest] = []

    def send(self, job: PlanningRequest) -> None:
        self.jobs.append(job)
        for answer in answers(job):
            self._took(answer.to_json().encode())

    def close(self) -> None:
        self.ended = True


def chosen(now: Plan, preferred_plan: Plan, members: Sequence[str], profile: Profile = PROFILE) -> str | None:
    """What `choose` says, without its figures."""
    try:
        choice = choose(now, preferred_plan, members, profile)
    except NotPossible:
        return None
    return described(choice)


def described(choice: Choice) -> str:
    return "\n\n".join([choice.chosen.policy, str(choice.plan), str(choice.preferred_plan), choice.reason])


@pytest.fixture
def inline() -> Iterator[Ahead]:
    with contextlib.closing(Ahead(start=Inline)) as ahead:
        yield ahead


@pytest.fixture
def ahead() -> Iterator[Ahead]:
    # With the usual priority: on a busy machine the lowest one gets next to no time.
    with contextlib.closing(Ahead(start=partial(Process, nice=0))) as ahead:
        yield ahead


# -- which events -----------------------------------------------------------------------------------------------------


def test_the_first_member_expects_the_loss_of_every_other_and_of_every_other_node() -> None:
    assert events(WORKERS, WORKERS[0]) == [
        MembershipChange(lost=("n0/1#0",)),
        MembershipChange(lost=("n1/0#0",)),
        MembershipChange(lost=("n1/1#0",)),
        MembershipChange(lost=("n1/0#0", "n1/1#0")),
    ]


def test_the_others_expect_only_what_makes_them_the_first() -> None:
    assert events(WORKERS, WORKERS[1]) == [MembershipChange(lost=(WORKERS[0],))]
    assert events(WORKERS, WORKERS[2]) == [MembershipChange(lost=WORKERS[:2])]
    assert events(WORKERS, WORKERS[3]) == []
    assert events(WORKERS, "n9/0#0") == []
    assert events(WORKERS[:1], WORKERS[0]) == []


def test_who_may_be_told_to_leave_is_planned_without_right_after_the_present_members() -> None:
    me, first = WORKERS[0], WORKERS[1]
    found = events(WORKERS, me, again=True, without=[first])
    assert found[:2] == [MembershipChange(), MembershipChange(lost=(first,))]
    assert len(found) == len(set(found))
    # Also where somebody else is the first member then.
    assert MembershipChange(lost=(me,)) in events(WORKERS, me, without=[me])


def test_who_was_lost_last_returns_with_another_incarnation() -> None:
    found = events(WORKERS[:2], WORKERS[0], ["n1/0#3", "n1/1#0"])
    assert found[:3] == [
        MembershipChange(joined=("n1/0#4", "n1/1#1")),
        MembershipChange(joined=("n1/0#4",)),
        MembershipChange(joined=("n1/1#1",)),
    ]
    assert events(WORKERS[1:], WORKERS[1], [WORKERS[0]])[0].members(WORKERS[1:]) == (*WORKERS[1:], "n0/0#1")
    assert not any(event.joined for event in events(WORKERS, WORKERS[0], ["n1/0#-1"])), "it is back"


@given(st.permutations(["a/0#0", "a/1#0", "a/2#5", "b/0#0", "b/1#0", "c/0#1"]), st.integers(1, 6))
def test_each_loss_has_exactly_one_who_expects_it(order: list[str], count: int) -> None:
    members = order[:count]
    expected = [(event, me) for me in members for event in events(members, me)]
    losses = {event for event, _ in expected}
    assert len(losses) == len(expected)
    assert all(event.members(members)[0] == me for event, me in expected)
    assert {event.lost for event in losses if len(event.lost) == 1} == {(one,) for one in members if count > 1}


# -- what is found ----------------------------------------------------------------------------------------------------


def test_a_plan_is_found_for_each_event(inline: Ahead) -> None:
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    assert inline.left == 0
    for event in events(WORKERS, WORKERS[0]):
        members = event.members(WORKERS)
        choice = inline.find(HOME, HOME, members)
        assert choice is not None
        assert choice == choose(HOME, HOME, members, PROFILE)


def test_no_plan_is_found_for_what_it_was_not_made_of(inline: Ahead) -> None:
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    members = WORKERS[:3]
    assert inline.find(HOME, HOME, members) is not None
    assert inline.find(HOME, HOME, WORKERS) is None
    assert inline.find(HOME, HOME, WORKERS[:1]) is None
    assert inline.find(HOME, HOME, (*members[1:], members[0])) is None, "another order"
    assert inline.find(HOME, HOME, (*members[:2], "n1/0#1")) is None, "another incarnation"
    other = replace(HOME, zero="contiguous")
    assert inline.find(other, HOME, members) is None
    assert inline.find(HOME, other, members) is None
    inline.settings = SelectorSettings("reroute")
    assert inline.find(HOME, HOME, members) is None
    inline.settings = SelectorSettings()
    assert inline.find(HOME, HOME, members) is not None


def test_a_plan_of_another_profile_is_found_only_where_any_will_do(inline: Ahead) -> None:
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    members = WORKERS[:3]
    assert inline.find(HOME, HOME, members, PROFILE) is not None
    assert inline.find(HOME, HOME, members, replace(PROFILE, step_s=0.5)) is None
    assert inline.find(HOME, HOME, members) is not None


@pytest.mark.parametrize("incarnation", [1, 2, 10])
def test_who_returns_is_found_by_its_slot_and_called_by_its_name(inline: Ahead, incarnation: int) -> None:
    left = WORKERS[:3]
    after = choose(HOME, HOME, left, PROFILE)
    inline.begin(after.plan, after.preferred_plan, left, left[0], PROFILE, [WORKERS[3]])
    members = (*left, f"n1/1#{incarnation}")
    choice = inline.find(after.plan, after.preferred_plan, members)
    assert choice == choose(after.plan, after.preferred_plan, members, PROFILE)
    assert choice.reason.startswith(f"{members[-1]} joined: ")
    assert inline.find(after.plan, after.preferred_plan, (*left, "n2/0#0")) is None
    assert inline.find(after.plan, after.preferred_plan, (*left, "n1/1")) is None


def test_a_new_beginning_drops_what_was_made_before(inline: Ahead) -> None:
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    inline.begin(HOME, HOME, WORKERS, WORKERS[1], PROFILE)
    assert inline.find(HOME, HOME, WORKERS[:3]) is None
    assert inline.find(HOME, HOME, WORKERS[1:]) is not None


def test_an_event_without_a_plan_leaves_the_others_theirs(inline: Ahead) -> None:
    # Three workers can hold the model; two cannot.
    tight = replace(PROFILE, memory_bytes=4000)
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], tight)
    assert inline.left == 0
    known = [event.members(WORKERS) for event in events(WORKERS, WORKERS[0])]
    found = [inline.find(HOME, HOME, members) is not None for members in known]
    assert found == [chosen(HOME, HOME, members, tight) is not None for members in known]
    assert found == [True, True, True, False]


def test_a_profile_of_another_model_gives_no_plans(inline: Ahead) -> None:
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], replace(PROFILE, layers=(LAYER,)))
    assert inline.left == 0
    assert inline.find(HOME, HOME, WORKERS[:3]) is None


def test_what_is_no_answer_and_what_is_no_plan_for_the_members_is_a_miss() -> None:
    sent: list[Callable[[bytes], None]] = []

    class Silent(Inline):
        def send(self, job: PlanningRequest) -> None:
            sent.append(self._took)

    other = choose(HOME, HOME, WORKERS[:2], PROFILE).to_json()
    with contextlib.closing(Ahead(start=Silent)) as ahead:
        ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
        count = ahead.left
        for line in (b"\xff", b"", b"[]", b"7", b"{}", b'{"number": 1, "event": [], "choice": null}'):
            sent[0](line)
        sent[0](Answer(1, 99, other).to_json().encode())
        sent[0](Answer(0, 0, other).to_json().encode())
        assert ahead.left == count
        for place, choice in enumerate((other, "{}", other[:-9], other.replace("layers 0:", "layers 1:"))):
            sent[0](Answer(1, place, choice).to_json().encode())
        assert ahead.left == 0
        for event in events(WORKERS, WORKERS[0])[:3]:
            assert ahead.find(HOME, HOME, event.members(WORKERS)) is None


@settings(max_examples=scaled(12, 25), deadline=None)
@given(data=st.data())
def test_what_is_found_is_what_would_be_chosen(data: DataObject) -> None:
    preferred_plan = data.draw(valid_plans(max_workers=5, max_units=4, tp=(1, 2)))
    speeds = data.draw(
        st.dictionaries(st.sampled_from(list(map(slot_of, preferred_plan.workers))), st.sampled_from([0.5, 2.0]))
    )
    profile = replace(
        PROFILE,
        layers=(LAYER,) * preferred_plan.n_layers,
        memory_bytes=data.draw(st.sampled_from([None, 8000])),
        workers={slot: WorkerProfile(speed) for slot, speed in speeds.items()},
    )
    now, members, lost = preferred_plan, data.draw(st.permutations(preferred_plan.workers)), list[str]()
    if len(members) > 1 and data.draw(st.booleans()):
        lost = members[: data.draw(st.integers(1, len(members) - 1))]
        members = members[len(lost) :]
        with contextlib.suppress(NotPossible):
            after = choose(preferred_plan, preferred_plan, members, profile)
            now, preferred_plan = after.plan, after.preferred_plan
    me = data.draw(st.sampled_from([members[0], *members]))
    asked = [event.members(members) for event in events(members, me, lost)]
    asked += [event.members(members) for one in members for event in events(members, one)]
    new = {worker: f"{slot_of(worker)}#{data.draw(st.integers(1, 12))}" for worker in (*lost, "n9/0#0")}
    asked.append(tuple(data.draw(st.permutations(members))))
    asked.append((*members, data.draw(st.sampled_from(list(new.values())))))
    asked.append((*members, *(new[worker] for worker in lost)))
    with contextlib.closing(Ahead(start=Inline)) as ahead:
        ahead.begin(now, preferred_plan, members, me, profile, lost)
        hits = 0
        for some in dict.fromkeys(asked):
            choice = ahead.find(now, preferred_plan, some)
            if choice is not None:
                hits += 1
                choice.plan.validate(some)
                assert described(choice) == chosen(now, preferred_plan, some, profile)
        possible = [event.members(members) for event in events(members, me, lost)]
        assert hits >= sum(chosen(now, preferred_plan, some, profile) is not None for some in possible)


# -- what crosses the process's pipes ---------------------------------------------------------------------------------


def test_a_choice_is_read_as_it_was_written() -> None:
    for members in (WORKERS, WORKERS[:3], (*WORKERS, "n2/0#0")):
        choice = choose(HOME, HOME, members, replace(PROFILE, workers={"n0/1": WorkerProfile(0.8)}))
        read = Choice.from_json(choice.to_json())
        assert read == choice
        assert read.event() == choice.event()
        assert any(one is read.chosen for one in read.candidates)


@settings(max_examples=scaled(12, 25), deadline=None)
@given(plan=valid_plans(max_workers=5, max_units=4, tp=(1, 2)))
def test_the_choice_for_any_plan_is_read_as_it_was_written(plan: Plan) -> None:
    choice = choose(plan, plan, plan.workers, replace(PROFILE, layers=(LAYER,) * plan.n_layers))
    assert Choice.from_json(choice.to_json()) == choice


@pytest.mark.parametrize(
    "text", ["", "7", "[]", "{}", '{"reason": "", "preferred_plan": "", "chosen": 0, "candidates": []}']
)
def test_what_is_no_choice_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected a choice of a plan, found "):
        Choice.from_json(text)
    with pytest.raises(ProtocolError, match="expected settings of the choice, found "):
        SelectorSettings.from_json(text)


@pytest.mark.parametrize(
    "wanted",
    [
        SelectorSettings(),
        SelectorSettings("resize", "bitwise", Degrees((1, 2), (3, 4)), (2, 4), 30.0),
        SelectorSettings(next_s=float("inf")),
    ],
)
def test_settings_are_read_as_they_were_written(wanted: SelectorSettings) -> None:
    assert SelectorSettings.from_json(wanted.to_json()) == wanted


def test_jobs_and_answers_are_read_as_they_were_written() -> None:
    job = PlanningRequest(
        3,
        str(HOME),
        str(HOME),
        WORKERS,
        PROFILE.to_json(),
        SelectorSettings().to_json(),
        (MembershipChange(WORKERS[:1], ("a",)),),
    )
    assert PlanningRequest.from_json(job.to_json()) == job
    assert "\n" not in job.to_json()
    for answer in (Answer(1, 2, "text"), Answer(1, 2, refused="no plan")):
        assert Answer.from_json(answer.to_json()) == answer


def test_only_whole_names_are_renamed() -> None:
    choice = choose(HOME, HOME, [*WORKERS[:3], "xn1/1#1", "n1/1#1", "n1/1#10"], PROFILE)
    told = choice.renamed({"n1/1#1": "n1/1#2"})
    assert told.reason.startswith("n1/1#0 left; xn1/1#1, n1/1#2, n1/1#10 joined: ")
    assert set(told.plan.workers) == {*WORKERS[:3], "xn1/1#1", "n1/1#2", "n1/1#10"}
    assert told.renamed({"n1/1#2": "n1/1#1"}) == choice
    stay = next(one.rejected for one in choose(HOME, HOME, WORKERS[:3], PROFILE).candidates if one.policy == "stay")
    assert stay == "n1/1#0 must be replaced"
    gone = choose(HOME, HOME, WORKERS[:3], PROFILE).renamed({"n1/1#0": "other"})
    assert "other must be replaced" in [one.rejected for one in gone.candidates]


# -- the process ------------------------------------------------------------------------------------------------------


def planners(parent: int | None = None) -> list[psutil.Process]:
    """Processes that make plans for this process, or for another one."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if any("ahead_process" in word for word in child.cmdline()):
                found.append(child)
    return found


def the_planner(parent: int | None = None) -> psutil.Process:
    """Waited for, since it is a copy of its parent at first."""
    return wait_until(lambda: planners(parent), ALL_S, "the process to be there")[0]


def begin_large(ahead: Ahead) -> None:
    """Something that takes a minute or so."""
    ahead.begin(LARGE, LARGE, MANY, MANY[0], replace(PROFILE, layers=(LAYER,) * LARGE.n_layers))


def wait_for_all(ahead: Ahead) -> None:
    wait_until(lambda: ahead.left == 0, ALL_S, lambda: f"{ahead.left} plans")


def test_a_process_makes_the_plans(ahead: Ahead) -> None:
    assert ahead.find(HOME, HOME, WORKERS[:3]) is None
    assert planners() == []
    ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    wait_for_all(ahead)
    for event in events(WORKERS, WORKERS[0]):
        choice = ahead.find(HOME, HOME, event.members(WORKERS))
        assert choice == choose(HOME, HOME, event.members(WORKERS), PROFILE)
    # The same process serves the next membership.
    first = the_planner().pid
    ahead.begin(HOME, HOME, WORKERS, WORKERS[1], PROFILE)
    wait_for_all(ahead)
    assert ahead.find(HOME, HOME, WORKERS[:3]) is None
    assert ahead.find(HOME, HOME, WORKERS[1:]) is not None
    assert [process.pid for process in planners()] == [first]


def test_the_process_gives_way_to_others() -> None:
    with contextlib.closing(Ahead()) as ahead:
        ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
        process = the_planner()
        lowest = 19
        wait_until(lambda: process.nice() == min(psutil.Process().nice() + NICE, lowest), ALL_S, "its priority")


def test_the_process_has_no_torch_nor_anything_of_its_parents(ahead: Ahead) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.set_inheritable(True)
        ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
        wait_for_all(ahead)
        process = the_planner()
        loaded = {Path(one.path).name for one in process.memory_maps()}
        assert not [name for name in loaded if "torch" in name]
        files = {int(file.name): os.readlink(file) for file in Path(f"/proc/{process.pid}/fd").iterdir()}
        assert not [file for file in files.values() if file.startswith("socket:")]
        assert files[2] == os.devnull


def test_it_is_found_whatever_lies_in_the_working_directory(
    ahead: Ahead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("json", "select", "profile", "elaunch"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    wait_for_all(ahead)


def test_a_member_that_decides_nothing_starts_no_process(ahead: Ahead) -> None:
    ahead.begin(HOME, HOME, WORKERS, WORKERS[3], PROFILE)
    assert ahead.left == 0
    assert planners() == []


def test_the_next_job_takes_the_place_of_one_that_has_not_ended(ahead: Ahead) -> None:
    begin_large(ahead)
    assert ahead.left > len(MANY) / 2
    ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    wait_for_all(ahead)
    assert ahead.find(HOME, HOME, WORKERS[:3]) is not None
    assert ahead.find(LARGE, LARGE, MANY[:-1]) is None


def test_a_process_that_is_killed_is_a_miss_and_the_next_job_has_another(ahead: Ahead) -> None:
    begin_large(ahead)
    process = the_planner()
    process.kill()
    # A job that comes before its end was seen is lost with it.
    wait_until(lambda: ahead._planner is not None and ahead._planner.ended, ALL_S, "its end to be seen")
    assert not process.is_running(), "it was not reaped"
    assert ahead.left
    found = [ahead.find(LARGE, LARGE, event.members(MANY)) for event in events(MANY, MANY[0])]
    assert found.count(None) == ahead.left
    ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    wait_for_all(ahead)
    assert ahead.find(HOME, HOME, WORKERS[:3]) is not None
    assert the_planner().pid != process.pid


@pytest.mark.parametrize("stopped", [False, True])
def test_nothing_is_left_once_it_is_closed(ahead: Ahead, stopped: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    begin_large(ahead)
    process = the_planner()
    if stopped:
        # Nobody waits for one that does not get to end by itself.
        monkeypatch.setattr("elaunch.policy.ahead_process.CLOSE_S", 300.0)
        process.send_signal(signal.SIGSTOP)
    ahead.close()
    assert not process.is_running()
    assert ahead.find(HOME, HOME, WORKERS[:3]) is None
    ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    assert planners() == []
    ahead.close()


def test_what_cannot_be_started_is_a_miss(monkeypatch: pytest.MonkeyPatch, ahead: Ahead) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    ahead.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    assert ahead.find(HOME, HOME, WORKERS[:3]) is None


def test_a_fork_of_the_process_leaves_it_alone(inline: Ahead, monkeypatch: pytest.MonkeyPatch) -> None:
    inline.begin(HOME, HOME, WORKERS, WORKERS[0], PROFILE)
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert inline.find(HOME, HOME, WORKERS[:3]) is None
        inline.begin(HOME, HOME, WORKERS, WORKERS[1], PROFILE)
        inline.close()
    assert inline.find(HOME, HOME, WORKERS[:3]) is not None


PROGRAM = """
import os, sys, time
from elaunch.plan import symmetric
from elaunch.policy.ahead import Ahead
from elaunch.policy.profile import LayerProfile, Profile

workers = [f"n{number}/0#0" for number in range(64)]
plan = symmetric(workers, 32, 128, 1, dp=8, pp=8)
ahead = Ahead()
ahead.begin(plan, plan, workers, workers[0], Profile("", (LayerProfile(1.0, 2.0, 1, 1, 1, 1),) * 32, 1, 1e9, 0.0))
print("began", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
"""


@pytest.mark.parametrize("killed", [True, False])
def test_the_process_does_not_outlive_its_parent(spawn: Spawner, tmp_path: Path, killed: bool) -> None:
    end = tmp_path / "end"
    parent = spawn.python("-c", PROGRAM, end)
    parent.wait_for_text("began\n", ALL_S)
    process = the_planner(parent.pid)
    if killed:
        parent.signal(signal.SIGKILL)
    else:
        end.touch()
    parent.wait(ALL_S)
    wait_until(lambda: not is_running(process.pid), ALL_S, "the process to end")
    assert parent.text() == "began\n"


def test_a_process_that_cannot_be_written_to_is_replaced(capfd: pytest.CaptureFixture[str]) -> None:
    process = Process(lambda line: None)
    process.send("no job")  # type: ignore[arg-type]
    wait_until(lambda: process.ended, 20, "its end")
    assert "thread elaunch-ahead-write died: AttributeError" in capfd.readouterr().err
    process.close()
    assert not is_running(process.pid)


def test_a_process_whose_answers_cannot_be_taken_ends(capfd: pytest.CaptureFixture[str]) -> None:
    def took(line: bytes) -> None:
        raise ZeroDivisionError("a defect")

    process = Process(took)
    job = PlanningRequest(1, "", "", WORKERS, "", "", (MembershipChange(),))
    process.send(job)
    wait_until(lambda: process.ended, 60, "its end")
    process.close()
    assert "thread elaunch-ahead-read died: ZeroDivisionError: a defect" in capfd.readouterr().err
    assert not is_running(process.pid)
