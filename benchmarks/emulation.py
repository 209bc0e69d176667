"""Emulated compute: layers with small real tensors that take, by sleeping, the time that a profile gives them.

`emulated_layers` makes the layers of a model for the engine. Parameters, gradients, optimizer and messages are real,
but much smaller than those of the model; the time is the profile's. A layer lasts as long as the profile says for its
rows, its small real computation included: it sleeps the rest. What a sleep lasts too long (about a tenth of a
millisecond as a rule) is taken off the next one, up to MOST_CARRIED_S; more than that is a machine that is too busy,
and counts. Of the backward the profile's share for weight gradients is slept where those are computed.

    elaunch --standalone --nproc-per-node=8 benchmarks/emulation.py --profile P.json --plan P.plan --steps 5
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import elaunch
from elaunch.plan import Plan
from elaunch.policy.profile import LayerProfile, Profile
from elaunch.rendezvous.membership import slot_of

WORDS = 64
WIDTH = 32
ROW_BYTES = 64 << 10
"""Of an activation row: about a thousandth of what Llama 2 34B sends for a sample of 4096 tokens (67 MB)."""

MOST_CARRIED_S = 1e-3


class _Clock(threading.local):
    """How late the last sleep of this worker (a thread) ended."""

    late_s = 0.0

    def sleep_until(self, end_s: float) -> None:
        """Return at `end_s` (of time.monotonic), less what the sleep before was late."""
        end_s -= self.late_s
        now_s = time.monotonic()
        if now_s < end_s:
            time.sleep(end_s - now_s)
            now_s = time.monotonic()
        self.late_s = min(now_s - end_s, MOST_CARRIED_S)


_clock = _Clock()


class _BackwardEnds(torch.autograd.Function):
    """The identity; its backward is the last thing in the backward of a layer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, span: _Span) -> Tensor:
        ctx.span = span
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> Any:
        ctx.span.end()
        return dx, None


class _BackwardBegins(torch.autograd.Function):
    """The identity; its backward is the first thing in the backward of a layer."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, span: _Span) -> Tensor:
        ctx.span = span
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        ctx.span.begin()
        return dy, None


class _WeightGradient(torch.autograd.Function):
    """The identity of a parameter; its backward lasts as long as the gradients of the layer's parameters."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, span: _Span) -> Tensor:
        ctx.span = span
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.span.within()
        return grad, None


class _Span:
    """Something that lasts `seconds`, and `within_s` more if a part of it is done meanwhile; on the meta device no time
    passes.
    """

    def __init__(self, seconds: float, x: Tensor, within_s: float = 0.0) -> None:
        self._seconds = 0.0 if x.is_meta else seconds
        self._within_s = 0.0 if x.is_meta else within_s
        self._began_s = self._added_s = 0.0

    def begin(self) -> None:
        self._began_s, self._added_s = time.monotonic(), 0.0

    def within(self) -> None:
        if self._within_s:
            _clock.sleep_until(time.monotonic() + self._within_s)
            self._added_s = self._within_s

    def end(self) -> None:
        if self._seconds or self._added_s:
            _clock.sleep_until(self._began_s + self._seconds + self._added_s)


class EmulatedLayer(nn.Module):
    """Takes the time of `profile`: (rows, length, width) -> the same.

    The first layer of a model takes numbers of words (rows, length), the last gives logits (rows, length, WORDS). With
    zero seconds a layer does not sleep, and lasts as long as its small computation.
    """

    def __init__(
        self, profile: LayerProfile, width: int, first: bool, last: bool, slowness: Callable[[], float] = lambda: 1.0
    ) -> None:
        super().__init__()
        self.profile = profile
        self.slowness = slowness
        self.embedding = nn.Embedding(WORDS, width) if first else None
        self.mix = nn.Linear(width, WORDS if last else width)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[0]
        slower = self.slowness()
        here = _Span(slower * self.profile.forward_s(rows), x)
        back_s, share = slower * self.profile.backward_s(rows), self.profile.weight_share
        back = _Span((1 - share) * back_s, x, share * back_s)
        here.begin()
        if self.embedding is not None:
            x = self.embedding(x)
        x = _BackwardEnds.apply(x, back)  # type: ignore[no-untyped-call]
        weight = _WeightGradient.apply(self.mix.weight, back)  # type: ignore[no-untyped-call]
        y: Tensor = torch.func.functional_call(self.mix, {"weight": weight}, (x,))
        y = y if self.last else x + torch.tanh(y)
        y = _BackwardBegins.apply(y, back)  # type: ignore[no-untyped-call]
        here.end()
        return y


