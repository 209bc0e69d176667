"""What the warm parent of test jobs imports: all that their scripts need of torch and elaunch, without the compiler."""

from __future__ import annotations

from tests.jobs.eager import compile_nothing

compile_nothing()

# torch.distributed.checkpoint and torch.distributed.tensor come with these.
import tests.jobs.layers  # noqa: E402, F401
