"""What a job's layers, workers and links cost: the numbers that price a plan (Suika 3.1, A.2 to A.4).

The JSON form has a `version`; an entry of its `layers` may have a `count`, for so many equal layers in a row:

    {"version": 1, "name": "llama2-7b", "tensor_parallel": 4, "bandwidth_bytes_per_s": 8.76e9, "latency_s": 2e-05,
     "notes": ["…"], "layers": [{"count": 32, "forward_s_per_row": 0.0029, …}, …],
     "workers": {"n0/1": {"speed": 0.8}}, "links": [{"source": "n0/1", "target": "n1/0", …}]}

Workers are named by their slot, node/local_rank: who comes back to a slot computes on the same device.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from elaunch.errors import ProtocolError
from elaunch.plan.tiling import Plan, PlanError
from elaunch.plan.timeline import ActionPrice, Kind, TransferPrice
from elaunch.policy.measuring.profile_fields import DOCUMENT, LAYER, LINK, VERSION, WORKER, checked
from elaunch.rendezvous.membership import node_of, slot_of


@dataclass(frozen=True)
class LayerProfile:
    """One layer on one tensor-parallel group, all devices of the TP group taken together.

    A row is one sample. Seconds of an action are `fixed_*_s` + rows × `*_s_per_row`.

    Attributes:
        forward_s_per_row: includes what the devices of the TP group tell each other.
        backward_s_per_row: likewise; gradients of input and parameters, `weight_share` of it for the parameters.
        parameter_bytes: as they are kept for computing.
        optimizer_bytes: masters and states, before they are sharded over replicas.
        activation_bytes_per_row: kept from forward to backward.
        output_bytes_per_row: what the next layer is given.
        fixed_forward_s: of an action, whatever its rows.
        fixed_backward_s: likewise.
        update_s: of the optimizer's step on the whole layer, by one owner.
        weight_share: of the backward, what the gradients of the parameters take, 0..1; half, until a step has been
            measured in which they were deferred.
        weight_bytes_per_row: kept beside the activations from the input gradient to the weight gradients: gradients of
            outputs of the layer's operations. None: not measured; as much as the activations is assumed, which is more
            than it is where every output is an activation that is kept.
        gradient_bytes: of a sum of the parameters' gradients. None: not known; then as much as the parameters is taken,
            once, and nothing of what the engine has beside it (see `elaunch.policy.memory.StateBytes`).
        summed_in_tree: whether a worker keeps several partial sums of gradients, along a tree over the micro-batches.
    """

    forward_s_per_row: float
    backward_s_per_row: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes_per_row: int
    output_bytes_per_row: int
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0
    update_s: float = 0.0
    weight_share: float = 0.5
    weight_bytes_per_row: int | None = None
    gradient_bytes: int | None = None
    summed_in_tree: bool = False

    def forward_s(self, rows: int) -> float:
        """Returns the seconds of the forward of `rows` rows."""
        return self.fixed_forward_s + rows * self.forward_s_per_row

    def backward_s(self, rows: int) -> float:
        """Returns the seconds of the backward of `rows` rows."""
        return self.fixed_backward_s + rows * self.backward_s_per_row

    @property
    def deferred_bytes_per_row(self) -> int:
        """Returns what is kept beside the activations while weight gradients wait."""
        found = self.weight_bytes_per_row
        return self.activation_bytes_per_row if found is None else found

    def on_width(self, of: int, width: int, bandwidth_bytes_per_s: float) -> LayerProfile:
        """Returns the same layer on a tensor-parallel group of `width` workers, if these are its seconds on one of
        `of`.
        """
        if of == width:
            return self
        n_bytes = self.output_bytes_per_row

        def on(seconds: float, n_bytes: float) -> float:
            return _on_width(seconds, n_bytes / bandwidth_bytes_per_s, of, width)

        return dataclasses.replace(
            self,
            forward_s_per_row=on(self.forward_s_per_row, n_bytes),
            backward_s_per_row=on(self.backward_s_per_row, n_bytes),
            fixed_forward_s=on(self.fixed_forward_s, 0),
            fixed_backward_s=on(self.fixed_backward_s, 0),
        )

    def scaled(self, factor: float) -> LayerProfile:
        """Returns the same layer, taking `factor` times as long."""
        return dataclasses.replace(
            self,
            forward_s_per_row=factor * self.forward_s_per_row,
            backward_s_per_row=factor * self.backward_s_per_row,
            fixed_forward_s=factor * self.fixed_forward_s,
            fixed_backward_s=factor * self.fixed_backward_s,
            update_s=factor * self.update_s,
        )


@dataclass(frozen=True)
class WorkerProfile:
    """How one worker differs from the others.

    Attributes:
        speed: of computing, in units of what the layers' figures are for; 0.5 takes twice as long.
        memory_bytes: that it may use; None: what the profile says of all.
    """

    speed: float = 1.0
    memory_bytes: int | None = None


@dataclass(frozen=True)
class LinkProfile:
    """The cost of messages from one worker to another: latency_s + bytes / bandwidth_bytes_per_s."""

    bandwidth_bytes_per_s: float
    latency_s: float

    def __str__(self) -> str:
        return f"{self.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {self.latency_s * 1e6:.3g} us"

    def seconds(self, n_bytes: float) -> float:
        """Returns the seconds of a message."""
        return self.latency_s + n_bytes / self.bandwidth_bytes_per_s


def median_link(links: Collection[LinkProfile]) -> LinkProfile:
    """Returns a link with the median bandwidth and the median latency of one or more links."""
    return LinkProfile(
        statistics.median(link.bandwidth_bytes_per_s for link in links),
        statistics.median(link.latency_s for link in links),
    )


@dataclass(frozen=True)
class Profile:
    """The layers of a model, its workers and the links between them.

    Attributes:
        name: of the model.
        layers: in their order.
        tensor_parallel: devices of the TP group that the layers' figures are for.
        bandwidth_bytes_per_s: from one TP group to another.
        latency_s: of a message from one TP group to another.
        notes: where the figures come from and what they assume.
        width: workers of the TP group that the layers' figures are for; one may stand for several devices.
        memory_bytes: that a worker may use; None: nobody has said.
        overlap: exponent of the overlap of gradient reduction with the last backward (Suika A.2, with the exponent 1/k:
            docs/papers.md, error 2): 1 is none, infinity is all.
        memory_bound: the part of the seconds of computing that a higher clock of the device does not shorten, 0..1.
        step_s: of a step, whatever the plan: agreement, the like.
        action_s: of a forward or a backward, whatever its layers.
        send_s: of one whose rows go to another worker, which can do nothing else meanwhile.
        load_s_per_row: of a forward that begins with the inputs or ends with what is compared with the targets.
        hop_s: from when the rows have come until the worker that waits for them goes on.
        change_s: of a transition, whatever moves: agreement, plan, links.
        workers: those that are not as the others, by slot.
        links: those that were measured, by the slots of sender and receiver.
        unstable: the figures that still move.
        contradictions: where the figures contradict each other, in sentences.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    tensor_parallel: int
    bandwidth_bytes_per_s: float
    latency_s: float
    notes: tuple[str, ...] = ()
    width: int = 1
    memory_bytes: int | None = None
    overlap: float = 1.0
    memory_bound: float = 0.0
    step_s: float = 0.0
    action_s: float = 0.0
    send_s: float = 0.0
    load_s_per_row: float = 0.0
    hop_s: float = 0.0
    change_s: float = 0.0
    workers: Mapping[str, WorkerProfile] = field(default_factory=dict)
    links: Mapping[tuple[str, str], LinkProfile] = field(default_factory=dict)
    unstable: tuple[str, ...] = ()
    contradictions: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Reads a file in the JSON form.

        Raises:
            ProtocolError: names the file, the field and what was expected there.
            OSError: the file cannot be read.
        """
        return cls.from_json(path.read_text(), str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Reads the JSON form; `source` is its name in errors.

        Raises:
            ProtocolError: names the source, the field and what was expected there.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{source} is not JSON: {error}") from error
        fields = checked(document, DOCUMENT, source)
        layers = []
        for place, entry in enumerate(fields["layers"]):
            layer = dict(checked(entry, LAYER, f"{source}: layers[{place}]"))
            count = layer.pop("count", 1)
            layers += [LayerProfile(**layer)] * count
        workers = {
            slot: WorkerProfile(**checked(entry, WORKER, f"{source}: workers[{slot!r}]"))
            for slot, entry in fields.get("workers", {}).items()
        }
        links = {}
        for place, entry in enumerate(fields.get("links", [])):
            link = dict(checked(entry, LINK, f"{source}: links[{place}]"))
            ends = link.pop("source"), link.pop("target")
            links[ends] = LinkProfile(**link)
        made: dict[str, Any] = {"layers": tuple(layers), "workers": workers, "links": links}
        made |= {name: tuple(fields[name]) for name in ("notes", "unstable", "contradictions") if name in fields}
        rest = {name: value for name, value in fields.items() if name != "version" and name not in made}
        return cls(**made, **rest)

    def to_json(self) -> str:
        """Returns the JSON form, with a line end, leaving out defaults; `from_json` gives the same profile."""
        document = {"version": VERSION, **_unusual(self)}
        document["layers"] = [{"count": len(list(equal)), **_unusual(layer)} for layer, equal in groupby(self.layers)]
        if self.workers:
            document["workers"] = {slot: _unusual(worker) for slot, worker in self.workers.items()}
        if self.links:
            document["links"] = [
                {"source": source, "target": target, **_unusual(link)} for (source, target), link in self.links.items()
            ]
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    def speed(self, worker: str) -> float:
        """Returns a worker's speed of computing, relative to that of the layers' figures."""
        here = self._of(worker)
        return 1.0 if here is None else here.speed

    def cap_bytes(self, worker: str) -> float:
        """Returns the memory that a worker may use; infinite if nobody has said."""
        here = self._of(worker)
        cap = here.memory_bytes if here is not None and here.memory_bytes is not None else self.memory_bytes
        return math.inf if cap is None else cap

    def least_cap_bytes(self, workers: Iterable[str]) -> float:
        """Returns the memory that the one of some workers may use that has the least."""
        return min(map(self.cap_bytes, workers if self.workers else ("",)), default=math.inf)

    def link(self, source: str, target: str) -> LinkProfile:
        """Returns the link between two workers: as measured, else as between their nodes, else as any."""
        found = self.links.get((slot_of(source), slot_of(target)))
        if found is None:
            found = self._by_nodes.get((node_of(source), node_of(target)))
        return self._any if found is None else found

    def slowest(self, workers: Sequence[str]) -> float:
        """Returns the speed of the slowest of some workers, for which a tensor-parallel group waits."""
        return min(map(self.speed, workers)) if self.workers else 1.0

    def forward_s(self, layers: range, rows: float, width: int = 0) -> float:
        """Returns the seconds of a forward of some layers at speed 1, on a TP group of `width` workers (0: that of the
        figures).
        """
        seconds = self._seconds(self._forward, layers, rows, width)
        if self._has_overheads:
            seconds += self.action_s
            last = layers.stop == len(self.layers)
            if layers.start == 0 or last:
                seconds += rows * self.load_s_per_row
            if not last:
                seconds += self.send_s
        return seconds

    def backward_s(self, layers: range, rows: float, width: int = 0) -> float:
        """Returns the seconds of a backward of some layers at speed 1, on a TP group of `width` workers (0: that of the
        figures).
        """
        seconds = self._seconds(self._backward, layers, rows, width)
        if self._has_overheads:
            seconds += self.action_s + (self.send_s if layers.start else 0.0)
        return seconds

    def weights_s(self, layers: range, rows: float, width: int = 0) -> float:
        """Returns the part of `backward_s` that can wait: the gradients of the parameters."""
        fixed, per_row = self._weights
        seconds = fixed[layers.stop] - fixed[layers.start] + rows * (per_row[layers.stop] - per_row[layers.start])
        # The members of a TP group tell each other nothing in it.
        seconds *= self.width / (width or self.width)
        return min(seconds, self.backward_s(layers, rows, width))

    def turn_s(self, layers: range, rows: float, width: int = 0) -> float:
        """Returns the seconds of the forward and the backward of some layers."""
        return self.forward_s(layers, rows, width) + self.backward_s(layers, rows, width)

    def whole_turn_s(self, width: int) -> tuple[float, float]:
        """Returns the seconds of the forward and the backward of all layers with no rows and with one."""
        if width not in self._whole_turns:
            every = range(len(self.layers))
            self._whole_turns[width] = self.turn_s(every, 0, width), self.turn_s(every, 1, width)
        return self._whole_turns[width]

    @cached_property
    def _whole_turns(self) -> dict[int, tuple[float, float]]:
        return {}

    @cached_property
    def knows_gradients(self) -> bool:
        """Returns whether it is known of all layers what sums of their gradients need."""
        return all(layer.gradient_bytes is not None for layer in self.layers)

    @cached_property
    def _has_overheads(self) -> bool:
        return any((self.action_s, self.send_s, self.load_s_per_row))

    def _seconds(self, sums: _Sums, layers: range, rows: float, width: int) -> float:
        fixed, per_row = sums
        seconds = fixed[layers.stop] - fixed[layers.start] + rows * (per_row[layers.stop] - per_row[layers.start])
        if width in (0, self.width):
            return seconds
        output_bytes = rows * (self._outputs[layers.stop] - self._outputs[layers.start])
        return _on_width(seconds, output_bytes / self.bandwidth_bytes_per_s, self.width, width)

    def _of(self, worker: str) -> WorkerProfile | None:
        return self.workers.get(slot_of(worker)) if self.workers else None

    @cached_property
    def _any(self) -> LinkProfile:
        return LinkProfile(self.bandwidth_bytes_per_s, self.latency_s)

    @cached_property
    def _by_nodes(self) -> dict[tuple[str, str], LinkProfile]:
        """Returns the median link between each two nodes of which some links were measured."""
        found: dict[tuple[str, str], list[LinkProfile]] = {}
        for (source, target), link in self.links.items():
            found.setdefault((node_of(source), node_of(target)), []).append(link)
        return {nodes: median_link(some) for nodes, some in found.items()}

    @cached_property
    def costs(self) -> tuple[int, ...]:
        """Returns a row's cost in each layer, in eighths of the median layer, for `Plan.costs`; none if all are alike.

        So coarse that what is measured of equal layers is equal.
        """
        seconds = [layer.forward_s_per_row + layer.backward_s_per_row for layer in self.layers]
        median_s = statistics.median(seconds) or max(seconds)
        costs = tuple(round(8 * one / median_s) for one in seconds) if median_s else ()
        return costs if len(set(costs)) > 1 else ()

    @cached_property
    def parameter_bytes(self) -> int:
        """Returns the bytes of all layers' parameters."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @cached_property
    def bytes_before(self) -> tuple[list[int], ...]:
        """Returns, of the layers before each: parameters and gradients, optimizer, activations of a row."""
        sums = [one.parameter_bytes if one.gradient_bytes is None else one.gradient_bytes for one in self.layers]
        held = [one.parameter_bytes + n for one, n in zip(self.layers, sums)]
        kept = [one.optimizer_bytes for one in self.layers], [one.activation_bytes_per_row for one in self.layers]
        return tuple(list(accumulate(some, initial=0)) for some in (held, *kept))

    @cached_property
    def output_bytes_per_row(self) -> float:
        """Returns what an average layer gives to the next one."""
        return self._outputs[-1] / len(self.layers)

    @cached_property
    def _outputs(self) -> list[int]:
        return list(accumulate((layer.output_bytes_per_row for layer in self.layers), initial=0))

    @cached_property
    def _forward(self) -> _Sums:
        return _sums([(layer.fixed_forward_s, layer.forward_s_per_row) for layer in self.layers])

    @cached_property
    def _backward(self) -> _Sums:
        return _sums([(layer.fixed_backward_s, layer.backward_s_per_row) for layer in self.layers])

    @cached_property
    def _weights(self) -> _Sums:
        return _sums(
            [
                (layer.weight_share * layer.fixed_backward_s, layer.weight_share * layer.backward_s_per_row)
                for layer in self.layers
            ]
        )

    def scaled(self, factor: float) -> Profile:
        """Returns the same model on devices that take `factor` times as long to compute; links stay as they are."""
        return dataclasses.replace(self, layers=tuple(layer.scaled(factor) for layer in self.layers))

    def check(self, plan: Plan) -> None:
        """Checks that the profile has as many layers as a plan.

        Raises:
            PlanError: it is not.
        """
        if len(self.layers) != plan.n_layers:
            raise PlanError(
                f"the profile {self.name} has {len(self.layers)} layers and the plan {plan.n_layers}; give the "
                "profile of the model that the plan is for"
            )


