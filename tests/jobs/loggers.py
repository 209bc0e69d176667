"""TensorBoard's writer and W&B, of which no package is needed: what they are told goes to a file, a line each."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


class SummaryWriter:
    """As `torch.utils.tensorboard.SummaryWriter`: a row is in its file once it was flushed."""

    def __init__(
        self,
        log_dir: str | None = None,
        comment: str = "",
        purge_step: int | None = None,
        max_queue: int = 10,
        flush_secs: int = 120,
        filename_suffix: str = "",
    ) -> None:
        self._folder = log_dir
        self._rows: list[dict[str, Any]] = []

    def add_scalar(
        self,
        tag: str,
        scalar_value: float,
        global_step: int | None = None,
        walltime: float | None = None,
        new_style: bool = False,
        double_precision: bool = False,
    ) -> None:
        """Keeps a row until the next `flush`."""
        self._rows.append({"to": self._folder, tag: scalar_value, "step": global_step})

    def flush(self) -> None:
        """Writes what was kept."""
        while self._rows:
            _write("tensorboard", self._rows.pop(0))


class Wandb(ModuleType):
    """As the module `wandb`: a row belongs to the run that `init` has begun."""

    _run: str | None = None

    def init(
        self,
        entity: str | None = None,
        project: str | None = None,
        dir: str | None = None,
        id: str | None = None,
        name: str | None = None,
        notes: str | None = None,
        tags: list[str] | None = None,
        config: dict[str, Any] | None = None,
        *,
        resume: str | bool | None = None,
    ) -> None:
        """Begins a run, or goes on with one of that id."""
        assert resume == "allow", "a run of this id exists: the one of the worker that was lost"
        self._run = id

    def log(self, data: dict[str, Any], step: int | None = None, commit: bool | None = None) -> None:
        """Writes a row. Raises as wandb does where no run was begun."""
        if self._run is None:
            raise RuntimeError("You must call wandb.init() before wandb.log()")
        _write("wandb", {"to": self._run, **data, "step": step})


def install() -> None:
    """Has `torch.utils.tensorboard` and `wandb` be the ones here; the variable CURVES names their file."""
    tensorboard = ModuleType("torch.utils.tensorboard")
    tensorboard.SummaryWriter = SummaryWriter  # type: ignore[attr-defined]
    sys.modules["torch.utils.tensorboard"] = tensorboard
    sys.modules["wandb"] = Wandb("wandb")


def _write(tool: str, row: dict[str, Any]) -> None:
    line = json.dumps({"tool": tool, "worker": os.environ["ELAUNCH_WORKER"], **row}) + "\n"
    with Path(os.environ["CURVES"]).open("ab", buffering=0) as file:
        file.write(line.encode())
