"""Starting a job from a Python program, in the terms of `torch.distributed.launcher.api`.

    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=4)
    results = elastic_launch(config, train)("an argument")   # {rank: what train returned}, of this node's workers
    elastic_launch(config, sys.executable)("-u", "train.py")

The agent runs as a child process: it must be forked from before it has threads, which a program cannot promise.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing.spawn
import os
import pickle
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elaunch.agent.launch import PARENT
from elaunch.agent.output.outputs import RESULT
from elaunch.errors import JobFailed, LaunchError
from elaunch.threads import with_elaunch


@dataclass
class LaunchConfig:
    """Settings of a job; the fields are torch's, and what they mean is said there and in docs/torchrun.md.

    Different from torch: without a backend, a job of one node needs no endpoint; `max_restarts` is 0 by default, as on
    the command line; `logs_specs` is anything with the attributes of torch's `DefaultLogsSpecs`; functions that a
    program calls to configure metrics or NUMA have no counterpart, `numa_binding` names the mode.
    """

    min_nodes: int
    max_nodes: int
    nproc_per_node: int
    logs_specs: Any = None
    run_id: str = ""
    role: str = "default_role"
    rdzv_endpoint: str = ""
    rdzv_backend: str = ""
    rdzv_configs: dict[str, Any] = field(default_factory=dict)
    rdzv_timeout: int = -1
    max_restarts: int | None = 0
    monitor_interval: float = 0.1
    start_method: str = "spawn"
    log_line_prefix_template: str | None = None
    metrics_cfg: dict[str, str] = field(default_factory=dict)
    local_addr: str | None = None
    event_log_handler: str = "null"
    numa_binding: str | None = None
    signals_to_handle: str = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"
    duplicate_stdout_filters: list[str] | None = None
    duplicate_stderr_filters: list[str] | None = None
    virtual_local_rank: bool = False
    shutdown_timeout: int | None = None

    def flags(self) -> list[str]:
        """Returns the same as a command line of `elaunch`."""
        configs = dict(self.rdzv_configs)
        rank = configs.pop("rank", None)
        if self.rdzv_timeout != -1:
            configs["timeout"] = self.rdzv_timeout
        values: dict[str, object] = {
            "nnodes": f"{self.min_nodes}:{self.max_nodes}",
            "nproc-per-node": self.nproc_per_node,
            "rdzv-id": self.run_id or secrets.token_hex(8),
            "role": self.role,
            "rdzv-backend": self.rdzv_backend,
            "rdzv-endpoint": self.rdzv_endpoint,
            "rdzv-conf": ",".join(f"{name}={value}" for name, value in configs.items()),
            "node-rank": rank,
            "max-restarts": self.max_restarts,
            "monitor-interval": self.monitor_interval,
            "start-method": self.start_method,
            "local-addr": self.local_addr,
            "event-log-handler": self.event_log_handler,
            "numa-binding": self.numa_binding,
            "signals-to-handle": self.signals_to_handle,
            "duplicate-stdout-filters": _list(self.duplicate_stdout_filters),
            "duplicate-stderr-filters": _list(self.duplicate_stderr_filters),
            "shutdown-timeout": self.shutdown_timeout,
            **_log_flags(self.logs_specs),
        }
        flags = [f"--{name}={value}" for name, value in values.items() if value not in (None, "")]
        return flags + ["--virtual-local-rank"] * self.virtual_local_rank


class elastic_launch:
    """Run `entrypoint`, a function or a command, on the nodes of a job: call it with the arguments."""

    def __init__(self, config: LaunchConfig, entrypoint: Callable[..., Any] | str) -> None:
        self._config = config
        self._entrypoint = entrypoint

    def __call__(self, *args: Any) -> dict[int, Any]:
        """Runs this node's part of the job to its end; returns, and raises, what `launch_agent` does."""
        return launch_agent(self._config, self._entrypoint, list(args))


def launch_agent(config: LaunchConfig, entrypoint: Callable[..., Any] | str, args: list[Any]) -> dict[int, Any]:
    """Runs this node's part of a job to its end.

    Args:
        config: the settings.
        entrypoint: a function that can be pickled by name, or a program.
        args: its arguments; `${local_rank}` in a string is replaced.

    Returns:
        What the function returned, by rank, for the workers of this node; None for each where it is a program.

    Raises:
        JobFailed: a worker failed for good (its `failures` tell how), or the job was closed by another node.
        LaunchError: the function, its arguments or its results cannot be pickled.
    """
    if not entrypoint:
        raise LaunchError("launch_agent: expected a function or a program to run, found nothing")
    with tempfile.TemporaryDirectory(prefix="elaunch-call-") as folder:
        if callable(entrypoint):
            _write_call(folder, entrypoint, args)
            command = ["--module", "elaunch.function", folder]
        else:
            command = ["--no-python", entrypoint, *map(str, args)]
        ended = os.path.join(folder, "ended.json")
        code = _run([sys.executable, "-m", "elaunch", *config.flags(), *command], _environment(config, ended))
        report = _read_report(ended)
        if code != 0:
            failures = {failure["rank"]: failure for failure in report["failures"]}
            raise JobFailed(report["message"] or f"the agent exited with code {code}", failures)
        return {rank: _read_result(folder, rank) if callable(entrypoint) else None for rank in report["ranks"]}


def _run(command: list[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=environment)
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def _environment(config: LaunchConfig, ended: str) -> dict[str, str]:
    # What the program was started with itself must not change what it asks for.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PET_")}
    environment |= {PARENT: str(os.getpid()), RESULT: ended}
    if config.log_line_prefix_template is not None:
        environment["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"] = config.log_line_prefix_template
    return with_elaunch(environment)


def _write_call(folder: str, function: Callable[..., Any], args: list[Any]) -> None:
    try:
        call = pickle.dumps((function, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(f"launch_agent: the function or an argument cannot be pickled: {error}") from error
    preparation = multiprocessing.spawn.get_preparation_data("elaunch")
    preparation.pop("authkey", None)  # a secret, and not needed
    with open(os.path.join(folder, "call.pickle"), "wb") as file:
        pickle.dump((preparation, call), file)


def _read_report(path: str) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="utf-8") as file:
        report: dict[str, Any] = json.load(file)
        return report
    return {"failures": [], "ranks": [], "message": ""}


def _read_result(folder: str, rank: int) -> Any:
    # Written by this node's own workers into a folder that only this user can read.
    try:
        with open(os.path.join(folder, f"result-{rank}.pickle"), "rb") as file:
            return pickle.load(file)  # noqa: S301
    except FileNotFoundError:
        return None


def _list(filters: list[str] | None) -> str:
    return ",".join(word.replace(",", ",,") for word in filters or ())


def _log_flags(specs: Any) -> dict[str, object]:
    """What torch's DefaultLogsSpecs, or an object like it, says."""
    if specs is None:
        return {}

    def named(name: str) -> Any:
        return getattr(specs, name, getattr(specs, f"_{name}", None))

    def mask(value: Any) -> str | None:
        if isinstance(value, dict):
            return ",".join(f"{rank}:{int(each)}" for rank, each in value.items())
        return None if value is None else str(int(value))

    ranks = named("local_ranks_filter")
    return {
        "log-dir": named("log_dir") or named("root_log_dir"),
        "redirects": mask(named("redirects")),
        "tee": mask(named("tee")),
        "local-ranks-filter": ",".join(map(str, sorted(ranks))) if ranks else None,
    }
