"""What a member and a data-parallel job are made of, each part alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from elaunch.errors import GenerationChanged, StateError
from elaunch.plan.tiling import Plan
from elaunch.rendezvous.membership import Generation, GenerationStage, Worker
from elaunch.wire import AGAIN, MOST_NAMES, Finished, Logged, Message, Report
from elaunch.workers.data_parallel.layout import SampleLayout, Share
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.member.notes import Notes, pack
from elaunch.workers.member.reports import (
    AGREED,
    GONE,
    KEPT,
    LAST_STEP,
    MOST_KEPT,
    TELLERS,
    TOLD,
    StepReports,
    tells_again,
)
from elaunch.workers.runtime import Member

MEMBERS = ("a/0#0", "a/1#0", "a/2#0")
LAYOUT = SampleLayout(20, 3, whole_shares=False, n_samples=100, seed=7, shuffle=True)


class Client:
    """An agent's end that keeps what it is told."""

    token, host, local_rank, min_nodes, elastic = "", "", 0, 1, False

    def __init__(self, worker: str = MEMBERS[0]) -> None:
        self.worker = worker
        self.logged: Logged | None = None
        self.waited = 0.0
        self.sent: list[Message] = []
        self.closed = False

    def send(self, message: Message) -> None:
        self.sent.append(message)

    def listen(self, on_generation: Any) -> None: ...

    def newest(self) -> None: ...

    def wait_logged(self, generation: int, step: int, timeout_s: float) -> None:
        self.waited += timeout_s

    def steps(self) -> list[tuple[int, bool]]:
        """The steps that it was told, and whether again."""
        reports = [one.fields for one in self.sent if isinstance(one, Report)]
        return [(fields["step"], AGAIN in fields) for fields in reports]

    def close(self) -> None:
        self.closed = True


class Links:
    """A transport without links."""

    worker, address = MEMBERS[0], "simulated:1"

    def __init__(self) -> None:
        self.interrupted: list[int] = []
        self.closed = False

    def interrupt(self, generation: int) -> None:
        self.interrupted.append(generation)

    def watch(self, watcher: Callable[[int], None]) -> None:
        self.watcher = watcher

    def close(self) -> None:
        self.closed = True


class Team:
    """A group, as far as reports need it; the others bring `others` when it reduces."""

    def __init__(self, rank: int, members: tuple[str, ...] = MEMBERS, others: tuple[bytes, ...] = ()) -> None:
        self.rank, self.members, self.size, self.others = rank, members, len(members), others

    def reduce_bytes(self, payload: bytes, combine: Callable[[Sequence[bytes]], bytes]) -> bytes:
        return combine([payload, *self.others])


class Framework:
    """Hooks that only vote."""

    def vote(self) -> Vote:
        return Vote(step=4, facts={"mine": 1})


def test_notes_of_selectors_and_frameworks_come_apart_again() -> None:
    notes = Notes({0: pack({"pace": 0.5}, b"\0loss"), 1: pack({}, b"only"), 3: pack({"closer": True}, b"")})
    assert notes.of_frameworks(5) == [b"\0loss", b"only", b"", b"", b""]
    assert notes.of_selectors("abcde") == {"a": {"pace": 0.5}, "b": {}, "c": {}, "d": {"closer": True}, "e": {}}


def test_who_has_nothing_to_note_sends_nothing() -> None:
    assert pack({}, b"") == b""
    assert Notes().of_frameworks(2) == [b"", b""]
    assert Notes().of_selectors("ab") == {"a": {}, "b": {}}


def test_the_first_member_reports_a_step_and_the_others_may_have_to() -> None:
    first, other = Client(), Client()
    reports = [StepReports(first), StepReports(other)]  # type: ignore[arg-type]
    for rank, one in enumerate(reports):
        one.tell(Team(rank), 2, 5, 0.25, range(10))  # type: ignore[arg-type]
    assert other.sent == []
    (report,) = first.sent
    assert isinstance(report, Report)
    told = {name: report.fields[name] for name in ("generation", "step", "loss", "samples", "members")}
    assert told == {"generation": 2, "step": 5, "loss": 0.25, "samples": 10, "members": 3}
    reports[1].tell_again(5)  # so many have committed, and it knows of one more
    assert other.sent == []
    reports[1].tell_again(6, ["a/0#0"])
    assert [(one.fields["step"], one.fields[AGAIN]) for one in other.sent if isinstance(one, Report)] == [
        (5, ["a/0#0"])
    ]


