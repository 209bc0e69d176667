"""Training state as data: what registered objects hold, described without pickle, and moved between memories.

`codec` turns state_dicts into a manifest (JSON) and a list of tensors, and back. `transfer` sees such a list as one
byte string, so that several sources can each send an interval of it straight from tensor memory into place.
"""

from __future__ import annotations

from elaunch.workers.state.codec import describe, digest, restore
from elaunch.workers.state.transfer import allocate, checksum, cut, stage, total_bytes, windows

__all__ = [
    "allocate",
    "checksum",
    "cut",
    "describe",
    "digest",
    "restore",
    "stage",
    "total_bytes",
    "windows",
]
