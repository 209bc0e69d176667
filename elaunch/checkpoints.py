"""Checkpoints as far as they need no torch: the settings, and which folders hold a complete one.

    DIR/step-000000200/                  complete: it was renamed when all of it was on the disk
    DIR/step-000000300.4-9f2c11d0.part/  being written, or left behind by members that died

What is in them is a matter of `elaunch.workers.state.checkpoint`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elaunch.errors import LaunchError, UsageError

FOLDER = "ELAUNCH_CHECKPOINT_DIR"
EVERY = "ELAUNCH_CHECKPOINT_EVERY"
DEFAULT_EVERY = 100
KEPT = 2
"""Complete checkpoints that stay."""

METADATA = ".metadata"
ABOUT = "elaunch.json"

_COMPLETE = re.compile(r"step-(\d{9,})")
_PART = re.compile(r"step-(\d{9,})\.[\w-]+\.part")


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Where checkpoints go, and after how many steps each."""

    folder: Path
    every: int


def parse(folder: str | None, every: str | None, names: tuple[str, str] = (FOLDER, EVERY)) -> Checkpointing | None:
    """Read the settings; None without a folder.

    Args:
        folder, every: as given.
        names: what they are called in messages.

    Raises:
        UsageError: `every` is no number of steps, or comes without a folder.
    """
    if not folder:
        if every:
            raise UsageError(f"{names[1]}={every} needs {names[0]}=PATH, the folder for the checkpoints")
        return None
    text = every or str(DEFAULT_EVERY)
    if not text.isdecimal() or int(text) < 1:
        raise UsageError(f"{names[1]}={every}: expected a number of steps of at least 1")
    return Checkpointing(Path(os.path.abspath(folder)), int(text))


def from_environment(environment: Mapping[str, str]) -> Checkpointing | None:
    """The settings of a worker.

    Raises:
        UsageError: as `parse`.
        LaunchError: the folder cannot be used.
    """
    settings = parse(environment.get(FOLDER), environment.get(EVERY))
    if settings is not None:
        make_folder(settings, FOLDER)
    return settings


def make_folder(settings: Checkpointing, name: str) -> None:
    """Make the folder, if it is not there.

    Raises:
        LaunchError: it cannot be made, is none, or cannot be written to.
    """
    folder = settings.folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "it is a file" if folder.is_file() else error.strerror or error
        raise LaunchError(f"{name}={folder}: the folder cannot be made: {why}") from error
    if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
        raise LaunchError(f"{name}={folder}: the folder cannot be written to")


def path_of(folder: Path, step: int) -> Path:
    """Of the complete checkpoint with so many committed steps."""
    return folder / f"step-{step:09d}"


def part_of(folder: Path, step: int, attempt: str) -> Path:
    """Of one that is being written. Each attempt has its own, so that no file of an older one gets into it."""
    return folder / f"step-{step:09d}.{attempt}.part"


def complete(folder: Path) -> list[int]:
    """The numbers of steps of all complete checkpoints, the newest first."""
    found = ((name, match) for name in _names(folder) if (match := _COMPLETE.fullmatch(name)))
    return sorted((int(match[1]) for name, match in found if _is_complete(folder / name)), reverse=True)


def newest(folder: Path) -> int | None:
    """The number of steps of the newest complete checkpoint."""
    return next(iter(complete(folder)), None)


def outdated(folder: Path, step: int) -> list[Path]:
    """What may go once the checkpoint of `step` is complete: all but the newest ones, and what is incomplete."""
    old = [path_of(folder, each) for each in complete(folder)[KEPT:]]
    parts = ((name, _PART.fullmatch(name) or _COMPLETE.fullmatch(name)) for name in _names(folder))
    left = [
        folder / name
        for name, match in parts
        if match is not None and int(match[1]) <= step and not _is_complete(folder / name)
    ]
    return old + left


def _is_complete(path: Path) -> bool:
    return not path.name.endswith(".part") and all((path / name).is_file() for name in (METADATA, ABOUT))


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
