"""Copies of the state in host memory: the one of the last commit, and the one before.

What only an optimizer changes is copied while the next forward and backward run; the optimizer waits for that before it
steps. What does not change is copied once, all else at each commit, at once. On an accelerator the copies go to pinned
memory, on a stream of their own, and come after the step: a device that an abort has freed goes on with garbage, so a
copy is good only if no group had failed when it was complete.
"""

from __future__ import annotations

import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.workers.comm.native import ended
from elaunch.workers.reentry import copier
from elaunch.workers.reentry.tensor_shard import TensorShard
from elaunch.workers.state.boxes import Box, whole
from elaunch.workers.state.codec import VERSION, Encoder, Manifest, TensorPlaces
from elaunch.workers.state.space import box_of_placements


class ShardEncoder(Encoder):
    """Describes values, and of a DTensor the whole tensor, while the list has this worker's part.

    Attributes:
        boxes: by place in the list, the parts that are not whole tensors.
    """

    def __init__(self, before: TensorPlaces | None = None) -> None:
        super().__init__(before)
        self.boxes: dict[int, Box] = {}
        self._cut: dict[tuple[Any, ...], Box] = {}

    def encode(self, value: Any, path: str, depth: int = 0) -> Any:
        """Returns what stands for a value in a manifest."""
        if type(value) in _WITHOUT_PARTS or not is_dtensor(value):
            return super().encode(value, path, depth)
        # Of engines' shards, two may lie at the same place on one worker and not on another: these have names instead.
        place = self.add(value.to_local(), path, tied=not isinstance(value, TensorShard))
        self.boxes[place] = self._box(value)
        spec, shape = self.specs[place], list(value.shape)
        if spec["shape"] != shape or "strides" in spec:  # else it is from before, and shared
            self.specs[place] = {key: item for key, item in spec.items() if key != "strides"} | {"shape": shape}
        return {"k": "tensor", "i": place}

    def _box(self, value: Any) -> Box:
        if isinstance(value, TensorShard):
            return value.box
        # An optimizer keeps several tensors that are cut like their parameter; the mesh lives as long as they do.
        cut = tuple(value.shape), id(value.device_mesh), value.placements
        if cut not in self._cut:
            self._cut[cut] = box_of(value)
        return self._cut[cut]


_WITHOUT_PARTS = frozenset((Tensor, torch.nn.Parameter, dict, OrderedDict, list, int, float, bool, str, type(None)))


def is_dtensor(value: Any) -> bool:
    """Returns whether a value is a part of a tensor, as DTensors are, without importing what defines these."""
    module = sys.modules.get("torch.distributed.tensor")
    return isinstance(value, TensorShard) or (module is not None and isinstance(value, module.DTensor))


def is_sharded(thing: Any) -> bool:
    """Returns whether an object has tensors of which this worker has a part: parameters, or others of its state."""
    if isinstance(thing, torch.nn.Module):
        return any(_is_cut(one) for one in thing.parameters())
    if isinstance(thing, torch.optim.Optimizer):
        return any(_is_cut(one) for group in thing.param_groups for one in group["params"])
    return _has_cut(thing.state_dict())


def _has_cut(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_cut, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_cut, value))
    return _is_cut(value)


def _is_cut(value: Any) -> bool:
    if isinstance(value, TensorShard):
        return value.is_cut
    return is_dtensor(value) and not all(placement.is_replicate() for placement in value.placements)


def box_of(tensor: Any) -> Box:
    """Returns which part of a DTensor this worker has; it may be empty.

    Raises:
        StateError: it has a placement that gives no box, such as a partial sum.
    """
    if isinstance(tensor, TensorShard):
        return tensor.box
    mesh = tensor.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return tuple((0, 0) for _ in range(tensor.dim()))
    box: Box = box_of_placements(tuple(tensor.shape), tuple(mesh.shape), tensor.placements, coordinate)
    return box


Described = tuple[Manifest, ShardEncoder]
"""The manifest of objects, and what encoded it."""


@torch.no_grad()
def describe_shards(objects: Mapping[str, Any], before: TensorPlaces | None = None) -> Described:
    """Returns the manifest of objects with `state_dict`, by name, and what encoded it: live tensors and their boxes.

    Args:
        objects: by name.
        before: what was found in the same objects before, if that is known; it makes this quicker.

    Raises:
        StateError: an object has no state_dict, or one with a value that cannot be described; names the path.
    """
    encoder = ShardEncoder(before)
    described = {name: encoder.encode(_state_of(thing), name) for name, thing in objects.items()}
    return {"version": VERSION, "objects": described, "tensors": encoder.specs}, encoder


