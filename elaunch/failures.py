"""Why workers failed: the error files that they leave, the report of a failed job, and the launcher's own error file.

The forms are those of torch.distributed.elastic.multiprocessing.errors, whose `record`, put around a worker's main
function, writes them:

    nested   {"message": {"message": str, "extraInfo": {"py_callstack": str, "timestamp": str}}}
    flat     {"message": str, "timestamp": int}

Timestamps are Unix time in whole seconds. The launcher may have an error file too, named by its own
TORCHELASTIC_ERROR_FILE: a scheduler reads there why the job failed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
NOT_AVAILABLE = "<N/A>"
EXCEPTION = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError"
HINT = "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
MAX_WIDTH = 60
MAX_SUMMARY = 300  # characters of an exception in a line of the log
_PLACE = re.compile(r'^ +File "([^"\n]+)", line (\d+), in (\S+)$', re.MULTILINE)
MAX_BYTES = 16 << 20  # of an error file; a traceback has some thousands


@dataclass(frozen=True, slots=True)
class Failure:
    """How one worker failed.

    Attributes:
        rank, local_rank, host, pid: the worker's.
        exitcode: negative for a signal.
        error_file: its path, or None where the worker wrote none.
        t: when the agent heard of the end, in Unix seconds.
        timestamp: when it failed, in whole Unix seconds: as the error file says, else when that was written, else `t`.
        written_t: when the error file was written, in Unix seconds, else `t`. It orders failures of the same second.
        message: the traceback or what else is known; one line where there is no readable error file.
        record: the error file's content, None where there is none that can be read.
    """

    rank: int
    local_rank: int
    host: str
    pid: int
    exitcode: int
    error_file: str | None
    t: float
    timestamp: int
    written_t: float
    message: str
    record: dict[str, Any] | None = field(default=None, repr=False, hash=False)

    @property
    def signal_name(self) -> str:
        """Returns the name of the signal that ended the worker, empty if none did, "<N/A>" if it has no name."""
        return _signal_name(self.exitcode)


def _signal_name(exitcode: int) -> str:
    if exitcode >= 0:
        return ""
    try:
        return signal.Signals(-exitcode).name
    except ValueError:
        return NOT_AVAILABLE


@functools.cache
def this_host() -> str:
    """Returns the full name of this machine, as the report shows it. May ask a name server, the first time."""
    return socket.getfqdn()


def read_failure(
    *, rank: int, local_rank: int, pid: int, exitcode: int, error_file: str | None, t: float, host: str | None = None
) -> Failure:
    """Describes a worker's failure from its end and its error file. A damaged file is no error: the message says it.

    Args:
        rank, local_rank, pid: the worker's.
        exitcode: negative for a signal.
        error_file: the path that the worker was told to write to; there need not be a file.
        t: when its end was heard of, in Unix seconds.
        host: this machine's name, by default `this_host()`.
    """
    host = this_host() if host is None else host
    if error_file is not None and not os.path.isfile(error_file):
        error_file = None
    record, written_t, problem = _read(error_file, t)
    message, _ = _content(record)
    if not message:
        message = _without_traceback(pid, exitcode, problem)
    elif problem:
        message = f"{message}; {problem}"
    timestamp, written_t = _moment(record, written_t)
    return Failure(
        rank, local_rank, host, pid, exitcode, error_file, t, timestamp, written_t, message=message, record=record
    )


def failed_at(error_file: str, t: float) -> tuple[int, float]:
    """Returns when a worker failed, for comparing: the second that its error file gives, and when it was written.

    Where there is no such file it is `t`, in Unix seconds.
    """
    record, written_t, _ = _read(error_file or None, t)
    return _moment(record, written_t)


def _read(error_file: str | None, t: float) -> tuple[dict[str, Any] | None, float, str]:
    """Returns the content, when it was written (`t` where it is not there), and why it cannot be read."""
    if error_file is None:
        return None, t, ""
    written_t = t
    try:
        written_t = os.stat(error_file).st_mtime
        return _parse(error_file), written_t, ""
    except (OSError, ValueError, RecursionError) as error:
        return None, written_t, f"the error file cannot be read: {_one_line(error)}"


def _moment(record: dict[str, Any] | None, written_t: float) -> tuple[int, float]:
    told_s = _content(record)[1]
    return int(written_t) if told_s is None else told_s, written_t


def summary(path: str) -> str:
    """Returns what an error file says, in a line: the exception, and the place that raised it."""
    try:
        record = _parse(path)
    except (OSError, ValueError, RecursionError) as error:
        return f"the error file cannot be read: {_one_line(error)}"
    message = record["message"]
    reason = message if isinstance(message, str) else str(message.get("message", NOT_AVAILABLE))
    text = " ".join(reason.split())
    text = text if len(text) <= MAX_SUMMARY else f"{text[:MAX_SUMMARY]}..."
    places = _PLACE.findall(_content(record)[0])
    if not places:
        return text
    file, line, function = places[-1]
    return f"{text} ({os.path.basename(file)}:{line} in {function})"


def _parse(path: str) -> dict[str, Any]:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    record = json.loads(data)
    if not isinstance(record, dict):
        raise ValueError(f"expected an object, found {type(record).__name__}")
    if not isinstance(record.get("message"), dict | str):
        raise ValueError('expected text or an object as "message"')
    return record


def _content(record: dict[str, Any] | None) -> tuple[str, int | None]:
    """The text to show and the Unix second, as far as the record has them."""
    if record is None:
        return "", None
    message = record["message"]
    if isinstance(message, str):
        return message, _second(record.get("timestamp"))
    if not message:
        return "", None
    extra = message.get("extraInfo")
    extra = extra if isinstance(extra, dict) else {}
    return str(extra.get("py_callstack", message.get("message", NOT_AVAILABLE))), _second(extra.get("timestamp"))


def _second(value: object) -> int | None:
    """The whole second, or None for what is no time that a calendar has."""
    if not isinstance(value, int | float | str):
        return None
    try:
        second = int(float(value))
        datetime.fromtimestamp(second)
    except (ValueError, OverflowError, OSError):
        return None
    return second


def _without_traceback(pid: int, exitcode: int, problem: str) -> str:
    if exitcode < 0:
        text = f"Signal {-exitcode} ({_signal_name(exitcode)}) received by PID {pid}"
        return f"{text}; {problem}" if problem else text
    return problem or HINT


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Returns the earliest failure by the second that it gives; within a second, the one written down first.

    The order of `failures` does not matter: of two at one time it is the one of the lower rank.
    """
    return min(failures, key=lambda failure: (failure.timestamp, failure.written_t, failure.rank))


