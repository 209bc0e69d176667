"""A tiny GPT-2 trained by transformers' Trainer, from random data; workers die where they are told to."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

from elaunch.integrations.transformers import Trainer
from tests.jobs.cpus_for_devices import take_cpus_for_devices


class Deaths(TrainerCallback):  # type: ignore[misc]
    """Kills a worker in a step, before its update. Steps of fewer members are slow, so that others join meanwhile."""

    def __init__(self, deaths: list[str], unlogged: int) -> None:
        self._deaths = [death.split(":") for death in deaths]
        self._unlogged = unlogged

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step > state.max_steps - self._unlogged:
            control.should_log = False

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.world_size < 3:
            time.sleep(0.15)
        worker = os.environ.get("ELAUNCH_WORKER", "")
        if any(worker.endswith(f"/{rank}#0") and state.global_step == int(step) for rank, step in self._deaths):
            os.kill(os.getpid(), signal.SIGKILL)


def rows(count: int, ragged: int = 5) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    found = []
    for place in range(count):
        ids = torch.randint(0, 50, (12,), generator=generator)
        labels = ids.clone()
        labels[: place % ragged] = -100  # so batches have different numbers of tokens
        found.append({"input_ids": ids, "labels": labels})
    return found


def whole(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--die", action="append", default=[], help="RANK:STEP")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--unlogged", type=int, default=0, help="steps at the end without a log")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--fsdp", choices=["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
    options = parser.parse_args()
    if options.fsdp:
        take_cpus_for_devices()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=16, n_embd=16, n_layer=1, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model: Any = GPT2LMHeadModel(config)
    if options.lora:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
    args = TrainingArguments(
        output_dir=options.out,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=options.accumulation,
        num_train_epochs=2,
        logging_steps=1,
        save_steps=8,
        eval_strategy="epoch",
        learning_rate=5e-3,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        fsdp=bool(options.fsdp),
        fsdp_config={"version": 2, "state_dict_type": options.fsdp} if options.fsdp else None,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=rows(100),
        eval_dataset=rows(24, ragged=1),
        callbacks=[Deaths(options.die, options.unlogged)],
    )
    result = trainer.train(resume_from_checkpoint=options.resume or None)
    weights = sum(one.detach().double().abs().sum().item() for one in map(whole, trainer.model.parameters()))
    loss = trainer.evaluate()["eval_loss"]
    sys.stdout.write(f"end: {result.global_step} {result.training_loss:.9f} {loss:.9f} {weights:.9f}.\n")
    trainer.save_model()


if __name__ == "__main__":
    main()
