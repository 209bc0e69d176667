"""A scheduling policy after Sia (Jayaram Subramanya et al., SOSP 2023), as Suika is compared with it (Suika 5.1)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from elaunch.errors import UsageError
from elaunch.scheduler.baselines import give
from elaunch.scheduler.draft import Draft, JobDraft
from elaunch.scheduler.model import Allocation, JobState, Node, Schedule, Speed
from elaunch.scheduler.pool import Pool, devices_text
from elaunch.scheduler.repair import repair

MOST_COST = 200.0
"""Of a configuration in the objective."""


TIE = 1e-6
"""By how much a configuration that a job has is better than an equal one."""


@dataclass(frozen=True)
class Configuration:
    """What the programme may give to a job: so many devices of one kind, on one node or on whole nodes."""

    kind: str
    devices: int


class SiaLike:
    """Every round all jobs are allocated anew by an integer linear programme over configurations.

    Taken from the paper and from `policy/mip.py` of its published artifacts: the configurations (powers of two on a
    node, then whole nodes, of one kind); goodputs, each divided by the job's least; the factor
    (age - restarts x S) / (age + S) on those that need a restart; the objective, the sum of goodput^p with p = -0.5 and
    of lambda = 1.1 for each job that gets nothing, to be least, with 0.01 for each variable that changes; one
    configuration for a job; the devices of each kind; rounds of 60 s; kept places, and all places anew where the free
    devices do not lie together.

    Not taken: the statistical efficiency and the adaptive batch size (Suika 5.1 sets jobs to strong scaling, so goodput
    is the throughput); rounding of the objective to two digits; learning the throughput of kinds that have not been
    tried (`Speed` knows it); that jobs grow at most twofold in a round. S is what `Speed.change_s` says instead of
    30 s, so give it a speed of the family "data-parallel" with the cost of a restart. A basic demand that is no
    configuration is one here, and nothing smaller is; a job without a speed has no other. Priorities and quotas are not
    known to Sia and are ignored.
    """

    interval_s = 60.0

    def __init__(self, fairness: float = -0.5, waiting_penalty: float = 1.1, change_penalty: float = 0.01) -> None:
        """Makes a policy.

        Args:
            fairness: p, below 0.
            waiting_penalty: lambda, of a job that gets nothing.
            change_penalty: of each variable that is not as in the round before.

        Raises:
            UsageError: p is not below 0.
        """
        if not fairness < 0:
            raise UsageError(f"the fairness of Sia is {fairness}: make it less than 0")
        self.fairness, self.waiting_penalty, self.change_penalty = fairness, waiting_penalty, change_penalty

    def schedule(
        self, jobs: Iterable[JobState], nodes: Iterable[Node], speeds: Mapping[str, Speed], now_s: float
    ) -> Schedule:
        """Returns what every job is to have; see `SchedulingPolicy`.

        Raises:
            UsageError: scipy is not installed.
        """
        draft = Draft(jobs, nodes, speeds, now_s, {})
        repair(draft, {})
        options = [Options(draft, job) for job in draft.jobs.values() if not (job.running and job.job.settling)]
        for one in options:
            least = min(one.rates.values(), default=1.0)
            one.stopping = self.change_penalty if one.now is not None else 0.0
            for choice, rate in one.rates.items():
                goodput = one.factors[choice] * rate / least
                # The artifacts bound what would be infinite likewise.
                cost = min(goodput**self.fairness, MOST_COST) if goodput else MOST_COST
                one.costs[choice] = cost + (2 * self.change_penalty if one.now not in (None, choice) else 0.0)
        free = free_by_kind(draft, [one.job for one in options])
        chosen = solved(options, free, self.waiting_penalty)
        carry_out(draft, {one.job.job.name: choice for one, choice in zip(options, chosen, strict=True)})
        for job in draft.jobs.values():
            if not job.running:
                job.waits = f"waits for {devices_text(job.job.basic)}: others gain more by what there is"
            elif job.allocation != dict(job.job.allocation):
                job.note("the sum over all jobs is best so")
        return draft.schedule("by Sia's programme")


class Options:
    """The configurations of a job, and what each adds to the objective."""

    def __init__(self, draft: Draft, job: JobDraft, every: bool = False) -> None:
        """Finds out what a job can get.

        Args:
            draft: of the schedule.
            job: that may get it.
            every: whether any number of devices is a configuration.
        """
        self.job = job
        self.now = configuration_of(draft.pool, job)
        self.rates: dict[Configuration, float] = {}
        self.factors: dict[Configuration, float] = {}
        self.costs: dict[Configuration, float] = {}
        self.stopping = 0.0
        for configuration, allocation in configurations(draft.pool, job, every):
            rate = 1.0 if job.speed is None else job.speed.rate(allocation)
            if rate > 0:
                self.rates[configuration] = rate
                changes = self.now is not None and configuration != self.now
                self.factors[configuration] = _restart_factor(draft, job, allocation) if changes else 1.0


def _restart_factor(draft: Draft, job: JobDraft, allocation: Allocation) -> float:
    """Returns the part of its time that a job trains if it restarts as often as until now (Pollux and Sia)."""
    restart_s = 0.0 if job.speed is None else job.speed.change_s(job.allocation, allocation)
    age_s = max(0.0, draft.now_s - job.job.submitted_s)
    if not age_s + restart_s:
        return 1.0
    return max(age_s - job.job.changes * restart_s, 0.0) / (age_s + restart_s)


def configurations(pool: Pool, job: JobDraft, every: bool = False) -> list[tuple[Configuration, Allocation]]:
    """Returns the configurations that a job may get, each with devices of that shape."""
    state = job.job
    kinds: dict[str, list[Node]] = {}
    for name in pool.free:
        if pool.allows(state, name):
            kinds.setdefault(pool.nodes[name].kind, []).append(pool.nodes[name])
    most = max(job.devices, state.basic) if state.frozen or job.speed is None else state.most
    found: list[tuple[Configuration, Allocation]] = []
    for kind, nodes in kinds.items():
        size = max(node.devices for node in nodes)
        whole = [node for node in nodes if node.devices == size]
        sizes = {2**power for power in range(size.bit_length())} if not state.whole_nodes else set()
        sizes |= {size * number for number in range(1, len(whole) + 1)}
        if every and not state.whole_nodes:
            sizes = set(range(1, size * len(whole) + 1))
        if state.whole_nodes and state.basic % size:
            continue
        sizes = {n for n in sizes if state.basic <= n <= most and (n - state.basic) % state.unit == 0}
        for n in sorted(sizes | {state.basic}):
            taken: dict[str, int] = {}
            left = n
            for node in whole:
                if left:
                    taken[node.name] = min(size, left)
                    left -= taken[node.name]
            if not left:
                found.append((Configuration(kind, n), taken))
    return found


def configuration_of(pool: Pool, job: JobDraft) -> Configuration | None:
    """Returns the configuration that a job has; None if it waits, or has devices of several kinds."""
    kinds = {pool.nodes[name].kind for name in job.allocation}
    return Configuration(kinds.pop(), job.devices) if len(kinds) == 1 else None


def free_by_kind(draft: Draft, jobs: Sequence[JobDraft]) -> dict[str, int]:
    """Returns how many devices of each kind these jobs have or could have."""
    free: dict[str, int] = {}
    for name, n in draft.pool.free.items():
        kind = draft.pool.nodes[name].kind
        free[kind] = free.get(kind, 0) + n + sum(job.allocation.get(name, 0) for job in jobs)
    return free


def solved(options: Sequence[Options], free: Mapping[str, int], waiting_penalty: float) -> list[Configuration | None]:
    """Returns the configuration of each job with which the objective is least; None: it gets nothing."""
    try:
        import numpy as np
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import lil_array
    except ImportError as error:
        raise UsageError(f"Sia's programme is solved by scipy, which cannot be imported: {error}") from error
    columns = [(row, choice) for row, one in enumerate(options) for choice in one.costs]
    if not columns:
        return [None] * len(options)
    kinds = list(free)
    left = lil_array((len(options) + len(kinds), len(columns)))
    for column, (row, choice) in enumerate(columns):
        left[row, column] = 1
        left[len(options) + kinds.index(choice.kind), column] = choice.devices
    costs = [options[row].costs[choice] - waiting_penalty - options[row].stopping for row, choice in columns]
    # Of equally good solutions the one that changes the least.
    costs = [cost - TIE * (options[row].now == choice) for cost, (row, choice) in zip(costs, columns, strict=True)]
    limits = [1.0] * len(options) + [float(free[kind]) for kind in kinds]
    found = milp(
        np.array(costs),
        constraints=LinearConstraint(left.tocsr(), -np.inf, np.array(limits)),
        integrality=np.ones(len(columns)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 0.0},
    )
    chosen: list[Configuration | None] = [None] * len(options)
    if found.x is not None:
        for value, (row, choice) in zip(found.x, columns, strict=True):
            if value > 0.5:
                chosen[row] = choice
    return chosen


def carry_out(draft: Draft, chosen: Mapping[str, Configuration | None]) -> None:
    """Gives the jobs what was chosen: who keeps a configuration keeps the place, as long as all others find one."""
    saved = draft.save()
    for keep in (True, False):
        moving: list[tuple[JobDraft, Configuration]] = []
        for name, choice in chosen.items():
            job = draft.jobs[name]
            if keep and choice is not None and configuration_of(draft.pool, job) == choice:
                continue
            if job.running:
                draft.stop(job)
            if choice is not None:
                moving.append((job, choice))
        fit = True
        for job, choice in sorted(moving, key=lambda one: (-one[1].devices, one[0].job.name)):
            fit &= _placed(draft, job, choice)
        if fit:
            return
        if keep:
            draft.back_to(saved)


def _placed(draft: Draft, job: JobDraft, choice: Configuration) -> bool:
    """Puts a job on devices of a configuration; returns whether there are any that lie together as they have to."""
    pool = draft.pool
    nodes = [name for name in pool.free if pool.nodes[name].kind == choice.kind]
    size = max((pool.nodes[name].devices for name in nodes), default=0)
    as_asked = JobState("", 0.0, choice.devices, choice.devices, job.job.unit, choice.devices % max(size, 1) == 0)
    found = pool.place(as_asked, nodes)
    if found is None:
        return False
    give(draft, job, found)
    return True
