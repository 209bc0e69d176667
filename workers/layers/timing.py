"""How long each layer takes, measured in the steps that train (Suika 3.1): no runs of their own.

In a step that is measured, a moment is taken before and after the forward of each layer, and where backward passes from
one layer to the one before it. On an accelerator a moment is an event in its queue, read once it is over; nothing waits
for it. The same moments tell when each action of the step began and ended (`Stopwatch.executed`).
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor

from elaunch.plan.executed import ExecutedAction, ExecutedPhase
from elaunch.plan.timeline import Action
from elaunch.policy.sample import Overheads
from elaunch.workers.barrier import StepRecord
from elaunch.workers.moments import TimedWork, timing_of


class ActivationMeter:
    """Counts what autograd keeps between forward and backward, in the thread that enters it.

    A storage counts once however many operations keep it, from the first that does until the last lets go of it; so it
    is what the activations occupy. Parameters do not count. It slows the forward down, so it is for measuring only.

    Args:
        parameters: storages of these tensors are left out.

    Attributes:
        now_bytes: kept at the moment.
        peak_bytes: the most that was kept at any moment.
    """

    def __init__(self, parameters: Collection[Tensor] = ()) -> None:
        self.now_bytes = 0
        self.peak_bytes = 0
        self._left_out = {parameter.untyped_storage().data_ptr() for parameter in parameters}
        self._users: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._keep, lambda kept: kept.tensor)

    def __enter__(self) -> ActivationMeter:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _keep(self, tensor: Tensor) -> _Kept:
        return _Kept(self, tensor)

    def _taken(self, storage: Any) -> None:
        where = storage.data_ptr()
        self._users[where] += 1
        if self._users[where] == 1 and where not in self._left_out:
            self.now_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)

    def _let_go(self, storage: Any) -> None:
        where = storage.data_ptr()
        self._users[where] -= 1
        if not self._users[where]:
            del self._users[where]
            if where not in self._left_out:
                self.now_bytes -= storage.nbytes()


class _Kept:
    """A tensor that autograd keeps as long as it keeps this."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self.tensor = tensor
        self._meter = meter
        meter._taken(tensor.untyped_storage())

    def __del__(self) -> None:
        self._meter._let_go(self.tensor.untyped_storage())


@dataclass(frozen=True)
class Turn:
    """A layer on micro-batches of so many rows, the median over those of a step.

    Attributes:
        layer: its number.
        rows: of a micro-batch.
        width: workers of the tensor-parallel group that has the layer.
        forward_s: seconds, those in which its tensor-parallel group was waited for included.
        backward_s: likewise, of both parts where it was split.
        waited_s: of both, in which the TP group was waited for.
        count: micro-batches.
    """

    layer: int
    rows: int
    width: int
    forward_s: float
    backward_s: float
    waited_s: float
    count: int