def _state_of(thing: Any) -> Any:
    """Returns the state of an object; parameters as they are, since to detach a DTensor takes long."""
    if isinstance(thing, torch.nn.Module) and type(thing).state_dict is torch.nn.Module.state_dict:
        return thing.state_dict(keep_vars=True)
    return thing.state_dict()


Part = tuple[int, Box, Tensor]
"""The place of a tensor in a manifest, a box of it, and what is in the box."""


@dataclass(eq=False)
class StateCopy:
    """The state as it was at one commit.

    Attributes:
        step: number of steps that had committed.
        manifest: of all objects, the same on all members.
        values: what else makes up the state, as JSON; the same on all.
        tensors: this worker's parts, in the order of the manifest.
        boxes: by place in it, the parts that are not whole.
        constant: places of what does not change as long as the same objects are bound.
        torn: paths of tensors that were changed while they were copied.
        spoiled: what had gone wrong in the process groups when the device was done with it; "": nothing.
    """

    step: int
    manifest: Manifest
    values: dict[str, Any]
    tensors: list[Tensor]
    boxes: Mapping[int, Box] = field(default_factory=dict)
    constant: Collection[int] = ()
    torn: tuple[str, ...] = ()
    spoiled: str = ""

    @property
    def parts(self) -> list[Part]:
        """Returns this worker's parts."""
        shapes = [tuple(spec["shape"]) for spec in self.manifest["tensors"]]
        return [
            (place, self.boxes.get(place, whole(shapes[place])), tensor) for place, tensor in enumerate(self.tensors)
        ]


