"""Jobs as users describe them, and what the commands do with them in etcd. Reads no clock; `submit` and alike write."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from elaunch.errors import ProtocolError, RequestRefused, UsageError
from elaunch.rendezvous.codec import from_json, to_json
from elaunch.rendezvous.store import Store
from elaunch.scheduler.service.documents import FINAL, PREFIX, JobProgress, JobSpec

KEYS: dict[str, type] = {
    "name": str,
    "command": list,
    "folder": str,
    "basic": int,
    "most": int,
    "unit": int,
    "whole_nodes": bool,
    "kinds": list,
    "priority": int,
    "user": str,
    "profile": str,
    "rates": dict,
    "global_batch_size": int,
    "micro_batch_size": int,
    "pp": int,
    "tp": int,
    "options": list,
    "attempts": int,
    "start_s": float,
    "leave_s": float,
}
"""What a job's file may have, and the type of each value."""


def read_job(path: str) -> dict[str, Any]:
    """Returns the values of a job's file in TOML; the paths in it count from its folder.

    Raises:
        UsageError: it cannot be read, or a value is none that a job has.
    """
    try:
        with open(path, "rb") as file:
            values = tomllib.load(file)
    except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: {reason}") from error
    for key, value in values.items():
        if key not in KEYS:
            raise UsageError(f"{path}: {key} is nothing that a job has; it has {', '.join(KEYS)}")
        kind = KEYS[key]
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise UsageError(f"{path}: {key} is {value!r}, expected a value of type {kind.__name__}")
        if isinstance(value, list) and not all(isinstance(word, str) for word in value):
            raise UsageError(f"{path}: {key} is {value!r}, expected a list of strings")
    here = os.path.dirname(os.path.abspath(path))
    values["folder"] = os.path.join(here, values.get("folder", ""))
    if "profile" in values:
        values["profile"] = os.path.join(here, values["profile"])
    return values


def job_spec(values: Mapping[str, Any], now_t: float) -> JobSpec:
    """Returns the job of these values, in which `profile` is a path.

    Raises:
        UsageError: a value is missing or cannot be used.
    """
    given = dict(values)
    for key in ("name", "basic", "command"):
        if not given.get(key):
            raise UsageError(f"a job needs a {key}: give it in the file or as a flag")
    given.setdefault("most", given["basic"])
    given["folder"] = os.path.abspath(given.get("folder") or os.getcwd())
    if given.get("profile"):
        given["profile"] = _profile(given["profile"])
    try:
        rates = tuple(sorted((int(devices), float(rate)) for devices, rate in given.get("rates", {}).items()))
        for key in ("command", "kinds", "options"):
            given[key] = tuple(given.get(key, ()))
        spec = JobSpec(**{**given, "rates": rates, "submitted_t": now_t})
        spec.check()
        return from_json(JobSpec, to_json(spec))  # as the daemon will read it
    except (ValueError, TypeError, ProtocolError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"job {given['name']}: {error}") from error


def _profile(path: str) -> str:
    from elaunch.policy.profile import Profile

    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        Profile.from_json(text)
    except OSError as error:
        raise UsageError(f"profile {path}: {error.strerror}") from error
    except (ProtocolError, UnicodeDecodeError) as error:
        raise UsageError(f"profile {path}: {error}") from error
    return text


# -- etcd -------------------------------------------------------------------------------------------------------------


def submit(store: Store, scheduler: str, spec: JobSpec) -> None:
    """Writes a job. The name of a job that has ended may be used again.

    Raises:
        RequestRefused: there is a job of this name.
    """
    prefix = f"{PREFIX}{scheduler}/"
    if store.create(f"{prefix}jobs/{spec.name}", to_json(spec)):
        return
    entry, old = store.get(f"{prefix}progress/{spec.name}"), store.get(f"{prefix}jobs/{spec.name}")
    progress = None if entry is None else from_json(JobProgress, entry.value)
    if progress is None or old is None or progress.stage not in FINAL:
        stage = "waiting" if progress is None else progress.stage
        raise RequestRefused(f"there is a job {spec.name!r} already, which is {stage}: give another name, or cancel it")
    # The new one waits as soon as its progress is gone; a daemon that reads in between sees the old one.
    store.delete(f"{prefix}cancel/{spec.name}")
    spec = replace(spec, first_attempt=progress.attempt + 1)
    if not store.replace(f"{prefix}jobs/{spec.name}", to_json(spec), old.revision):
        raise RequestRefused(f"somebody else has submitted a job {spec.name!r} at this moment: give another name")
    store.delete(f"{prefix}progress/{spec.name}")


def cancel(store: Store, scheduler: str, names: Sequence[str], who: str) -> None:
    """Asks for the end of jobs.

    Raises:
        RequestRefused: there is no such job, or it has ended.
    """
    prefix = f"{PREFIX}{scheduler}/"
    for name in names:
        if store.get(f"{prefix}jobs/{name}") is None:
            raise RequestRefused(f"there is no job {name!r}; `elaunch schedule status` shows them all")
        entry = store.get(f"{prefix}progress/{name}")
        if entry is not None and (stage := from_json(JobProgress, entry.value).stage) in FINAL:
            raise RequestRefused(f"job {name!r} is {stage} already")
    for name in names:
        store.put(f"{prefix}cancel/{name}", who.encode())
