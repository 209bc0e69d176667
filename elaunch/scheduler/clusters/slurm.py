"""Slurm as a cluster, through its commands: `sbatch`, `squeue`, `sinfo`, `scancel` (22.05 or newer).

An agent is a batch job of one task on one node. It runs in the batch script itself: signals to a step of `srun` reach
all of its processes, the workers too. Slurm forgets jobs some minutes after their end (`MinJobAge`), so the exit code
goes to a file of the scheduler's folder, which all nodes share.
"""

from __future__ import annotations

import re
import shlex
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.model import ClusterNode

PREFIX = "elaunch"
LIMIT_S = 8.0  # of a command: two of them are within the lease of the leading daemon
SIGNAL_S = 60  # before a limit of Slurm's on the time of a job: its agent drains
GONE = "Invalid job id"  # what scancel says of a job that has just ended
USABLE = {"allocated", "completing", "idle", "mixed", "planned"}
QUEUED_STATES = {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
RUNNING_STATES = {"RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING", "STAGE_OUT", "RESIZING"}

NODES = "NodeList:|,StateLong:|,CPUsState:|,Gres:|,GresUsed:|,Features:|"
JOBS = "%A|%T|%j|%n|%k|%r"

SCRIPT = """#!/bin/sh
# One agent of elaunch, which alone gets the signals of this script. Its exit code outlives Slurm's memory of the job.
early=
trap 'early=TERM' TERM
trap 'early=${{early:-USR1}}' USR1
{command} &
pid=$!
trap 'kill -TERM $pid' TERM
trap 'kill -USR1 $pid' USR1
[ -z "$early" ] || kill -$early $pid
while :; do
    wait $pid
    code=$?
    kill -0 $pid 2>/dev/null || break
done
echo $code >{file}.new && mv {file}.new {file}
exit $code
"""


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """How jobs are submitted.

    Attributes:
        name: of the scheduler: agents of another one are not its own.
        folder: of logs and exit codes, which all nodes share.
        elaunch: the command of the launcher.
        options: of `sbatch`, for all agents, such as the partition.
        gpus: devices are those of `--gres=gpu`; else they are processors.
    """

    name: str
    folder: Path
    elaunch: tuple[str, ...]
    options: tuple[str, ...] = ()
    gpus: bool = True


@dataclass(slots=True)
class SlurmCluster:
    """Slurm, asked by its commands.

    Attributes:
        settings: how jobs are submitted.
        ids: numbers of Slurm's jobs by the names of their agents, as of the last look.
    """

    settings: SlurmSettings
    ids: dict[str, int] = field(default_factory=dict)

    def look(self) -> tuple[list[ClusterNode], list[AgentReport]]:
        """Asks `sinfo` and `squeue`; exit codes tell of agents that these have forgotten."""
        found = parse_jobs(
            run(["squeue", "--me", "--noheader", "--states=all", f"--format={JOBS}"]), self.settings.name
        )
        nodes = parse_nodes(run(["sinfo", "-N", "--noheader", "-O", NODES]), found, self.settings.gpus)
        return nodes, self._agents(found)

    def start(self, request: AgentRequest) -> None:
        """Submits a batch job. Slurm never runs two of one name at a time (`--dependency=singleton`)."""
        run(submission(request, self.settings), batch_script(request, self.settings))

    def stop(self, name: str, kill: bool) -> None:
        """Sends SIGTERM to the agent, or cancels its batch job, which also takes it from the queue."""
        number = self.ids.get(name)
        if number is not None:
            self._cancel(number, *([] if kill else ["--batch", "--signal=TERM"]))

    def forget(self, name: str) -> None:
        """Removes the exit code; the log stays."""
        with suppress(OSError):
            _file(self.settings.folder, name, "exit").unlink(missing_ok=True)

    def _agents(self, found: Iterable[Row]) -> list[AgentReport]:
        rows, doubles = without_doubles(found)
        for row in doubles:
            self._cancel(row.id)
        self.ids = {row.report.name: row.id for row in rows if row.report.stage is not ClusterStage.ENDED}
        reports = {row.report.name: row.report for row in rows}
        for file in self.settings.folder.glob("*.exit"):
            name = file.name.removesuffix(".exit")
            if name not in reports or reports[name].stage is ClusterStage.ENDED:
                with suppress(OSError, ValueError):
                    code = int(file.read_text())
                    reports[name] = AgentReport(name, ClusterStage.ENDED, f"exit code {code}", code == 0)
        return list(reports.values())

    def _cancel(self, number: int, *options: str) -> None:
        try:
            run(["scancel", *options, str(number)])
        except ClusterUnavailable as error:
            if GONE not in str(error):
                raise


# -- what goes to Slurm -----------------------------------------------------------------------------------------------


def submission(request: AgentRequest, settings: SlurmSettings) -> list[str]:
    """Returns the command that submits an agent; it reads the batch script from its standard input."""
    devices = [f"--gres=gpu:{request.devices}"] if settings.gpus else [f"--cpus-per-task={request.devices}"]
    return [
        "sbatch",
        "--parsable",
        f"--job-name={PREFIX}:{settings.name}:{request.name}",
        f"--comment={request.devices}",
        f"--nodelist={request.node}",
        "--nodes=1",
        "--ntasks=1",
        *devices,
        "--no-requeue",
        "--dependency=singleton",
        f"--signal=B:USR1@{SIGNAL_S}",
        "--open-mode=append",
        f"--output={_file(settings.folder, request.name, 'log')}",
        f"--chdir={request.folder}",
        *settings.options,
        *request.options,
    ]


def batch_script(request: AgentRequest, settings: SlurmSettings) -> str:
    """Returns what runs on the node."""
    file = shlex.quote(str(_file(settings.folder, request.name, "exit")))
    return SCRIPT.format(command=shlex.join([*settings.elaunch, *request.arguments]), file=file)


def _file(folder: Path, name: str, what: str) -> Path:
    return folder / f"{name}.{what}"


def run(command: Sequence[str], text: str = "") -> str:
    """Runs one of Slurm's commands, and returns what it writes.

    Raises:
        ClusterUnavailable: it fails, takes too long, or is not installed.
    """
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ClusterUnavailable(f"{command[0]} has not answered within {LIMIT_S:g} s") from error
    except OSError as error:
        raise ClusterUnavailable(f"{command[0]}: {error.strerror}; Slurm's commands must be in PATH") from error
    if done.returncode:
        complaint = (done.stderr.strip() or done.stdout.strip() or "no reason").splitlines()[0]
        raise ClusterUnavailable(f"{command[0]} ended with {done.returncode}: {complaint}")
    return done.stdout


# -- what comes from Slurm --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """A batch job of this scheduler, as `squeue` shows it: number, report of its agent, requested node, devices."""

    id: int
    report: AgentReport
    node: str
    devices: int


def parse_jobs(text: str, scheduler: str) -> list[Row]:
    """Returns the rows of this scheduler's agents; those of others, and what cannot be read, are left out."""
    rows = []
    for line in text.splitlines():
        parts = line.split("|", 5)
        prefix = f"{PREFIX}:{scheduler}:"
        if len(parts) < 6 or not parts[2].startswith(prefix) or not parts[0].isdecimal():
            continue
        number, state, name, node, comment, reason = parts
        if state in QUEUED_STATES:
            stage = ClusterStage.QUEUED
        else:
            stage = ClusterStage.RUNNING if state in RUNNING_STATES else ClusterStage.ENDED
        why = state if reason in ("", "None") else f"{state} ({reason})"
        report = AgentReport(name.removeprefix(prefix), stage, why)  # only its exit code tells whether it has succeeded
        rows.append(Row(int(number), report, node, int(comment) if comment.isdecimal() else 0))
    return rows


def without_doubles(rows: Iterable[Row]) -> tuple[list[Row], list[Row]]:
    """Returns one row for each name, and those that are to be cancelled: a killed daemon's `sbatch` may come late.

    Of those that have not ended, the first stays; without any, the last one that has ended.
    """
    kept: dict[str, Row] = {}
    doubles = []
    for row in sorted(rows, key=lambda row: row.id):
        before = kept.get(row.report.name)
        if before is None or before.report.stage is ClusterStage.ENDED:
            kept[row.report.name] = row
        elif row.report.stage is not ClusterStage.ENDED:
            doubles.append(row)
    return list(kept.values()), doubles


def parse_nodes(text: str, rows: Iterable[Row], gpus: bool) -> list[ClusterNode]:
    """Returns the nodes that have devices.

    Args:
        text: of `sinfo`, in the format `NODES`; a node in several partitions comes several times.
        rows: of this scheduler's agents.
        gpus: what a device is.
    """
    own = Counter[str]()  # what waited when `squeue` answered may have begun before `sinfo` did
    for row in rows:
        if row.report.stage is not ClusterStage.ENDED:
            own[row.node] += row.devices
    nodes: dict[str, ClusterNode] = {}
    for line in text.splitlines():
        parts = line.strip().split("|")
        if len(parts) < 6:
            continue
        name, state, cpus, gres, gres_used, features = parts[:6]
        taken, _, other, total = (int(part) if part.isdecimal() else 0 for part in (cpus.split("/") + [""] * 4)[:4])
        usable = state.rstrip("*~#+-") in USABLE
        if gpus:
            taken, other, total = _gpus(gres_used), 0, _gpus(gres)
        devices = total - max(0, taken - own[name]) - (other if usable else 0)
        if state.endswith("*"):  # it does not respond, often for a moment only: nothing new comes, what is there stays
            devices = own[name]
        if total > 0:
            nodes[name] = ClusterNode(name, max(0, devices), _kind(gres) if gpus else "", _rack(features), usable)
    return list(nodes.values())


def _gpus(gres: str) -> int:
    """How many devices `gpu:a100:8(S:0-1),gpu:v100:2` has."""
    return sum(int(count) for count in re.findall(r"(?:^|,)gpu(?::[^:,(]+)?:(\d+)", gres))


def _kind(gres: str) -> str:
    found = re.search(r"(?:^|,)gpu:([^:,(]+):\d+", gres)
    return found[1] if found else ""


def _rack(features: str) -> str:
    """The feature that begins with `rack`."""
    return next((feature for feature in features.split(",") if feature.startswith("rack")), "")
