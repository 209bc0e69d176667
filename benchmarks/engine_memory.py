"""Bytes that a worker of the hybrid engine keeps: parameters, optimizer states, activations.

The GPT of `examples/train_gpt_hybrid.py` under symmetric plans, each worker a thread of this process with links of its
own. Activations are what autograd keeps between forward and backward (`elaunch.workers.layers.timing`), parameters left
out, the most at any moment of three steps. Nothing here is emulated, and nothing is timed.
"""

from __future__ import annotations

import argparse
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.report import Report, add_arguments
from elaunch.plan import Plan, symmetric
from elaunch.plan.schedule import in_flight_limits
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.timing import ActivationMeter

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))
import train_gpt_hybrid as example

BATCH, MICRO_BATCH, STEPS = 64, 4, 3


def measure(plan: Plan, args: argparse.Namespace, **settings: Any) -> list[dict[str, int]]:
    """For each worker of the plan, the bytes of each kind."""
    dataset = example.Sources(200_000, args.context)
    transports = [Transport(worker, "memory") for worker in plan.workers]
    addresses = {transport.worker: transport.address for transport in transports}
    found: list[dict[str, int]] = [{} for _ in transports]
    errors: list[BaseException] = []

    def work(place: int) -> None:
        transport = transports[place]
        try:
            transport.connect(addresses, generation=1, timeout_s=60)
            engine = Engine(
                example.gpt(args),
                example.loss_fn,
                partial(example.adamw, lr=1e-3),
                plan,
                EngineSettings(dataset=dataset, **settings),
                group=Group(transport, 1, plan.workers),
            )
            parameters = [p for layer in engine.layers.values() for p in layer.module.parameters()]
            with ActivationMeter(parameters) as meter:
                for _ in range(STEPS):
                    engine.train_step()
            found[place] = {**engine.memory_bytes(), "activations": meter.peak_bytes}
        except BaseException as error:
            errors.append(error)
            transport.interrupt(1 << 60)

    threads = [threading.Thread(target=work, args=(place,)) for place in range(len(transports))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for transport in transports:
        transport.interrupt(1 << 60)
        transport.close()
    if errors:
        raise errors[0]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    given = parser.parse_args()
    blocks = 2 if given.quick else 6
    args = example.parse([f"--layers={blocks}", "--width=64" if given.quick else "--width=128"])
    torch.set_num_threads(1)
    layers = blocks + 2
    report = Report(
        f"memory of the hybrid engine: a GPT of {blocks} blocks, width {args.width}, float32, AdamW; batch {BATCH}, "
        f"micro-batches of {MICRO_BATCH}",
        notes=[
            "the workers are threads of one process; bytes of tensors, not of the process",
            "recomputed: one layer of one micro-batch at a time; the inputs of all layers of the micro-batches in "
            "flight, which are kept instead, are not counted",
        ],
    )

    def plan(**degrees: Any) -> Plan:
        count = degrees.get("dp", 1) * degrees.get("pp", 1) * degrees.get("tp", 1)
        return symmetric([f"w{number}" for number in range(count)], layers, BATCH, MICRO_BATCH, **degrees)

    alone = measure(plan(), args)[0]
    for dp in (1, 2, 4):
        most = _most(measure(plan(dp=dp), args) if dp > 1 else [alone])
        report.row(
            {
                "replicas": dp,
                "parameters_kb": most["parameters"] / 1e3,
                "masters_kb": most["masters"] / 1e3,
                "optimizer_kb": most["optimizer"] / 1e3,
                "optimizer, of one worker's": most["optimizer"] / alone["optimizer"],
                "1 / replicas": 1 / dp,
            }
        )
        if dp > 1:
            share = most["optimizer"] / alone["optimizer"] * dp
            report.target(f"optimizer states x replicas, {dp} replicas", share, "x one worker's", at_most=1.02)
    stages = 4
    whole = plan(pp=stages)
    single = symmetric(whole.workers, layers, MICRO_BATCH, MICRO_BATCH, pp=stages)
    of_one = measure(single, args)
    worst = 0.0
    for kind, settings in (("kept", {}), ("recomputed", {"recompute": True})):
        of_all = measure(whole, args, **settings)
        for stage, (one, all_, limit) in enumerate(zip(of_one, of_all, in_flight_limits(whole), strict=True)):
            ratio = all_["activations"] / one["activations"]
            report.row(
                {
                    "stage": stage,
                    "activations": kind,
                    "peak_kb": all_["activations"] / 1e3,
                    "of one micro-batch, kept, kb": one["activations"] / 1e3,
                    "peak / that": ratio,
                    "1F1B has in flight": limit,
                }
            )
            if kind == "kept":
                worst = max(worst, ratio / limit)
    report.target("peak activations over those of 1F1B, worst stage", worst, "x", at_most=1.02)
    report.print()
    report.write(given.json)
    return 0


def _most(of_workers: list[dict[str, int]]) -> dict[str, int]:
    return {kind: max(worker[kind] for worker in of_workers) for kind in of_workers[0]}


if __name__ == "__main__":
    sys.exit(main())
