"""Training of a model that is a list of layers: each member holds some layers and does some rows of a step.

`job` is what scripts use, and `engine.Engine` what it uses. The engine describes and builds the layers (`model`), cut
by `tensor_parallel`, has the `executor` run the actions of a plan's schedule over `messages`, adds gradients along
fixed trees (`sums`) and updates sharded masters (`zero`). `samples` loads any rows of a step, `snapshots` keeps copies
of what one worker alone holds, `change` moves state and layers to another plan, `durable` writes
checkpoints, `timing` measures.
"""

from __future__ import annotations
