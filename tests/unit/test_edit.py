"""What nodes are told of a change: with the generation before it makes the one after, or that is read as a whole."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.membership import Generation, GenerationStage, RequestedPlan, Worker
from elaunch.rendezvous.rules.edit import GenerationEdit, edit_between, follow

repeatable = settings(deadline=None, derandomize=True)
SIZE = 1000
ALL = tuple(Worker(f"n{number:04d}/0#0", f"n{number:04d}", 0, f"10.0.0.1:{1 + number}") for number in range(SIZE + 10))
plans = st.sampled_from([RequestedPlan(), RequestedPlan("a plan", "1"), RequestedPlan("another", "2")])
roles = st.sampled_from([(), (("n0000", "trainer"),)])


def through_json(edit: GenerationEdit) -> GenerationEdit:
    return from_json(GenerationEdit, to_json(edit))


@repeatable
@given(st.sets(st.integers(0, 9)), st.sets(st.integers(0, 9)), st.permutations(range(9)), plans, plans, roles, roles)
def test_whoever_knows_the_generation_before_has_the_one_after(
    before: set[int],
    leave: set[int],
    others: list[int],
    plan: RequestedPlan,
    next_plan: RequestedPlan,
    some_roles: tuple[tuple[str, str], ...],
    next_roles: tuple[tuple[str, str], ...],
) -> None:
    workers = tuple(ALL[number] for number in sorted(before))
    former = Generation(4, GenerationStage.TRAIN, workers, roles=some_roles, requested_plan=plan)
    joiners = tuple(ALL[10 + number] for number in others[: len(leave)])
    stay = tuple(ALL[number] for number in sorted(before - leave))
    after = replace(former, number=5, workers=(*stay, *joiners), cause="x", roles=next_roles, requested_plan=next_plan)
    edit = through_json(edit_between(former, after))
    assert follow(former, edit) == after
    assert follow(None, edit) is None
    assert follow(replace(former, number=3), edit) is None
    assert follow(replace(former, workers=(*workers, ALL[30])), edit) is None, "it is not what the leader knew"


def test_another_order_or_address_and_a_step_back_are_read_as_a_whole() -> None:
    former = Generation(4, GenerationStage.TRAIN, ALL[:3])
    for after in (
        replace(former, number=5, workers=ALL[2::-1]),
        replace(former, number=5, workers=(replace(ALL[0], address="10.0.0.2:1"), *ALL[1:3])),
        replace(former, number=3),
    ):
        edit = through_json(edit_between(former, after))
        assert (edit.former, edit.after.number, edit.after.workers) == (0, after.number, ())
        assert follow(former, edit) is None


def test_what_is_only_settled_keeps_its_number_and_all_of_its_workers() -> None:
    former = Generation(4, GenerationStage.TRAIN, ALL[:3], former_seats=(("n0", "10.0.0.1:1"),))
    settled = replace(former, former_seats=())
    edit = through_json(edit_between(former, settled))
    assert (edit.former, edit.joined, edit.without) == (4, (), ())
    assert follow(former, edit) == follow(settled, edit) == settled


def test_one_change_is_told_in_few_bytes_however_many_workers_there_are() -> None:
    plan = RequestedPlan("costs " * 1000, "1")
    former = Generation(4, GenerationStage.TRAIN, ALL[:SIZE], requested_plan=plan)
    after = replace(former, number=5, workers=(*ALL[: SIZE - 1], ALL[SIZE]))
    assert len(to_json(edit_between(former, after))) < 1000
    assert len(to_json(after)) > 80 * SIZE
