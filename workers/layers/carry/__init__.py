"""How tensors travel between the workers of a plan: over links, through host memory, or from device to device.

carrier   what the executor, the tensor-parallel sums and ZeRO ask for
links     over links
native    over native groups
routes    which native groups a plan needs, and in which order its messages come in them; pure
tp_sums   sums over tensor-parallel groups
"""

from __future__ import annotations
