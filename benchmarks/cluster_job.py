"""An elastic job whose compute is emulated: a step lasts, by sleeping, as long as a table says for its workers.

Parameters, gradients, messages and commits are real, but small; what they take comes on top of the table.
`slurm_against_simulator.py` runs it.

    elaunch --standalone --nproc-per-node=2 benchmarks/cluster_job.py --steps=20 --rates 2=46 4=90
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from torch import Tensor, nn

import elaunch

BATCH, MICRO_BATCH = 48, 4
FEATURES = 64


class Samples(torch.utils.data.Dataset[Tensor]):
    """Fixed random rows."""

    def __init__(self) -> None:
        self.rows = torch.randn(512, FEATURES, generator=torch.Generator().manual_seed(7))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Tensor:
        return self.rows[index]


def read_rates(words: Sequence[str]) -> dict[int, float]:
    """Reads samples per second by workers, such as `2=46 4=90`."""
    return {int(workers): float(rate) for workers, rate in (word.split("=") for word in words)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--rates", nargs="+", required=True, metavar="WORKERS=SAMPLES_PER_S")
    args = parser.parse_args()
    rates = read_rates(args.rates)
    torch.set_num_threads(1)
    job = elaunch.init()
    torch.manual_seed(0)
    model = job.wrap(nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, 1)))
    job.register(model=model)
    for step in job.steps(Samples(), global_batch_size=BATCH, micro_batch_size=MICRO_BATCH, seed=0, steps=args.steps):
        for rows in step:
            if job.last_micro_batch:
                time.sleep(BATCH / rates[job.size])
            loss = model(rows).square().mean()
            loss.backward()
            job.report(loss=loss)
        # By hand: the optimizers of torch import its compiler, which takes seconds of a core for each worker.
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(parameter.grad, alpha=1e-3)
                parameter.grad.zero_()


if __name__ == "__main__":
    main()
