"""Whether members hold the same state, and what they are told where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from elaunch.errors import StateError, UsageError
from elaunch.replica_check import ReplicaCheck, parse
from elaunch.workers import replicas
from elaunch.workers.barrier import StepRecord
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.data_parallel import calls
from elaunch.workers.data_parallel.calls import StepCalls
from elaunch.workers.data_parallel.watch import ReplicaWatch
from elaunch.workers.layers.change.compare import Odd, odd_places
from elaunch.workers.replicas import ReplicasDiffer
from tests.unit.comm_crew import crew, outcomes, together

Objects = dict[str, Any]


def trained(steps: int = 2) -> Objects:
    """A model with a buffer, an optimizer with moments, a schedule; and something that is not compared."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(steps):
        model(torch.ones(2, 3) * torch.tensor([[1.0], [2.0]])).square().sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler, "own": _Own()}


class _Own:
    """State that may differ, such as a meter."""

    def __init__(self) -> None:
        self.seen = torch.rand(())

    def state_dict(self) -> dict[str, Any]:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.seen = state["seen"]


class TestSetting:
    @pytest.mark.parametrize(
        ("text", "meant"),
        [
            (None, ReplicaCheck(500, False)),
            ("", ReplicaCheck(500, False)),
            ("off", ReplicaCheck(0, False)),
            ("7", ReplicaCheck(7, False)),
            ("7,repair", ReplicaCheck(7, True)),
        ],
    )
    def test_it_is_a_number_of_steps_and_what_to_do(self, text: str | None, meant: ReplicaCheck) -> None:
        assert parse(text) == meant
        assert parse(str(meant)) == meant

    @pytest.mark.parametrize("text", ["0", "-1", "often", "7,", "7,mend", "repair", "off,repair"])
    def test_all_else_is_refused(self, text: str) -> None:
        with pytest.raises(UsageError, match=f"--check-replicas={text}: expected off, or a number of steps"):
            parse(text, "--check-replicas")


class TestDigests:
    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.complex64]
    )
    @pytest.mark.parametrize("length", [1, 7, 64])
    def test_one_changed_bit_changes_it_and_the_layout_in_memory_does_not(
        self, dtype: torch.dtype, length: int
    ) -> None:
        value = torch.arange(length).to(dtype)
        (digest,) = replicas.digests_of_tensors({"x": value}).values()
        elsewhere = torch.empty(length + 3, dtype=dtype)[3:].copy_(value)
        assert replicas.digests_of_tensors({"x": elsewhere}) == {"x": digest}
        if length > 1:
            assert replicas.digests_of_tensors({"x": torch.stack((value, value), 1)[:, 0]}) == {"x": digest}
        changed = value.clone()
        changed.view(-1).view(torch.uint8)[-1] ^= 1
        assert replicas.digests_of_tensors({"x": changed}) != {"x": digest}

    def test_scalars_and_empty_tensors_have_one(self) -> None:
        found = replicas.digests_of_tensors({"scalar": torch.tensor(3.0), "none": torch.empty(0)})
        assert found["none"] == 0
        assert found["scalar"] != 0

    def test_they_cover_parameters_buffers_moments_and_rates_and_nothing_else(self) -> None:
        before = replicas.digests_of_objects(trained())
        assert replicas.digests_of_objects(trained()) == before
        changes: dict[str, Callable[[Objects], object]] = {
            "model.0.weight": lambda one: one["model"][0].weight.data.mul_(2),
            "model.1.running_mean": lambda one: one["model"][1].running_mean.add_(1),
            "optimizer.state.0.exp_avg": lambda one: next(iter(one["optimizer"].state.values()))["exp_avg"].add_(1),
            "optimizer": lambda one: one["optimizer"].param_groups[0].update(lr=0.7),
            "scheduler": lambda one: one["scheduler"].step(),
        }
        for name, change in changes.items():
            objects = trained()
            change(objects)
            after = replicas.digests_of_objects(objects)
            assert name in [key for key in before if before[key] != after[key]], name
            assert replicas.whole(after) != replicas.whole(before)


def test_the_odd_ones_are_those_that_are_not_as_most() -> None:
    told = [{"a": 1, "b": 2}, {"a": 1, "b": 3}, None, {"a": 1, "b": 2}]
    assert replicas.odd_ones(told) == ((0, 3), (1,), "b")
    # Of two states that equally many have, that of the first member counts.
    assert replicas.odd_ones([{"a": 2}, {"a": 1}]) == ((0,), (1,), "a")
    # One may have a tensor that others lack.
    assert replicas.odd_ones([{"a": 2}, {"a": 2, "b": 1}, {"a": 2}]) == ((0, 2), (1,), "b")


def test_of_each_place_that_differs_the_first_of_most_is_the_source() -> None:
    told = [{"0 0/1": 1, "10 0/1": 5}, {"0 0/1": 1, "2 0/1": 7}, {"2 0/1": 8, "10 0/1": 6, "3 0/1": 1}, {"10 0/1": 6}]
    assert list(odd_places(told).items()) == [("2 0/1", Odd(1, (2,))), ("10 0/1", Odd(2, (0,)))]
    assert odd_places(told[:2]) == {}


