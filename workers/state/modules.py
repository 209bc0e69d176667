"""From a model and its optimizer to tensors by name, and back.

A parameter or buffer has the name that the model gives it; what the optimizer keeps of a parameter is `name@key`. The
settings of the optimizer's groups are values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from elaunch.errors import StateError
from elaunch.workers.state.tensors import TensorSpace

GROUPS = "groups"
"""Among the values: the settings of the optimizer's groups, in their order."""


def tensors_of(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns all tensors by name, and the values, for `TensorSpace.hold`. A tensor that has several names is there
    once.

    Raises:
        StateError: the optimizer keeps something that is neither a number nor a tensor of its parameter's shape.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    if optimizer is None:
        return tensors, {}
    for name, parameter in model.named_parameters():
        for key, kept in optimizer.state.get(parameter, {}).items():
            if not isinstance(kept, Tensor) or (kept.dim() and kept.shape != parameter.shape):
                raise StateError(
                    f"the optimizer keeps {key} of {name}, which is neither a tensor of the shape "
                    f"{list(parameter.shape)} nor a number in a tensor; such an optimizer cannot be moved"
                )
            tensors[f"{name}@{key}"] = kept
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    return tensors, {GROUPS: settings}


@torch.no_grad()
def load_model(space: TensorSpace, model: nn.Module) -> None:
    """Gives a model, placed as the installed layout says, the tensors of the space.

    What is on the meta device is replaced by the tensors of the space, so optimizers are made afterwards; into what has
    memory they are copied.

    Raises:
        StateError: the model has a tensor that the space has not, or places it otherwise.
    """
    filled: dict[Tensor, Tensor] = {}
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            for leaf, old in table.items():
                if old is None:
                    continue
                if old not in filled:
                    filled[old] = _filled(space, f"{prefix}.{leaf}" if prefix else leaf, old)
                table[leaf] = filled[old]


@torch.no_grad()
def load_optimizer(space: TensorSpace, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gives an optimizer of a loaded model what the space has of it: its state and its settings."""
    kept: dict[str, list[str]] = {}
    for item in space.names():
        base, _, key = item.partition("@")
        if key:
            kept.setdefault(base, []).append(key)
    for name, parameter in model.named_parameters():
        for key in kept.get(name, ()):
            local = space.local(f"{name}@{key}")
            alike = space.shape(f"{name}@{key}") == tuple(parameter.shape)
            optimizer.state[parameter][key] = _like(parameter, local) if alike else local
    for group, settings in zip(optimizer.param_groups, space.values.get(GROUPS, ()), strict=False):
        group.update(settings)


def _filled(space: TensorSpace, name: str, old: Tensor) -> Tensor:
    if name not in space.names():
        raise StateError(f"the model has {name}, and the job has no such tensor")
    local = space.local(name)
    own = old.to_local() if isinstance(old, DTensor) else old
    if own.shape != local.shape or old.dtype != local.dtype:
        raise StateError(
            f"{name} is {list(own.shape)} {old.dtype} in the model and {list(local.shape)} {local.dtype} in its layout"
        )
    if old.device.type != "meta":
        own.copy_(local)
        return old
    new = _like(old, local)
    return nn.Parameter(new, old.requires_grad) if isinstance(old, nn.Parameter) else new


def _like(old: Tensor, local: Tensor) -> Tensor:
    """A tensor placed as another, of this worker's part."""
    if not isinstance(old, DTensor):
        return local
    return DTensor.from_local(
        local, old.device_mesh, old.placements, run_check=False, shape=old.shape, stride=old.stride()
    )
