"""What a job's layers and links cost: the numbers that price a schedule.

The JSON form has a `version`; an entry of its `layers` may have a `count`, for so many equal layers in a row:

    {"version": 1, "name": "llama2-7b", "tensor_parallel": 4, "bandwidth_bytes_per_s": 8.76e9, "latency_s": 2e-05,
     "notes": ["…"], "layers": [{"count": 32, "forward_s_per_row": 0.0029, …}, …]}
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from elaunch.errors import ProtocolError
from elaunch.workers.plan.schedule import Action
from elaunch.workers.plan.tiling import Plan, PlanError, n_rows
from elaunch.workers.plan.views import inputs

VERSION = 1


@dataclass(frozen=True)
class LayerProfile:
    """One layer on one tensor-parallel tuple, all devices of the tuple taken together.

    A row is one sample. Seconds of an action are `fixed_*_s` + rows × `*_s_per_row`.

    Attributes:
        forward_s_per_row: includes what the devices of the tuple tell each other.
        backward_s_per_row: likewise; gradients of input and parameters.
        parameter_bytes: as they are kept for computing.
        optimizer_bytes: masters and states, before they are sharded over replicas.
        activation_bytes_per_row: kept from forward to backward.
        output_bytes_per_row: what the next layer is given.
        fixed_forward_s: of an action, whatever its rows.
        fixed_backward_s: likewise.
    """

    forward_s_per_row: float
    backward_s_per_row: float
    parameter_bytes: int
    optimizer_bytes: int
    activation_bytes_per_row: int
    output_bytes_per_row: int
    fixed_forward_s: float = 0.0
    fixed_backward_s: float = 0.0

    def forward_s(self, rows: int) -> float:
        """Seconds of the forward of `rows` rows."""
        return self.fixed_forward_s + rows * self.forward_s_per_row

    def backward_s(self, rows: int) -> float:
        """Seconds of the backward of `rows` rows."""
        return self.fixed_backward_s + rows * self.backward_s_per_row

    def scaled(self, factor: float) -> LayerProfile:
        """The same layer, taking `factor` times as long."""
        return dataclasses.replace(
            self,
            forward_s_per_row=factor * self.forward_s_per_row,
            backward_s_per_row=factor * self.backward_s_per_row,
            fixed_forward_s=factor * self.fixed_forward_s,
            fixed_backward_s=factor * self.fixed_backward_s,
        )


@dataclass(frozen=True)
class Profile:
    """The layers of a model and the links between its workers.

    Attributes:
        name: of the model.
        layers: in their order.
        tensor_parallel: devices of the tuple that the layers' figures are for.
        bandwidth_bytes_per_s: from one tuple to another.
        latency_s: of a message from one tuple to another.
        notes: where the figures come from and what they assume.
    """

    name: str
    layers: tuple[LayerProfile, ...]
    tensor_parallel: int
    bandwidth_bytes_per_s: float
    latency_s: float
    notes: tuple[str, ...] = ()

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file in the JSON form.

        Raises:
            ProtocolError: names the file, the field and what was expected there.
            OSError: the file cannot be read.
        """
        return cls.from_json(path.read_text(), str(path))

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        """Read the JSON form; `source` is what errors call it.

        Raises:
            ProtocolError: names the source, the field and what was expected there.
        """
        try:
            document = json.loads(text)
        except ValueError as error:
            raise ProtocolError(f"{source} is not JSON: {error}") from error
        fields = _checked(document, _DOCUMENT, source)
        layers = []
        for place, entry in enumerate(fields["layers"]):
            layer = dict(_checked(entry, _LAYER, f"{source}: layers[{place}]"))
            count = layer.pop("count", 1)
            layers += [LayerProfile(**layer)] * count
        rest = {name: value for name, value in fields.items() if name not in ("version", "layers", "notes")}
        return cls(layers=tuple(layers), notes=tuple(fields.get("notes", ())), **rest)

    def to_json(self) -> str:
        """The JSON form, with a line end; `from_json` gives the same profile."""
        document = {"version": VERSION, **dataclasses.asdict(self)}
        document["layers"] = [
            {"count": len(list(equal)), **dataclasses.asdict(layer)} for layer, equal in groupby(self.layers)
        ]
        return json.dumps(document, indent=1, ensure_ascii=False) + "\n"

    def scaled(self, factor: float) -> Profile:
        """The same model on devices that take `factor` times as long to compute; links stay as they are."""
        return dataclasses.replace(self, layers=tuple(layer.scaled(factor) for layer in self.layers))


