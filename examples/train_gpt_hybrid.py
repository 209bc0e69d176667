"""Train the byte-level GPT of train_gpt.py cut over data, pipeline and tensor parallelism, or by any execution plan.

    elaunch --standalone --nproc-per-node=4 examples/train_gpt_hybrid.py --dp 2 --pp 2 --tp 1
    elaunch --standalone --nproc-per-node=3 examples/train_gpt_hybrid.py --plan my.plan
    python examples/train_gpt_hybrid.py --dp 2 --pp 2 --show-plan > my.plan        # a plan to start from

A plan is text: `docs/plans.md` says how to read and write one.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import Shard
from train_gpt import DTYPES, Sources, learning_rate

import elaunch
from elaunch.plan import Plan, symmetric


class Embedding(nn.Module):
    """Bytes (batch, length) in, vectors (batch, length, width) out."""

    placements: ClassVar = {"embedding.weight": Shard(0)}

    def __init__(self, width: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x: torch.Tensor = self.dropout(self.embedding(tokens) + self.position(places))
        return x


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input; heads and features can be cut."""

    placements: ClassVar = {
        "qkv.weight": Shard(0),
        "qkv.bias": Shard(0),
        "out.weight": Shard(1),
        "up.weight": Shard(0),
        "up.bias": Shard(0),
        "down.weight": Shard(1),
    }

    def __init__(self, width: int, heads: int, layers: int, dropout: float) -> None:
        super().__init__()
        self.head_width = width // heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        for linear in (self.qkv, self.out, self.up, self.down):
            deep = linear in (self.out, self.down)
            nn.init.normal_(linear.weight, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width) -> the same
        # The three projections of a head lie together, so that a part of the features is some heads.
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (-1, 3, self.head_width)).permute(3, 0, 2, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), self.dropout)


class Head(nn.Module):
    """Vectors in, logits of the next byte (batch, length, 256) out."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.head.weight, std=0.02)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def gpt(args: argparse.Namespace) -> list[Callable[[], nn.Module]]:
    """The model, a function for each layer."""
    block = partial(Block, args.width, args.heads, args.layers, args.dropout)
    return [
        partial(Embedding, args.width, args.context, args.dropout),
        *[block] * args.layers,
        partial(Head, args.width),
    ]


def loss_fn(logits: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """The mean over all bytes of a micro-batch, in float32 at least."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(exact.flatten(0, 1), following.flatten())


def adamw(named: Iterable[tuple[str, nn.Parameter]], lr: float) -> torch.optim.Optimizer:
    """AdamW with weight decay on matrices only."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for name, part in named:
        groups["weight" in name and "norm" not in name].append(part)
    return torch.optim.AdamW(
        [{"params": parts, "weight_decay": 0.1 if decays else 0.0} for decays, parts in groups.items()],
        lr=lr,
        betas=(0.9, 0.95),
    )


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT under an execution plan.")
    parser.add_argument("--dp", type=int, default=1, help="replicas of the model")
    parser.add_argument("--pp", type=int, default=1, help="stages of the pipeline")
    parser.add_argument("--tp", type=int, default=1, help="workers that share each layer")
    parser.add_argument("--plan", type=Path, help="a file with an execution plan, instead of --dp, --pp and --tp")
    parser.add_argument("--show-plan", action="store_true", help="print the plan and end")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples in a step, over all workers")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples that are computed at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--layers", type=int, default=4, help="blocks; with the embedding and the head, two layers more"
    )
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--snapshots", type=int, default=1, help="workers that copy each worker's optimizer state")
    parser.add_argument("--recompute", action="store_true", help="compute activations again instead of keeping them")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000)
    parser.add_argument("--log-every", type=int, default=10, help="steps from line to line")
    return parser.parse_args(arguments)


def plan_of(args: argparse.Namespace) -> Plan:
    """The plan that the command line asks for; its workers are w0, w1, … in the order of the ranks."""
    if args.plan is not None:
        return Plan.parse(args.plan.read_text())
    workers = [f"w{rank}" for rank in range(args.dp * args.pp * args.tp)]
    sizes = (args.layers + 2, args.global_batch_size, args.micro_batch_size)
    return symmetric(workers, *sizes, dp=args.dp, pp=args.pp, tp=args.tp)


def main(arguments: list[str] | None = None) -> None:
    """Train."""
    args = parse(arguments)
    plan = plan_of(args)
    if args.show_plan:
        print(plan)
        return
    job = elaunch.hybrid()
    job.engine(
        gpt(args),
        loss_fn,
        partial(adamw, lr=args.lr),
        plan,
        dataset=Sources(args.corpus_bytes, args.context),
        seed=args.seed,
        scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=partial(learning_rate, steps=args.steps)),
        clip_norm=args.clip_norm,
        dtype=DTYPES[args.dtype],
        recompute=args.recompute,
        snapshots=args.snapshots,
    )
    for report in job.steps(args.steps):
        if job.rank == 0 and report.step % args.log_every == 0:
            print(
                f"step {report.step:5d}  loss {report.loss:.4f}  gradient norm {report.gradient_norm:.3f}", flush=True
            )


if __name__ == "__main__":
    main()
