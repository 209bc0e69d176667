"""What every worker knows of a layer that it may not have: names, shapes and random numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from elaunch.workers.random.trace import RandomTrace


@dataclass(frozen=True)
class LayerSpec:
    """What every worker knows of every layer.

    Attributes:
        index: of the layer.
        name: for messages.
        shapes: of the parameters that are trained, whole, in registration order.
        dtypes: of them.
        cuts: the dimension along which tensor parallelism cuts a parameter; those that are not in it stay whole.
        output: shape of a row of its output, and its dtype.
        trace: the random numbers it draws.
    """

    index: int
    name: str
    shapes: Mapping[str, torch.Size]
    dtypes: Mapping[str, torch.dtype]
    cuts: Mapping[str, int]
    output: tuple[torch.Size, torch.dtype]
    trace: RandomTrace