def action_s(profile: Profile, plan: Plan) -> Callable[[Action], float]:
    """Seconds of computation of an action of `plan`, for `elaunch.workers.plan.schedule.timeline`.

    Each tile of the plan counts as one tuple of the profile.

    Raises:
        PlanError: the plan is for another number of layers.
    """
    _check(profile, plan)

    def seconds(action: Action) -> float:
        tile = plan.tiles[action.tile]
        rows = n_rows(tile.micro_batches[action.micro_batch])
        layers = profile.layers[tile.layers.start : tile.layers.stop]
        return sum(layer.forward_s(rows) if action.kind == "F" else layer.backward_s(rows) for layer in layers)

    return seconds


def transfer_s(profile: Profile, plan: Plan) -> Callable[[Action, Action], float]:
    """Seconds from the end of an action to the arrival of its rows at one that needs them, for `timeline`.

    Zero where both are done by the same workers.

    Raises:
        PlanError: the plan is for another number of layers.
    """
    _check(profile, plan)

    def seconds(source: Action, target: Action) -> float:
        lower, upper = (source, target) if source.kind == "F" else (target, source)
        if plan.tiles[lower.tile].workers == plan.tiles[upper.tile].workers:
            return 0.0
        rows = sum(
            count
            for feed in inputs(plan)[upper.tile][upper.micro_batch]
            if (feed.tile, feed.micro_batch) == (lower.tile, lower.micro_batch)
            for _, _, count in feed.runs
        )
        # The gradient of an output is as large as the output.
        row_bytes = profile.layers[plan.tiles[upper.tile].layers.start - 1].output_bytes_per_row
        return profile.latency_s + rows * row_bytes / profile.bandwidth_bytes_per_s

    return seconds


def _check(profile: Profile, plan: Plan) -> None:
    if len(profile.layers) != plan.n_layers:
        raise PlanError(
            f"the profile {profile.name} has {len(profile.layers)} layers and the plan {plan.n_layers}; give the "
            "profile of the model that the plan is for"
        )


def _checked(given: Any, expected: Mapping[str, _Expected], where: str) -> dict[str, Any]:
    """The fields of a JSON object."""
    if not isinstance(given, dict):
        raise ProtocolError(f"{where} must be an object, got {given!r}")
    dot = "." if "]" in where else ": "
    for name, one in expected.items():
        if name in given and not one.fits(given[name]):
            raise ProtocolError(f"{where}{dot}{name} must be {one.what}, got {given[name]!r}")
        if name not in given and not one.optional:
            raise ProtocolError(f"{where}{dot}{name} is missing; it must be {one.what}")
    if unknown := sorted(set(given) - set(expected)):
        raise ProtocolError(f"{where}{dot}{unknown[0]} is unknown; expected {', '.join(expected)}")
    return given


@dataclass(frozen=True)
class _Expected:
    what: str
    fits: Callable[[Any], bool]
    optional: bool = False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return _is_whole(value) or (isinstance(value, float) and math.isfinite(value))


_SECONDS = _Expected("a number of 0 or more", lambda value: _is_number(value) and value >= 0)
_FIXED_SECONDS = dataclasses.replace(_SECONDS, optional=True)
_BYTES = _Expected("a whole number of 0 or more", lambda value: _is_whole(value) and value >= 0)
_COUNT = _Expected("a whole number of 1 or more", lambda value: _is_whole(value) and value >= 1)
_DOCUMENT = {
    "version": _Expected(f"{VERSION}, or the profile has to be written again", lambda value: value == VERSION),
    "name": _Expected("a text", lambda value: isinstance(value, str)),
    "layers": _Expected("a list with an entry or more", lambda value: isinstance(value, list) and bool(value)),
    "tensor_parallel": _COUNT,
    "bandwidth_bytes_per_s": _Expected("a number above 0", lambda value: _is_number(value) and value > 0),
    "latency_s": _SECONDS,
    "notes": _Expected(
        "a list of texts",
        lambda value: isinstance(value, list) and all(isinstance(text, str) for text in value),
        optional=True,
    ),
}
_LAYER = {
    "count": dataclasses.replace(_COUNT, optional=True),
    "forward_s_per_row": _SECONDS,
    "backward_s_per_row": _SECONDS,
    "parameter_bytes": _BYTES,
    "optimizer_bytes": _BYTES,
    "activation_bytes_per_row": _BYTES,
    "output_bytes_per_row": _BYTES,
    "fixed_forward_s": _FIXED_SECONDS,
    "fixed_backward_s": _FIXED_SECONDS,
}
