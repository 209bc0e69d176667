"""Loggers that another worker takes over: it goes on where the first one was."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

from lightning.fabric.loggers.csv_logs import CSVLogger


def versions(loggers: Sequence[Any]) -> list[int | str | None]:
    """Returns the versions of loggers, as their first worker chooses them; None for those that have none."""
    return [logger.version if hasattr(logger, "_version") else None for logger in loggers]


def take_over(loggers: Sequence[Any], versions: Sequence[int | str | None], writes: bool) -> None:
    """Has loggers write where those of a worker that is gone have written.

    Args:
        loggers: of this worker.
        versions: of those of the first one.
        writes: whether this worker is the one who writes.
    """
    for logger, version in zip(loggers, versions, strict=True):
        if version is not None:
            logger._version = version
        if writes and isinstance(logger, CSVLogger) and logger._experiment is None:
            _continue_table(logger)


def forget_from(loggers: Sequence[Any], step: int) -> None:
    """Takes the rows from a step on out of tables: that step is done again."""
    for logger in _tables(loggers):
        experiment: Any = logger._experiment
        experiment.metrics = [row for row in experiment.metrics if row["step"] < step]
        _keep(experiment, lambda row: int(row["step"]) < step)


def last_step(loggers: Sequence[Any]) -> int:
    """Returns the last step that is in a table; -1 if there is none."""
    tables = _tables(loggers)
    return max((int(row["step"]) for table in tables for row in _rows(table._experiment)), default=-1)


def forget_row(loggers: Sequence[Any], step: int, names: Collection[str]) -> None:
    """Takes a row out of tables: it will be logged again.

    Args:
        loggers: of this worker.
        step: of the row.
        names: of its metrics.
    """
    for logger in _tables(loggers):
        before = f"{logger._prefix}{logger.LOGGER_JOIN_CHAR}" if logger._prefix else ""
        columns = {"step", *(f"{before}{name}" for name in names)}
        _keep(logger._experiment, partial(_is_other, step, columns))


def save(loggers: Sequence[Any]) -> None:
    """Writes what tables have not written yet."""
    for logger in _tables(loggers):
        logger.save()


def _tables(loggers: Sequence[Any]) -> list[CSVLogger]:
    """Returns those loggers that have begun a table."""
    return [one for one in loggers if isinstance(one, CSVLogger) and one._experiment is not None]


def _is_other(step: int, columns: set[str], row: dict[str, str]) -> bool:
    return int(row["step"]) != step or {name for name, value in row.items() if value} != columns


def _keep(experiment: Any, stays: Callable[[dict[str, str]], bool]) -> None:
    """Takes the other rows out of a table."""
    rows = _rows(experiment)
    kept = [row for row in rows if stays(row)]
    if len(kept) < len(rows):
        _write(experiment, kept)


def _continue_table(logger: Any) -> None:
    """Makes the writer of a table whose file is there; by itself it would delete it."""
    path = f"{logger.log_dir}/metrics.csv"
    if not logger._fs.isfile(path):
        return
    with logger._fs.open(path, "r", newline="") as file:
        reader = csv.DictReader(file)
        rows, names = list(reader), list(reader.fieldnames or ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        experiment = logger.experiment
    experiment.metrics_keys = names
    _write(experiment, rows)


def _rows(experiment: Any) -> list[dict[str, str]]:
    if not experiment._fs.isfile(experiment.metrics_file_path):
        return []
    with experiment._fs.open(experiment.metrics_file_path, "r", newline="") as file:
        return list(csv.DictReader(file))


def _write(experiment: Any, rows: Sequence[dict[str, str]]) -> None:
    with experiment._fs.open(experiment.metrics_file_path, "w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=experiment.metrics_keys)
        writer.writeheader()
        writer.writerows(rows)
