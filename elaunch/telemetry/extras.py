"""Packages that monitoring needs and that are installed only where it is asked for."""

from __future__ import annotations


def is_missing(package: str, error: ModuleNotFoundError) -> bool:
    """Returns whether an import failed because this package, or a part of it, is not installed."""
    return (error.name or "").partition(".")[0] == package
