"""Transformers' Trainer that survives: import `Trainer` from here in place of transformers' (docs/frameworks.md).

`elastic` makes the same of trainers that other libraries derive from it, such as TRL's SFTTrainer.

Under torchrun and in a plain process it is transformers' own. Under elaunch the import has accelerate form no process
group: `train()` does that, over the members there are, and is left and entered again when they change.

outside  every worker is alone, before `train()`
sharded  models that FSDP shards, anew for each group of members
trainer  the Trainer
"""

from __future__ import annotations

from elaunch.integrations.transformers.trainer import Trainer, elastic

__all__ = ["Trainer", "elastic"]
