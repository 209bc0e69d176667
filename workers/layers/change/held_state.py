"""What workers tell each other of their state when the plan changes; each then knows where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from elaunch.workers.layers.shards import Form
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.space import Holdings


@dataclass(frozen=True)
class Commit:
    """What a step that committed came to; who was at its barrier and did not pass can apply it.

    Attributes:
        step: its number.
        coefficient: by which the gradients are multiplied.
        loss: mean over the global batch.
        gradient_norm: before clipping; None without clipping.
    """

    step: int
    coefficient: float
    loss: float
    gradient_norm: float | None


@dataclass(frozen=True)
class StepReport:
    """What a step that has committed came to; the same on all workers.

    Attributes:
        step: its number.
        loss: mean over the global batch.
        gradient_norm: of the mean loss over the global batch, before clipping; None without clipping.
    """

    step: int
    loss: float
    gradient_norm: float | None


class Hosted(NamedTuple):
    """State in host memory as it was when the last step committed, and what belongs to the state everywhere then."""

    chunks: dict[str, list[Chunk]]
    forms: Mapping[str, Form]
    schedule: dict[str, Any] | None


@dataclass(frozen=True)
class HeldState:
    """One worker's state.

    Attributes:
        plan: text of the plan under which it holds its part; "": it holds nothing.
        stale: some of its parameters may be those of the step before.
        boxes: of optimizer items, if they are not what the plan says: a change was interrupted.
        hosted: in host memory besides, if it is not what `snapshots` says: a change was interrupted, or no step has
            committed after the last one.
        snapshots: by worker whose optimizer state it has in host memory, how many of its pieces.
        copied: in host memory of others' frozen parameters and buffers.
        forms: what the optimizer keeps, by name of a parameter.
        schedule: state of the learning-rate scheduler.
        settings: digest of what all workers must be given alike.
    """

    plan: str = ""
    stale: bool = False
    boxes: Holdings | None = None
    hosted: Holdings | None = None
    snapshots: Mapping[str, int] = field(default_factory=dict)
    copied: Holdings = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    settings: str = ""

    def is_of(self, plan: str) -> bool:
        """Returns whether all of it is what a plan says, given its text."""
        return self.plan == plan and not self.stale and self.boxes is None

    def to_json(self) -> dict[str, Any]:
        """Returns it as JSON."""
        return {**asdict(self), "forms": forms_to_json(self.forms)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> HeldState:
        """Returns the value that `to_json` wrote."""
        read = {
            "forms": forms_from_json(fields["forms"]),
            "boxes": _boxes_from_json(fields["boxes"]),
            "hosted": _boxes_from_json(fields["hosted"]),
            "copied": _boxes_from_json(fields["copied"]),
        }
        return cls(**{**fields, **read})


def _boxes_from_json(fields: Mapping[str, Any] | None) -> Holdings | None:
    if fields is None:
        return None
    return {name: tuple(tuple(map(tuple, box)) for box in boxes) for name, boxes in fields.items()}


def forms_to_json(forms: Mapping[str, Form]) -> list[Any]:
    """Returns the forms as JSON; parameters of one form stand together."""
    alike: dict[Form, list[str]] = {}
    for name, form in forms.items():
        alike.setdefault(form, []).append(name)
    return [[form.tensors, form.numbers, form.options, names] for form, names in alike.items()]


def forms_from_json(fields: list[Any]) -> dict[str, Form]:
    """Returns the forms that `forms_to_json` wrote."""
    found: dict[str, Form] = {}
    for tensors, numbers, options, names in fields:
        form = Form(tuple(map(tuple, tensors)), tuple(map(tuple, numbers)), options)
        found |= dict.fromkeys(names, form)
    return found
