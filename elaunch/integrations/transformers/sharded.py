"""Models that FSDP shards in place: a whole one is made anew for each group of members."""

from __future__ import annotations

import copy
import os
from typing import Any

import torch
from torch import Tensor, nn

from elaunch.integrations.parameters import emptied
from elaunch.workers.reentry.encoding import local_part


def fsdp_version(args: Any) -> int:
    """Returns which FSDP the arguments of a Trainer, or accelerate's variables, ask for; 0: none."""
    if getattr(args, "fsdp", None):
        return int((args.fsdp_plugin_args or {}).get("fsdp_version", 1))
    if os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true":
        return int(os.environ.get("FSDP_VERSION", "1"))
    return 0


class UnshardedModel:
    """A model as it is before it is sharded, without the values of its parameters.

    Args:
        model: whole; it may be sharded afterwards.

    Raises:
        UsageError: a parameter is of a class of its own, such as a quantized one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = _emptied(model, {name: torch.device("meta") for name, _ in model.named_parameters()})
        self._devices = {name: one.device for name, one in model.named_parameters()}

    def make(self) -> nn.Module:
        """Returns such a model, which is whole, and whose parameters have any values."""
        return _emptied(self._model, self._devices)


def _emptied(model: nn.Module, devices: dict[str, torch.device]) -> nn.Module:
    """Returns a deep copy of a model but for the values of its parameters; those that are tied, stay so."""
    adapter = "elaunch.integrations.transformers.Trainer with FSDP"
    made: dict[int, Any] = {
        id(one): emptied(name, one, devices[name], adapter) for name, one in model.named_parameters()
    }
    return copy.deepcopy(model, made)


def local_parts(model: nn.Module) -> dict[str, Tensor]:
    """Returns what this worker has of a model: its parts of parameters, and the buffers."""
    parts = [*model.named_parameters(), *model.named_buffers()]
    return {name: local_part(one).detach() for name, one in parts}


@torch.no_grad()
def take_local_parts(model: nn.Module, parts: dict[str, Tensor]) -> None:
    """Gives a model what another one of the same members has here."""
    for name, one in [*model.named_parameters(), *model.named_buffers()]:
        local_part(one).copy_(parts[name])
