"""The profile of a job that runs, from what its workers measure in the steps that train (Suika 3.1 and A.4).

    each worker      Turn (layer, rows, seconds) of measured steps -> Recorder -> Sample, told at a commit barrier
    every worker     Samples of all -> Measured -> Profile

The seconds of a layer are those of a worker as fast as most. `elaunch.policy.stragglers.slow` finds who is not: by how
long each measured step took beside the Sample that was told last.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from elaunch.plan.tiling import Plan
from elaunch.policy.dvfs import ClockRange
from elaunch.policy.estimate import estimate_step, shared_s
from elaunch.policy.measuring.contradictions import Contradiction, contradictions
from elaunch.policy.profile import LayerProfile, LinkProfile, Profile, WorkerProfile, median_link
from elaunch.policy.sample import SAME, MeasuredTurn, Overheads, Point, Sample, moved
from elaunch.policy.stragglers.slow import Detector
from elaunch.policy.stragglers.slow_links import LinkDetector, Slower
from elaunch.policy.stragglers.track import Change
from elaunch.rendezvous.membership import slot_of

RECENT = 3
"""A figure is the median of so many measured steps, the newest ones."""

SURE = 2
"""What was seen in fewer steps is not told."""

QUIET = 12
"""A figure that nobody has told anew for so many steps is stable."""

NOMINAL_S = 1e-9
"""Seconds of a forward per row and parameter where nothing was measured: what counts then is only that larger layers
take longer."""

LINK = LinkProfile(1e9, 1e-4)
"""Where none was measured."""


LONGEST_HOP_S = 5e-4
"""A message that takes longer beside its bytes waits for a busy machine, which is no property of the plan."""


class Recorder:
    """One worker's own figures."""

    def __init__(self) -> None:
        self._turns: dict[Point, deque[tuple[float, float, float]]] = {}
        self._kept: dict[int, float] = {}
        self._weights: dict[int, tuple[float, float]] = {}
        self._update_s: deque[float] = deque(maxlen=RECENT)
        self._overheads: deque[Overheads] = deque(maxlen=RECENT)
        self._told: Sample | None = None
        self._n_told = 0
        self._fresh = False
        self._looked = True

    def add(
        self,
        turns: Iterable[MeasuredTurn],
        kept_bytes: Mapping[int, float],
        update_s: float,
        elements: int,
        weights: Mapping[int, tuple[float, float]] | None = None,
        overheads: Overheads | None = None,
    ) -> None:
        """Takes in what a step has shown.

        Args:
            turns: of the layers of this worker.
            kept_bytes: by layer, of a row, if counted.
            update_s: of the optimizer's step.
            elements: of parameters on which it was done.
            weights: see `Sample`, if weight gradients were deferred.
            overheads: what was spent beside the layers.
        """
        now: dict[Point, deque[tuple[float, float, float]]] = {}
        for one in turns:
            point = one.layer, one.rows, one.width
            now[point] = self._turns.get(point, deque(maxlen=RECENT))
            now[point].append((one.forward_s, one.backward_s, one.waited_s))
        self._fresh, self._looked = True, False
        self._turns = now  # of layers that have gone elsewhere others tell
        self._kept |= kept_bytes
        self._weights |= weights or {}
        if elements:
            self._update_s.append(update_s / elements)
        if overheads is not None:
            self._overheads.append(overheads)

    def news(
        self,
        links: Callable[[], Mapping[str, tuple[float, float]]],
        memory_bytes: int | None = None,
        clocks: ClockRange | None = None,
        anew: bool = False,
    ) -> Sample | None:
        """Returns what the others do not know yet; None if nothing was measured since, or nothing differs from what was
        told.

        Args:
            links: asked for them when they are to be told, by the slot of the receiver.
            memory_bytes: of the device.
            clocks: of the device, if they may be set.
            anew: tell it anyway: somebody has come who was told nothing.
        """
        if not self._fresh:
            return None
        sample = Sample(
            {
                point: tuple(statistics.median(column) for column in zip(*spent))
                for point, spent in self._turns.items()
                if len(spent) >= SURE
            },
            dict(self._kept),
            statistics.median(self._update_s) if self._update_s else 0.0,
            {},
            memory_bytes,
            clocks,
            dict(self._weights),
            _median_overheads(self._overheads),
        )
        known = self._n_told >= RECENT and not anew
        if not sample.turns or (known and not sample.differs(self._told)):
            return None
        self._told, self._fresh = sample, False
        self._n_told += 1
        return replace(sample, links=links())

    def pace(self) -> float | None:
        """Returns the last measured step's computing time relative to what was told of its layers; once per step.

        None: no step was measured since, or its layers are others than those that were told of.
        """
        if self._looked or self._told is None or self._told.turns.keys() != self._turns.keys():
            return None
        self._looked = True
        told_s = sum(map(_own_s, self._told.turns.values()))
        return sum(_own_s(spent[-1]) for spent in self._turns.values()) / told_s


