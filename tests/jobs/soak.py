"""Small jobs in float64 for tests/soak: data-parallel, in layers, or with FSDP2 on the hooks; files give orders.

`--control FOLDER` holds the orders. A worker reads those in the file that has its node's name and its local rank, such
as `b-1`, and those in `all`, one in a line:

    sleep SECONDS      each step takes so much longer
    rate BYTES         its links carry so many bytes a second
    swell MEGABYTES    it takes so much memory, and keeps it

All runs of one `--api` and `--steps` have the same losses, up to rounding, whoever the members are.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

import elaunch
from elaunch.plan import symmetric
from tests import ROOT
from tests.jobs import say
from tests.jobs.layers import Layer, loss_fn
from tests.jobs.links import SO_MAX_PACING_RATE
from tests.jobs.train import Samples

sys.path.insert(0, str(ROOT / "examples"))
from train_fsdp2_hooks import Trainer, parse

UNLIMITED = 2**31 - 1
MB = 1_000_000


class _Member(Protocol):
    _transport: Any


class Orders:
    """What this worker's files in the folder ask for.

    Args:
        folder: where they lie.
        worker: its name, `node/local_rank#incarnation`.
        member: the runtime, whose links are slowed.
    """

    def __init__(self, folder: Path, worker: str, member: _Member) -> None:
        node, _, slot = worker.partition("/")
        self._files = [folder / "all", folder / f"{node}-{slot.partition('#')[0]}"]
        self._member = member
        self._swollen: list[bytearray] = []

    def obey(self) -> None:
        """Does what is asked for now; called in each step."""
        asked: dict[str, float] = {}
        for file in self._files:
            try:
                asked |= {name: float(value) for name, value in map(str.split, file.read_text().splitlines())}
            except FileNotFoundError:
                continue
        for link in list(self._member._transport._links.values()):
            if link.socket.family != socket.AF_UNIX:
                link.socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, int(asked.get("rate", UNLIMITED)))
        if asked.get("swell") and not self._swollen:
            self._swollen.append(bytearray(os.urandom(MB) * int(asked["swell"])))
        time.sleep(asked.get("sleep", 0.0))


def train_data_parallel(steps: int, control: Path) -> None:
    """Trains by `elaunch.init()`."""
    job = elaunch.init()
    orders = Orders(control, job.worker, job._member)
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Dropout(0.2), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    model = job.wrap(net.double())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    job.register(model=model, optimizer=optimizer)
    for step in job.steps(Samples(torch.float64), global_batch_size=24, micro_batch_size=2, seed=7, steps=steps):
        orders.obey()
        for points, values in step:
            loss = (model(points) - values).square().mean()
            loss.backward()
            job.report(loss=loss)
        optimizer.step()
        optimizer.zero_grad()


def train_in_layers(steps: int, control: Path) -> None:
    """Trains by `elaunch.hybrid()`: two stages, and as many pipelines as there are pairs of workers at the start."""
    job = elaunch.hybrid()
    orders = Orders(control, job.worker, job._member)
    stages = 2 if int(os.environ["WORLD_SIZE"]) > 1 else 1
    names = [f"w{rank}" for rank in range(6 if stages > 1 else 1)]
    engine = job.engine(
        [partial(Layer, number, None) for number in range(4)],
        loss_fn,
        partial(torch.optim.AdamW, lr=1e-3),
        symmetric(names, 4, 24, 2, dp=len(names) // stages, pp=stages),
        dataset=Samples(torch.float64),
        dtype=torch.float64,
        clip_norm=1.0,
    )
    while engine.step < steps:
        orders.obey()
        job.train_step()
    job.finish()


class Fsdp(Trainer):  # type: ignore[misc]  # an example is no module where types are checked
    """The example's trainer, with a model in float64."""

    def __init__(self, steps: int, control: Path) -> None:
        sizes = ["--layers=2", "--width=16", "--batch-size=12", "--corpus-bytes=20000", f"--log-every={10**9}"]
        super().__init__(parse([f"--steps={steps}", *sizes]))
        self._orders = Orders(control, self.job.member.worker, self.job.member)

    def build(self) -> nn.Module:
        model: nn.Module = super().build()
        return model.double()

    def gradients(self) -> float:
        self._orders.obey()
        return float(super().gradients())


def train_sharded(steps: int, control: Path) -> None:
    """Trains by `elaunch.attach()`: FSDP2 over all members, each of whose shards has a copy elsewhere."""
    trainer = Fsdp(steps, control)
    trainer.train()
    trainer.job.member.close()


APIS = {"init": train_data_parallel, "hybrid": train_in_layers, "attach": train_sharded}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--api", choices=APIS, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--control", type=Path, required=True)
    args = parser.parse_args()
    APIS[args.api](args.steps, args.control)
    say(f"ended {os.environ.get('ELAUNCH_WORKER')} pid {os.getpid()}")


if __name__ == "__main__":
    main()