def verdict(told: Sequence[int | None], committing: tuple[int, ...] = (), step: int = 6, told_by: str = "") -> Verdict:
    members = tuple(range(len(told)))
    return Verdict(step, committing, members, (), facts=tuple({TOLD: one and [one, told_by]} for one in told))


@pytest.mark.parametrize(
    ("told", "committing", "teller"),
    [
        ((5, None), (), None),
        ((None, 5), (0,), None),
        ((None, None), (0,), 1),
        ((None, 4), (), 0),
        ((4, None), (), 0),
    ],
)
def test_a_step_that_no_member_has_reported_is_reported_by_one_that_passed_its_barrier(
    told: Sequence[int | None], committing: tuple[int, ...], teller: int | None
) -> None:
    generation = Generation(3, GenerationStage.TRAIN, tuple(Worker(one, one[0], 0) for one in MEMBERS[:2]))
    tells = [tells_again(verdict(told, committing), generation, one, None) for one in MEMBERS[:2]]
    assert tells == [place == teller for place in range(2)]
    assert not any(tells_again(verdict((None, None), step=0), generation, one, None) for one in MEMBERS[:2])
    for known in ((5, ""), (6, "")):  # the second is the step after, which committed only on workers that died
        assert not any(tells_again(verdict(told, committing), generation, one, known) for one in MEMBERS[:2])


@pytest.mark.parametrize(("told_by", "teller"), [(MEMBERS[0], None), ("", None), ("lost/0#0", 0), ("a/0#9", 0)])
def test_the_report_of_a_worker_that_is_gone_counts_only_where_a_log_is_known_to_have_it(
    told_by: str, teller: int | None
) -> None:
    generation = Generation(3, GenerationStage.TRAIN, tuple(Worker(one, one[0], 0) for one in MEMBERS[:2]))
    tells = [tells_again(verdict((5, 5), told_by=told_by), generation, one, (5, told_by)) for one in MEMBERS[:2]]
    assert tells == [place == teller for place in range(2)]


@pytest.mark.parametrize(
    ("logged", "is_planned", "told"),
    [
        (0, False, None),
        (6, False, (5, "")),  # the first member died after it had reported the last step
        (7, False, (6, "")),  # the next one had committed, on workers that died
        (5, False, None),
        (9, False, None),  # before the job went back to a checkpoint
        (0, True, (5, "b")),
        (7, True, (6, "")),
    ],
)
def test_an_agreement_shows_what_the_logs_have(logged: int, is_planned: bool, told: tuple[int, str] | None) -> None:
    report = StepReports(Client())  # type: ignore[arg-type]
    report.learn(6, logged, is_planned, "b")
    assert report.told == told


@pytest.mark.parametrize(("logged", "told"), [(6, (5, "")), (5, (5, "b"))])
def test_a_first_member_that_leaves_has_reported_the_last_step_only_if_its_agent_says_so(
    logged: int, told: tuple[int, str]
) -> None:
    report = StepReports(Client())  # type: ignore[arg-type]
    report.settle(Team(1, MEMBERS, (logged.to_bytes(8, "big"),)))  # type: ignore[arg-type]
    report.learn(6, 0, is_planned=True, first="b")
    assert report.told == told


def test_a_planned_change_right_after_an_agreement_shows_nothing_of_a_step_that_another_was_to_report() -> None:
    """That one may never have come to the agreement; the next step that commits makes it good."""
    client = Client()
    report = StepReports(client)  # type: ignore[arg-type]
    generation = Generation(3, GenerationStage.TRAIN, tuple(Worker(one, one[0], 0) for one in MEMBERS[:2]))
    report.learn(6, 0, is_planned=False, first="a/0#0")
    report.agree(verdict((None, None), (0,)), generation)
    report.learn(6, 0, is_planned=True, first="a/0#0")
    assert report.told is None
    report.tell(Team(0), 3, 6, 0.25, range(10))  # type: ignore[arg-type]
    report.learn(7, 0, is_planned=True, first="a/0#0")
    assert report.told == (6, "a/0#0")


