"""Train a small byte-level GPT on the sources of Python's standard library, with workers that come and go.

    elaunch --standalone --nproc-per-node=2 examples/train_gpt.py --steps 500

It also runs under torchrun and as a plain `python examples/train_gpt.py`. What is elastic about it are the lines of
`main` that say `job`.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import elaunch

PACKAGES = ("asyncio", "email", "encodings", "http", "importlib", "json", "logging", "multiprocessing", "unittest")
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


class Sources(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """The standard library cut into windows: sample i is `context` bytes and, for each of them, the byte after it."""

    def __init__(self, corpus_bytes: int, context: int) -> None:
        root = Path(sysconfig.get_path("stdlib"))
        text = bytearray()
        for path in (path for folder in (".", *PACKAGES) for path in sorted((root / folder).glob("*.py"))):
            if len(text) < corpus_bytes:
                text += path.read_bytes()
        del text[corpus_bytes:]
        if len(text) <= context:
            raise SystemExit(f"a corpus of {len(text)} bytes from {root} is too short for --context {context}")
        self.context = context
        self.bytes = torch.frombuffer(text, dtype=torch.uint8)

    def __len__(self) -> int:
        return (len(self.bytes) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        start = index * self.context
        window = self.bytes[start : start + self.context + 1].long()
        return window[:-1], window[1:]


class Block(nn.Module):
    """Causal self-attention and a two-layer perceptron, each added to its input."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (batch, length, width) -> the same
        q, k, v = self.qkv(self.attention_norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).flatten(2)), dropout)
        return x + F.dropout(self.mlp(self.mlp_norm(x)), dropout)


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, layers: int, width: int, heads: int, context: int, dropout: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.position = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                deep = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if deep else 0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:  # (batch, length) -> (batch, length, 256)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.position(places))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


def learning_rate(step: int, steps: int, warmup_steps: int = 20) -> float:
    """The factor of --lr in a step: a linear warm-up, then half a cosine down to a tenth."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.1 + 0.45 * (1 + math.cos(math.pi * done))


class Log:
    """Prints a line every so many steps on the first worker; the loss is the mean over that worker's samples."""

    def __init__(self, job: elaunch.Job, every: int) -> None:
        self.job = job
        self.every = every
        self.step = -1
        self.losses: list[torch.Tensor] = []
        self.lines_at = (0, time.monotonic())  # step and time of the last line

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Takes the loss of one micro-batch of `step`."""
        if step != self.step:
            self.print()
            self.step, self.losses = step, []
        self.losses.append(loss.detach())

    def print(self) -> None:
        """Prints the line of the last step, if it is due."""
        if not self.losses or self.step % self.every:
            return
        step, now = self.lines_at
        ms = 1000 * (time.monotonic() - now) / max(1, self.step + 1 - step)
        self.lines_at = (self.step + 1, time.monotonic())
        if self.job.rank == 0:
            loss = torch.stack(self.losses).mean().item()
            print(f"step {self.step:5d}  loss {loss:.4f}  members {self.job.size}  {ms:.0f} ms/step", flush=True)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The settings from the command line."""
    parser = argparse.ArgumentParser(description="Train a byte-level GPT with workers that come and go.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--global-batch-size", type=int, default=64, help="samples in a step, over all workers")
    parser.add_argument("--micro-batch-size", type=int, default=8, help="samples that are computed at once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--context", type=int, default=64, help="bytes in a sample")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--corpus-bytes", type=int, default=8_000_000)
    parser.add_argument("--log-every", type=int, default=10, help="steps from line to line")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Train."""
    args = parse(arguments)
    job = elaunch.init()
    dataset = Sources(args.corpus_bytes, args.context)
    torch.manual_seed(args.seed)
    net = GPT(args.layers, args.width, args.heads, args.context, args.dropout).to(job.device, DTYPES[args.dtype])
    model = job.wrap(net)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, partial(learning_rate, steps=args.steps))
    job.register(model=model, optimizer=optimizer, scheduler=scheduler)

    log = Log(job, args.log_every)
    for context, following in job.batches(
        dataset,
        global_batch_size=args.global_batch_size,
        micro_batch_size=args.micro_batch_size,
        seed=args.seed,
        steps=args.steps,
    ):
        log.add(job.step, loss := F.cross_entropy(model(context).flatten(0, 1), following.flatten()))
        loss.backward()
        job.report(loss=loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    log.print()


if __name__ == "__main__":
    main()
