"""What the warm parent of test jobs imports: all that their scripts need of torch and elaunch, without the compiler."""

from __future__ import annotations

from tests.jobs.eager import compile_nothing

compile_nothing()


import elaunch.workers.data_parallel.job  # noqa: E402
import elaunch.workers.layers.job  # noqa: E402, F401