def test_the_text_names_tensor_workers_and_steps() -> None:
    told = [{"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 3, "c": 4}, {"a": 1, "b": 2, "c": 3}]
    found = replicas.text(("n/0#0", "n/1#0", "n/2#0"), told, 200, 100)
    assert found == (
        "the workers' replicas differ after 200 steps (after 100 they were the same): `b` is not the same on n/1#0 as "
        "on n/0#0, n/2#0, as do 1 more of 3 parts of the state"
    )


@pytest.fixture(scope="module")
def transports() -> Iterator[list[Transport]]:
    with crew(3) as made:
        yield made


_generations = iter(range(1, 1 << 30))


def groups(transports: list[Transport]) -> list[Group]:
    generation = next(_generations)
    members = [one.worker for one in transports]
    for one in transports:
        one.interrupt(generation)
    return [Group(one, generation, members) for one in transports]


class TestWatch:
    def watches(self, check: ReplicaCheck) -> list[ReplicaWatch]:
        return [ReplicaWatch(check) for _ in range(3)]

    def test_what_is_the_same_is_compared_when_it_is_due(self, transports: list[Transport]) -> None:
        made, watches = groups(transports), self.watches(ReplicaCheck(5))
        boundaries = [(0, True), (4, False), (4, True), (5, False)]
        due = [watches[0].is_due(made[0], step, saving) for step, saving in boundaries]
        assert due == [False, False, True, True]
        calls_ = [partial(watch.at_boundary, group, trained(), 5, False) for watch, group in zip(watches, made)]
        assert together(calls_) == [None] * 3
        assert not watches[0].is_due(made[0], 5, False)  # once in a generation
        assert watches[0].is_due(groups(transports)[0], 5, False)

    def test_a_difference_ends_it_on_all_members(self, transports: list[Transport]) -> None:
        made, watches = groups(transports), self.watches(ReplicaCheck(5))
        objects = [trained(), trained(), trained()]
        objects[1]["model"][0].bias.data.add_(1)
        found = outcomes([partial(w.at_boundary, g, o, 5, False) for w, g, o in zip(watches, made, objects)])
        assert [type(one) for one in found] == [ReplicasDiffer] * 3
        assert "`model.0.bias` is not the same on a/1#0 as on a/0#0, a/2#0" in str(found[0])
        assert "they have not been compared before" in str(found[0])
        assert "job.steps(" in str(found[0])
        assert "step.number" in str(found[0]), "a script's own count of steps begins anew in a worker that joins"

    def test_or_says_who_gets_whose_state(self, transports: list[Transport]) -> None:
        made, watches = groups(transports), self.watches(ReplicaCheck(5, repair=True))
        objects = [trained(), trained(3), trained()]
        found = together([partial(w.at_boundary, g, o, 5, False) for w, g, o in zip(watches, made, objects)])
        assert {(one.sources, one.receivers) for one in found if one is not None} == {((0, 2), (1,))}
        assert None not in found

    def test_who_holds_nothing_has_no_say(self, transports: list[Transport]) -> None:
        made, watches = groups(transports), self.watches(ReplicaCheck(5))
        objects = [trained(), None, trained()]
        assert together([partial(w.compare, g, o, 5) for w, g, o in zip(watches, made, objects)]) == [None] * 3

    def test_when_it_is_off_nobody_is_asked(self, transports: list[Transport]) -> None:
        (group, *_), watch = groups(transports), ReplicaWatch(ReplicaCheck(0))
        assert watch.compare(group, trained(), 5) is None
        assert watch.at_boundary(group, trained(), 100, True) is None

    def step(self, watches: list[ReplicaWatch], step: int, generation: int) -> None:
        whole = StepRecord.of_all([StepRecord.at(step, effects=watch.calls.span) for watch in watches])
        for watch in watches:
            watch.committed(whole, generation)

    def test_a_step_that_ran_on_some_members_only_is_an_error(self, transports: list[Transport]) -> None:
        made, watches = groups(transports), self.watches(ReplicaCheck(100))
        generation = made[0].generation
        self.step(watches, 0, generation)
        for watch in watches:
            watch.calls.add("optimizer")
        self.step(watches, 1, generation)
        assert together([partial(w.at_boundary, g, trained(), 2, False) for w, g in zip(watches, made)]) == [None] * 3
        for watch in watches[1:]:
            watch.calls.add("optimizer")
        self.step(watches, 2, generation)
        found = outcomes([partial(w.at_boundary, g, trained(), 3, False) for w, g in zip(watches, made)])
        assert [type(one) for one in found] == [StateError] * 3
        assert str(found[0]).startswith(
            "in step 1, `optimizer.step()` took effect once on a/1#0, a/2#0; never on a/0#0: what changes the model"
        )

    def test_who_has_come_since_has_no_say(self, transports: list[Transport]) -> None:
        made, watches = groups(transports), self.watches(ReplicaCheck(100))
        self.step(watches[:2], 0, 7)
        for watch in watches[:2]:
            watch.calls.add("optimizer")
        self.step(watches, 1, made[0].generation)
        assert together([partial(w.at_boundary, g, trained(), 2, False) for w, g in zip(watches, made)]) == [None] * 3

    def test_who_was_not_at_that_barrier_is_not_waited_for(self, transports: list[Transport]) -> None:
        watches = self.watches(ReplicaCheck(100))
        self.step(watches, 0, 7)
        watches[0].calls.add("optimizer")
        self.step(watches, 1, 7)
        # The generation has changed: others may have committed that step by the agreement alone.
        assert ReplicaWatch.at_boundary(watches[0], groups(transports)[0], trained(), 2, False) is None


def test_calls_are_counted_from_a_commit_to_the_next() -> None:
    counted = StepCalls()
    counted.add("optimizer")
    assert not calls.differ(StepRecord.of_all([StepRecord.at(3, effects=counted.span)] * 2).effects)
    assert counted.committed() is None  # before its first commit it may have missed some
    counted.add("optimizer")
    counted.add("scheduler")
    assert counted.committed() == {"optimizer": 1, "scheduler": 1}
    assert counted.counts == {}
