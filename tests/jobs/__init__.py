"""Scripts that tests run under a launcher; they import nothing of the tests but what stands here."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

LATE_S = 0.4
"""How long a replacement takes on an idle machine; where several tests run at a time, longer."""


def say(line: str) -> None:
    """Write a line whole: several workers share an output, and `print` writes text and newline by two calls."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def come_late() -> None:
    """Let a replacement come when the others have gone on without it, as one does that has torch to import.

    Forks of a warm parent are ready at once, and may find the others still on their way to the same generation.
    """
    if is_replacement():
        time.sleep(LATE_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)))


def share_device() -> None:
    """Lets several workers have one GPU; call it before the job is made."""
    from benchmarks import one_device  # noqa: F401  # it sets what NCCL reads


def join_after(file: Path) -> None:
    """Let a replacement come once a file is there, which the others make where they have gone on without it."""
    while is_replacement() and not file.exists():
        time.sleep(0.01)


def is_replacement() -> bool:
    """Whether this process is not the first one in its slot."""
    return not os.environ.get("ELAUNCH_WORKER", "#0").endswith("#0")