class Copies:
    """The copies of one worker. All of it belongs to the training thread.

    Args:
        errored: returns what has gone wrong in the process groups in which a device works; for any thread.
        abort: frees the device, when something has.

    Attributes:
        newest: the last copy that was begun.
        former: the one before.
    """

    def __init__(
        self, errored: Callable[[], str | None] = lambda: None, abort: Callable[[], object] = lambda: None
    ) -> None:
        self._errored, self._abort = errored, abort
        self.newest: StateCopy | None = None
        self.former: StateCopy | None = None
        self._under_way: _Copying | None = None
        self._hooks: list[Any] = []
        self._gated: set[str] = set()
        self._found: TensorPlaces | None = None
        self._constant: frozenset[str] = frozenset()
        self._constants: dict[str, tuple[int, int]] = {}  # by path: where it lies, and its version when it was copied

    def describe(self, objects: Mapping[str, Any]) -> Described:
        """Returns what `describe_shards` does, quicker where the tensors lie where they lay the last time."""
        described = describe_shards(objects, self._found)
        self._found = described[1].found
        return described

    def gate(self, objects: Mapping[str, Any], constant: Collection[str] = ()) -> None:
        """Has the optimizers among some objects wait for a copy that is under way before they step.

        Args:
            objects: by name; the next copies are of these.
            constant: paths of tensors that do not change, or of what they are part of.
        """
        self._constant, self._constants = frozenset(constant), {}
        for hook in self._hooks:
            hook.remove()
        optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        self._hooks = [one.register_step_pre_hook(lambda *_: self._let_pass()) for one in optimizers]
        self._gated = {name for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}

    @property
    def under_way(self) -> _Copying | None:
        """Returns what is being copied; None if nothing is."""
        return self._under_way

    def begin(
        self,
        step: int,
        objects: Mapping[str, Any],
        values: dict[str, Any],
        later: Collection[str] = (),
        described: Described | None = None,
    ) -> StateCopy:
        """Begins to copy the present state, in place of the copy before the newest one; returns the copy.

        Args:
            step: number of steps that will have committed with it.
            objects: that make it up, by name, with `state_dict`.
            values: what else does, as JSON.
            later: paths of tensors that do not change before `finish`, beside those that only an optimizer changes.
            described: what `describe` has just given of the objects; None: they are described here.

        Raises:
            StateError: an object has a value that cannot be described; names the path.
        """
        self.finish()
        manifest, encoder = self.describe(objects) if described is None else described
        sources = encoder.tensors
        constant = self._places_of_constants(encoder)
        kept = self._kept(constant, encoder)
        places = [kept[i] if i in kept else _place(source, self._spare(i)) for i, source in enumerate(sources)]
        copy = StateCopy(step, manifest, values, places, dict(encoder.boxes), constant)
        copied_later = self._later(objects, encoder) - constant
        copied_later |= {place for place, spec in enumerate(encoder.specs) if spec["path"] in later}
        now = [place for place in range(len(sources)) if place not in copied_later and place not in kept]
        with torch.no_grad():
            for place in now:
                places[place].copy_(sources[place], non_blocking=True)
        self.former, self.newest = self.newest, copy
        device = device_of(sources)
        if copied_later or device is not None:
            later_ones = [(place, sources[place]) for place in sorted(copied_later)]
            self._under_way = _Copying(copy, later_ones, device, self._errored, self._abort)
        return copy

    def of_step(self, step: int) -> list[Part]:
        """Returns this worker's parts of copies with so many steps: of one, or of two that were cut for different
        members. None is under way.
        """
        copies = [copy for copy in (self.newest, self.former) if copy is not None and copy.step == step]
        return [part for copy in copies if not copy.spoiled for part in copy.parts]

    def copied(self, lost: Callable[[str], Exception]) -> Callable[[], None]:
        """Returns a function that returns when the copy that is under way now is complete. For any thread.

        Args:
            lost: returns what the function raises where the copy is spoiled.
        """
        copying = self._under_way

        def wait() -> None:
            if copying is not None:
                copying.await_copy(BESIDE_S)
                if copying.copy.spoiled:
                    raise lost(copying.copy.spoiled)

        return wait

    def finish(self) -> None:
        """Returns when no copy is under way.

        Raises:
            StateError: something was changed by another than an optimizer meanwhile; names the tensors.
        """
        copying, self._under_way = self._under_way, None
        if copying is not None:
            copying.wait()
            if copying.copy.torn:
                names = ", ".join(copying.copy.torn[:5])
                raise StateError(
                    f"{names} changed after commit(), while it was copied, and not by an optimizer that is bound: bind "
                    "that optimizer, or change it before commit()"
                )

    def forget_newest(self) -> None:
        """Lets the newest copy go: its commit does not count."""
        self.finish()
        self.newest, self.former = self.former, None

    def forget(self) -> None:
        """Lets all copies go."""
        self.finish()
        self.newest = self.former = None

    def _places_of_constants(self, encoder: ShardEncoder) -> set[int]:
        if not self._constant:
            return set()
        return {place for place, spec in enumerate(encoder.specs) if _is_part(spec["path"], self._constant)}

    def _kept(self, constant: Collection[int], encoder: ShardEncoder) -> dict[int, Tensor]:
        """Returns by place the copies of what does not change, as far as they have been made.

        Raises:
            StateError: something has changed nevertheless; names it.
        """
        if not constant:
            return {}
        before, known, tensors = self.newest, self._constants, encoder.tensors
        paths = {encoder.specs[place]["path"]: place for place in constant}
        self._constants = {path: (tensors[place].data_ptr(), tensors[place]._version) for path, place in paths.items()}
        changed = [path for path, found in self._constants.items() if known.get(path, found) != found]
        if changed:
            raise StateError(
                f"{', '.join(changed[:5])} changed, but state.bind(constant=...) says that it does not: leave it out"
            )
        if not known or before is None:
            return {}
        made = {before.manifest["tensors"][place]["path"]: before.tensors[place] for place in before.constant}
        return {place: made[path] for path, place in paths.items() if path in known and path in made}

    def _spare(self, place: int) -> Tensor | None:
        """Returns memory that a copy of the tensor at a place may overwrite, if there is some."""
        former = self.former
        if former is None or place >= len(former.tensors) or place in former.constant:
            return None
        return former.tensors[place]

    @torch.no_grad()
    def _later(self, objects: Mapping[str, Any], encoder: ShardEncoder) -> set[int]:
        """Places of the tensors that nothing but an optimizer changes."""
        changed: set[int] = set()
        for name in self._gated:
            for group in objects[name].param_groups:
                changed.update(local_part(one).data_ptr() for one in group["params"])
        return {
            place
            for place, (tensor, spec) in enumerate(zip(encoder.tensors, encoder.specs, strict=True))
            if tensor.numel() and (spec["path"].partition(".")[0] in self._gated or tensor.data_ptr() in changed)
        }

    def _let_pass(self) -> None:
        if self._under_way is not None:
            self._under_way.let_pass()


