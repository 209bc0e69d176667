"""A stand-in for torch._dynamo, torch's compiler, which the first optimizer of a process imports to no purpose.

That import takes a second of processor time, and the tests run hundreds of workers. The examples have the real one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def compile_nothing() -> None:
    """Spare this process the compiler, if it has not imported it yet; call it before an optimizer is made."""
    if "torch._dynamo" in sys.modules:
        return
    # What optimizers ask of it; and torch.distributed, where it is imported.
    stand_in = ModuleType("torch._dynamo")
    vars(stand_in).update(
        disable=_disable,
        graph_break=lambda: None,
        trace_rules=SimpleNamespace(clear_lru_cache=lambda: None),
    )
    sys.modules["torch._dynamo"] = torch._dynamo = stand_in


def _disable(function: Callable[..., Any], recursive: bool = True, *, wrapping: bool = True) -> Callable[..., Any]:
    return function