def test_after_the_job_went_back_what_logs_had_of_its_steps_says_nothing_of_those_done_again() -> None:
    client = Client()
    report = StepReports(client)  # type: ignore[arg-type]
    report.learn(13, 13, is_planned=False)
    report.forget()
    report.learn(12, 13, is_planned=True, first="a/0#0")  # somebody joins
    report.tell(Team(0), 5, 12, 0.25, range(10))  # type: ignore[arg-type]
    assert [one.fields["step"] for one in client.sent if isinstance(one, Report)] == [12]
    report.learn(16, 17, is_planned=False)  # now it is of these
    assert report.told == (16, "")


def test_a_step_that_a_log_has_is_done_again_without_a_report() -> None:
    client = Client()
    report = StepReports(client)  # type: ignore[arg-type]
    report.learn(5, 6, False)
    for step in (5, 6):
        report.tell(Team(0), 3, step, 0.25, range(10))  # type: ignore[arg-type]
    assert [one.fields["step"] for one in client.sent if isinstance(one, Report)] == [6]


def test_after_a_checkpoint_a_step_may_have_to_be_reported_once_more() -> None:
    report = StepReports(Client())  # type: ignore[arg-type]
    report.tell(Team(0), 2, 5, 0.25, range(10))  # type: ignore[arg-type]
    assert report.facts()[TOLD][0] == 5
    report.forget()
    assert report.facts() == {LAST_STEP: None, TOLD: None, KEPT: [0, None], GONE: [], TELLERS: ["", ""], AGREED: 0}


APART = ("a/0#0", "b/0#0", "c/0#0")
"""Members, each on a node of its own."""


def reports_of(steps: int, known: int = 0) -> tuple[list[Client], list[StepReports]]:
    """Members that have committed so many steps, of which they know that so many stand in a log."""
    clients = [Client(one) for one in APART]
    reports = [StepReports(one) for one in clients]  # type: ignore[arg-type]
    for step in range(steps):
        for rank, one in enumerate(reports):
            one.tell(Team(rank, APART), 2, step, 0.25, range(10))  # type: ignore[arg-type]
    for one in reports:
        one.hear(known)
    return clients, reports


def agree(
    reports: Sequence[StepReports],
    steps: int,
    members: tuple[str, ...],
    left: str = "",
    is_planned: bool = False,
    unsettled: tuple[str, ...] = (),
    committing: tuple[int, ...] = (),
) -> None:
    """The members of the next generation agree that so many steps have committed, on some of them only now.

    They leave a generation with this first member; a newcomer among them knows of no step.
    """
    workers = tuple(Worker(one, one[0], 0) for one in members)
    generation = Generation(3, GenerationStage.TRAIN, workers, aborts_step_before=2 if is_planned else 3)
    facts = tuple(one.facts() if one.last is None else one.facts(left, 2) for one in reports)
    places: dict[bool, list[int]] = {True: [], False: []}
    for place, one in enumerate(reports):
        places[one.last is not None].append(place)
    found = Verdict(steps, committing, tuple(places[True]), tuple(places[False]), facts=facts, unsettled=unsettled)
    for one in reports:
        one.inherit(found)
        one.agree(found, generation)


def test_the_log_of_a_member_that_leaves_right_after_an_agreement_may_have_the_step() -> None:
    clients, reports = reports_of(8, known=7)
    agree(reports, 8, APART)
    for one in reports[1:]:
        one.learn(8, 0, is_planned=True, first=APART[0])
    agree(reports[1:], 8, APART[1:], left=APART[0], is_planned=True)
    (said,) = [one for one in clients[1].sent if isinstance(one, Report)]
    assert (said.fields["step"], said.fields[AGAIN]) == (7, [APART[0]])


def test_who_has_reported_a_step_is_known_after_it_has_left_though_it_was_not_the_first_any_more() -> None:
    clients, reports = reports_of(8, known=7)
    agree([reports[1], reports[0], reports[2]], 8, (APART[1], APART[0], APART[2]))
    for one in reports[1:]:
        one.learn(8, 0, is_planned=True, first=APART[1])
    agree(reports[1:], 8, APART[1:], left=APART[1], is_planned=True)
    (said,) = [one for one in clients[1].sent if isinstance(one, Report)]
    assert (said.fields["step"], said.fields[AGAIN]) == (7, [APART[0]])


