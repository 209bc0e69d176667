"""torchtitan's training on CPUs, with a model of two layers: `tests/jobs/titan.py` and torchtitan's arguments.

torchtitan takes `cuda` for the device where torch has no accelerator, asks it for its memory, and has FSDP multiply
gradients in the sum, which Gloo cannot. Its Trainer, loaders, checkpoints and everything else are the real ones.

    elaunch --standalone --nproc-per-node=3 tests/jobs/titan.py --job.config_file train.toml
"""

from __future__ import annotations

import os
import signal
import types
from typing import Any

import torch
import torch._utils
from torch.distributed.fsdp import FSDPModule


def take_cpus_for_devices() -> None:
    """Has torchtitan, which must not be imported yet, train on CPUs."""
    torch._utils._get_available_device_type = lambda: "cpu"
    answers: dict[str, Any] = {
        "current_device": lambda: 0,
        "get_device_name": lambda *_: "CPU",
        "get_device_properties": lambda *_: types.SimpleNamespace(total_memory=1 << 34),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "memory_stats": lambda *_: {},
    }
    for name, answer in answers.items():
        setattr(torch.cpu, name, answer)
    divide = FSDPModule.set_gradient_divide_factor

    def divide_apart(module: FSDPModule, factor: float) -> None:
        divide(module, factor)
        module.set_force_sum_reduction_for_comms(True)

    setattr(FSDPModule, divide.__name__, divide_apart)


take_cpus_for_devices()

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args  # noqa: E402
from torchtitan.train import Trainer  # noqa: E402

from elaunch.integrations.passes import FunctionEntry  # noqa: E402
from elaunch.integrations.torchtitan import main  # noqa: E402

llama3_args["tiny"] = TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=512, rope_theta=500000)


class Mortal(Trainer):  # type: ignore[misc]
    """DIE=LOCAL_RANK:STEP,... kills the first process of a slot in that step, before its optimizer steps.

    ALL_FROM=STEP:MEMBERS has fewer members wait from that step on.
    """

    def train_step(self, data_iterator: Any) -> None:
        """Does one update."""
        step, members = map(int, os.environ.get("ALL_FROM", "0:0").split(":"))
        entry = FunctionEntry.current
        if entry is not None and self.step >= step and entry.state.size < members:
            entry.state.wait_for_members(f"step {self.step} is for {members}")
        super().train_step(data_iterator)

    def forward_backward_step(self, **batch: Any) -> torch.Tensor:
        """Goes forward and backward."""
        loss: torch.Tensor = super().forward_backward_step(**batch)
        deaths = os.environ.get("DIE", "").split(",")
        if os.environ.get("ELAUNCH_WORKER", "").endswith("#0") and f"{os.environ['LOCAL_RANK']}:{self.step}" in deaths:
            os.kill(os.getpid(), signal.SIGKILL)
        return loss


if __name__ == "__main__":
    main(Mortal)
