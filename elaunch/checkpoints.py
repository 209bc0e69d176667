"""Checkpoints as far as they need no torch: the settings, and which folders hold a complete one.

    DIR/step-000000200/                  complete: it was renamed when all of it was on the disk
    DIR/step-000000300.4-9f2c11d0.part/  being written, being removed, or left behind by members that died
    DIR/step-000000400.damaged/          passed over: it could not be read

What is in them is a matter of `elaunch.workers.state.checkpoint`.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elaunch.errors import LaunchError, UsageError

FOLDER = "ELAUNCH_CHECKPOINT_DIR"
EVERY = "ELAUNCH_CHECKPOINT_EVERY"
FLAGS = FOLDER_FLAG, EVERY_FLAG = "--checkpoint-dir", "--checkpoint-every"
DEFAULT_EVERY = 100
KEPT = 2
"""Complete checkpoints that stay."""

METADATA = ".metadata"
ABOUT = "elaunch.json"

_COMPLETE = re.compile(r"step-(\d{9,})")
_PART = re.compile(r"step-(\d{9,})\.[\w-]+\.part")
_DAMAGED = re.compile(r"step-(\d{9,})\.damaged(-\d+)?")


@dataclass(frozen=True, slots=True)
class Checkpointing:
    """Where checkpoints go, and after how many steps each."""

    folder: Path
    every: int


def parse(folder: str | None, every: str | None, names: tuple[str, str] = (FOLDER, EVERY)) -> Checkpointing | None:
    """Reads the settings; None without a folder.

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
    """Returns the settings of a worker.

    Raises:
        UsageError: as `parse`.
        LaunchError: the folder cannot be used.
    """
    settings = parse(environment.get(FOLDER), environment.get(EVERY))
    if settings is not None:
        make_folder(settings, FOLDER)
    return settings


def make_folder(settings: Checkpointing, name: str) -> None:
    """Makes the folder, if it is not there.

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
    """Returns the folder of the complete checkpoint with so many committed steps."""
    return folder / f"step-{step:09d}"


def part_of(folder: Path, step: int, attempt: str) -> Path:
    """Returns the folder of a checkpoint being written. Each attempt has its own, without files of older ones."""
    return folder / f"step-{step:09d}.{attempt}.part"


def complete(folder: Path) -> list[int]:
    """Returns the numbers of steps of all complete checkpoints, the newest first.

    The name tells: a folder has it from when all is on the disk until it is removed. So one that lacks a file is
    damaged, not incomplete.
    """
    return sorted((int(match[1]) for match in map(_COMPLETE.fullmatch, _names(folder)) if match), reverse=True)


def newest(folder: Path) -> int | None:
    """Returns the number of steps of the newest complete checkpoint."""
    return next(iter(complete(folder)), None)


def before(folder: Path, step: int) -> int | None:
    """Returns the number of steps of the newest complete checkpoint that is older than that of `step`."""
    return next((each for each in complete(folder) if each < step), None)


def outdated(folder: Path) -> list[Path]:
    """Returns what may go: complete and damaged checkpoints that are older than the newest complete ones."""
    kept = complete(folder)[:KEPT]
    if len(kept) < KEPT:
        return []
    found = ((name, _COMPLETE.fullmatch(name) or _DAMAGED.fullmatch(name)) for name in sorted(_names(folder)))
    return [
        folder / name
        for name, match in found
        if match and int(match[1]) <= kept[-1] and match[0] != path_of(folder, kept[-1]).name
    ]


def parts(folder: Path) -> list[Path]:
    """Returns what is incomplete: being written, being removed, or left behind."""
    return [folder / name for name in sorted(_names(folder)) if _PART.fullmatch(name)]


def discard(path: Path) -> bool:
    """Removes a checkpoint, whether complete or not.

    It loses its name first. So what is half removed never counts as complete, and members that still write to it
    cannot open another file there.

    Returns:
        False if it was not there: somebody else removes it, or has completed it.
    """
    doomed = part_of(
        path.parent, int(path.name.removeprefix("step-").partition(".")[0]), f"gone-{secrets.token_hex(4)}"
    )
    try:
        path.rename(doomed)
    except FileNotFoundError:
        return False
    except OSError:
        doomed = path
    shutil.rmtree(doomed, ignore_errors=True)
    return True


def discard_all(folders: Iterable[Path]) -> None:
    """Removes checkpoints, one after the other."""
    for folder in folders:
        discard(folder)


def set_aside(path: Path) -> Path:
    """Renames a damaged checkpoint so that it does not count any more; returns where it is.

    Raises:
        OSError: it cannot be renamed.
    """
    kept, number = path.with_name(f"{path.name}.damaged"), 1
    while kept.exists():
        number += 1
        kept = path.with_name(f"{path.name}.damaged-{number}")
    return path.rename(kept)


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