@pytest.mark.parametrize(("is_planned", "again"), [(True, None), (False, [APART[0]])])
def test_a_newcomer_in_the_place_of_a_first_member_that_left_by_plan_asks_nobody_for_its_log(
    is_planned: bool, again: list[str] | None
) -> None:
    """That one has committed nothing that the others have not, and its line would wait for its end."""
    _, reports = reports_of(8)
    late = Client("d/0#0")
    newcomer = StepReports(late)  # type: ignore[arg-type]
    for one in reports[1:]:
        one.learn(8, 0, is_planned, first=APART[0])
    members = ("d/0#0", *APART[1:])
    agree([newcomer, *reports[1:]], 8, members, APART[0], is_planned)
    newcomer.tell(Team(0, members), 3, 8, 0.25, range(10))  # type: ignore[arg-type]
    (said,) = [one for one in late.sent if isinstance(one, Report)]
    assert (said.fields["step"], said.fields.get(AGAIN)) == (8, again)


def test_who_was_lost_after_an_agreement_that_others_did_not_come_to_may_have_reported_the_step() -> None:
    """It had passed a barrier that the first member had not, so there it was to report that step."""
    clients, reports = reports_of(8)
    agree(reports[:2], 8, APART[:2], left=APART[0], unsettled=(APART[2],))
    reports[0].tell(Team(0, APART[:2]), 4, 8, 0.25, range(10))  # type: ignore[arg-type]
    (*_, said) = [one for one in clients[0].sent if isinstance(one, Report)]
    assert (said.fields["step"], said.fields[AGAIN]) == (8, [APART[2]])

    clients, reports = reports_of(8, known=7)
    agree(reports[1:2], 8, APART[1:2], left=APART[0], unsettled=(APART[2],))
    (said,) = [one for one in clients[1].sent if isinstance(one, Report)]
    assert (said.fields["step"], said.fields[AGAIN]) == (7, [APART[0], APART[2]])


def test_the_likeliest_are_named_where_more_may_have_reported_a_step_than_a_report_names() -> None:
    clients, reports = reports_of(8)
    lost = tuple(f"a/{n}#0" for n in range(1, 2 * MOST_NAMES))
    agree(reports[1:], 8, APART[1:], left=APART[0], unsettled=lost)
    reports[1].tell(Team(0, APART[1:]), 4, 8, 0.25, range(10))  # type: ignore[arg-type]
    named = [one for one in clients[1].sent if isinstance(one, Report)][-1].fields[AGAIN]
    assert (named[0], len(named)) == (APART[0], MOST_NAMES)


def test_steps_that_a_lost_agent_had_not_written_are_reported_by_one_of_the_others() -> None:
    clients, reports = reports_of(8, known=5)
    agree(reports[1:], 8, APART[1:])
    assert clients[1].steps() == [(5, True), (6, True), (7, True)]
    assert clients[2].steps() == []
    agree(reports[2:], 8, APART[2:])  # its agent is lost, too, before it says that it has written them
    assert clients[2].steps() == [(5, True), (6, True), (7, True)]
    said = Logged(2, 7)
    clients[2].logged = said
    assert reports[2].heard() == 8
    assert reports[2].facts()[KEPT] == [8, None]


def test_a_node_that_came_back_has_another_agent_which_may_not_have_the_lines_of_the_lost_one() -> None:
    clients, reports = reports_of(8, known=5)
    back = Client("a/0#3")
    newcomer = StepReports(back)  # type: ignore[arg-type]
    agree([newcomer, *reports[1:]], 8, (back.worker, *APART[1:]))
    assert clients[1].steps() == [(5, True), (6, True), (7, True)]
    assert back.steps() == clients[2].steps() == []


def test_a_lost_step_is_reported_with_the_names_of_all_that_may_have_reported_it() -> None:
    clients, reports = reports_of(8, known=7)
    agree(reports[1:], 8, APART[1:], left=APART[0])  # the second member reports it again, to an agent that is lost
    for rank, one in enumerate(reports[1:]):
        one.tell(Team(rank, APART[1:]), 3, 8, 0.25, range(10))  # type: ignore[arg-type]
    agree(reports[2:], 9, APART[2:], left=APART[1])
    named = {one.fields["step"]: one.fields[AGAIN] for one in clients[2].sent if isinstance(one, Report)}
    assert named == {7: [APART[1], APART[0]], 8: [APART[1]]}


