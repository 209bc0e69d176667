"""Copies of the state in host memory: the one of the last commit, and the one before.

What only an optimizer changes is copied while the next forward and backward run; the optimizer waits for that before it
steps. What does not change is copied once, all else at each commit, at once. On an accelerator the copies go to pinned
memory, on a stream of their own, and come after the step: a device that an abort has freed goes on with garbage, so a
copy is good only if no group had failed when it was complete.
"""

from __future__ import annotations

import json
import operator
import threading
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import StateError
from elaunch.workers import heartbeat
from elaunch.workers.comm.native import ended
from elaunch.workers.reentry import copier
from elaunch.workers.reentry.describer import Describer
from elaunch.workers.reentry.encoding import Description, local_part
from elaunch.workers.state.boxes import Box, whole
from elaunch.workers.state.codec import Manifest

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
        form: of what it is a copy of (`Description.form`).
    """

    step: int
    manifest: Manifest
    values: dict[str, Any]
    tensors: list[Tensor]
    boxes: Mapping[int, Box] = field(default_factory=dict)
    constant: Collection[int] = ()
    torn: tuple[str, ...] = ()
    spoiled: str = ""
    form: object = None

    @property
    def parts(self) -> list[Part]:
        """Returns this worker's parts."""
        shapes = [tuple(spec["shape"]) for spec in self.manifest["tensors"]]
        return [
            (place, self.boxes.get(place, whole(shapes[place])), tensor) for place, tensor in enumerate(self.tensors)
        ]

    def packed(self) -> bytes:
        """Returns all that is not in tensors, for others."""
        return json.dumps([self.manifest, self.values]).encode()


def forms_of(manifest: Manifest) -> int:
    """Returns a checksum of the names, dtypes and shapes of all tensors, which is the same on all members."""
    forms = [[spec["path"], spec["dtype"], spec["shape"]] for spec in manifest["tensors"]]
    return zlib.crc32(repr(forms).encode())


@dataclass(frozen=True, eq=False)
class _CopyOrder:
    """What of some objects is copied when.

    Attributes:
        form: of their description.
        parameters: that optimizers step.
        paths: of what else is copied later.
        constant: places of what does not change.
        later: places of what does not change before the optimizer steps.
        now: places of all else.
        device: that some of it lies on; None: all is in host memory.
    """

    form: object
    parameters: list[Tensor]
    paths: Collection[str]
    constant: set[int]
    later: list[int]
    now: list[int]
    device: torch.device | None


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
        self._describer = Describer()
        self._order: _CopyOrder | None = None
        self._constant: frozenset[str] = frozenset()
        self._constants: dict[str, tuple[int, int]] = {}  # by path: where it lies, and its version when it was copied

    def describe(self, objects: Mapping[str, Any]) -> Description:
        """Returns what `describe_shards` does, quicker where the tensors lie where they lay the last time."""
        return self._describer.describe(objects)

    def describes(self, objects: Mapping[str, Any], manifest: Manifest) -> bool:
        """Returns whether objects have the tensors of a manifest, at the same places."""
        return forms_of(self.describe(objects).manifest) == forms_of(manifest)

    def gate(self, objects: Mapping[str, Any], constant: Collection[str] = ()) -> None:
        """Has the optimizers among some objects wait for a copy that is under way before they step.

        Args:
            objects: by name; the next copies are of these.
            constant: paths of tensors that do not change, or of what they are part of.
        """
        self._constant, self._constants = frozenset(constant), {}
        self._describer, self._order = Describer(), None
        for hook in self._hooks:
            hook.remove()
        optimizers = [thing for thing in objects.values() if isinstance(thing, torch.optim.Optimizer)]
        self._hooks = [one.register_step_pre_hook(lambda *_: self._let_pass()) for one in optimizers]
        self._gated = {name for name, thing in objects.items() if isinstance(thing, torch.optim.Optimizer)}

    def ungate(self) -> None:
        """Lets go of the objects, and of their tensors; the copies stay."""
        self.gate({})

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
        described: Description | None = None,
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
        description = self.describe(objects) if described is None else described
        sources, order = description.tensors, self._order_of(objects, description, later)
        kept = self._kept(order.constant, description)
        places = self._memory(description, order, kept)
        manifest, boxes = description.manifest, description.boxes
        copy = StateCopy(step, manifest, values, places, boxes, order.constant, form=description.form)
        now = [*order.now, *(place for place in order.constant if place not in kept)]
        if now:
            with torch.no_grad():
                into, of = ([tensors[place] for place in now] for tensors in (places, sources))
                torch._foreach_copy_(into, of, non_blocking=True)
        self.former, self.newest = self.newest, copy
        if order.later or order.device is not None:
            later_ones = [(place, sources[place]) for place in order.later]
            self._under_way = _Copying(copy, later_ones, order.device, self._errored, self._abort)
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

    def _order_of(self, objects: Mapping[str, Any], description: Description, paths: Collection[str]) -> _CopyOrder:
        """Returns what is copied when; that of the last copy, if it is of the same tensors."""
        before = self._order
        groups = [group for name in self._gated for group in objects[name].param_groups]
        parameters = [parameter for group in groups for parameter in group["params"]]
        if (
            before is not None
            and before.form is description.form
            and before.paths == paths
            and len(before.parameters) == len(parameters)
            and all(map(operator.is_, before.parameters, parameters))
        ):
            return before
        sources, specs = description.tensors, description.manifest["tensors"]
        constant = set[int]()
        if self._constant:
            constant = {place for place, spec in enumerate(specs) if _is_part(spec["path"], self._constant)}
        later = self._stepped(parameters, description) - constant
        later |= {place for place, spec in enumerate(specs) if spec["path"] in paths}
        now = [place for place in range(len(sources)) if place not in later and place not in constant]
        self._order = _CopyOrder(description.form, parameters, paths, constant, sorted(later), now, device_of(sources))
        return self._order

    def _kept(self, constant: Collection[int], description: Description) -> dict[int, Tensor]:
        """Returns by place the copies of what does not change, as far as they have been made.

        Raises:
            StateError: something has changed nevertheless; names it.
        """
        if not constant:
            return {}
        before, known, tensors = self.newest, self._constants, description.tensors
        paths = {description.manifest["tensors"][place]["path"]: place for place in constant}
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

    def _memory(self, description: Description, order: _CopyOrder, kept: Mapping[int, Tensor]) -> list[Tensor]:
        """Returns host memory for a copy: that of the copy before the newest one, where it fits."""
        sources, former = description.tensors, self.former
        if former is not None and former.form is description.form and former.constant is order.constant:
            places = list(former.tensors)
            for place in order.constant:
                places[place] = kept[place] if place in kept else _place(sources[place], None)
            return places
        return [
            kept[place] if place in kept else _place(sources[place], self._spare(place))
            for place in range(len(sources))
        ]

    def _spare(self, place: int) -> Tensor | None:
        """Returns memory that a copy of the tensor at a place may overwrite, if there is some."""
        former = self.former
        if former is None or place >= len(former.tensors) or place in former.constant:
            return None
        return former.tensors[place]

    @torch.no_grad()
    def _stepped(self, parameters: Sequence[Tensor], description: Description) -> set[int]:
        """Places of the tensors that nothing but an optimizer changes."""
        changed = {local_part(one).data_ptr() for one in parameters}
        return {
            place
            for place, (tensor, spec) in enumerate(zip(description.tensors, description.manifest["tensors"]))
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

    def _begin_on(self, device: torch.device) -> heartbeat.Mark:
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
