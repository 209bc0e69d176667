"""Random numbers that belong to a step, a micro-batch and a layer, and not to the worker that draws them.

`rng` seeds a micro-batch, `trace` finds out what a layer draws, `rows` gives any rows of a micro-batch what the whole
one would have drawn for them.
"""

from __future__ import annotations