class Stopwatch:
    """Measures one step of one worker.

    Args:
        device: on which it computes.
        meter: whether the bytes that are kept for backward are counted too; that takes longer.
        layers: whether each layer is measured, and not only what is done with all layers of a tile.

    Attributes:
        of_layers: this, if each layer is measured.
        kept_bytes: for backward, of a row of each layer, where they were counted; of all members of its TP group.
        weight_bytes: likewise, from the input gradient to the weight gradients where these came later.
        waited_s: so long this worker has waited for members of a tensor-parallel group; whoever waits adds to it.
    """

    def __init__(self, device: torch.device, meter: bool = False, layers: bool = True) -> None:
        self.of_layers = self if layers else None
        self._timing, self._meter = timing_of(device), meter
        self._moments: list[tuple[float, Any]] = []  # each with the time at which the host asked for it
        self._spans: list[Span] = []
        self._actions: list[ActionSpan] = []
        self._received: tuple[Any, Any] | None = None  # of the action that comes
        self._phases: list[tuple[str, Any, Any]] = []
        self._loads: list[tuple[int, float]] = []
        self._end_began_s = 0.0
        self._end_s: float | None = None
        self._update: tuple[Any, Any] | None = None
        self.kept_bytes: dict[int, float] = {}
        self.weight_bytes: dict[int, float] = {}
        self.waited_s = 0.0

    def counts(self, layer: int) -> bool:
        """Returns whether the bytes that this layer keeps are still to be counted."""
        return self._meter and layer not in self.kept_bytes

    def moment(self) -> Any:
        """Returns this moment, by the device's queue."""
        asked_s = time.perf_counter()
        self._moments.append((asked_s, self._timing.now()))
        return self._moments[-1][1]

    @property
    def is_over(self) -> bool:
        """Returns whether the device has come to all moments; before, there are no figures. It waits for nothing."""
        return self._timing.are_over([*(moment for _, moment in self._moments), *(self._update or ())])

    def span(self, layer: int, rows: int, width: int = 1) -> Span:
        """Returns the span of a layer, or of this member's part of it, on a micro-batch; its forward follows."""
        self._spans.append(Span(self, layer, rows, width))
        return self._spans[-1]

    @contextmanager
    def receiving(self) -> Iterator[None]:
        """Measures what is done here: waiting for the rows of the action that comes."""
        begin = self.moment()
        yield
        self._received = begin, self.moment()

    @contextmanager
    def action(self, action: Action) -> Iterator[ActionSpan]:
        """Measures what is done here: an action of this worker, without waiting for its rows."""
        received, self._received = self._received, None
        self._actions.append(ActionSpan(self, action, self.moment(), received=received))
        yield self._actions[-1]
        self._actions[-1].end = self.moment()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measures what is done here: a part of the step beside its actions."""
        begin = self.moment()
        yield
        self._phases.append((name, begin, self.moment()))

    @contextmanager
    def loading(self, rows: int) -> Iterator[None]:
        """Measures what is done here: getting the samples of an action."""
        begin_s = time.perf_counter()
        yield
        self._loads.append((rows, time.perf_counter() - begin_s))

    def at_end(self, barrier: Callable[[StepRecord], StepRecord]) -> Callable[[StepRecord], StepRecord]:
        """Returns what passes the commit barrier and notes that the end of the step begins with it."""

        def pass_barrier(record: StepRecord) -> StepRecord:
            self._end_began_s = time.perf_counter()
            with self.phase("commit"):
                return barrier(record)

        return pass_barrier

    def ended(self, update: TimedWork) -> None:
        """Notes that the step has ended here, with the optimizer's step."""
        self._end_s = max(0.0, time.perf_counter() - self._end_began_s - update.host_s)
        self._update = update.moments
        if self._update is not None:
            self._phases += [("optimizer", *self._update), ("parameters", self._update[1], self.moment())]

    @property
    def update_s(self) -> float:
        """Returns how long the optimizer's step took."""
        return self._timing.seconds(*self._update) if self._update is not None else 0.0

    def executed(self) -> tuple[list[ExecutedAction], list[ExecutedPhase]]:
        """Returns when this worker did what it did in the step, whose actions are over.

        Times are seconds of the host's `time.perf_counter`. A device does nothing before the host has asked for it, and
        does it at once where it has nothing else to do; so its clock is put as early as that allows.
        """
        if not self._moments:
            return [], []
        first = self._moments[0][1]
        begin_s = max(asked_s - self._timing.seconds(first, moment) for asked_s, moment in self._moments)

        def at(moment: Any) -> float:
            return begin_s + self._timing.seconds(first, moment)

        actions = [one.executed(at) for one in self._actions if one.end is not None]
        return actions, [ExecutedPhase(name, at(begin), at(end)) for name, begin, end in self._phases]

    def overheads(self) -> Overheads:
        """Returns what this worker has spent beside its layers in the step, whose actions are over."""
        between = self._timing.seconds
        beside = {kind: [one.seconds(between) for one in self._actions if one.action.kind == kind] for kind in "FB"}
        of_actions = [statistics.median(rest_s for rest_s, _ in some) for some in beside.values() if some]
        sent = [sent_s for some in beside.values() for _, sent_s in some if sent_s]
        return Overheads(
            max(0.0, statistics.fmean(of_actions)) if of_actions else 0.0,
            statistics.median(sent) if sent else 0.0,
            statistics.median(seconds / rows for rows, seconds in self._loads) if self._loads else 0.0,
            self._end_s,
        )

    def turns(self) -> list[Turn]:
        """Returns all turns of the step, whose actions are over."""
        found: dict[tuple[int, int, int], list[Span]] = defaultdict(list)
        for span in self._spans:
            if {"F", "B"} <= span.ends.keys():
                found[span.layer, span.rows, span.width].append(span)
        return [
            Turn(
                *point,
                statistics.median(self._seconds(one, "F") for one in spans),
                statistics.median(self._seconds(one, "B") + self._weights_s(one) for one in spans),
                statistics.median(sum(one.waited_s.values()) for one in spans),
                len(spans),
            )
            for point, spans in found.items()
        ]

    def weights(self) -> dict[int, tuple[float, float]]:
        """Returns, by layer whose weight gradients came later, the part of the backward that they took, and the
        bytes of a row that waited for them.
        """
        found: dict[int, list[float]] = defaultdict(list)
        for span in self._spans:
            if "W" in span.ends and "B" in span.ends:
                seconds = self._weights_s(span)
                whole_s = self._seconds(span, "B") + seconds
                found[span.layer].append(seconds / whole_s if whole_s else 0.0)
        return {layer: (statistics.median(parts), self.weight_bytes.get(layer, 0.0)) for layer, parts in found.items()}

    def _weights_s(self, span: Span) -> float:
        return self._seconds(span, "W") if "W" in span.ends else 0.0

    def _seconds(self, span: Span, kind: str) -> float:
        return self._timing.seconds(span.begins[kind], span.ends[kind])


