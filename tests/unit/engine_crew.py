"""A small model under any plan: one engine per worker in threads of this process, joined by real links."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from elaunch.plan.tiling import Plan
from elaunch.workers.barrier import StepRecord, reduce
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.transport import Transport
from elaunch.workers.layers.change.held_state import StepReport
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from tests.helpers import wait_until
from tests.unit.comm_crew import PATIENCE_S, addresses, switching_often, together

TRAIN_S = 250.0
WIDTH, HEADS, LENGTH, WORDS = 16, 4, 5, 24


class Words(nn.Module):
    """(rows, LENGTH) numbers of words -> (rows, LENGTH, WIDTH)."""

    placements: ClassVar = {"embedding.weight": Shard(0)}

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)

    def forward(self, words: Tensor) -> Tensor:
        return F.dropout(self.embedding(words), 0.1, self.training)


class Block(nn.Module):
    """Attention and perceptron with dropout, cut by heads and features as Megatron does."""

    placements: ClassVar = {
        "qkv.weight": Shard(0),
        "qkv.bias": Shard(0),
        "out.weight": Shard(1),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
    }

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        # The features of a head are together, so a slice of the output features is whole heads.
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (-1, 3, WIDTH // HEADS)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), 0.1)
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)


class Head(nn.Module):
    """(rows, LENGTH, WIDTH) -> (rows, LENGTH, WORDS)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.norm(x))
        return logits


class Sentences(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Sixty pairs of words and the words to predict."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = (torch.arange(LENGTH + 1) * (index + 1) + index // 7) % WORDS
        return words[:-1], words[1:]


def loss(logits: Tensor, words: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, -2), words.flatten())


@dataclass
class Natively:
    """A crew whose tensors travel in Gloo groups in some of its steps, and over links in the others.

    Attributes:
        begin: the first step that uses the groups.
        end: the first one that does so no more.
        calls: of the groups of all workers together, by name.
    """

    begin: int = 1
    end: int = 1 << 30
    calls: Counter[str] = field(default_factory=Counter)
    store: dist.Store = field(default_factory=dist.HashStore)

    def make(self) -> GlooBulk:
        calls = self.calls

        class Counting(GlooBulk):
            def backend_group(self) -> Any:
                calls["all"] += 1
                return super().backend_group()

            def send(self, tensor: Tensor, to: int) -> dist.Work:
                calls["send"] += 1
                return super().send(tensor, to)

            def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Sequence[dist.Work]:
                calls["exchange"] += 1
                return super().exchange(outgoing, incoming)

            def all_reduce(self, tensor: Tensor) -> dist.Work:
                calls["all_reduce"] += 1
                return super().all_reduce(tensor)

        return Counting("127.0.0.1")

    def steps(self, engine: Engine, group: Group, groups: NativeGroups, count: int) -> list[StepReport]:
        """Trains as the runtime does: the groups are opened in the background, and taken into use at a barrier."""
        groups.needs, needs = (lambda members: engine.needs), bool(engine.needs)
        groups.enter(group.generation, group.members, group.rank, lambda: self.store)

        def barrier(record: StepRecord) -> StepRecord:
            ready = groups.ready() if record.step[0] == self.begin - 1 else 0
            whole = reduce(group, replace(record, native=(ready, ready)))
            assert groups.passed(whole.native) == (needs and record.step[0] == self.begin - 1)
            return whole

        reports = []
        for step in range(count):
            if step == self.begin - 1 and needs:
                wait_until(lambda: groups.ready() != 0, 60, "the groups to open")
            if step == self.end:
                group.barrier()  # all have left the last step
                groups.pause()
                groups.settled(())
            reports.append(engine.train_step(barrier))
        return reports


def model(n_layers: int) -> list[Any]:
    """Any number of layers, from one."""
    if n_layers == 1:
        return [lambda: nn.Sequential(Words(), Head())]
    return [Words, *[Block] * (n_layers - 2), Head]


def train(plan: Plan, steps: int, **settings: Any) -> tuple[list[StepReport], dict[str, Tensor]]:
    """The reports of each step, and the whole parameters at the end."""
    transports = [Transport(worker, "secret") for worker in plan.workers]
    engines: list[Engine | None] = [None] * len(transports)
    # Copies of the state are another test's matter.
    settings = {"dtype": torch.float64, "seed": 3, "dataset": Sentences(), "snapshots": 0, **settings}
    layers = settings.pop("layers", None) or model(plan.n_layers)
    optimizer = settings.pop("optimizer", lambda named: torch.optim.AdamW(named, lr=0.01))
    loss_fn = settings.pop("loss_fn", loss)
    natively: Natively | None = settings.pop("natively", None)
    groups = [NativeGroups(natively.make if natively is not None else None) for _ in transports]
    script = settings.pop("script", lambda engine: None)

    def work(place: int) -> list[StepReport]:
        transport = transports[place]
        try:
            transport.connect(addresses(transports), generation=1, timeout_s=PATIENCE_S)
            group = Group(transport, 1, plan.workers)
            engine = engines[place] = Engine(
                layers, loss_fn, optimizer, plan, EngineSettings(**settings), group=group, native=groups[place]
            )
            script(engine)
            if natively is not None:
                return natively.steps(engine, group, groups[place], steps)
            return [engine.train_step() for _ in range(steps)]
        except BaseException:
            # As when a process ends: the others must not wait for it.
            for one in groups:
                one.poison(1 << 60)
            transport.interrupt(1 << 60)
            transport.close()
            raise

    try:
        with switching_often():
            reports = together([partial(work, place) for place in range(len(transports))], TRAIN_S)
    finally:
        for one in groups:
            one.close()
        for transport in transports:
            transport.interrupt(1 << 60)
            transport.close()
    assert all(report == reports[0] for report in reports)
    return reports[0], whole([engine for engine in engines if engine is not None])


def whole(engines: Sequence[Engine]) -> dict[str, Tensor]:
    """All tensors of all layers, put together; all workers that hold the same part must have the same values."""
    parts: dict[tuple[int, str, int], dict[int, Tensor]] = {}
    dims: dict[tuple[int, str], int] = {}
    for engine in engines:
        for (index, _), layer in engine.layers.items():
            for name, value in layer.tensors().items():
                cut = name in layer.spec.cuts
                size, rank = (layer.tp_rank.size, layer.tp_rank.rank) if cut else (1, 0)
                dims[index, name] = layer.spec.cuts.get(name, 0)
                seen = parts.setdefault((index, name, size), {})
                assert rank not in seen or torch.equal(seen[rank], value), f"{index}.{name} differs between workers"
                seen[rank] = value.detach()
    found: dict[str, Tensor] = {}
    for (index, name, _), pieces in parts.items():
        held = [pieces[rank] for rank in sorted(pieces)]
        joined = torch.cat(held, dims[index, name]) if len(held) > 1 else held[0]
        known = found.setdefault(f"{index}.{name}", joined)
        assert torch.equal(known, joined), f"{index}.{name} differs between TP groups of different size"
    return found
