"""What `configure_model` does to a module, such as sharding it in place, and how that is undone for other members."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._composable_state import _module_state_mapping

from elaunch.integrations.parameters import emptied

PARTS = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of any module that say what it is made of: parameters, buffers, children, hooks."""

ADAPTER = "elaunch.integrations.lightning with ModelParallelStrategy"

MISSING = object()


def copied(tensors: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
    """Returns those of some tensors that have values, with copies of these in host memory."""
    return [(one, one.detach().to("cpu", copy=True)) for one in tensors if not one.is_meta]


@torch.no_grad()
def put_back_values(values: list[tuple[Tensor, Tensor]]) -> None:
    """Gives tensors the values that `copied` has taken."""
    for tensor, value in values:
        tensor.copy_(value)


class GivenModule:
    """A module as it is before `configure_model`.

    Parameters are kept without their values, which come from the last commit. Before the first one there are only the
    values that the module begins with: they are copied to host memory.

    Args:
        module: the module.
        has_values: whether there has been no commit.

    Raises:
        UsageError: a parameter is of a class of its own, such as a quantized one.
    """

    def __init__(self, module: nn.Module, has_values: bool) -> None:
        parameters = dict(module.named_parameters())
        kept = {id(one): emptied(name, one, "meta", ADAPTER) for name, one in parameters.items()}
        self._devices = {kept[id(one)]: one.device for one in parameters.values()}
        self._values: dict[nn.Parameter, Tensor] = {}
        self._buffers: list[tuple[Tensor, Tensor]] = []
        if has_values:
            self._values = {kept[id(one)]: value for one, value in copied(parameters.values())}
            self._buffers = copied(module.buffers())
        self._modules: list[tuple[nn.Module, type, dict[str, Any], dict[str, Any]]] = []
        for one in module.modules():
            parts = {name: copy.copy(value) for name, value in vars(one).items() if name in PARTS}
            parts["_parameters"] = {name: kept.get(id(own), own) for name, own in parts["_parameters"].items()}
            others = {name: value for name, value in vars(one).items() if name not in PARTS}
            self._modules.append((one, type(one), parts, others))

    @contextmanager
    def configuring(self) -> Iterator[None]:
        """Returns a context in which `configure_model` runs: attributes that it sets are known after it."""
        try:
            yield
        finally:
            for module, _, _, others in self._modules:
                own = vars(module)
                changed = {
                    name: others.get(name, MISSING)
                    for name in (own.keys() | others.keys()) - PARTS
                    if own.get(name, MISSING) is not others.get(name, MISSING)
                }
                others.clear()
                others.update(changed)

    @torch.no_grad()
    def put_back(self) -> None:
        """Makes the module again what it was; its parameters have any values if there has been a commit. Once."""
        made: dict[int, nn.Parameter] = {}
        for kept, device in self._devices.items():
            made[id(kept)] = one = emptied("", kept, device, ADAPTER)
            if kept in self._values:
                one.copy_(self._values[kept])
        put_back_values(self._buffers)
        for module, kind, parts, changed in self._modules:
            module.__class__ = kind
            _module_state_mapping.pop(module, None)  # or torch would not shard it once more
            parts["_parameters"] = {name: made.get(id(own), own) for name, own in parts["_parameters"].items()}
            own = vars(module)
            for name in [name for name in own if name in PARTS - parts.keys()]:
                del own[name]
            own |= parts
            for name, value in changed.items():
                if value is MISSING:
                    own.pop(name, None)
                else:
                    own[name] = value

    def forget_values(self) -> None:
        """Lets the copies of values go: there has been a commit."""
        self._values, self._buffers = {}, []
