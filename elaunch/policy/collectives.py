"""What carries the gradients of workers: the setting alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

from elaunch.errors import UsageError
from elaunch.policy import settings

NAME = "ELAUNCH_COLLECTIVES"

Collectives = Literal["auto", "native", "links"]
WITHOUT_MESSAGES = ("npu",)
"""Devices whose native groups only sum. In the others summands can travel, and members add them in a fixed order."""

CHOICES: tuple[str, ...] = get_args(Collectives)


def parse(text: str | None, name: str = NAME) -> Collectives:
    """Reads the setting; none or empty is "auto".

    Args:
        text: as given.
        name: what it is called in messages.

    Raises:
        UsageError: it is none of the choices.
    """
    if text and text not in CHOICES:
        raise UsageError(
            f"{name}={text}: expected auto (the device's own library on accelerators, links else), native (NCCL, "
            "HCCL or Gloo) or links"
        )
    return text or "auto"  # type: ignore[return-value]


def uses_native(environment: Mapping[str, str], device_type: str) -> bool:
    """Returns whether a worker's tensors go over groups of torch's own backends once these are open.

    Args:
        environment: of the worker.
        device_type: where it computes, such as "cpu".

    Raises:
        UsageError: the setting is none of the choices, or a fixed order is asked for, and native groups that lack it.
    """
    choice = parse(environment.get(NAME))
    can = device_type not in WITHOUT_MESSAGES or not in_order(environment)
    if choice == "auto":
        return device_type != "cpu" and can
    if choice == "native" and not can:
        raise UsageError(
            f"--collectives=native ({NAME}) and --consistency=bitwise ({settings.CONSISTENCY}) exclude each other on "
            f"{device_type}: HCCL adds gradients in an order of its own; use --collectives=links, which adds them in "
            "the order of ranks, or leave --consistency=bitwise out"
        )
    return choice == "native"


def in_order(environment: Mapping[str, str]) -> bool:
    """Returns whether sums have a fixed order, over links and in native groups alike.

    Args:
        environment: of the worker.
    """
    return environment.get(settings.CONSISTENCY) == "bitwise"
