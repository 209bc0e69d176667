"""A node is lost from a job of three: a spare with the state, one held ready, one without workers, and one that comes.

    python benchmarks/spares.py --quick
    python benchmarks/spares.py --json spares.json

The job is `train_small.py` on three nodes of one worker each, which are agents on this machine with an etcd beside
them. Each loss is a SIGKILL of the agent and the worker of a random node at a random moment of a step, timed by this
program; each commit is timed by the job. With `--device gpu` it is `accelerator_job.py`, a GPT of 85.6 M parameters in
bfloat16, and its workers share one GPU over NCCL.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.accelerator import GPU_KILLS, native_backend
from benchmarks.commits import Commit, median_steps
from benchmarks.jobs import ELAUNCH, HERE, Job, JobFailed, TimeLimit, Training, add_device, ask_job, limit_time, on_gpu
from benchmarks.report import Report, add_arguments, spread
from benchmarks.small_model import MICRO_BATCHES
from elaunch.rendezvous.embedded import EmbeddedEtcd

NODES = 3
STEP_S = 0.07  # emulated; the messages, the real compute and the optimizer bring it to about 0.1
SETTLE_STEPS = 10
LIMIT_S = 90.0
GPU_JOB = dataclasses.replace(GPU_KILLS, workers=NODES, global_batch_size=8 * NODES)


@dataclasses.dataclass(frozen=True)
class Kind:
    """How the job is made whole: with which flags, and whether a further node is there before the loss."""

    key: str
    name: str
    flags: tuple[str, ...]
    waits: bool


KINDS = (
    Kind(
        "state",
        "a spare that holds the state (--spares=1 --spare-state)",
        (f"--nnodes={NODES}", "--spares=1", "--spare-state"),
        True,
    ),
    Kind("ready", "a spare, held ready (--spares=1)", (f"--nnodes={NODES}", "--spares=1"), True),
    Kind("waits", "a node that waits, without workers", (f"--nnodes=1:{NODES}",), True),
    Kind("comes", "a node that is started at the loss", (f"--nnodes=1:{NODES}",), False),
)


MARKS = {"state": "(spare, holds the state)", "ready": "(spare, ready)"}
"""What `elaunch ctl status` says of the node beyond those of the job, where its workers run."""


@dataclasses.dataclass(frozen=True)
class Loss:
    """What one loss cost.

    Attributes:
        next_commit_s: until a step has committed without the lost node.
        whole_s: until one has with as many workers as before.
        fewer: steps by fewer workers in between.
    """

    next_commit_s: float
    whole_s: float
    fewer: int


class NodesJob(Job):
    """The small job on several nodes."""

    def __init__(self, kind: Kind, shares_gpu: bool, folder: Path) -> None:
        super().__init__(kind.name, Training(NODES, STEP_S / (MICRO_BATCHES // NODES)), folder)
        self.kind = kind
        self._shares_gpu = shares_gpu
        if shares_gpu:
            self._script = ["--collectives=native", str(HERE / "accelerator_job.py"), *GPU_JOB.flags]
        else:
            self._script = [str(HERE / "train_small.py"), *self.training.flags]
        self._etcd = EmbeddedEtcd(str(folder / f"{self.log.stem}.etcd"))
        self._agents: dict[str, subprocess.Popen[bytes]] = {}
        self._started = 0

    def begin(self) -> None:
        self._etcd.start()
        self._etcd.wait_ready()
        for _ in range(NODES):
            self.start_node()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._etcd.stop()

    def launcher(self) -> subprocess.Popen[bytes]:
        return next(iter(self._agents.values()))

    def start_node(self) -> None:
        """Starts the agent of another node."""
        name = f"n{self._started}"
        self._started += 1
        self._agents[name] = self.processes.start(
            [
                *[*ELAUNCH, *self.kind.flags, "--nproc-per-node=1", f"--rdzv-endpoint={self._etcd.endpoint}"],
                *["--rdzv-id=spares", f"--node-name={name}", "--rdzv-conf=last_call_timeout=60"],
                *["--events", str(self.log), *self._script],
            ],
            **({"NCCL_HOSTID": name} if self._shares_gpu else {}),
        )

    def settle(self, after_generation: int) -> None:
        """Returns once all workers have trained together for a while, in a generation above this one."""
        self.wait_complete(after_generation, SETTLE_STEPS, LIMIT_S)
        if self._shares_gpu:
            self.wait(lambda: native_backend(self.lines) is not None, "native group", LIMIT_S)

    def wait_for_one_more(self) -> None:
        """Returns when the node beyond those of the job is there: with its workers ready where it is a spare."""
        self.start_node()
        name = f"n{self._started - 1}"
        mark = MARKS.get(self.kind.key, "(waits)")

        def there() -> bool:
            said = ask_job(
                "status", job="spares", endpoint=self._etcd.endpoint, limit_s=LIMIT_S, failed=f"{self.name}: no status"
            )
            return f"{name} {mark}" in said

        self.wait(there, f"{name} to be {mark}", LIMIT_S)

    def wait_with_standby(self) -> None:
        """Returns once the node on standby has taken part in some steps."""

        def there() -> bool:
            last = self.commits()[-SETTLE_STEPS:]
            return all(commit.members == NODES + 1 for commit in last)

        self.wait(there, f"{SETTLE_STEPS} steps with the spare", LIMIT_S)

    def working(self) -> list[str]:
        """The nodes of the generation that trains, but for those on standby."""
        last = next(line for line in reversed(self.lines) if line["kind"] == "generation" and line["stage"] == "train")
        return [worker.partition("/")[0] for worker in last["workers"] if worker not in last.get("standby", ())]

    def lose(self, node: str) -> float:
        """Ends an agent and its worker as the loss of their machine would; returns the Unix time."""
        ended = {line["pid"] for line in self.lines if line["kind"] == "worker_exited"}
        pids = [line["pid"] for line in self.lines if line["kind"] == "worker_started" and line["node"] == node]
        agent = self._agents.pop(node)
        now_t = time.time()
        for pid in [*(pid for pid in pids if pid not in ended), agent.pid]:
            os.kill(pid, signal.SIGKILL)
        agent.wait()
        return now_t


def loss_of(commits: list[Commit], lost_t: float) -> Loss:
    """What the loss at a Unix time cost, by the commits of the job."""
    before = [commit for commit in commits if commit.t <= lost_t][-1]
    later = [commit for commit in commits if commit.t > lost_t and commit.generation != before.generation]
    whole = next((place for place, commit in enumerate(later) if commit.members == NODES), None)
    if whole is None:
        return Loss(math.inf, math.inf, len(later))
    return Loss(later[0].t - lost_t, later[whole].t - lost_t, whole)


def measure(kind: Kind, shares_gpu: bool, count: int, chance: random.Random, folder: Path, report: Report) -> None:
    """Loses a node so many times, each time after the job is whole again."""
    losses: list[Loss] = []
    say(f"{kind.name}: {count} losses")
    with NodesJob(kind, shares_gpu, folder) as job:
        job.settle(-1)
        for number in range(count):
            if kind.waits:
                job.wait_for_one_more()
            if kind.key == "state":
                job.wait_with_standby()
            step_s = median_steps(job.commits())[NODES]
            time.sleep(1.0 + chance.uniform(0.0, step_s))
            job.read()
            generation = job.commits()[-1].generation
            lost_t = job.lose(chance.choice(job.working()))
            if not kind.waits:
                job.start_node()
            job.settle(generation)
            losses.append(loss_of(job.commits(), lost_t))
            found = losses[-1]
            say(f"  {number + 1}/{count}: {found.next_commit_s:.3f} s, whole after {found.whole_s:.3f} s")
        steps_s = median_steps(job.commits())
        step_s = steps_s[NODES]
    first, whole = spread(one.next_commit_s for one in losses), spread(one.whole_s for one in losses)
    report.row(
        {
            "a node is lost": kind.name,
            "losses": count,
            "step_ms": 1e3 * step_s,
            "step_with_standby_ms": 1e3 * steps_s[NODES + 1] if NODES + 1 in steps_s else None,
            "next_commit_median_ms": 1e3 * first.median,
            "next_commit_worst_ms": 1e3 * first.worst,
            "whole_median_ms": 1e3 * whole.median,
            "whole_worst_ms": 1e3 * whole.worst,
            "steps_by_fewer": sum(one.fewer for one in losses) / count,
        }
    )
    if kind.key not in MARKS:
        return
    report.target(f"steps by fewer workers with {kind.name}", sum(one.fewer for one in losses), "steps", at_most=0)
    if shares_gpu:
        report.target("loss -> as many workers again, worst", whole.worst, "s", below=3.0)
    else:
        report.target("loss -> as many workers again, less a step", 1e3 * (whole.median - step_s), "ms", below=500)


def say(text: str) -> None:
    """Progress goes to standard error, so that standard output is the report alone."""
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    add_device(parser)
    parser.add_argument("--kind", choices=[kind.key for kind in KINDS], help="one of the four alone")
    parser.add_argument("--losses", type=int, help="of each kind (default 8, quick 1)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments and nodes")
    parser.add_argument("--limit-s", type=int, default=280, help="the most that the whole benchmark may take")
    args = parser.parse_args()
    emulated = (
        "the workers share one GPU: each tells NCCL that it is a machine of its own and talks over loopback sockets"
        if on_gpu(args)
        else f"compute is emulated: forwards sleep {STEP_S * 1e3:.0f} ms in a step of {NODES} workers; parameters, "
        "gradients, optimizer, messages and processes are real"
    )
    report = Report(
        f"a node of {NODES} is lost: spares",
        notes=[
            emulated,
            "next commit: the first one without the lost node; whole: the first one by as many workers as before",
        ],
    )
    limit_time(args.limit_s)
    failed = False
    with tempfile.TemporaryDirectory(prefix="spares-") as folder:
        chance = random.Random(args.seed)
        for kind in KINDS:
            if args.kind not in (None, kind.key):
                continue
            try:
                measure(kind, on_gpu(args), args.losses or (1 if args.quick else 8), chance, Path(folder), report)
            except (JobFailed, TimeLimit) as error:
                failed = True
                report.notes.append(f"{kind.name} FAILED: {error}")
                if isinstance(error, TimeLimit):
                    break
        signal.alarm(0)
    report.print()
    report.write(args.json)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
