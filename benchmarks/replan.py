"""A job that goes to and fro between two layouts: our switch, a checkpoint, and gathering all and dealing it out.

    python benchmarks/replan.py
    python benchmarks/replan.py --quick --json replan.json

After DynaTran's table 3 (and table 1, figures 9 and 10), with its pairs of layouts scaled down: four processes on this
machine, links within it, a small Llama in bfloat16 that trains with AdamW (float32 masters and two moments), a step
after each change. Side by side, in turn, there and back:

- *elaunch*: what `job.replan(plan)` does after the members' agreement: `Engine.change`, pausing, with all that the next
  step needs.
- *weights*: `job.replan(plan, weights_only=True)`, and the way back by `job.replan(plan)`.
- *checkpoint*: `torch.distributed.checkpoint` save and load of the same boxes, on tmpfs.
- *gathered*: the first worker gets each tensor whole, and deals out to each what it needs; Gloo over loopback.

Timed is from a barrier until the last process has all. After each round the masters are compared with those before it.

Then, for the paper's own models and layouts, the estimator: all state, and the weights alone, over links of 25 GB/s,
one network card of the paper's nodes for each GPU; the paper's seconds beside it (links within its nodes are faster).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from benchmarks.crew import crew
from benchmarks.jobs import limit_time
from benchmarks.report import Report, add_arguments, spread
from benchmarks.routes import llama2_70b
from benchmarks.transfer import WORKERS, Change, Chunks, Degrees, TransferRank
from elaunch.plan import Plan, symmetric
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.policy.transition import estimate_transition
from elaunch.workers.comm.group import memory
from elaunch.workers.device import keep_freed_memory
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.model import describe
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.state.boxes import Box, intersect
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.layout import LayerSpec
from elaunch.workers.state.space import holdings_of_plan, items_of_layers

LENGTH, BATCH = 4, 16
PROFILES = Path(__file__).resolve().parent / "profiles"
LINK_BYTES_S = 25e9


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two layouts.

    Attributes:
        paper: where the paper has them, at its size.
        there, back: plans, by the workers of this benchmark.
    """

    paper: str
    there: Degrees
    back: Degrees
    moved: bool = False

    def plans(self, n_layers: int) -> tuple[Plan, Plan]:
        """Both, for so many layers; of a migration, the second one has the other workers."""
        old, new = self.there.plan(n_layers), self.back.plan(n_layers)
        return old, new.renamed(dict(zip(WORKERS, WORKERS[2:] + WORKERS[:2], strict=True))) if self.moved else new

    @property
    def name(self) -> str:
        """Of the change, for people."""
        return f"{self.there} and {'other workers' if self.moved else self.back}"


PAIRS = [
    Pair("table 3, PP8 TP2 and PP2 TP2 DP4", Degrees(pp=4), Degrees(dp=4)),
    Pair("table 1, TP2 PP8 DP2 and PP16 DP2", Degrees(pp=2, tp=2), Degrees(pp=4)),
    Pair("table 1, TP4 PP4 and TP2 PP8 DP2", Degrees(tp=4), Degrees(tp=2, pp=2)),
    Pair("figure 10, DP and PP", Degrees(dp=2, pp=2), Degrees(dp=4)),
    Pair("figure 9, to other workers", Degrees(tp=2), Degrees(tp=2), moved=True),
]

PAPER = [
    # Model, (TP, PP, DP) of both layouts, seconds there and back, and those of Megatron's checkpoint.
    ("llama2-13b", (2, 8, 1), (2, 2, 4), (0.67, 0.64), None),
    ("llama2-7b", (2, 2, 2), (4, 4, 1), (0.818, 0.874), (30.41, 30.55)),
    ("llama2-13b", (4, 4, 1), (2, 8, 2), (0.57, 0.51), (30.02, 42.05)),
    ("llama2-70b", (4, 8, 2), (8, 16, 1), (1.96, 1.62), (92.88, 85.99)),
]


