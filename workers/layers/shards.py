"""The optimizer's state of one worker: masters and moments of the pieces that it owns, or a snapshot of another's.

Elementwise optimizers keep for each parameter some tensors of its size and some numbers. Here a "parameter" is a piece
of one (`elaunch.workers.state.layout`). So the state of any piece is a row of flat tensors, the master first, that can
be cut and joined like the parameter itself, and a `Form`: what they are called, the numbers, the group's options.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from elaunch.errors import StateError
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.layout import OptimizerShard, ParameterPiece
from elaunch.workers.state.space import OPTIMIZER

MakeOptimizer = Callable[[Iterable[tuple[str, nn.Parameter]]], torch.optim.Optimizer]
MakeScheduler = Callable[[torch.optim.Optimizer], Any]

_NOT_ELEMENTWISE = (torch.optim.LBFGS, torch.optim.Adafactor, torch.optim.Muon, torch.optim.SparseAdam)


@dataclass(frozen=True)
class Form:
    """What an optimizer keeps for a parameter, without the tensors of its size.

    Attributes:
        tensors: (key, dtype) of each, the master left out.
        numbers: (key, dtype or "" for a Python number, value).
        options: of its group, as JSON.
    """

    tensors: tuple[tuple[str, str], ...] = ()
    numbers: tuple[tuple[str, str, float], ...] = ()
    options: str = "{}"

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """Returns the dtypes of the tensors."""
        return tuple(getattr(torch, name) for _, name in self.tensors)


class Shards:
    """Masters, optimizer and scheduler of some pieces, on one device.

    Args:
        pieces: in the order of the layout.
        tensors: for each, flat: its master, and what its form says.
        make_optimizer: called with (name, flat part of a parameter) pairs, named `layers.INDEX.NAME[START:STOP]`.
        make_scheduler: of the learning rate, called with the optimizer.
        forms: by name of a parameter; none of an optimizer that has not stepped.
        schedule: state of the scheduler.

    Raises:
        StateError: the optimizer needs more than one element at a time.
    """

    def __init__(
        self,
        pieces: Sequence[ParameterPiece],
        tensors: Sequence[tuple[Tensor, ...]],
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        forms: Mapping[str, Form] | None = None,
        schedule: Mapping[str, Any] | None = None,
    ) -> None:
        self.pieces = tuple(pieces)
        self._values = [nn.Parameter(parts[0]) for parts in tensors]
        self._optimizer: torch.optim.Optimizer | None = None
        self._scheduler: Any = None
        if not self.pieces:
            return
        self._optimizer = make_optimizer([(piece.label, value) for piece, value in zip(self.pieces, self._values)])
        if not isinstance(self._optimizer, torch.optim.Optimizer):
            raise StateError(
                "the optimizer of a model in layers must be one torch optimizer for all (name, parameter) pairs that "
                f"its function gets, not a {type(self._optimizer).__name__}: sort the pairs by name into groups of one "
                "optimizer, each with its own settings"
            )
        if isinstance(self._optimizer, _NOT_ELEMENTWISE):
            raise StateError(
                f"{type(self._optimizer).__name__} does not update each element by itself, so its states cannot be "
                "sharded; use an elementwise optimizer such as AdamW or SGD"
            )
        if forms:
            self.set_options(forms)
            for place, parts in enumerate(tensors):
                self.put(place, parts, forms[self.pieces[place].parameter])
        if make_scheduler is not None:
            self._scheduler = make_scheduler(self._optimizer)
            if schedule is not None:
                self.set_schedule(schedule)
                self.set_options(forms or {})

    def step(self, gradients: Mapping[OptimizerShard, Tensor], coefficient: float, count: int | None = None) -> None:
        """Updates the masters, with the gradients multiplied by `coefficient`; only of the first `count` pieces."""
        if self._optimizer is None:
            return
        if coefficient != 1.0:
            gradients = {shard: gradient * coefficient for shard, gradient in gradients.items()}
        for piece, value in zip(self.pieces[:count], self._values):
            first = piece.shard.start
            value.grad = gradients[piece.shard][piece.start - first : piece.stop - first].to(value.device)
        self._optimizer.step()
        for value in self._values:
            value.grad = None
        if self._scheduler is not None:
            self._scheduler.step()

    def master(self, place: int) -> Tensor:
        """Returns the master of a piece, by its place."""
        return self._values[place].data

    def tensors(self, place: int) -> tuple[Tensor, ...]:
        """Returns all tensors of a piece, the master first."""
        value = self._values[place]
        kept = (tensor for _, tensor in sorted(self._state(place).items()) if isinstance(tensor, Tensor))
        return self.master(place), *(tensor for tensor in kept if tensor.shape == value.shape)

    def put(self, place: int, parts: Sequence[Tensor], form: Form) -> None:
        """Makes these the tensors of a piece; the master must be the one it has, or is copied into it."""
        assert self._optimizer is not None
        value = self._values[place]
        if parts[0].data_ptr() != value.data_ptr():
            value.data.copy_(parts[0])
        if not form.tensors and not form.numbers:
            return
        state: dict[str, Any] = {key: part for (key, _), part in zip(form.tensors, parts[1:], strict=True)}
        for key, dtype, number in form.numbers:
            # As the optimizer makes them, on the host: it takes them from there.
            state[key] = torch.tensor(number, dtype=getattr(torch, dtype)) if dtype else number
        self._optimizer.state[value] = state

    def chunks(self, count: int | None = None) -> dict[str, list[Chunk]]:
        """Returns the state of the first `count` pieces, by item and box."""
        found: dict[str, list[Chunk]] = {}
        for place, piece in enumerate(self.pieces[:count]):
            found.setdefault(piece.parameter + OPTIMIZER, []).extend(chunks_of(piece, self.tensors(place)))
        return found

    def forms(self, count: int | None = None) -> dict[str, Form]:
        """Returns what the optimizer keeps, by name of a parameter; of the first `count` pieces."""
        found: dict[str, Form] = {}
        groups = self._optimizer.param_groups if self._optimizer is not None else []
        options = {id(value): text for group in groups for text in (_options(group),) for value in group["params"]}
        for place, piece in enumerate(self.pieces[:count]):
            if piece.parameter not in found:
                if id(self._values[place]) not in options:
                    raise StateError(f"the optimizer left out {piece.label}; it must take all that it is given")
                found[piece.parameter] = self._form_of(place, options[id(self._values[place])])
        return found

    def schedule(self) -> dict[str, Any] | None:
        """Returns the state of the scheduler.

        Raises:
            StateError: it has something that is no JSON.
        """
        if self._scheduler is None:
            return None
        state = {key: value for key, value in self._scheduler.state_dict().items() if not callable(value)}
        try:
            json.dumps(state)
        except TypeError as error:
            raise StateError(
                f"the state of {type(self._scheduler).__name__} cannot be sent to other workers: {error}"
            ) from error
        return state

    def place(self, device: torch.device) -> None:
        """Has masters and states on a device."""
        if self._optimizer is None:
            return
        for value in self._values:
            for tensor in (value, *self._optimizer.state.get(value, {}).values()):
                if isinstance(tensor, Tensor) and tensor.shape == value.shape and tensor.device.type != device.type:
                    tensor.data = tensor.data.to(device)

    def release(self) -> None:
        """Lets go of everything: the state is somewhere else."""
        if self._optimizer is not None:
            # Schedulers and optimizers refer to each other, so they live until the garbage collector comes.
            self._optimizer.state.clear()
            self._optimizer.param_groups.clear()
        self.pieces, self._values, self._optimizer, self._scheduler = (), [], None, None

    @property
    def optimizer_name(self) -> str:
        """Returns the optimizer's class; empty without pieces."""
        return "" if self._optimizer is None else type(self._optimizer).__name__

    @property
    def learning_rates(self) -> list[float]:
        """Returns the learning rate of each group of the optimizer; empty without pieces."""
        return [] if self._optimizer is None else [float(group["lr"]) for group in self._optimizer.param_groups]

    def master_bytes(self) -> int:
        """Returns the bytes of the masters of this worker's pieces."""
        return sum(value.nbytes for value in self._values)

    def state_bytes(self) -> int:
        """Returns the bytes of the optimizer's state, without the masters."""
        if self._optimizer is None:
            return 0
        states = self._optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if isinstance(value, Tensor))

    def _state(self, place: int) -> dict[str, Any]:
        assert self._optimizer is not None
        found: dict[str, Any] = self._optimizer.state.get(self._values[place], {})
        return found

    def _form_of(self, place: int, options: str) -> Form:
        tensors: list[tuple[str, str]] = []
        numbers: list[tuple[str, str, float]] = []
        value, state = self._values[place], self._state(place)
        for key in sorted(state):
            kept = state[key]
            if isinstance(kept, Tensor) and kept.shape == value.shape:
                tensors.append((key, _name(kept.dtype)))
            elif isinstance(kept, Tensor) and kept.dim() == 0:
                numbers.append((key, _name(kept.dtype), kept.item()))
            elif isinstance(kept, (int, float)):
                numbers.append((key, "", kept))
            elif kept is not None:
                raise StateError(
                    f"the optimizer keeps {key!r} for {self.pieces[place].label}, which is neither a number nor a "
                    "tensor of the parameter's size; use an elementwise optimizer such as AdamW or SGD"
                )
        return Form(tuple(tensors), tuple(numbers), options)

    def set_options(self, forms: Mapping[str, Form]) -> None:
        """Gives the groups the options that their parameters have elsewhere."""
        assert self._optimizer is not None
        parameters = {id(value): piece.parameter for piece, value in zip(self.pieces, self._values)}
        for group in self._optimizer.param_groups:
            known = (forms[name] for value in group["params"] if (name := parameters[id(value)]) in forms)
            form = next(known, None)
            if form is None:
                continue
            for key, kept in json.loads(form.options).items():
                was = group.get(key)
                if isinstance(was, Tensor):
                    was.fill_(kept)
                else:
                    group[key] = tuple(kept) if isinstance(was, tuple) else kept

    def set_schedule(self, schedule: Mapping[str, Any] | None) -> None:
        """Sets the scheduler's state; what it keeps for each group is its own, since others may have other groups."""
        if self._scheduler is None or schedule is None:
            return
        own = self._scheduler.state_dict()
        taken = {
            key: value
            for key, value in schedule.items()
            if not (isinstance(value, list) and isinstance(own.get(key), list) and len(own[key]) != len(value))
        }
        self._scheduler.load_state_dict({**own, **taken})


def chunks_of(piece: ParameterPiece, tensors: Sequence[Tensor]) -> list[Chunk]:
    """Returns views of flat tensors of a piece, box by box."""
    found, first = [], 0
    for box in piece.boxes:
        shape = tuple(stop - start for start, stop in box)
        size = torch.Size(shape).numel()
        found.append(Chunk(box, tuple(tensor[first : first + size].view(shape) for tensor in tensors)))
        first += size
    return found


def _options(group: Mapping[str, Any]) -> str:
    kept: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and value.dim() == 0:
            kept[key] = value.item()
        elif isinstance(value, (bool, int, float, str, type(None), tuple, list)) and key != "params":
            kept[key] = value
    try:
        return json.dumps(kept, sort_keys=True)
    except TypeError as error:
        raise StateError(f"an option of the optimizer cannot be sent to other workers: {error}") from error


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
