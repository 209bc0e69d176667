"""torchtitan's training, which survives: `-m elaunch.integrations.torchtitan` in place of `-m torchtitan.train`.

A script with a Trainer of its own calls `main(ItsTrainer)` of this package in place of torchtitan's. Under torchrun
both do what torchtitan does.
"""

from __future__ import annotations

from elaunch.integrations.torchtitan.trainer import elastic, main

__all__ = ["elastic", "main"]
