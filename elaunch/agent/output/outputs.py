"""What workers leave behind: their log files, lines for the console, error files, and the report of a failed job."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Protocol

from elaunch.agent.decisions.actions import Account
from elaunch.agent.output.logs import LogFolders, Told, WorkerLogs
from elaunch.agent.output.tee import Tee

if TYPE_CHECKING:
    from elaunch.agent.config import AgentConfig
    from elaunch.agent.decisions.actions import Ended

RESULT = "ELAUNCH_RESULT"  # set by elaunch.api: where the end of the job is written down for the calling program


class Folders(Protocol):
    """Says where the streams of a worker that is about to start go."""

    def worker(self, attempt: int, local_rank: int, told: Told) -> WorkerLogs:
        """Returns where the streams of the worker in slot `local_rank` go in its attempt number `attempt`."""


class Outputs:
    """The files and lines of this node's workers.

    Args:
        config: the settings.
        folders: where streams go; by default as the flags say.
    """

    def __init__(self, config: AgentConfig, folders: Folders | None = None) -> None:
        self._config = config
        if folders is None:
            folders = LogFolders(config.output.logs, config.nproc_per_node)
            folders.check()
        self._folders = folders
        self._tee = Tee(config.output.logs, config.node)
        self._result_path = os.environ.pop(RESULT, "")  # not for the workers, which may start jobs too
        self._ranks: dict[str, int] = {}
        self._error_files: dict[str, str] = {}
        self._stacks: dict[str, str] = {}

    def prepare(
        self, worker: str, attempt: int, local_rank: int, rank: int, told: Told
    ) -> tuple[WorkerLogs, dict[str, str]]:
        """Prepares for the start of a worker: its streams, and what its environment says of them.

        Raises:
            LaunchError: a folder or file cannot be made, or a plug-in fails.
        """
        logs = self._folders.worker(attempt, local_rank, told)
        self._tee.follow(worker, local_rank, rank, logs)
        self._ranks[worker] = rank
        self._error_files[worker] = logs.error_file or ""
        beside = next(filter(None, (logs.error_file, logs.stdout, logs.stderr)), os.devnull)
        name = f"stacks.{worker.rpartition('#')[2]}.txt"
        self._stacks[worker] = "" if beside == os.devnull else os.path.join(os.path.dirname(beside), name)
        return logs, {"TORCHELASTIC_ERROR_FILE": logs.error_file or "", **dict(logs.variables)}

    def ended(self, worker: str) -> None:
        """Shows what the worker wrote last."""
        self._tee.ended(worker)

    def stacks_path(self, worker: str) -> str:
        """Returns the file for the stacks of a worker that hangs, beside its other ones; empty where it has none."""
        return self._stacks.get(worker, "")

    def account(self, worker: str, t: float, others: Iterable[str]) -> Account:
        """Returns what `worker`, which failed and ended at Unix time `t`, and others of this node have written down.

        Of the `others` the earliest failure counts, if it came before that of `worker`: the order of ends does not
        matter.
        """
        files = {each: path for each in (worker, *others) if os.path.exists(path := self._error_files.get(each, ""))}
        if not files:
            return Account()
        from elaunch.failures import failed_at, summary  # only where something has failed

        moments = {each: (failed_at(files.get(each, ""), t), self._ranks[each]) for each in (worker, *files)}
        first = min(moments, key=lambda each: moments[each])
        reason = summary(files[worker]) if worker in files else ""
        return Account(reason, "" if first == worker else f"worker {first} failed: {summary(files[first])}")

    def close(self) -> None:
        """Shows all that is left to show."""
        self._tee.close()

    def report(self, failed: Iterable[Ended], code: int, text: str) -> None:
        """Tells how the job ended, where it did not end well: the table, and the launcher's own error file."""
        from elaunch.failures import copy_to_launcher, read_failure, record_own_error, report, root_cause

        failures = [
            read_failure(
                rank=self._ranks[ended.worker],
                local_rank=ended.local_rank,
                pid=ended.pid,
                exitcode=ended.exitcode,
                error_file=self._error_files[ended.worker] or None,
                t=ended.t,
            )
            for ended in sorted(failed, key=lambda ended: self._ranks[ended.worker])
        ]
        if code != 0 and failures:
            sys.stderr.write(report(self._config.program.script, failures) + "\n")
            sys.stderr.flush()
            copy_to_launcher(root_cause(failures))
        elif code != 0 and text:
            record_own_error(RuntimeError(text))
        if self._result_path:
            ranks = sorted(self._ranks.values())
            told = {"failures": [asdict(failure) for failure in failures], "ranks": ranks, "message": text}
            with open(self._result_path, "w", encoding="utf-8") as file:
                json.dump(told, file)
        if isinstance(self._folders, LogFolders):
            self._folders.tidy()
