"""What an operator sets for Suika."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from elaunch.errors import UsageError

QueueOrder = Literal["fifo", "sjf"]
QUEUE_ORDERS: tuple[str, ...] = get_args(QueueOrder)


@dataclass(frozen=True)
class SuikaSettings:
    """Settings of `Suika`; the defaults are the paper's where it names one.

    Attributes:
        queue: jobs of one priority start in the order of their arrival, or the shortest first.
        aggressiveness: lambda of the threshold tau = U^lambda, which the benefit of a growth has to reach; 0: 1 always.
        aging_s: waiting for so long raises the priority in the queue by one.
        backfill_s: jobs behind one that finds no place may start before it until it has waited so long; 0: never.
        quotas: devices that the jobs of a user may have at a time; those of a user who is not named: any number.
        preempt: whether a job takes the basic demand of jobs of lower priority, which stop and wait, if it finds no
            place otherwise.
        most_moved: how many running jobs may be moved for one that would have room only if the free devices lay
            together; 0: none.
        horizon_s: a growth has to make up within this time, or until the job's end, for the training that the change
            costs; infinite: costs do not count.
        rest_s: a job does not grow again until so long after its last change.
        tflops: speed of the devices of a kind, relative to the others; 1 for one that is not named.
        window_units: a job grows by as many devices as it has in a round, or by so many of its units.
    """

    queue: QueueOrder = "fifo"
    aggressiveness: float = 1.0
    aging_s: float = math.inf
    backfill_s: float = 0.0
    quotas: Mapping[str, int] = field(default_factory=dict)
    preempt: bool = False
    most_moved: int = 4
    horizon_s: float = 600.0
    rest_s: float = 0.0
    tflops: Mapping[str, float] = field(default_factory=dict)
    window_units: int = 16

    def __post_init__(self) -> None:
        """Checks the values.

        Raises:
            UsageError: names the value and what was expected.
        """
        if self.queue not in QUEUE_ORDERS:
            raise UsageError(f"the order of the queue is {' or '.join(QUEUE_ORDERS)}, got {self.queue!r}")
        for name in ("aggressiveness", "backfill_s", "horizon_s", "rest_s", "most_moved"):
            if not getattr(self, name) >= 0:
                raise UsageError(f"{name} is {getattr(self, name)}: make it 0 or more")
        for name in ("aging_s", "window_units"):
            if not getattr(self, name) > 0:
                raise UsageError(f"{name} is {getattr(self, name)}: make it more than 0")
        for kind, speed in self.tflops.items():
            if not 0 < speed < math.inf:
                raise UsageError(f"devices of kind {kind} have a speed of {speed}: give a number above 0")
        for user, quota in self.quotas.items():
            if quota < 0:
                raise UsageError(f"user {user} has a quota of {quota} devices: make it 0 or more")