def test_the_log_of_the_first_says_nothing_of_a_step_that_another_node_was_told() -> None:
    clients, reports = reports_of(7, known=7)
    reports[1].tell(Team(1, APART), 2, 7, 0.25, range(10))  # type: ignore[arg-type]  # it alone has passed that barrier
    found = Verdict(8, (0, 2), (0, 1, 2), (), facts=tuple(one.facts(APART[0], 2) for one in reports))
    generation = Generation(3, GenerationStage.TRAIN, tuple(Worker(one, one[0], 0) for one in APART))
    for rank, one in enumerate(reports):
        one.inherit(found)
        one.agree(found, generation)
        one.tell(Team(rank, APART), 3, 8, 0.25, range(10))  # type: ignore[arg-type]
    assert clients[1].steps() == [(7, True)]
    clients[0].logged = Logged(3, 8)
    assert [one.heard() for one in reports] == [7, 7, 7]
    clients[1].logged = Logged(2, 7)
    assert [one.heard() for one in reports] == [7, 8, 7]
    reports[0].hear(8)
    assert reports[0].heard() == 9
    agree(reports[2:], 9, APART[2:], left=APART[0])
    assert clients[2].steps() == [(7, True), (8, True)]


@pytest.mark.parametrize(("logged", "again"), [(8, []), (7, [7]), (3, [5, 6, 7])])
def test_what_the_log_of_a_node_without_workers_has_is_not_reported_again(logged: int, again: list[int]) -> None:
    clients, reports = reports_of(8, known=5)
    for one in reports[1:]:
        one.learn(8, logged, is_planned=False)  # 3: before the job went back to a checkpoint
    agree(reports[1:], 8, APART[1:])
    assert clients[1].steps() == [(step, True) for step in again]
    assert clients[2].steps() == []


def test_what_an_agent_that_lives_was_told_is_not_reported_again() -> None:
    clients, reports = reports_of(8, known=5)
    agree([reports[0], reports[2]], 8, (APART[0], APART[2]))  # the worker of another node has died
    assert [client.steps()[8:] for client in clients] == [[], [], []]


def test_a_newcomer_reports_the_last_step_before_it_came_if_all_others_are_lost() -> None:
    _, reports = reports_of(8, known=7)
    late = Client("d/0#0")
    newcomer = StepReports(late)  # type: ignore[arg-type]
    newcomer.tell_again(8)
    assert late.steps() == []
    agree([*reports, newcomer], 8, (*APART, "d/0#0"), APART[0], is_planned=True)
    for rank, one in enumerate([*reports, newcomer]):
        one.tell(Team(rank, (*APART, "d/0#0")), 3, 8, 0.25, range(10))  # type: ignore[arg-type]
    agree([newcomer], 9, ("d/0#0",), APART[0])
    assert late.steps() == [(7, True), (8, True)]


def test_a_member_that_came_late_leaves_it_to_one_that_knows_the_lost_steps() -> None:
    clients, reports = reports_of(6, known=2)
    late = Client(APART[1])
    newcomer = StepReports(late)  # type: ignore[arg-type]
    newcomer.tell(Team(1, APART), 2, 5, 0.25, range(10))  # type: ignore[arg-type]
    agree([newcomer, reports[2]], 6, APART[1:])
    assert clients[2].steps() == [(2, True), (3, True), (4, True)]
    assert late.steps() == [(5, True)]


@pytest.mark.parametrize(("generation", "known"), [(2, 5), (1, 0)])
def test_only_what_an_agent_has_written_of_this_generation_counts(generation: int, known: int) -> None:
    clients, reports = reports_of(6)
    clients[0].logged = Logged(generation, 4)
    assert reports[0].heard() == known
    assert reports[0].facts()[KEPT] == [known, known]


def test_reports_that_are_kept_are_bounded() -> None:
    _, (first, *_) = reports_of(MOST_KEPT + 10)
    assert first.facts()[KEPT] == [0, 10]


