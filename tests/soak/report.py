"""What jobs with random faults have shown, as tables and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from benchmarks.report import Cell, Report
from tests.soak.run import Findings
from tests.soak.schedule import KINDS, Round


@dataclass(frozen=True)
class Tried:
    """One job, what it has shown, and why it has failed; empty: it has not."""

    round: Round
    findings: Findings = field(default_factory=Findings)
    failure: str = ""

    @property
    def name(self) -> str:
        """Returns what it is called in messages."""
        clocks = ", clocks" if self.round.has_clocks else ""
        return f"round {self.round.number} ({self.round.setting}; {self.round.store}{clocks})"


def summary(
    jobs: Sequence[Tried],
    seed: int,
    minutes: float,
    left_out: Collection[str] = (),
    before: Mapping[str, Cell] | None = None,
) -> Report:
    """Returns a row for each kind of fault, one for each setting over each store, one for all, and the failures.

    Args:
        jobs: those that were run.
        seed: that names them, with their numbers.
        minutes: that all of them took.
        left_out: why kinds of faults were not injected.
        before: the machine as it was before the first job; None: as it is.
    """
    faults = sum(len(job.findings.met) for job in jobs)
    failed = [job for job in jobs if job.failure]
    report = Report(f"{faults} random faults in {len(jobs)} jobs, {len(failed)} of which failed; {minutes:.1f} minutes")
    report.machine = dict(before or report.machine)
    for kind in KINDS:
        met = [(job, one) for job in jobs for one in job.findings.met if one.fault.kind == kind]
        if met:
            on, whole = [one.on_s for _, one in met], [one.whole_s for _, one in met]
            report.row(
                fault=kind,
                times=len(met),
                jobs=len({job.round.number for job, _ in met}),
                settings=len({job.round.setting for job, _ in met}),
                stores=len({job.round.store for job, _ in met}),
                two_steps_median_s=round(median(on), 2),
                two_steps_worst_s=round(max(on), 2),
                all_back_median_s=round(median(whole), 2),
                all_back_worst_s=round(max(whole), 2),
            )
    for setting, store in sorted({(job.round.setting, job.round.store) for job in jobs}):
        same = [job for job in jobs if (job.round.setting, job.round.store) == (setting, store)]
        report.row(
            setting=setting,
            store=store,
            jobs=len(same),
            with_clocks=sum(job.round.has_clocks for job in same),
            faults=sum(len(job.findings.met) for job in same),
            failed=sum(bool(job.failure) for job in same),
        )
    judged: Counter[str] = sum((Counter(job.findings.judged) for job in jobs), Counter())
    report.row(
        seed=seed,
        faults=faults,
        jobs=len(jobs),
        failed=len(failed),
        minutes=round(minutes, 1),
        steps=sum(job.round.steps for job in jobs if not job.failure),
        lines_told_twice=sum(len(job.findings.twice) for job in jobs),
        steps_done_again=sum(len(job.findings.again) for job in jobs),
        agents_judged=judged["agent"],
        workers_judged=judged["worker"],
    )
    report.notes += [f"{job.name} failed: {job.failure}" for job in failed]
    report.notes += left_out
    return report
