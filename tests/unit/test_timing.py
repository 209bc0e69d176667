"""What is measured of the layers in a step that trains; the clock is a count that the layers move on."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elaunch.plan.executed import ExecutedAction, ExecutedPhase
from elaunch.plan.timeline import Action
from elaunch.policy.sample import Overheads
from elaunch.workers.barrier import StepRecord
from elaunch.workers.layers.chain.chain import Chain
from elaunch.workers.layers.model import Draw, build, describe
from elaunch.workers.layers.tensor_parallel import TPRank
from elaunch.workers.layers.timing import Stopwatch, Turn
from elaunch.workers.moments import HostTiming, TimedWork, timing_of

CPU = torch.device("cpu")


class Clock:
    """Stands until somebody moves it on."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


clock = Clock()


class _Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        if not x.is_meta:
            clock.now_s += forward_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        clock.now_s += ctx.backward_s
        return dy, None, None


class Slow(nn.Module):
    """Takes so long, in the first half of its forward and in the last of its backward."""

    def __init__(self, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.forward_s, self.backward_s = forward_s, backward_s
        self.mix = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.mix(_Slow.apply(x, self.forward_s, self.backward_s))  # type: ignore[no-untyped-call]
        return y


@pytest.fixture(autouse=True)
def _counting(monkeypatch: pytest.MonkeyPatch) -> None:
    clock.now_s = 0.0
    for module in ("layers.timing", "moments"):
        monkeypatch.setattr(f"elaunch.workers.{module}.time", SimpleNamespace(perf_counter=clock))


def chain(*seconds: tuple[float, float], recompute: tuple[int, ...] = ()) -> Chain:
    factories = [partial(Slow, *pair) for pair in seconds]
    specs = describe(factories, torch.zeros(1, 6), 2, None)
    here = TPRank(0, 1)
    return Chain(
        [
            build(spec, factory, 0, CPU, None, here, spec.index in recompute)
            for spec, factory in zip(specs, factories, strict=True)
        ]
    )


def run(layers: Chain, watch: Stopwatch | None, rows: int) -> None:
    draw = Draw(0, 0, (), 2)
    y, saved = layers.forward(torch.ones(rows, 6), draw, watch)
    clock.now_s += 100  # others compute
    layers.backward(saved, torch.ones_like(y), draw, lambda layer, grads: None)


def test_each_layer_has_its_own_seconds() -> None:
    watch = Stopwatch(CPU)
    run(chain((1.0, 2.0), (3.0, 5.0), (7.0, 11.0)), watch, 2)
    assert watch.turns() == [
        Turn(0, 2, 1, 1.0, 2.0, 0.0, 1),
        Turn(1, 2, 1, 3.0, 5.0, 0.0, 1),
        Turn(2, 2, 1, 7.0, 11.0, 0.0, 1),
    ]


def test_of_several_micro_batches_of_a_size_the_median_counts() -> None:
    watch = Stopwatch(CPU)
    for seconds, rows in ((1.0, 2), (9.0, 2), (2.0, 2), (4.0, 1)):
        run(chain((seconds, 2 * seconds)), watch, rows)
    assert watch.turns() == [Turn(0, 2, 1, 2.0, 4.0, 0.0, 3), Turn(0, 1, 1, 4.0, 8.0, 0.0, 1)]


def test_what_is_computed_again_is_of_the_backward() -> None:
    watch = Stopwatch(CPU, meter=True)
    run(chain((1.0, 2.0), (3.0, 5.0), recompute=(0, 1)), watch, 2)
    assert watch.turns() == [Turn(0, 2, 1, 1.0, 3.0, 0.0, 1), Turn(1, 2, 1, 3.0, 8.0, 0.0, 1)]
    assert watch.kept_bytes == {}


def test_waiting_for_a_tuple_is_told_apart() -> None:
    watch = Stopwatch(CPU)
    span = watch.span(0, 1)
    span.begin("F")
    watch.waited_s += 0.5
    clock.now_s += 2.0
    span.end("F")
    watch.waited_s += 100  # between its actions
    span.begin("B")
    watch.waited_s += 0.25
    clock.now_s += 3.0
    span.end("B")
    assert watch.turns() == [Turn(0, 1, 1, 2.0, 3.0, 0.75, 1)]


def test_kept_bytes_are_counted_once_for_each_layer() -> None:
    watch = Stopwatch(CPU, meter=True)
    layers = chain((1.0, 1.0), (1.0, 1.0))
    run(layers, watch, 2)
    # The linear layer keeps its input: six numbers a row.
    assert watch.kept_bytes == {0: 24.0, 1: 24.0}
    assert not watch.counts(0)


def test_a_member_of_a_tuple_tells_what_all_of_it_keep() -> None:
    watch = Stopwatch(CPU, meter=True)
    weight = torch.ones(3, requires_grad=True)
    watch.span(0, 2, width=2).forward(lambda: (weight * torch.ones(2, 3)).sum(), [weight])
    assert watch.kept_bytes == {0: 2 * 3 * 4.0}


def test_a_step_that_is_not_over_has_no_figures() -> None:
    watch = Stopwatch(CPU)
    chain((1.0, 1.0)).forward(torch.ones(2, 6), Draw(0, 0, (), 2), watch)
    assert watch.turns() == []


def test_measuring_changes_no_gradient() -> None:
    def gradients(watch: Stopwatch | None) -> list[Tensor]:
        layers, draw, found = chain((0.0, 0.0), (0.0, 0.0)), Draw(0, 0, (), 2), []
        y, saved = layers.forward(torch.ones(2, 6), draw, watch)
        layers.backward(saved, torch.ones_like(y), draw, lambda layer, grads: found.extend(grads))
        return found

    pairs = list(zip(gradients(None), gradients(Stopwatch(CPU, meter=True)), strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(plain, measured) for plain, measured in pairs)


def test_what_an_action_takes_beside_its_layers_and_what_it_sends_are_told_apart() -> None:
    watch, layers, draw = Stopwatch(CPU), chain((1.0, 2.0), (3.0, 5.0)), Draw(0, 0, (), 2)
    with watch.loading(2):
        clock.now_s += 0.5
    clock.now_s += 100  # waits for rows
    with watch.action(Action("F", 0, 0)) as action:
        clock.now_s += 0.25
        y, saved = layers.forward(torch.ones(2, 6), draw, watch)
        action.layers = [span for one in saved for span in one.spans]
        clock.now_s += 4.0  # the loss, which is of the last layer
        action.layers[-1].lasts("F")
        with action.sending():
            clock.now_s += 0.125
    with watch.action(Action("B", 0, 0)) as action:
        action.layers = [span for one in saved for span in one.spans]
        layers.backward(saved, torch.ones_like(y), draw, lambda layer, grads: None)
        clock.now_s += 0.75
    assert watch.overheads() == Overheads(0.5, 0.125, 0.25, None)
    assert [turn.forward_s for turn in watch.turns()] == [1.0, 7.0]


def test_the_end_of_a_step_is_what_follows_its_barrier_without_the_optimizer() -> None:
    watch = Stopwatch(CPU)
    record = StepRecord.at(0)

    def barrier(given: StepRecord) -> StepRecord:
        clock.now_s += 2.0
        return given

    assert watch.at_end(barrier)(record) is record
    clock.now_s += 0.5
    update = TimedWork(timing_of(CPU))
    with update:
        clock.now_s += 1.0
    watch.ended(update)
    assert watch.overheads().end_s == 2.5
    assert watch.update_s == 1.0


def test_a_step_has_figures_once_the_device_has_come_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ahead(HostTiming):
        """A device whose host does not wait for it."""

        reached_s = 0.0

        def are_over(self, moments: Iterable[float]) -> bool:
            return all(moment <= self.reached_s for moment in moments)

    device = Ahead()
    monkeypatch.setattr("elaunch.workers.layers.timing.timing_of", lambda _: device)
    watch, update = Stopwatch(CPU), TimedWork(device)
    run(chain((1.0, 2.0)), watch, 2)
    with update:
        clock.now_s += 4.0
    watch.ended(update)
    reached = [0.0, clock.now_s - 1.0, clock.now_s]  # the update is part of it
    over = []
    for device.reached_s in reached:
        over.append(watch.is_over)
    assert over == [False, False, True]
    assert watch.update_s == 4.0


def act(watch: Stopwatch, sends: bool) -> None:
    """Two actions, a sum and the end of a step: 1 s of waiting, 2 s of computing, 0.5 s of sending, and so on."""
    with watch.receiving():
        clock.now_s += 1.0
    with watch.action(Action("F", 1, 0)) as action:
        clock.now_s += 2.0
        if sends:
            with action.sending():
                clock.now_s += 0.5
    with watch.action(Action("W", 1, 0)):
        clock.now_s += 4.0
    with watch.phase("sums"):
        clock.now_s += 8.0
    watch.at_end(lambda record: record)(StepRecord.at(0))
    update = TimedWork(watch._timing)
    with update:
        clock.now_s += 16.0
    watch.ended(update)


@pytest.mark.parametrize("sends", [True, False])
def test_a_step_as_executed_has_all_moments_of_its_actions_and_what_followed(sends: bool) -> None:
    clock.now_s = 100.0
    watch = Stopwatch(CPU)
    act(watch, sends)
    actions, phases = watch.executed()
    ends_s = 103.5 if sends else 103.0
    forward = ExecutedAction(Action("F", 1, 0), 100.0, 101.0, 103.0, ends_s, ends_s)
    weights = ExecutedAction(Action("W", 1, 0), ends_s, ends_s, *[ends_s + 4.0] * 3)  # it waits for nobody's rows
    assert actions == [forward, weights]
    since_s = ends_s + 4.0
    assert phases == [
        ExecutedPhase("sums", since_s, since_s + 8.0),
        ExecutedPhase("commit", since_s + 8.0, since_s + 8.0),
        ExecutedPhase("optimizer", since_s + 8.0, since_s + 24.0),
        ExecutedPhase("parameters", since_s + 24.0, since_s + 24.0),
    ]
    assert Stopwatch(CPU).executed() == ([], [])


def test_the_clock_of_a_device_is_put_where_it_does_nothing_before_the_host_has_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Behind(HostTiming):
        """A device with a clock of its own, which comes to its first moments late."""

        LATE_S = (30.0, 30.0, 2.0)
        n_moments = 0

        def now(self) -> float:
            late_s = self.LATE_S[self.n_moments] if self.n_moments < len(self.LATE_S) else 0.0
            self.n_moments += 1
            return -5000.0 + clock.now_s + late_s

    device = Behind()
    monkeypatch.setattr("elaunch.workers.layers.timing.timing_of", lambda _: device)
    clock.now_s = 100.0
    watch = Stopwatch(CPU)
    with watch.action(Action("F", 0, 0)):
        clock.now_s += 1.0
    clock.now_s += 40.0
    with watch.action(Action("B", 0, 0)):
        clock.now_s += 5.0
    actions, _ = watch.executed()
    assert [one.begins_s for one in actions] == [130.0, 143.0]
    assert [one.ends_s for one in actions] == [131.0, 146.0]


def test_where_layers_are_not_measured_there_are_no_turns_of_theirs() -> None:
    assert Stopwatch(CPU).of_layers is not None
    watch = Stopwatch(CPU, layers=False)
    assert watch.of_layers is None
    run(chain((1.0, 2.0)), watch.of_layers, 2)
    act(watch, sends=True)
    assert watch.turns() == []
    assert [one.action.kind for one in watch.executed()[0]] == ["F", "W"]
