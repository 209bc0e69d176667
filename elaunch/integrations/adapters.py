"""Models with adapters of PEFT, such as LoRA's: what lies under them does not change."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch


def under_adapters(objects: Mapping[str, Any]) -> list[str]:
    """Returns the paths of the frozen parameters of models with adapters, for the `constant` of `bind`.

    Args:
        objects: that are bound, by name.
    """
    module: Any = sys.modules.get("peft")
    if module is None:
        return []
    return [
        ".".join(filter(None, (name, prefix, path)))
        for name, thing in objects.items()
        if isinstance(thing, torch.nn.Module)
        for prefix, one in thing.named_modules()
        if isinstance(one, module.PeftModel)
        for path, parameter in one.named_parameters(remove_duplicate=False)
        if not parameter.requires_grad
    ]
