"""unit/ values and decisions; contract/ one suite per interface; integration/ real jobs; faults/ jobs that are hurt."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
"""The top folder of the repository."""