@dataclass(eq=False)
class ActionSpan:
    """An action of this worker: when it begins and ends, and the spans of its layers and of what it sends.

    Before it, where it needed rows of others, they were received.
    """

    watch: Stopwatch
    action: Action
    begin: Any
    end: Any = None
    layers: Sequence[Span] = ()
    sent: list[tuple[Any, Any]] = field(default_factory=list)
    received: tuple[Any, Any] | None = None

    @contextmanager
    def sending(self) -> Iterator[None]:
        """Measures what is done here: sending its rows to other workers."""
        begin = self.watch.moment()
        yield
        self.sent.append((begin, self.watch.moment()))

    def seconds(self, between: Callable[[Any, Any], float]) -> tuple[float, float]:
        """Returns the seconds beside its layers and sending, and those of sending."""
        sent_s = sum(between(*one) for one in self.sent)
        kind = self.action.kind
        spans = [one for one in self.layers if kind in one.ends]
        in_layers_s = sum(between(one.begins[kind], one.ends[kind]) for one in spans)
        return between(self.begin, self.end) - in_layers_s - sent_s, sent_s

    def executed(self, at: Callable[[Any], float]) -> ExecutedAction:
        """Returns when it was done; `at` is the time of a moment."""
        awaits = self.begin if self.received is None else self.received[0]
        sent = (self.sent[0][0], self.sent[-1][1]) if self.sent else (self.end, self.end)
        return ExecutedAction(self.action, *map(at, (awaits, self.begin, *sent, self.end)))


@dataclass(eq=False)
class Span:
    """A layer on a micro-batch: when its forward ("F"), its backward ("B") and its weight gradients ("W"), if they come
    later, begin and end.
    """

    watch: Stopwatch
    layer: int
    rows: int
    width: int
    begins: dict[str, Any] = field(default_factory=dict)
    ends: dict[str, Any] = field(default_factory=dict)
    waited_s: dict[str, float] = field(default_factory=dict)

    def begin(self, kind: Literal["F", "B", "W"]) -> None:
        """Notes that a part begins now, if it has not begun: a hook may run again when the backward is split."""
        if kind in self.begins:
            return
        self.waited_s[kind] = -self.watch.waited_s
        self.begins[kind] = self.watch.moment()

    def end(self, kind: Literal["F", "B", "W"]) -> None:
        """Notes that a part ends now, if it has begun."""
        if kind in self.begins and kind not in self.ends:
            self.ends[kind] = self.watch.moment()
            self.waited_s[kind] += self.watch.waited_s

    def lasts(self, kind: Literal["F", "B", "W"]) -> None:
        """Notes that a part that had ended ends only now: what follows it belongs to the layer."""
        if kind in self.ends:
            self.ends[kind] = self.watch.moment()

    def kept_for_weights(self, n_bytes: int) -> None:
        """Notes how many bytes this member kept for the weight gradients, beside the activations."""
        self.watch.weight_bytes[self.layer] = self.width * n_bytes / self.rows

    def forward(self, run: Callable[[], Tensor], parameters: Collection[Tensor]) -> Tensor:
        """Returns the output of `run`, the layer's forward, and measures it."""
        metered = self.watch.counts(self.layer)
        with ActivationMeter(parameters) if metered else nullcontext() as meter:
            self.begin("F")
            y = run()
            self.end("F")
        if meter is not None and torch.is_grad_enabled():
            self.watch.kept_bytes[self.layer] = self.width * meter.now_bytes / self.rows
        return y
