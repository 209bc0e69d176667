"""What the warm parent of jobs with transformers and accelerate imports."""

from __future__ import annotations

import os

# pyarrow, which comes with datasets, would start a thread, and a fork would not be sound.
os.environ["JE_ARROW_MALLOC_CONF"] = "background_thread:false"

import accelerate  # noqa: F401
import transformers.models.gpt2.modeling_gpt2
import transformers.trainer  # noqa: F401

import elaunch.workers.reentry.run  # noqa: F401
