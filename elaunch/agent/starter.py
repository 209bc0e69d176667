"""Starts this node's workers as the flags say: their command, environment, streams, devices and CPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elaunch.agent.config import AgentConfig
from elaunch.agent.decisions.actions import Start
from elaunch.agent.output.outputs import Outputs
from elaunch.agent.supervisor import (
    Supervisor,
    command,
    fill,
    torchrun_variables,
    worker_cpus,
    worker_devices,
    worker_env,
)
from elaunch.agent.tcp_store.process import StoreOffer
from elaunch.errors import DeviceError

SHARE_OF_CORE = 0.25
"""What the imports for replacements take from workers that compute on all cores: ten seconds of it for torch."""


class WorkerStarter:
    """Knows what the workers of one node are started with.

    Args:
        config: the settings.
        supervisor: starts processes.
        outputs: prepares streams.
        control: path of the socket at which the agent listens for its workers.
        variables: more of the workers' environment.
        store: the one that this node offers its workers.

    Raises:
        LaunchError: the devices or CPUs that the flags ask for are not there.
    """

    def __init__(
        self,
        config: AgentConfig,
        supervisor: Supervisor,
        outputs: Outputs,
        control: str,
        variables: Mapping[str, str],
        store: StoreOffer,
    ) -> None:
        self._config = config
        self._supervisor = supervisor
        self._outputs = outputs
        self._control = control
        self._variables = variables
        self._store = store
        self._argv, self._program = command(config.program)
        self._cpus = worker_cpus(config)
        self._devices = worker_devices(config)

    def start(self, start: Start) -> None:
        """Starts a worker; its start, and its end, are heard of from the supervisor.

        Raises:
            LaunchError: a folder or file for its streams cannot be made.
        """
        local_rank = start.local_rank
        env = worker_env(self._config, start, self._control, self._store.served)
        env |= {**self._variables, **self._devices.get(local_rank, {})}
        attempt, told = start.generation.attempt, partial(self._told, start)
        logs, more = self._outputs.prepare(start.worker, attempt, local_rank, int(env["RANK"]), told)
        self._supervisor.spawn(
            start.worker,
            [fill(arg, local_rank) for arg in self._argv],
            {**env, **more},
            self._program_of(local_rank) if start.warm else None,
            logs.stdout,
            logs.stderr,
            self._cpus.get(local_rank),
        )

    def _told(self, start: Start) -> dict[int, dict[str, str]]:
        """Returns what torchrun would tell the workers of this node that start with this one, by local rank."""
        return {
            local_rank: {
                **torchrun_variables(self._config, replace(start, local_rank=local_rank), self._store.served),
                **self._devices.get(local_rank, {}),
            }
            for local_rank in range(self._config.nproc_per_node)
        }

    def warm(self) -> None:
        """Begins to keep a preloaded process, where the script is Python's and the user has not forbidden it."""
        if self._config.start.warm and self._program is not None:
            env = {**os.environ}
            if self._config.nproc_per_node > 1:
                env.setdefault("OMP_NUM_THREADS", "1")
            # Where there are no more cores than workers, the imports take theirs from them.
            has_free_cores = len(os.sched_getaffinity(0)) > self._config.nproc_per_node
            self._supervisor.warm(env, self._config.start.preload, 1.0 if has_free_cores else SHARE_OF_CORE)

    def _program_of(self, local_rank: int) -> dict[str, Any] | None:
        """Returns what a fork of the preloaded process runs."""
        if self._program is None:
            return None
        return {**self._program, "args": [fill(arg, local_rank) for arg in self._program["args"]]}


def unlock_clock(local_rank: int) -> str:
    """Unlocks the clock of the device of a worker that was killed and so could not.

    Returns:
        A line for the user where that has failed, else "".
    """
    from elaunch.detect.nvml import NvmlClocks, gpu_of

    try:
        NvmlClocks(gpu_of(local_rank, os.environ)).reset()
    except DeviceError as error:
        return f"--allow-dvfs: {error}; if the worker of local rank {local_rank} had locked its clock, it still is"
    return ""
