"""How long a worker takes to find its routes: Llama 2 70B on 128 workers, every degree of parallelism changing.

    python benchmarks/routes.py
    python benchmarks/routes.py --json routes.json

Pure computation: no worker is started, no byte is moved. Timed is what each worker does by itself when a change comes:
what everybody holds under the old plan and needs under the new one, and its own part of the routes.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.report import Report, add_arguments, spread
from elaunch.plan import OptimizerLayout, Plan, symmetric
from elaunch.workers.random.trace import RandomTrace
from elaunch.workers.state.layout import LayerSpec
from elaunch.workers.state.routes import Router, n_bytes
from elaunch.workers.state.space import holdings_of_plan, items_of_layers

WIDTH, KEY_WIDTH, INNER, WORDS, BLOCKS = 8192, 1024, 28672, 32000, 80
Parameters = dict[str, tuple[tuple[int, ...], int | None]]
"""Shapes by name, and the dimension along which tensor parallelism cuts them, if it does."""
WORKERS = [f"n{number // 8}/{number % 8}#0" for number in range(128)]


@dataclasses.dataclass(frozen=True)
class Degrees:
    """Of one plan."""

    dp: int
    pp: int
    tp: int
    zero: OptimizerLayout = "interleaved"

    def plan(self) -> Plan:
        workers = WORKERS[: self.dp * self.pp * self.tp]
        return symmetric(workers, BLOCKS + 2, 48, 1, dp=self.dp, pp=self.pp, tp=self.tp, zero=self.zero)

    def __str__(self) -> str:
        return f"DP {self.dp} PP {self.pp} TP {self.tp}, {self.zero}"


CASES = [
    ("all degrees", Degrees(4, 4, 8), Degrees(8, 8, 2)),
    ("all degrees, to contiguous", Degrees(8, 4, 4), Degrees(4, 16, 2, "contiguous")),
    ("fewer workers", Degrees(4, 4, 8), Degrees(3, 4, 8)),
    ("TP only", Degrees(4, 4, 8), Degrees(8, 4, 4)),
    ("the same", Degrees(4, 4, 8), Degrees(4, 4, 8)),
]


def llama2_70b() -> list[LayerSpec]:
    """Its parameters with Megatron's placements: embedding, blocks, head."""
    block: Parameters = {
        "attention.q": ((WIDTH, WIDTH), 0),
        "attention.k": ((KEY_WIDTH, WIDTH), 0),
        "attention.v": ((KEY_WIDTH, WIDTH), 0),
        "attention.o": ((WIDTH, WIDTH), 1),
        "mlp.gate": ((INNER, WIDTH), 0),
        "mlp.up": ((INNER, WIDTH), 0),
        "mlp.down": ((WIDTH, INNER), 1),
        "norm1": ((WIDTH,), None),
        "norm2": ((WIDTH,), None),
    }
    words: Parameters = {"words": ((WORDS, WIDTH), 0)}
    return described([words, *[block] * BLOCKS, words])


def described(layers: Sequence[Parameters]) -> list[LayerSpec]:
    """Layers with these parameters, in bfloat16."""
    return [
        LayerSpec(
            index,
            f"layer {index}",
            {name: torch.Size(shape) for name, (shape, _) in layer.items()},
            dict.fromkeys(layer, torch.bfloat16),
            {name: dim for name, (_, dim) in layer.items() if dim is not None},
            (torch.Size([WIDTH]), torch.bfloat16),
            RandomTrace((), 1),
        )
        for index, layer in enumerate(layers)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    specs = llama2_70b()
    items = items_of_layers(specs)
    report = Report(
        "routes: Llama 2 70B, 128 workers", notes=["12 bytes of optimizer state per parameter; 8 workers a node"]
    )
    for name, old, new in CASES[: 2 if args.quick else None]:
        seconds, moved, load = [], [], []
        for worker in WORKERS[:: 32 if args.quick else 8]:
            start_s = time.perf_counter()
            router = Router(items, holdings_of_plan(old.plan(), specs), holdings_of_plan(new.plan(), specs))
            routes = router.of(worker)
            seconds.append(time.perf_counter() - start_s)
            moved.append(n_bytes(items, routes.receive))
            load.append(n_bytes(items, routes.send))
        found = spread(seconds)
        report.row(
            {
                "change": name,
                "from": str(old),
                "to": str(new),
                "workers timed": found.count,
                "median_s": found.median,
                "worst_s": found.worst,
                "receives_gb": sum(moved) / len(moved) / 1e9,
                "most_received_gb": max(moved) / 1e9,
                "most_sent_gb": max(load) / 1e9,
            }
        )
        report.target(f"routes of a worker, {name}", found.worst, "s, the slowest", at_most=1.0)
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
