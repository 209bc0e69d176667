"""The devices that a scenario is tried on: the CPU, and one GPU that all its workers share, where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from _pytest.mark import ParameterSet

GPU = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
)
"""The marks of a test that needs a GPU."""

Test = TypeVar("Test", bound=Callable[..., object])


def needs_gpu(test: Test) -> Test:
    """Marks a test."""
    for mark in GPU:
        test = mark(test)
    return test


BACKENDS = {"cpu": "gloo", "cuda": "nccl"}
"""What native groups are made of, by type of the device."""

WORKERS = {"cpu": 4, "cuda": 3}
"""How many workers a job has; each context on a GPU takes seconds."""


def on_gpu(*values: object) -> ParameterSet:
    """Returns values for `parametrize` that are tried where there is a GPU."""
    return pytest.param(*values, marks=GPU)


DEVICES = ("cpu", on_gpu("cuda"))
"""Values for `parametrize`."""


def environment_on(device: str) -> dict[str, str]:
    """Returns what workers need in their environment to compute on a type of device, whatever else there is.

    What differs between workers that share a GPU they set themselves (`tests.jobs.share_device`).
    """
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