class _Copying:
    """Tensors on their way to a copy.

    Args:
        copy: into which.
        sources: with their places in it.
        device: that has some of what the copy is of, copied by now or not; None: all is in host memory.
        errored, abort: as for `Copies`.
    """

    def __init__(
        self,
        copy: StateCopy,
        sources: Sequence[tuple[int, Tensor]],
        device: torch.device | None,
        errored: Callable[[], str | None],
        abort: Callable[[], object],
    ) -> None:
        self.copy, self._sources, self._errored, self._abort = copy, sources, errored, abort
        self._device, self._lock = device, threading.Lock()
        self._versions = [source._version for _, source in sources]
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._event: Any = None
        self._passed = False
        if device is None:
            copier.later(self._run, self._died)
            return
        self._event = self._begin_on(device)

    def _begin_on(self, device: torch.device) -> ended.Mark:
        """Begins to copy after all that the device was given; returns where its work will be complete."""
        stream = torch.Stream(device)
        stream.wait_stream(torch.accelerator.current_stream(device))
        with stream:
            self._copy()
            return ended.here(device)

    def let_pass(self) -> None:
        """Lets an optimizer step: on an accelerator, what it does comes after the copy."""
        if self._event is not None:
            torch.accelerator.current_stream().wait_event(self._event)
            self._check()
        else:
            self.wait()

    def wait(self) -> None:
        """Returns when all is copied, and it was looked whether anything changed meanwhile."""
        self.await_copy()
        if self._event is not None:
            self._check()

    def await_copy(self, poll_s: float = ended.POLL_S) -> None:
        """Returns when all is copied, and it is known whether it is good. For any thread.

        Args:
            poll_s: how often a device is asked.
        """
        if self._device is not None:  # not in the driver, where an abort could not free it
            ended.reach(self._device, self._event, self._errored, failed=self._abort, poll_s=poll_s)
            with self._lock:  # once: what is found after the members have changed says nothing of this copy
                if not self._done.is_set():
                    self.copy.spoiled = self._errored() or ""
                    self._done.set()
        else:
            self._done.wait()
            if self._error is not None:
                raise self._error

    def _run(self) -> None:
        self._copy()
        self._check()
        self._done.set()

    def _died(self, error: BaseException) -> None:
        self._error = error
        self._done.set()

    @torch.no_grad()
    def _copy(self) -> None:
        places = [self.copy.tensors[place] for place, _ in self._sources]
        if places:
            torch._foreach_copy_(places, [source for _, source in self._sources], non_blocking=True)

    def _check(self) -> None:
        """Looks whether something has changed since, before the optimizer may change it."""
        if self._passed:
            return
        self._passed = True
        specs = self.copy.manifest["tensors"]
        self.copy.torn = tuple(
            specs[place]["path"]
            for (place, source), version in zip(self._sources, self._versions, strict=True)
            if source._version != version
        )


BESIDE_S = 0.001
"""How often a thread beside the one that trains asks a device."""


def _is_part(path: str, names: Collection[str]) -> bool:
    """Returns whether a path is one of those given, or of a part of what one of them is."""
    while path not in names:
        path, dot, _ = path.rpartition(".")
        if not dot:
            return False
    return True


def device_of(tensors: Sequence[Tensor]) -> torch.device | None:
    """Returns the device that some of the tensors lie on; None: all are in host memory, as an optimizer's counters."""
    return next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)


def local_part(tensor: Any) -> Tensor:
    """Returns what this worker has of a tensor; all of it, unless it is a part."""
    local: Tensor = tensor.to_local() if is_dtensor(tensor) else tensor
    return local


def _place(source: Tensor, spare: Tensor | None) -> Tensor:
    """Returns host memory for a copy of a tensor; that of an older copy, where it fits."""
    if spare is not None and (spare.shape, spare.dtype, spare.stride()) == (
        source.shape,
        source.dtype,
        source.stride(),
    ):
        return spare
    pinned = source.device.type != "cpu"
    return torch.empty_strided(source.shape, source.stride(), dtype=source.dtype, pin_memory=pinned)
