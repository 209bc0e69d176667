"""DeepSpeed's ZeRO-1 and ZeRO-2 in elastic functions: its globals are reset, and its flat partitions are cut anew.

@elaunch.elastic
def train(state):
    adapter.reset()
    dist.init_process_group("nccl")
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(state.size))
    state.bind(training=adapter.ZeroState(engine))
    for inputs, targets in state.steps(loader, global_batch_size=64):
        engine.backward(loss_fn(engine(inputs), targets) * state.weight)
        engine.step()
        state.commit()
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from typing import Any

import deepspeed.comm.comm
import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups

from elaunch.errors import UsageError
from elaunch.workers.reentry.tensor_shard import TensorShard, fill

# As an attribute of the package this is torch itself, which the package imports under that name.
backend: Any = importlib.import_module("deepspeed.comm.torch")

COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")


def reset() -> None:
    """Forgets what DeepSpeed keeps of the entry before: its backend and groups. Call it first in the function.

    Its all-reduce through shared memory of CPUs, which only inference uses, is left out: it connects a process once.
    """
    deepspeed.comm.comm.cdb = None
    groups._release_process_group_references()
    backend.build_shm_op = lambda: None


class ZeroState:
    """The state of an engine with ZeRO-1 or ZeRO-2, which `state.bind` takes.

    Each member has a range of the flat parameters of each group, and of what the optimizer keeps of them; with another
    number of members the ranges are others.

    Args:
        engine: what `deepspeed.initialize` returns, with its optimizer and scheduler.

    Raises:
        UsageError: its optimizer is not that of ZeRO-1 or ZeRO-2, or orders parameters by the number of members.
    """

    def __init__(self, engine: Any) -> None:
        optimizer = engine.optimizer
        if not isinstance(optimizer, DeepSpeedZeroOptimizer):
            raise UsageError(
                "deepspeed.ZeroState takes an engine with ZeRO-1 or ZeRO-2, got one whose optimizer is "
                f"{type(optimizer).__name__}; bind ZeRO-0's module and optimizer themselves"
            )
        if optimizer.round_robin_gradients:
            raise UsageError("round_robin_gradients orders parameters by the number of members: switch it off")
        self._engine, self._optimizer = engine, optimizer
        inner = optimizer.optimizer
        for part in optimizer.single_partition_of_fp32_groups:
            if not inner.state[part]:
                # As the first step would, so that all that will be kept has a form from the start.
                inner.state[part] |= {name: torch.zeros_like(part) for name in _moments(inner)}
                inner.state[part]["step"] = torch.tensor(0.0)

    def state_dict(self) -> dict[str, Any]:
        """Returns the model, this worker's ranges, and what else is the same on all members."""
        engine, inner = self._engine, self._optimizer.optimizer
        steps = [float(kept["step"]) for kept in inner.state.values() if "step" in kept]
        scaler = {key: value for key, value in vars(self._optimizer.loss_scaler).items() if type(value) in (int, float)}
        state = {
            "module": engine.module.state_dict(),
            "shards": dict(self._shards()),
            "step": max(steps, default=None),
            "groups": [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups],
            "scaler": scaler,
            "counters": {name: getattr(engine, name) for name in COUNTERS},
        }
        if engine.lr_scheduler is not None:
            state["scheduler"] = engine.lr_scheduler.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state, with the ranges that belong here."""
        engine, inner = self._engine, self._optimizer.optimizer
        engine.module.load_state_dict(state["module"])
        fill(dict(self._shards()), state["shards"])
        for kept in inner.state.values():
            if "step" in kept:
                kept["step"] = torch.tensor(state["step"]) if torch.is_tensor(kept["step"]) else int(state["step"])
        for group, options in zip(inner.param_groups, state["groups"], strict=True):
            group.update(options)
        vars(self._optimizer.loss_scaler).update(state["scaler"])
        for name, value in state["counters"].items():
            setattr(engine, name, value)
        if engine.lr_scheduler is not None:
            engine.lr_scheduler.load_state_dict(state["scheduler"])

    def _shards(self) -> Iterator[tuple[str, TensorShard]]:
        optimizer = self._optimizer
        for number, part in enumerate(optimizer.single_partition_of_fp32_groups):
            total = sum(parameter.numel() for parameter in optimizer.bit16_groups[number])
            start = dist.get_rank(optimizer.real_dp_process_group[number]) * part.numel()
            # What is behind the last parameter fills the last partitions up.
            box = (min(start, total), min(start + part.numel(), total))
            kept = {"parameters": part.detach(), **optimizer.optimizer.state[part]}
            for name, tensor in kept.items():
                if isinstance(tensor, torch.Tensor) and tensor.shape == part.shape:
                    yield f"{name}.{number}", TensorShard(tensor[: box[1] - box[0]], (box,), (total,))


def _moments(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Returns what an optimizer keeps of each parameter.

    Raises:
        UsageError: it is not known.
    """
    if "betas" in optimizer.defaults and not optimizer.defaults.get("amsgrad"):
        return ("exp_avg", "exp_avg_sq")
    if "momentum" in optimizer.defaults:
        return ("momentum_buffer",) if optimizer.defaults["momentum"] else ()
    raise UsageError(f"deepspeed.ZeroState takes Adam, AdamW and SGD, got {type(optimizer).__name__}")
