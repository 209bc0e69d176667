"""Scripts that tests run under a launcher; they import nothing of the tests but what stands here."""

from __future__ import annotations

import sys


def say(line: str) -> None:
    """Write a line whole: several workers share an output, and `print` writes text and newline by two calls."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
