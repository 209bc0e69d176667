"""From the lines of an event log to recovery times: pure functions, the same for every launcher.

A line is a JSON object with `t` (Unix seconds) and `kind`; the benchmark reads `step`, `worker_started`,
`worker_exited` and `transition` lines of elaunch's event log, and the same kinds as the peers' scripts write them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Line = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Commit:
    """A step that took effect at `t` (Unix seconds), by `members` workers; `generation` changes with the membership."""

    t: float
    step: int
    members: int
    generation: int


@dataclasses.dataclass(frozen=True)
class KillFigures:
    """What one SIGKILL cost, in seconds: infinite without a next commit, NaN where the log shows no join."""

    next_commit_s: float
    join_stall_s: float


def commits_of(lines: Iterable[Line], first: dict[int, Commit] | None = None) -> list[Commit]:
    """The committed steps in order of time; where several workers report a step, the first report counts.

    Args:
        lines: of the log.
        first: by step, what earlier lines of the same log gave; takes in what these give.
    """
    first = {} if first is None else first
    for line in lines:
        if line["kind"] == "step":
            commit = Commit(line["t"], line["step"], line["members"], line["generation"])
            known = first.get(commit.step)
            if known is None or commit.t < known.t:
                first[commit.step] = commit
    return sorted(first.values(), key=lambda commit: commit.t)


def live_workers(lines: Iterable[Line]) -> dict[int, int]:
    """Local rank -> process id of the workers started last, without those that ended or have no rank (yet)."""
    pids: dict[int, int] = {}
    for line in lines:
        if line["kind"] == "worker_started" and line["local_rank"] is not None:
            pids[line["local_rank"]] = line["pid"]
        elif line["kind"] == "worker_exited":
            pids = {rank: pid for rank, pid in pids.items() if pid != line["pid"]}
    return pids


def step_gaps(commits: Sequence[Commit]) -> dict[int, list[float]]:
    """Members -> seconds between neighbouring commits of one and the same membership."""
    gaps: dict[int, list[float]] = {}
    for before, after in itertools.pairwise(commits):
        if before.generation == after.generation and before.members == after.members:
            gaps.setdefault(after.members, []).append(after.t - before.t)
    return gaps


def median_steps(commits: Sequence[Commit]) -> dict[int, float]:
    """Members -> median seconds of an undisturbed step."""
    return {members: statistics.median(gaps) for members, gaps in step_gaps(commits).items()}


def kill_figures(commits: Sequence[Commit], killed_t: float, members: int, settled_steps: int = 3) -> KillFigures:
    """What the kill at `killed_t` (Unix seconds) of one of `members` workers cost.

    The next commit is the first one of another generation: a step that was through already when the worker died says
    nothing about the recovery. The stall of the join is the longest gap between commits, less the median step of as
    many members, from that commit until `settled_steps` steps after the membership is complete again. Where the very
    first commit has the full membership (a restart of everybody, or a replacement that was as quick as the
    survivors), joining and recovering are one, and the gap that holds the kill counts.
    """
    earlier = [commit for commit in commits if commit.t <= killed_t]
    before = earlier[-1]
    later = [commit for commit in commits if commit.t > killed_t and commit.generation != before.generation]
    if not later:
        return KillFigures(math.inf, math.nan)
    complete = next((i for i, commit in enumerate(later) if commit.members == members), None)
    if complete is None:
        return KillFigures(later[0].t - killed_t, math.nan)
    window = later[: complete + 1 + settled_steps]
    if complete == 0:
        window = [before, *window]
    usual = median_steps(commits)
    full_step_s = usual.get(members, math.nan)
    stalls = [after.t - then.t - usual.get(after.members, full_step_s) for then, after in itertools.pairwise(window)]
    return KillFigures(later[0].t - killed_t, max(stalls))
