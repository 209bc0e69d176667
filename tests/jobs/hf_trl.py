"""A tiny GPT-2 trained by TRL's SFTTrainer or DPOTrainer, on made-up words; workers die where they are told to."""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from trl.trainer.dpo_config import DPOConfig
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from elaunch.integrations.transformers import elastic
from tests.jobs.hf import Deaths

WORDS = [f"w{number}" for number in range(40)]


def tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: place for place, word in enumerate(["<pad>", "<eos>", *WORDS])}
    words = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


def texts(count: int, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [" ".join(drawn.choices(WORDS, k=drawn.randint(2, 10))) for _ in range(count)]


def model() -> GPT2LMHeadModel:
    sizes = {"vocab_size": 42, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
    none = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
    return GPT2LMHeadModel(GPT2Config(**sizes, **none, bos_token_id=1, eos_token_id=1, pad_token_id=0))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--trainer", choices=("sft", "dpo"), default="sft")
    parser.add_argument("--die", action="append", default=[], help="RANK:STEP")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, config, columns = {
        "sft": (SFTTrainer, SFTConfig, {"text": 1}),
        "dpo": (DPOTrainer, DPOConfig, {"prompt": 1, "chosen": 2, "rejected": 3}),
    }[options.trainer]
    settings: dict[str, Any] = {
        "output_dir": options.out,
        "per_device_train_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 3,
        "save_steps": 8,
        "eval_strategy": "epoch",
        "learning_rate": 5e-3,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "disable_tqdm": True,
    }
    trainer: Any = elastic(kind)(
        model=model(),
        args=config(**settings),
        train_dataset=Dataset.from_dict({name: texts(100, seed) for name, seed in columns.items()}),
        eval_dataset=Dataset.from_dict({name: texts(24, seed + 10) for name, seed in columns.items()}),
        processing_class=tokenizer(),
        callbacks=[Deaths(options.die, 0)],
        **({"ref_model": model()} if options.trainer == "dpo" else {}),  # else TRL looks for it at the hub
    )
    result = trainer.train()
    weights = sum(one.double().abs().sum().item() for one in trainer.model.parameters())
    loss = trainer.evaluate()["eval_loss"]
    sys.stdout.write(f"end: {result.global_step} {result.training_loss:.9f} {loss:.9f} {weights:.9f}.\n")


if __name__ == "__main__":
    main()