def emulated_layers(
    profile: Profile, *, width: int = WIDTH, slowness: Callable[[], float] = lambda: 1.0
) -> list[Callable[[], EmulatedLayer]]:
    """The layers of a model, for `Engine`, which take the times of `profile`.

    The size of an activation row is that of the data set's rows: see `Words`.

    Args:
        profile: of the model.
        width: features of an activation.
        slowness: by what the profile's seconds are to be multiplied now.
    """
    last = len(profile.layers) - 1
    return [
        partial(EmulatedLayer, layer, width, index == 0, index == last, slowness)
        for index, layer in enumerate(profile.layers)
    ]


@dataclass(frozen=True)
class Slow:
    """From step `step` on the worker of `slot` takes `factor` times as long."""

    slot: str
    step: int
    factor: float

    @classmethod
    def parse(cls, text: str) -> Slow:
        """SLOT:STEP:FACTOR."""
        slot, step, factor = text.rsplit(":", 2)
        return cls(slot, int(step), float(factor))

    def __str__(self) -> str:
        return f"{self.slot}:{self.step}:{self.factor:g}"


def slowness(slow: Sequence[Slow], worker: str, step: int) -> float:
    """By how much a worker is slower in a step; the last that has begun counts."""
    begun = [one for one in slow if one.slot == slot_of(worker) and one.step <= step]
    return max(begun, key=lambda one: one.step).factor if begun else 1.0


class Words(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Pairs of numbers of words and the words to predict, both (length,).

    Args:
        row_bytes: of an activation row between two layers; decides the length.
        width: features of an activation.
    """

    def __init__(self, row_bytes: int = ROW_BYTES, width: int = WIDTH) -> None:
        self.length = max(1, row_bytes // (4 * width))

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words = (torch.arange(self.length + 1) * (index % 7 + 1) + index) % WORDS
        return words[:-1], words[1:]


def loss_fn(logits: Tensor, words: Tensor) -> Tensor:
    """The mean over all words of a micro-batch."""
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def arguments() -> argparse.ArgumentParser:
    """The flags of an emulated job, under whichever launcher."""
    parser = argparse.ArgumentParser(description="An emulated job: see benchmarks/pipeline.py.")
    parser.add_argument("--profile", type=Path, required=True, help="of the model, as benchmarks/profiles/*.json")
    parser.add_argument("--plan", type=Path, required=True, help="a file with an execution plan")
    parser.add_argument("--time-scale", type=float, default=1.0, help="factor on the profile's seconds")
    parser.add_argument("--row-bytes", type=int, default=ROW_BYTES, help="bytes of an activation row")
    parser.add_argument("--width", type=int, default=WIDTH, help="features; a layer has their square of parameters")
    parser.add_argument("--steps", type=int, default=10**9)
    return parser


def main() -> None:
    """Train under elaunch."""
    parser = arguments()
    parser.add_argument("--snapshots", type=int, default=0, help="copies of each worker's optimizer state")
    parser.add_argument(
        "--slow",
        type=Slow.parse,
        action="append",
        default=[],
        metavar="SLOT:STEP:FACTOR",
        help="from this step on, the worker of this slot (node/local_rank) takes so many times as long",
    )
    args = parser.parse_args()
    # The workers share the cores.
    torch.set_num_threads(1)
    job = elaunch.hybrid()
    profile = Profile.load(args.profile).scaled(args.time_scale)
    engine = job.engine(
        emulated_layers(profile, width=args.width, slowness=lambda: slowness(args.slow, job.worker, job.step)),
        loss_fn,
        torch.optim.AdamW,
        Plan.parse(args.plan.read_text()),
        dataset=Words(args.row_bytes, args.width),
        snapshots=args.snapshots,
    )
    while engine.step < args.steps:
        job.train_step()
    job.finish()


if __name__ == "__main__":
    main()
