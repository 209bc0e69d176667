"""Entry points: those that torchrun loads too, and the one that this package has for torchrun.

What they name needs torch, which is imported only when one is used.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

from elaunch.agent.config import AgentConfig
from elaunch.agent.output.logs import Masks, Told, WorkerLogs
from elaunch.errors import LaunchError

LOGS_SPECS = "torchrun.logs_specs"
HANDLERS = "torchrun.handlers"


def find(group: str, name: str) -> EntryPoint | None:
    """Returns the entry point of this name, if a package has registered one."""
    return next(iter(entry_points(group=group, name=name)), None)


class PluginFolders:
    """Asks a LogsSpecs class where streams go, once for each attempt.

    Args:
        specs: an instance of the class.
        name: what the user has called it, for errors.
    """

    def __init__(self, specs: Any, name: str) -> None:
        self._specs = specs
        self._name = name
        self._attempt = -1
        self._places: Any = None
        self._variables: dict[int, dict[str, str]] = {}

    def worker(self, attempt: int, local_rank: int, told: Told) -> WorkerLogs:
        """Returns where the streams of a worker go.

        Raises:
            LaunchError: the class fails.
        """
        if attempt != self._attempt:
            given = told()
            self._variables = {rank: dict(variables) for rank, variables in given.items()}
            # The class may set variables for the workers, as torch's own does with their error files.
            try:
                self._places = self._specs.reify(self._variables)
            except Exception as error:  # of code that is not ours
                raise LaunchError(f"{self._name}: reify failed: {type(error).__name__}: {error}") from error
            self._attempt = attempt
            for rank, variables in given.items():
                for name, value in variables.items():
                    if self._variables[rank].get(name) == value:
                        del self._variables[rank][name]
        places = self._places
        tee_stdout = places.tee_stdouts.get(local_rank)
        tee_stderr = places.tee_stderrs.get(local_rank)
        return WorkerLogs(
            stdout=places.stdouts.get(local_rank) or tee_stdout or None,
            stderr=places.stderrs.get(local_rank) or tee_stderr or None,
            error_file=places.error_files.get(local_rank) or None,
            tee_stdout=bool(tee_stdout),
            tee_stderr=bool(tee_stderr),
            filtered_stdout=getattr(places, "filtered_stdout", None) or None,
            filtered_stderr=getattr(places, "filtered_stderr", None) or None,
            variables=tuple(self._variables[local_rank].items()),
        )


def plugin_folders(config: AgentConfig) -> PluginFolders:
    """Makes the LogsSpecs that --logs-specs names, with what the other flags say.

    Raises:
        LaunchError: no package has registered it, or it cannot be made.
    """
    name = config.output.logs_specs
    entry = find(LOGS_SPECS, name)
    if entry is None:
        raise LaunchError(f"--logs-specs={name}: no installed package has registered it as a {LOGS_SPECS} entry point")
    logs = config.output.logs
    try:
        multiprocessing = importlib.import_module("torch.distributed.elastic.multiprocessing")
        specs = entry.load()(
            log_dir=logs.log_dir,
            redirects=multiprocessing.Std.from_str(_text(logs.redirects)),
            tee=multiprocessing.Std.from_str(_text(logs.tee)),
            local_ranks_filter=set(logs.local_ranks_filter) if logs.local_ranks_filter else None,
        )
    except Exception as error:  # of code that is not ours
        raise LaunchError(f"--logs-specs={name} ({entry.value}): {type(error).__name__}: {error}") from error
    return PluginFolders(specs, f"--logs-specs={name} ({entry.value})")


def _text(masks: Masks) -> str:
    return str(masks) if isinstance(masks, int) else ",".join(f"{rank}:{mask}" for rank, mask in masks.items())


def etcd_v3_handler() -> Callable[[Any], Any]:
    """Returns what makes the handler, for stock torchrun, which calls this wherever its rendezvous is imported: it is
    light.

    It is the same function at every call: torch refuses a second one under the name, and an installation may be found
    twice on the path.
    """
    return _create_etcd_v3


def _create_etcd_v3(params: Any) -> Any:
    return importlib.import_module("elaunch.rendezvous.torchrun").create(params)


def run_torchs_agent(flags: list[str]) -> NoReturn:
    """Becomes torch's own agent, for a rendezvous from a torchrun.handlers entry point, which speaks to no other."""
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *flags])