def _unusual(value: Any) -> dict[str, Any]:
    """Returns the fields of a dataclass that differ from their defaults."""
    found = {one.name: (one, getattr(value, one.name)) for one in dataclasses.fields(value)}
    return {
        name: here
        for name, (one, here) in found.items()
        if here != (one.default if one.default_factory is dataclasses.MISSING else one.default_factory())
    }


_Sums = tuple[list[float], list[float]]
"""Of the layers before each: the fixed seconds, and those per row."""


def _sums(seconds: list[tuple[float, float]]) -> _Sums:
    fixed = accumulate((one[0] for one in seconds), initial=0.0)
    return list(fixed), list(accumulate((one[1] for one in seconds), initial=0.0))


def action_s(profile: Profile, plan: Plan) -> ActionPrice:
    """Returns a function for `elaunch.plan.schedule.timeline`: the seconds of computation of an action of `plan`.

    Each tile of the plan counts as one TP group of the profile.

    Raises:
        PlanError: the plan is for another number of layers.
    """
    profile.check(plan)

    def seconds(kind: Kind, tile: int, rows: int) -> float:
        here = plan.tiles[tile]
        what = here.layers, rows, len(here.workers)
        if kind == "F":
            found = profile.forward_s(*what)
        elif kind == "W":
            found = profile.weights_s(*what)
        else:
            found = profile.backward_s(*what) - (profile.weights_s(*what) if kind == "I" else 0.0)
        return found / profile.slowest(here.workers)

    return seconds


def _on_width(seconds: float, output_s: float, of: int, width: int) -> float:
    """Converts seconds on a tensor-parallel group of `of` workers to seconds on one of `width`.

    The computing is cut; what the members tell each other grows with the degree (Suika A.2): two all-reduces in rings
    of the output, which takes `output_s` from one member to another.
    """
    told_s = [2 * 2 * (some - 1) / some * output_s for some in (of, width)]
    return max(0.0, seconds - told_s[0]) * of / width + told_s[1]


def transfer_s(profile: Profile, plan: Plan) -> TransferPrice:
    """Returns a function for `timeline`: the seconds from the end of an action until its rows reach the one that needs
    them.

    Zero where both are done by the same workers.

    Raises:
        PlanError: the plan is for another number of layers.
    """
    profile.check(plan)

    def seconds(source: int, target: int, rows: int) -> float:
        here, there = plan.tiles[source], plan.tiles[target]
        if here.workers == there.workers:
            return 0.0
        # The gradient of an output is as large as the output.
        layer = profile.layers[max(here.layers.start, there.layers.start) - 1]
        link = profile.link(here.workers[0], there.workers[0])
        return link.seconds(rows * layer.output_bytes_per_row) + profile.hop_s

    return seconds