class Words(nn.Module):
    """(rows, LENGTH) numbers of words to (rows, LENGTH, width), or the way back."""

    placements: ClassVar = {"words.weight": Shard(0)}

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():
            return x.mean(-1, keepdim=True) + self.words.weight.mean()
        found: Tensor = self.words(x)
        return found


class Block(nn.Module):
    """The matrices of a block of Llama."""

    placements: ClassVar = {
        "qkv.weight": Shard(0),
        "o.weight": Shard(1),
        "gate.weight": Shard(0),
        "up.weight": Shard(0),
        "down.weight": Shard(1),
    }

    def __init__(self, width: int) -> None:
        super().__init__()
        inner = width * 11 // 4
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.o = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, -1)).unbind(-2)
        x = x + self.o(torch.sigmoid(q) * k + v)
        y = self.norm2(x)
        found: Tensor = x + self.down(torch.nn.functional.silu(self.gate(y)) * self.up(y))
        return found


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Words, and the mean to predict."""

    def __len__(self) -> int:
        return 4 * BATCH

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.arange(LENGTH) + index, torch.tensor(index / BATCH)


def loss_fn(y: Tensor, target: Tensor) -> Tensor:
    return (y.float().mean((1, 2)) - target).square().mean()


def layers_of(width: int, blocks: int) -> list[Callable[[], nn.Module]]:
    words = partial(Words, 8 * width, width)
    return [words, *[partial(Block, width)] * blocks, words]


def specs_of(width: int, blocks: int) -> Sequence[LayerSpec]:
    return describe(layers_of(width, blocks), torch.zeros(1, LENGTH, dtype=torch.int64), 1, torch.bfloat16)


class ReplanRank(TransferRank):
    """One worker."""

    engine: Engine

    def train(self, plan: Plan, width: int, blocks: int) -> None:
        """Make an engine, and do a step, so that there is something to move."""
        keep_freed_memory(os.environ)  # as jobs do
        self.engine = Engine(
            layers_of(width, blocks),
            loss_fn,
            partial(torch.optim.AdamW, lr=0.0),  # so that masters stay as they are
            plan,
            EngineSettings(dataset=Sentences(), dtype=torch.bfloat16, snapshots=0),
            group=self.group,
        )
        self.engine.train_step()

    def end(self) -> None:
        """Let go of the engine."""
        self.engine.close()
        del self.engine

    def digest(self) -> int:
        """Of the masters of this worker."""
        shards, code = self.engine._here.zero.shards, 0
        for place in range(len(shards.pieces)):
            code = zlib.crc32(memory(shards.master(place)), code)
        return code

    def step(self) -> None:
        """Train: until a step has committed, who gave state away still has it."""
        self.engine.train_step()

    def switch(self, plan: Plan, weights_only: bool) -> tuple[float, int]:
        """Go over to another plan; seconds from a barrier until all are there, and bytes that came here."""
        received: list[int] = []

        def work() -> None:
            if weights_only:
                received.append(self.engine.lend(self.group, plan))
            else:
                received.append(self.engine.change(self.group, plan, self.engine.step, pausing=True))
            self.engine.install()

        return self.timed(work), received[0]

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds from a barrier until all have done it."""
        self.group.barrier()
        start_s = time.perf_counter()
        work()
        self.group.barrier()
        return time.perf_counter() - start_s

    def _gathered(self, _: str, __: contextlib.ExitStack) -> Callable[[], Chunks]:
        def work() -> Chunks:
            found: Chunks = {}
            for name, item in self.change.items.items():
                wholes = [torch.empty(item.shape, dtype=dtype) for dtype in item.dtypes] if self.place == 0 else []
                for from_, box in self._first_holders(name):
                    here = [one for one in self.state.get(name, ()) if one.box == box] if from_ == self.place else []
                    for which in range(len(item.dtypes)):
                        if from_ == self.place == 0:
                            _view(wholes[which], box).copy_(here[0].tensors[which])
                        elif from_ == self.place:
                            dist.send(here[0].tensors[which].contiguous().view(torch.uint8), 0)
                        elif self.place == 0:
                            part = torch.empty([stop - start for start, stop in box], dtype=item.dtypes[which])
                            dist.recv(part.view(torch.uint8), from_)
                            _view(wholes[which], box).copy_(part)
                for to, worker in enumerate(WORKERS):
                    for box in self.change.after[worker].get(name, ()):
                        if to == self.place:
                            found.setdefault(name, []).append(Chunk(box, self.allocate(name, box)))
                        for which in range(len(item.dtypes)):
                            if self.place == 0:
                                part = _view(wholes[which], box).contiguous()
                                if to == 0:
                                    found[name][-1].tensors[which].copy_(part)
                                else:
                                    dist.send(part.view(torch.uint8), to)
                            elif to == self.place:
                                dist.recv(found[name][-1].tensors[which].view(torch.uint8), 0)
            return found

        return work

    def _first_holders(self, name: str) -> list[tuple[int, Box]]:
        """Who sends which boxes of an item to the first worker: each element once, as far as boxes are the same."""
        found: list[tuple[int, Box]] = []
        for place, worker in enumerate(WORKERS):
            for box in self.change.before[worker].get(name, ()):
                if all(_n_common(box, known) == 0 for _, known in found):
                    found.append((place, box))
        return found