class Measured:
    """The figures that all workers have told, by slot.

    Args:
        name: of the model.
        layers: what is known of them without measuring; their seconds do not count.
        elements: of their parameters.
        prior: a profile of an earlier run, for what has not been measured yet.
    """

    def __init__(
        self, name: str, layers: Sequence[LayerProfile], elements: Sequence[int], prior: Profile | None = None
    ) -> None:
        self._name, self._layers, self._elements, self._prior = name, tuple(layers), tuple(elements), prior
        self._samples: dict[str, Sample] = {}
        self._detector = Detector()
        self._links = LinkDetector()
        # What a turn took at speed 1 when it was last sure.
        self._usual: dict[Point, tuple[float, float]] = {}
        self._steps = 0
        # The step in which a worker last told something else than before of a layer.
        self._moved: dict[int, int] = {}
        self._step_s: deque[float] = deque(maxlen=RECENT)
        self._change_s: deque[float] = deque(maxlen=RECENT)
        # Of the last plan in which somebody waited for rows of others.
        self._hop_s = 0.0 if prior is None else prior.hop_s
        self._parts_s: float | None = None

    def speeds(self) -> dict[str, float]:
        """Returns the speeds of the workers that are not as fast as most, by slot."""
        return self._detector.speeds()

    @property
    def doubts(self) -> bool:
        """Returns whether every step should be measured, since somebody may be about to become slow or to recover."""
        return self._detector.doubts or self._links.doubts

    @property
    def waits(self) -> bool:
        """Returns whether more slow workers of a node may be reported soon."""
        return self._detector.waits

    def look(
        self,
        step: int,
        time_s: float,
        paces: Mapping[str, float],
        links: Mapping[tuple[str, str], Slower],
    ) -> list[Change]:
        """Takes in what a measured step has shown; see `Detector.look` and `LinkDetector.look`.

        Returns:
            Who has become slow, or has recovered.
        """
        changes = self._detector.look(step, time_s, paces)
        return changes + self._links.look(step, time_s, paces.keys(), links, self._detector.may_be_slow)

    def take_links(self, slot: str, usual: Mapping[str, tuple[float, int]]) -> None:
        """Takes in what the links of a worker usually carry; see `LinkDetector.told`."""
        self._links.told(slot, usual)

    def known(self) -> dict[str, float]:
        """Returns the slots that are slow or fast, as factors, for members that join; see `adopt`."""
        return self._detector.known()

    def adopt(self, factors: Mapping[str, float]) -> None:
        """Begins with what the members know of the speeds of slots."""
        self._detector.adopt(factors)

    @property
    def empty(self) -> bool:
        """Returns whether nobody has told anything."""
        return not self._samples

    def clocks(self) -> dict[str, ClockRange]:
        """Returns the clocks of the devices that may be set, by slot."""
        return {slot: sample.clocks for slot, sample in self._samples.items() if sample.clocks is not None}

    def take(self, slot: str, sample: Sample) -> None:
        """Takes in what the worker of a slot has measured."""
        before = self._samples.get(slot, Sample())
        for point, spent in sample.turns.items():
            if moved(sum(spent[:2]), sum(before.turns.get(point, ())[:2])):
                self._moved[point[0]] = self._steps
        self._samples[slot] = sample
        self._detector.told(slot, {point: _own_s(spent) for point, spent in sample.turns.items()})

    def keep(self, workers: Collection[str]) -> None:
        """Sets the members; what is known of the speed of other slots counts again when they return."""
        slots = set(map(slot_of, workers))
        self._samples = {slot: one for slot, one in self._samples.items() if slot in slots}
        self._detector.entered(workers)
        self._links.entered(workers)

    def step_took(self, seconds: float) -> None:
        """Takes in the seconds of a step under the present plan, in which nothing changed."""
        self._steps += 1
        self._step_s.append(seconds)

    def change_took(self, seconds: float) -> None:
        """Takes in the seconds of a transition that do not depend on what moved."""
        self._change_s.append(seconds)

    def plan_changed(self) -> None:
        """Forgets the seconds of steps, which differ under another plan."""
        self._step_s.clear()
        self._parts_s = None

    def contradictions(self, profile: Profile) -> list[Contradiction]:
        """Returns where the figures contradict each other, if `profile` was just made of them."""
        step = None
        if self._parts_s is not None and "step_s" not in profile.unstable:
            step = statistics.median(self._step_s), self._parts_s
        links = {
            (slot, other): LinkProfile(*found)
            for slot, sample in self._samples.items()
            for other, found in sample.links.items()
        }
        return contradictions(self._samples, self.speeds(), links, self._links.usual(), step)

    def profile(self, plan: Plan | None = None) -> Profile:
        """Returns the profile: all that is known.

        Args:
            plan: under which the steps were done; what they took longer than its parts is of every step and of every
                message between stages, and the layers' figures are for TP groups as wide as most of its are.
        """
        width = 1 if plan is None else statistics.mode(len(tile.workers) for tile in plan.tiles)
        self._find_usual()
        speeds, prior = self.speeds(), self._prior
        links = {
            (slot, other): LinkProfile(*found)
            for slot, sample in self._samples.items()
            for other, found in sample.links.items()
        }
        anywhere = median_link(links.values()) if links else self._prior_link() or LINK
        for ends, factor in self._links.factors().items():
            link = links.get(ends, anywhere)
            links[ends] = replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / factor)
        widths = {} if plan is None else {index: len(tile.workers) for tile in plan.tiles for index in tile.layers}
        layers = tuple(
            self._layer(index, known, widths.get(index, width), width, anywhere.bandwidth_bytes_per_s)
            for index, known in enumerate(self._layers)
        )
        caps = {slot: one.memory_bytes for slot, one in self._samples.items() if one.memory_bytes is not None}
        most = statistics.mode(caps.values()) if caps else None
        special = {} if prior is None else {slot: replace(one, speed=1.0) for slot, one in prior.workers.items()}
        special |= {slot: replace(special.get(slot, WorkerProfile()), speed=speed) for slot, speed in speeds.items()}
        special = {slot: one for slot, one in special.items() if one != WorkerProfile()}
        for slot, cap in caps.items():
            if cap != most:
                special[slot] = replace(special.get(slot, WorkerProfile()), memory_bytes=cap)
        found = Profile(
            self._name,
            layers,
            tensor_parallel=width,
            bandwidth_bytes_per_s=anywhere.bandwidth_bytes_per_s,
            latency_s=anywhere.latency_s,
            width=width,
            memory_bytes=prior.memory_bytes if most is None and prior is not None else most,
            **self._overheads(),
            hop_s=self._hop_s,
            change_s=statistics.median(self._change_s) if self._change_s else 0.0,
            workers=special,
            links=links,
        )
        if plan is not None and self._step_s:
            found = self._with_rest(plan, found)
        return replace(found, unstable=self._unstable())

    def _overheads(self) -> dict[str, Any]:
        """Returns what is spent beside the layers, by field of a profile."""
        known = [one.overheads for one in self._samples.values() if one.overheads is not None]
        if not known:
            names = ("action_s", "send_s", "load_s_per_row")
            return {} if self._prior is None else {name: getattr(self._prior, name) for name in names}
        sent = [one.send_s for one in known if one.send_s]
        loaded = [one.load_s_per_row for one in known if one.load_s_per_row]
        return {
            "action_s": statistics.median(one.action_s for one in known),
            "send_s": statistics.median(sent) if sent else 0.0,
            "load_s_per_row": statistics.median(loaded) if loaded else 0.0,
        }

    def _with_rest(self, plan: Plan, found: Profile) -> Profile:
        """Shares out what a step takes longer than its parts: as much as its end is seen to take is of every step, the
        rest of the messages between stages that somebody waits for, or also of every step if there are none.
        """
        found = replace(found, hop_s=0.0)
        parts_s = estimate_step(plan, found).step_s
        step_s = statistics.median(self._step_s)
        self._parts_s, rest_s = parts_s, step_s - parts_s
        ends = [one.overheads.end_s for one in self._samples.values() if one.overheads is not None]
        # The last one at the barrier waits for nobody there.
        first_s = min((end_s for end_s in ends if end_s is not None), default=None)
        end_s = 0.0 if first_s is None else max(0.0, first_s - shared_s(plan, found))
        self._parts_s += end_s
        if rest_s <= 0:
            return found
        if first_s is None:
            return replace(found, step_s=rest_s, hop_s=self._hop_s)
        end_s = min(rest_s, end_s)

        def later_s(hop_s: float) -> float:
            return estimate_step(plan, replace(found, hop_s=hop_s)).step_s - parts_s

        hop_s = _reaching(later_s, rest_s - end_s, 2 * sum(len(tile.micro_batches) for tile in plan.tiles))
        if hop_s is None:
            return replace(found, step_s=rest_s, hop_s=self._hop_s)
        self._hop_s = min(hop_s, LONGEST_HOP_S)
        if hop_s > LONGEST_HOP_S:
            end_s = rest_s - later_s(LONGEST_HOP_S)
        return replace(found, step_s=end_s, hop_s=self._hop_s)

    # -- how fast the workers are ---------------------------------------------------------------------------------

    def _find_usual(self) -> None:
        """Finds what each turn takes at speed 1."""
        speeds = self.speeds()
        own: dict[Point, dict[str, float]] = defaultdict(dict)
        for slot, sample in self._samples.items():
            for point, spent in sample.turns.items():
                own[point][slot] = _own_s(spent)
        for point, holders in own.items():
            normal = [slot for slot in holders if slot not in speeds] or list(holders)
            forwards, backwards = zip(*(self._turn_s(slot, point, holders, speeds) for slot in normal))
            self._usual[point] = statistics.median_low(forwards), statistics.median_low(backwards)

    def _turn_s(
        self, slot: str, point: Point, spent: Mapping[str, float], speeds: Mapping[str, float]
    ) -> tuple[float, float]:
        """Returns forward and backward seconds at speed 1. The last of a TP group waits for nobody: its waiting is
        communication.
        """
        forward_s, backward_s, _ = self._samples[slot].turns[point]
        told_s = min(self._samples[one].turns[point][2] for one in spent)
        usual_s = self._detector.usual_s(slot, point) if len(spent) == 1 else None
        if usual_s is None:
            usual_s = spent[slot] * speeds.get(slot, 1.0)
        seconds = usual_s + told_s
        part = seconds / (forward_s + backward_s)
        return part * forward_s, part * backward_s

    def _layer(self, index: int, known: LayerProfile, here: int, width: int, rate: float) -> LayerProfile:
        """Returns a layer's profile on a group of `width`, from what was measured at its present width (`here`) or an
        earlier one.
        """
        points: dict[int, dict[int, tuple[float, float]]] = defaultdict(dict)
        for (layer, rows, of), spent in self._usual.items():
            if layer == index:
                points[of][rows] = spent
        kept = [sample.kept_bytes[index] for sample in self._samples.values() if index in sample.kept_bytes]
        weights = [sample.weights[index] for sample in self._samples.values() if index in sample.weights]
        updates = [sample.update_s for sample in self._samples.values() if sample.update_s]
        if not points:
            return self._unmeasured(index, known, width)
        of = min(points, key=lambda one: (one != here, one != width, one))
        fixed_forward_s, forward_s = _line({rows: one[0] for rows, one in points[of].items()})
        fixed_backward_s, backward_s = _line({rows: one[1] for rows, one in points[of].items()})
        found = replace(
            known,
            forward_s_per_row=forward_s,
            backward_s_per_row=backward_s,
            fixed_forward_s=fixed_forward_s,
            fixed_backward_s=fixed_backward_s,
        )
        return replace(
            found.on_width(of, width, rate),
            activation_bytes_per_row=round(max(kept)) if kept else known.activation_bytes_per_row,
            update_s=statistics.median(updates) * self._elements[index] if updates else 0.0,
            weight_share=statistics.median(part for part, _ in weights) if weights else known.weight_share,
            weight_bytes_per_row=round(max(n for _, n in weights)) if weights else known.weight_bytes_per_row,
        )

    def _unmeasured(self, index: int, known: LayerProfile, width: int) -> LayerProfile:
        if self._prior is not None:
            return self._prior.layers[index]
        # As long as measured ones of its size are, if there are such.
        rates = [
            sum(spent) * of / width / rows / max(1, self._elements[layer])
            for (layer, rows, of), spent in self._usual.items()
        ]
        rate = statistics.median(rates) / 3 if rates else NOMINAL_S
        seconds = rate * max(1, self._elements[index])
        return replace(known, forward_s_per_row=seconds, backward_s_per_row=2 * seconds)

    def _prior_link(self) -> LinkProfile | None:
        prior = self._prior
        return None if prior is None else LinkProfile(prior.bandwidth_bytes_per_s, prior.latency_s)

    def _unstable(self) -> tuple[str, ...]:
        """Returns the layers whose seconds have moved lately or are unknown, and the step if its own have."""
        known = {layer for layer, *_ in self._usual}
        moving = [
            f"layers[{layer}]"
            for layer in range(len(self._layers))
            if layer not in known or self._steps - self._moved.get(layer, 0) < QUIET
        ]
        spread = max(self._step_s, default=0.0) - min(self._step_s, default=0.0)
        still = len(self._step_s) == RECENT and spread <= SAME * max(self._step_s)
        return (*moving, *(() if still else ("step_s",)))