def report(name: str, failures: Sequence[Failure]) -> str:
    """Returns the table of failures under the name of the exception with which torchrun ends: logs are searched for it.

    Args:
        name: of what was launched: the script's path, the module or the program.
        failures: at least one; their place here is their number in the table.
    """
    title = f"{name} FAILED"
    entries = [_entry(number, failure) for number, failure in enumerate(failures)]
    width = min(MAX_WIDTH, max(len(line) for line in [title, *"\n".join(entries).split("\n")]))
    root = entries.pop(failures.index(root_cause(failures)))
    return "\n".join(
        [
            f"{EXCEPTION}: ",  # the blank is torchrun's
            "=" * width,
            title,
            "-" * width,
            "Failures:",
            *(entries or ["  <NO_OTHER_FAILURES>"]),
            "-" * width,
            "Root Cause (first observed failure):",
            root,
            "=" * width,
        ]
    )


def _entry(number: int, failure: Failure) -> str:
    nested = failure.record is not None and isinstance(failure.record["message"], dict)
    message = failure.message.replace("\n", "\n  ") if nested else failure.message
    known = failure.signal_name not in ("", NOT_AVAILABLE)
    fields = {
        "time": datetime.fromtimestamp(failure.timestamp).isoformat(sep="_"),
        "host": failure.host,
        "rank": f"{failure.rank} (local_rank: {failure.local_rank})",
        # The blank at the end of a line without a signal is torchrun's.
        "exitcode": f"{failure.exitcode} (pid: {failure.pid}) {f' ({failure.signal_name})' if known else ''}",
        "error_file": failure.error_file or NOT_AVAILABLE,
        "traceback": message,
    }
    return "\n".join([f"[{number}]:", *(f"  {field:<10}: {value}" for field, value in fields.items())])


def copy_to_launcher(failure: Failure) -> str | None:
    """Copies a root cause to the launcher's own error file, if it has one and the worker wrote one.

    The nested form gets the exit code as "errorCode"; the flat form is copied as it is. A file that cannot be read is
    described in the nested form. Never raises: a file that cannot be written is said on standard error.

    Returns:
        The path written to, or None.
    """
    path = os.environ.get(ERROR_FILE)
    if not path or failure.error_file is None:
        return None
    record = failure.record
    if record is None:
        record = _nested(failure.message, failure.message, failure.timestamp)
    if isinstance(record["message"], dict) and failure.exitcode:
        record = {**record, "message": {**record["message"], "errorCode": failure.exitcode}}
    return _write(path, record)


def record_own_error(error: BaseException) -> str | None:
    """Writes the launcher's own error to its error file, if it has one, in the nested form. Never raises.

    Returns:
        The path written to, or None.
    """
    path = os.environ.get(ERROR_FILE)
    if not path:
        return None
    try:
        callstack = "".join(traceback.format_exception(error))
        message = f"{type(error).__name__}: {error}"
    except Exception:  # whatever its __str__ does
        message = callstack = type(error).__name__
    return _write(path, _nested(message, callstack, int(time.time())))


def _nested(message: str, callstack: str, timestamp: int) -> dict[str, Any]:
    return {"message": {"message": message, "extraInfo": {"py_callstack": callstack, "timestamp": str(timestamp)}}}


def _write(path: str, record: dict[str, Any]) -> str | None:
    # In place: the file may be a mount of its own (Kubernetes' termination log), which cannot be replaced.
    try:
        text = json.dumps(record)
        with open(path, "w") as file:
            file.write(text)
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(f"elaunch: cannot write {ERROR_FILE}={path}: {_one_line(error)}\n")
        return None
    return path


def _one_line(error: Exception) -> str:
    text = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return " ".join(text.split()) or type(error).__name__
