"""How exact estimates are before and after a loss, in the configurations of Chameleon's figure 9.

    python benchmarks/chameleon_estimates.py --quick
    python benchmarks/chameleon_estimates.py --json chameleon_estimates.json

Llama 2 7B with (PP, DP, TP) of (4, 2, 1), (4, 4, 1) and (2, 2, 8), batches of 16 and 64, micro-batches of 1; one device
is lost, with TP 8 its TP group. Jobs are real (agents, etcd, processes, messages, gradients, measuring, choosing,
changing over), compute is emulated (benchmarks/emulation.py) by the derived profile: a worker stands for a device, or
for a TP group. The estimate before the loss is that of the profile which the job has measured, of the plan that it has;
after it, that of the decision, for a plan which the job has not run yet.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chameleon_tables import profile_of
from benchmarks.cluster import SETTLE, STEP_LIMIT_S, Case, ClusterJob, Model, Window
from benchmarks.jobs import JobFailed
from benchmarks.pipeline import say
from benchmarks.policies import START_LIMIT_S, WARM_UP
from benchmarks.report import Report, add_arguments
from elaunch.policy.estimate import estimate_step

CONFIGURATIONS = ((4, 2, 1), (4, 4, 1), (2, 2, 8))
"""PP, DP, TP (Chameleon V-A)."""

BATCHES = (16, 64)
PAPER_ERROR = 0.0802
"""The greatest of figure 9; its bars have no figures in the text."""


class Compared:
    """Runs the jobs and fills the report."""

    def __init__(self, args: argparse.Namespace, folder: Path, report: Report) -> None:
        self.args, self.folder, self.report = args, folder, report
        self.errors: list[float] = []

    def run(self, configuration: tuple[int, int, int], batch: int) -> None:
        """One job, before and after the loss of its last worker."""
        pp, dp, tp = configuration
        file = self.folder / f"llama2-7b-tp{tp}.json"
        file.write_text(profile_of(tp).to_json())
        model = Model(f"PP {pp} DP {dp} TP {tp}, batch {batch}", str(file), pp, dp, 1, batch // dp)
        case = Case(model, 1, nodes=pp * dp, per_node=1)
        plan = case.plan(model.profile(self.args.time_scale))
        limit_s = START_LIMIT_S + (self.args.steps + 20) * STEP_LIMIT_S
        with ClusterJob(case, "auto", plan, self.args, self.folder) as job:
            before = job.window(WARM_UP - SETTLE, self.args.steps, limit_s)
            estimate_s = estimate_step(plan, job.profile()).step_s
            self._row(model.name, "before", "as given", before, estimate_s)
            after = len(job.commits())
            job.lose(case.lose()[0])
            found = job.window(after, self.args.steps, limit_s)
            self._row(model.name, "after", found.policy, found, found.estimate_s)

    def _row(self, name: str, when: str, what: str, window: Window, estimate_s: float) -> None:
        error = estimate_s / window.step_s - 1
        self.errors.append(error)
        self.report.row(
            {
                "job": name,
                "when": when,
                "workers": window.members,
                "plan": what,
                "step_s": window.step_s,
                "least_s": min(window.steps_s),
                "worst_s": max(window.steps_s),
                "estimate_s": estimate_s,
                "error_pct": 100 * error,
                "cores_busy": window.cores,
                "machine_busy": window.machine_cores,
            }
        )
        say(f"  {name}, {when}: {window.step_s:.3f} s, estimate {estimate_s:.3f} s ({100 * error:+.1f} %)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--only", choices=("8", "16", "32"), help="the configuration of so many devices")
    parser.add_argument("--steps", type=int, default=8, help="that count, before and after (default 8)")
    parser.add_argument("--time-scale", type=float, default=0.5, help="factor on the profile's seconds (default 0.5)")
    parser.add_argument("--row-bytes", type=int, default=4 << 10, help="bytes of an activation row")
    args = parser.parse_args()
    report = Report(
        "Chameleon's figure 9: estimates before and after a loss",
        notes=["compute is emulated by sleeping; agents, messages, gradients, measuring and choosing are real"],
    )
    failed = False
    with tempfile.TemporaryDirectory(prefix="chameleon-") as folder:
        compared = Compared(args, Path(folder), report)
        for pp, dp, tp in CONFIGURATIONS[:1] if args.quick else CONFIGURATIONS:
            if args.only not in (None, str(pp * dp * tp)):
                continue
            for batch in BATCHES[:1] if args.quick else BATCHES:
                try:
                    compared.run((pp, dp, tp), batch)
                except (JobFailed, subprocess.TimeoutExpired) as error:
                    failed = True
                    report.notes.append(f"FAILED: {error}")
    if compared.errors:
        worst = max(map(abs, compared.errors))
        report.target(f"error of {len(compared.errors)} estimates, worst", 100 * worst, "%", at_most=100 * PAPER_ERROR)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
