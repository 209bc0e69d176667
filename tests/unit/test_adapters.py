"""What does not change under adapters is told from the rest by its names in the state."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from elaunch.integrations.adapters import under_adapters


class Adapted(nn.Module):
    """In the place of PEFT's model: tests/integration/test_hf.py has the real one."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(2, 2).requires_grad_(False)
        self.tied = self.base
        self.adapter = nn.Linear(2, 1)


def test_frozen_parameters_under_adapters_are_named_as_in_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(Adapted(), nn.Linear(1, 1).requires_grad_(False))  # what is frozen elsewhere may change
    objects = {"net": net, "optimizer": torch.optim.SGD(net[0].parameters()), "alone": net[0]}
    monkeypatch.delitem(sys.modules, "peft", raising=False)
    assert under_adapters(objects) == []
    peft = ModuleType("peft")
    peft.PeftModel = Adapted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "peft", peft)
    found = under_adapters(objects)
    frozen = ["base.weight", "base.bias", "tied.weight", "tied.bias"]
    assert found == [*(f"net.0.{name}" for name in frozen), *(f"alone.{name}" for name in frozen)]
    assert {name.removeprefix("net.") for name in found if name.startswith("net.")} < set(net.state_dict())