def _n_common(box: Box, other: Box) -> int:
    common = intersect(box, other)
    return 0 if common is None else 1


def _view(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(slice(start, stop) for start, stop in box)]


def paper_profile(name: str) -> Profile:
    """What its layers weigh, and the links of the paper's nodes."""
    if name == "llama2-70b":
        sizes = [sum(shape.numel() for shape in spec.shapes.values()) for spec in llama2_70b()]
        layers = tuple(LayerProfile(0.0, 0.0, 2 * size, 12 * size, 0, 0) for size in sizes)
    else:
        layers = Profile.load(PROFILES / f"{name}.json").layers
    return Profile(name, layers, 1, LINK_BYTES_S, 0.0)


def estimated(profile: Profile, old: Sequence[int], new: Sequence[int]) -> tuple[float, float]:
    """Seconds and bytes of a switch between two layouts (TP, PP, DP)."""
    sizes = [tp * pp * dp for tp, pp, dp in (old, new)]
    workers = [f"n{number // 8}/{number % 8}#0" for number in range(max(sizes))]
    plans = []
    for (tp, pp, dp), size in zip((old, new), sizes, strict=True):
        plan = symmetric(workers[:size], len(profile.layers), 64, 1, dp=dp, pp=pp, tp=tp)
        plans.append(dataclasses.replace(plan, idle=tuple(workers[size:])))
    found = estimate_transition(plans[0], plans[1], profile)
    return found.transfer_s, found.moved_bytes


