"""What workers tell each other of their state when the plan changes; each then knows where everything is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from elaunch.workers.engine.shards import Form
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
class Standing:
    """One worker's state.

    Attributes:
        plan: text of the plan under which it holds its part; "": it holds nothing.
        stale: some of its parameters may be those of the step before.
        boxes: of optimizer items, if they are not what the plan says: a change was interrupted.
        snapshots: by worker whose optimizer state it has in host memory, how many of its pieces.
        forms: what the optimizer keeps, by name of a parameter.
        schedule: state of the learning-rate scheduler.
        commit: the last step that it saw commit.
        settings: digest of what all workers must be given alike.
    """

    plan: str = ""
    stale: bool = False
    boxes: Holdings | None = None
    snapshots: Mapping[str, int] = field(default_factory=dict)
    forms: Mapping[str, Form] = field(default_factory=dict)
    schedule: dict[str, Any] | None = None
    commit: Commit | None = None
    settings: str = ""

    def to_json(self) -> dict[str, Any]:
        """Parameters of one form are told together."""
        alike: dict[Form, list[str]] = {}
        for name, form in self.forms.items():
            alike.setdefault(form, []).append(name)
        return {
            **asdict(self),
            "forms": [[form.tensors, form.numbers, form.options, names] for form, names in alike.items()],
        }

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Standing:
        forms: dict[str, Form] = {}
        for tensors, numbers, options, names in said["forms"]:
            form = Form(tuple(map(tuple, tensors)), tuple(map(tuple, numbers)), options)
            forms |= dict.fromkeys(names, form)
        boxes = said["boxes"]
        return cls(
            **{
                **said,
                "forms": forms,
                "commit": Commit(**said["commit"]) if said["commit"] else None,
                "boxes": boxes and {name: tuple(tuple(map(tuple, box)) for box in of) for name, of in boxes.items()},
            }
        )
