"""Trains a small GPT-2 with transformers' Trainer. The import of Trainer is all that elaunch asks for.

    elaunch --standalone --nproc-per-node=3 --max-restarts=5 examples/train_transformers.py

Kill any worker with `kill -9`: the others go on at once, and a replacement joins them. It also runs under torchrun.
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

from elaunch.integrations.transformers import Trainer


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    """Returns count sequences that go up or down by a fixed step, modulo 64."""
    found = []
    for place in range(count):
        ids = (place + torch.arange(32) * (place % 7 - 3)) % 64
        found.append({"input_ids": ids, "labels": ids})
    return found


def main(args: argparse.Namespace) -> None:
    """Trains, and evaluates."""
    set_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=64, n_layer=2, n_head=4))
    settings = TrainingArguments(
        output_dir=args.out,
        per_device_train_batch_size=8,
        num_train_epochs=args.epochs,
        learning_rate=1e-3,
        logging_steps=10,
        save_steps=50,
        report_to=[],
    )
    trainer = Trainer(model=model, args=settings, train_dataset=rows(1024), eval_dataset=rows(64))
    trainer.train()
    print(trainer.evaluate())


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", default="train_transformers", help="folder for checkpoints")
    return parser.parse_args()


if __name__ == "__main__":
    main(parse())