@pytest.mark.parametrize(("known", "told"), [(3, []), (1, [(1, True), (2, True)])])
def test_at_the_end_another_node_reports_what_the_first_agent_does_not_say_to_have_written(
    known: int, told: list[tuple[int, bool]]
) -> None:
    clients, reports = reports_of(3)
    for rank, one in enumerate(reports):
        one.end(Team(rank, APART, (known.to_bytes(8, "big"),)))  # type: ignore[arg-type]
    assert [client.waited > 0 for client in clients] == [True, False, False]
    assert clients[1].steps() == told
    assert clients[2].steps() == []


def test_whoever_has_reported_the_last_step_waits_at_the_end_for_its_agent_to_have_written_it() -> None:
    clients, reports = reports_of(8)
    for rank in (1, 2):  # they have passed the barrier of the last step, which the first member has not
        reports[rank].tell(Team(rank, APART), 2, 8, 0.25, range(10))  # type: ignore[arg-type]
    agree(reports, 9, APART, left=APART[0], committing=(0,))
    assert clients[1].steps()[-1] == (8, True)
    for rank, one in enumerate(reports):
        one.settle(Team(rank, APART, ((9).to_bytes(8, "big"),)))  # type: ignore[arg-type]
    assert [client.waited > 0 for client in clients] == [False, True, False]


@pytest.mark.parametrize("finished", [False, True])
def test_who_has_come_to_the_end_ends_where_another_has_finished(
    finished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it, nobody might have all of the state; but no step is left that would need it."""
    client = Client()
    member = Member(client, Framework(), transport=Links())  # type: ignore[arg-type]
    settled, ends = list[int](), iter([GenerationChanged(3), None])

    def end(group: Any) -> None:
        if (error := next(ends)) is not None:
            raise error

    generation = Generation(3, GenerationStage.TRAIN, finished=finished)
    for name, value in (("group", Team(0)), ("generation", generation)):
        monkeypatch.setattr(Member, name, value)
    monkeypatch.setattr(member, "settle", lambda: settled.append(3))
    monkeypatch.setattr(member, "agree", lambda error: None)
    monkeypatch.setattr(member._reports, "end", end)
    assert member.finish()
    assert client.sent == [Finished()]
    assert len(settled) == (1 if finished else 2)
    member.close()


def test_shares_tile_a_step_and_their_digests_add_up() -> None:
    plan = LAYOUT.even_plan(MEMBERS)
    shares = [Share.of(plan, member) for member in MEMBERS]
    assert [sample for share in shares for run in share.micro_batches for sample in run] == list(range(20))
    assert all(share.counts for share in shares)
    assert {sum(share.coverage for share in shares) % (1 << 64)} == {share.whole_coverage for share in shares}


def test_a_member_without_units_computes_a_micro_batch_that_does_not_count() -> None:
    share = Share.of(LAYOUT.plan({MEMBERS[0]: 7, MEMBERS[1]: 0}), MEMBERS[1])
    assert share.micro_batches == (range(3),)
    assert not share.counts
    assert share.coverage == 0


@pytest.mark.parametrize(
    ("other", "fits"),
    [
        (LAYOUT, True),
        (SampleLayout(20, 3, False, 50, 8, False), True),
        (SampleLayout(20, 4, False, 100, 7, True), False),
        (SampleLayout(24, 3, False, 100, 7, True), False),
        (SampleLayout(20, 3, True, 100, 7, True), False),
    ],
)
def test_a_plan_fits_steps_of_its_sizes(other: SampleLayout, fits: bool) -> None:
    assert other.fits(Plan.parse(str(LAYOUT.even_plan(MEMBERS)))) is fits


def test_a_member_runs_over_links_that_it_is_given() -> None:
    client, links = Client(), Links()
    member = Member(client, Framework(), transport=links)  # type: ignore[arg-type]
    assert not member.joined
    assert not member.entered
    with pytest.raises(StateError, match="call join"):
        member.group  # noqa: B018
    with pytest.raises(StateError, match="use_plans"):
        member.choose(None, None, Verdict(0, (), (0,), ()))  # type: ignore[arg-type]
    member.close()
    member.close()
    assert len(links.interrupted) == 1
    assert links.closed
    assert client.closed
