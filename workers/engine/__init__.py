"""What a worker does inside a step.

For data-parallel scripts: `data` says which samples a step uses, `rng` which random numbers, `gradients` collects the
gradients of the micro-batches in flat buckets that are handed on as soon as they are final, `buffers` keeps the model's
buffers in step.

For models in layers: `engine.Engine` is what others use. It describes and builds `layers`, cut by `tensor_parallel`,
lays their state out (`layout`), lets the `executor` run the actions of a plan's schedule over `messages`, adds
gradients along fixed trees (`sums`) and updates sharded masters (`zero`). `samples` loads any rows of a step,
`random_trace` and `random_rows` draw what a whole micro-batch would have drawn, `meter` counts activations.
"""

from __future__ import annotations
