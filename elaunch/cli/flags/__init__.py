"""Flags: how command lines are read, and those of `elaunch` itself."""
