"""Layers that `torch.compile` has compiled run as they were written where their operations must be seen."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_LOCK = threading.Lock()
_n_inside = 0
_stance: Any = None


@contextmanager
def uncompiled() -> Iterator[None]:
    """Has all that is compiled run uncompiled inside it.

    Without it the compiler would meet a mode that looks at each operation, and would never compile that code again. The
    stance is the process's: as long as one thread is inside, nothing is compiled.
    """
    if "torch._dynamo.eval_frame" not in sys.modules:  # nothing can have been compiled, and importing it takes a second
        yield
        return
    global _n_inside, _stance
    with _LOCK:
        _n_inside += 1
        if _n_inside == 1:
            _stance = torch.compiler.set_stance("force_eager")
    try:
        yield
    finally:
        with _LOCK:
            _n_inside -= 1
            if not _n_inside:
                _stance.__exit__(None, None, None)
                _stance = None
