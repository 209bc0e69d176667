"""The public names for packages that add a `--notice` (docs/running.md)."""

from __future__ import annotations

from elaunch.agent.notices import Announcement, Notice

__all__ = ["Announcement", "Notice"]
