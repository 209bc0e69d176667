"""The jobs of a simulated cluster, made of what a trace says of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from elaunch.scheduler.model import ClusterNode, JobState
from elaunch.scheduler.speeds import ChangeCost, TableSpeed
from elaunch.simulator.cluster_model import ClusterJob
from elaunch.simulator.traces import Arrival


def cluster_nodes(count: int, devices: int, per_rack: int) -> list[ClusterNode]:
    """Returns nodes that are alike."""
    return [ClusterNode(f"n{number + 1}", devices, rack=f"r{number // per_rack}") for number in range(count)]


def scaling_jobs(
    arrivals: Sequence[Arrival], per_node: int, most: int, scaling: float, cost: ChangeCost
) -> list[ClusterJob]:
    """Returns jobs that all scale alike; a sample is what a job does in a second on what it asks for.

    A job whose rates the trace has is as fast as they say, and takes its duration at the rate of what it asks for. The
    scheduler is told these rates, as the real one would be, and nothing of what a change costs.

    Args:
        arrivals: of jobs.
        per_node: devices of a node; a job grows by what it asks for, or by a node if that is less, unless the trace
            says otherwise.
        most: it can use so many times what it asks for, unless the trace says how many devices.
        scaling: twice the devices give twice this part of the speed.
        cost: of a change.
    """
    speeds: dict[tuple[int, int, int], TableSpeed] = {}
    found = []
    for one in arrivals:
        highest = one.most if one.most is not None else most * one.devices
        unit = one.unit or min(one.devices, per_node)
        key = one.devices, highest, unit
        if key not in speeds:
            exponent = 1 + math.log2(scaling)
            sizes = [*range(one.devices, highest, unit), highest]
            speeds[key] = TableSpeed({size: (size / one.devices) ** exponent for size in sizes}, cost)
        state = JobState(one.name, one.at_s, one.devices, highest, unit=unit, priority=one.priority, user=one.user)
        if one.rates:
            told = TableSpeed(one.rates)
            samples = one.duration_s * told.rate({"": one.devices})
            found.append(ClusterJob(state, samples, replace(told, cost=cost), told))
        else:
            found.append(ClusterJob(state, one.duration_s, speeds[key]))
    return found