def at_paper_sizes(report: Report) -> None:
    for name, old, new, seconds, checkpoint in PAPER:
        whole = paper_profile(name)
        weights = dataclasses.replace(
            whole, layers=tuple(dataclasses.replace(layer, optimizer_bytes=0) for layer in whole.layers)
        )
        for way, (one, other) in enumerate(((old, new), (new, old))):
            all_s, all_bytes = estimated(whole, one, other)
            weights_s, weights_bytes = estimated(weights, one, other)
            report.row(
                {
                    "model": name,
                    "TP PP DP": " ".join(map(str, one)),
                    "to": " ".join(map(str, other)),
                    "moved_gb": all_bytes / 1e9,
                    "estimate_s": all_s,
                    "weights_gb": weights_bytes / 1e9,
                    "weights_estimate_s": weights_s,
                    "dynatran_s": seconds[way],
                    "its_checkpoint_s": float("nan") if checkpoint is None else checkpoint[way],
                }
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, help="rounds (default 5, quick 2); a checkpoint has two at most")
    parser.add_argument("--pairs", default="", help="of all, those with these numbers, as in 0,1,4")
    parser.add_argument("--estimates", action="store_true", help="only what the estimator says of the paper's sizes")
    args = parser.parse_args()
    torch.set_num_threads(1)
    repeat, width, blocks = args.repeat or (2 if args.quick else 5), 256 if args.quick else 768, 6
    specs = specs_of(width, blocks)
    items = items_of_layers(specs)
    elements = sum(shape.numel() for spec in specs for shape in spec.shapes.values())
    report = Report(
        "replan: to and fro between two layouts, four processes on this machine",
        notes=[
            f"{elements / 1e6:.0f} M parameters in bfloat16, 12 bytes of optimizer state each; seconds: median of "
            f"{repeat}, in turn, and the least and the greatest of elaunch",
            "no device and no network: memory is copied by the same cores that send and receive",
        ],
    )
    limit_time(1500)
    numbers = [int(number) for number in args.pairs.split(",") if number]
    if not args.estimates:
        with crew(WORKERS, ReplanRank) as all_of:
            for pair in [PAIRS[number] for number in numbers] or PAIRS[: 2 if args.quick else None]:
                measure(report, all_of, pair, specs, items, width, blocks, repeat)
    at_paper_sizes(report)
    report.print()
    report.write(args.json)
    return 0


def measure(
    report: Report,
    all_of: Any,
    pair: Pair,
    specs: Sequence[LayerSpec],
    items: Any,
    width: int,
    blocks: int,
    repeat: int,
) -> None:
    """One pair, all ways in turn, there and back."""
    plans = pair.plans(len(specs))
    seconds: dict[tuple[str, int], list[float]] = {}
    moved: dict[tuple[str, int], int] = {}
    all_of("train", plans[0], width, blocks)
    before = all_of("digest")
    for turn in range(1 + repeat):
        for way in ("elaunch", "weights"):
            for to in (1, 0):
                ended = all_of("switch", plans[to], way == "weights" and to == 1)
                if way == "elaunch":
                    all_of("step")
                moved[way, to] = sum(received for _, received in ended)
                if turn:  # the first one warms memory up
                    seconds.setdefault((way, to), []).append(max(took for took, _ in ended))
            assert all_of("digest") == before, f"{pair.name}: the state is not what it was"
        if 0 < turn <= 2:
            for to in (1, 0):
                held = [holdings_of_plan(plan, specs) for plan in (plans[1 - to], plans[to])]
                all_of("begin", Change(pair.name, pair.there, pair.back, items, *held))
                for way in ("checkpoint", "gathered"):
                    folder = tempfile.mkdtemp(prefix="elaunch-replan-", dir="/dev/shm")
                    try:
                        seconds.setdefault((way, to), []).append(max(all_of("run", way, folder)))
                    finally:
                        shutil.rmtree(folder)
    all_of("end")
    for to in (1, 0):
        found = {way: spread(seconds[way, to]) for way in ("elaunch", "weights", "checkpoint", "gathered")}
        report.row(
            {
                "paper": pair.paper,
                "from": str(pair.there if to else pair.back),
                "to": ("other workers" if pair.moved else str(pair.back)) if to else str(pair.there),
                "moved_mb": moved["elaunch", to] / 1e6,
                "elaunch_s": found["elaunch"].median,
                "least_s": found["elaunch"].least,
                "worst_s": found["elaunch"].worst,
                "weights_mb": moved["weights", to] / 1e6,
                "weights_s": found["weights"].median,
                "checkpoint_s": found["checkpoint"].median,
                "gathered_s": found["gathered"].median,
            }
        )
        case = f"{report.rows[-1]['from']} to {report.rows[-1]['to']}"
        report.target(f"checkpoint, {case}", found["checkpoint"].median / found["elaunch"].median, "x", at_least=10)
        report.target(f"gathered, {case}", found["gathered"].median / found["elaunch"].median, "x", at_least=2)


if __name__ == "__main__":
    sys.exit(main())
