"""What the warm parent of test jobs imports: all that their scripts need of torch and elaunch, without the compiler."""

from __future__ import annotations

from tests.jobs.eager import compile_nothing

compile_nothing()

import torch.distributed.tensor  # noqa: E402, F401