def _own_s(spent: Sequence[float]) -> float:
    """Returns a worker's own share of (forward, backward, waiting in them), in seconds."""
    forward_s, backward_s, waited_s = spent
    return max(1e-9, forward_s + backward_s - waited_s)


def _median_overheads(some: Collection[Overheads]) -> Overheads | None:
    if not some:
        return None
    ends = [one.end_s for one in some if one.end_s is not None]
    return Overheads(
        statistics.median(one.action_s for one in some),
        statistics.median(one.send_s for one in some),
        statistics.median(one.load_s_per_row for one in some),
        statistics.median(ends) if ends else None,
    )


def _reaching(cost_s: Callable[[float], float], wanted_s: float, most: int) -> float | None:
    """Returns about where a cost that is 0 at 0 and grows, ever faster, reaches `wanted_s`; None if it stays 0.

    Args:
        cost_s: of a message's seconds; asked twice.
        wanted_s: 0 or more.
        most: as many messages one after the other, at most.
    """
    few_s = wanted_s / max(1, most)
    if not few_s:
        return 0.0 if cost_s(1e-6) else None
    low_s = cost_s(few_s)
    if low_s <= 0:
        return None
    # As it grows faster, this is too much, and what lies between the two is about right.
    many_s = few_s * wanted_s / low_s
    high_s = cost_s(many_s)
    return few_s if high_s <= low_s else few_s + (many_s - few_s) * (wanted_s - low_s) / (high_s - low_s)


def _line(points: Mapping[int, float]) -> tuple[float, float]:
    """Returns fixed seconds and seconds per row, by least squares; neither is negative."""
    if len(points) == 1:
        ((rows, seconds),) = points.items()
        return 0.0, seconds / rows
    slope, fixed = statistics.linear_regression(list(points), list(points.values()))
    if slope <= 0:
        return 0.0, statistics.fmean(seconds / rows for rows, seconds in points.items())
    if fixed < 0:
        return 0.0, statistics.linear_regression(list(points), list(points.values()), proportional=True).slope
    return fixed, slope
