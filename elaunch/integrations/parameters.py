"""Parameters as they were before a model was sharded in place: a whole model is made anew for each group of members."""

from __future__ import annotations

import copy

import torch
from torch import nn

from elaunch.errors import UsageError


def emptied(name: str, parameter: nn.Parameter, device: torch.device | str, adapter: str) -> nn.Parameter:
    """Returns a parameter that is as another one but for its value.

    Args:
        name: of the other one.
        parameter: the other one.
        device: where it lies; "meta": nowhere.
        adapter: what a message begins with.

    Raises:
        UsageError: the other one is of a class of its own, such as a quantized one.
    """
    if type(parameter) is not nn.Parameter:
        raise UsageError(
            f"{adapter}: {name} is a {type(parameter).__name__}, and not an ordinary parameter: leave the sharding "
            "out, or the quantization"
        )
    other = nn.Parameter(torch.empty_like(parameter, device=device), parameter.requires_grad)
    other.__dict__.update(copy.deepcopy(parameter.__dict__))
    return other
