"""A worker that writes down how it was started, and then does what it was told.

    worker.py FOLDER [WHO=STEP+STEP…] [anything]…

FOLDER/<restart>-<rank>.json gets what `_describe` returns. WHO is a rank, a rank at one restart count (`0@1`) or `*`:
the most particular entry counts, and a worker without one ends at once. A step is one of

    exit:CODE            end with this code
    die:SIGNAL           send itself this signal
    meet                 go on when all workers of the attempt have started
    wait                 do nothing until a signal comes
    outlive:RANK         go on when this worker of the same attempt has ended
    note:SIGNAL,…        from now on write each of these signals down as a line of FOLDER/signals-<restart>-<rank>, and
                         end with code 0
    defy:SIGNAL,…        the same, but do not end
    child                start a process in the same group, which notes the same signals as this one, as `<rank>c`
    say:TEXT             write a line to standard output;  `cry:TEXT` to standard error
    nested:TIME          write an error file as torch's `record` does;  `flat:TIME` as others do
    mark:NAME            write the file FOLDER/NAME-<rank>
    until:NAME-RANK      go on when that worker has written this file
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

LIMIT_S = 100.0
POLL_S = 0.01

RANK = os.environ.get("RANK", "")
RESTART = os.environ.get("TORCHELASTIC_RESTART_COUNT", "")


def main(folder: Path, arguments: list[str]) -> None:
    _write(folder / f"{RESTART}-{RANK}.json", json.dumps(_describe()))
    orders = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    for who in (f"{RANK}@{RESTART}", RANK, "*"):
        if who in orders:
            for step in orders[who].split("+"):
                name, _, value = step.partition(":")
                _do(folder, name, value)
            return


def _describe() -> dict[str, object]:
    return {
        "argv": sys.argv,
        "command": sys.orig_argv,
        "cwd": os.getcwd(),
        "environment": dict(os.environ),
        "executable": sys.executable,
        "name": __name__,
        "path": sys.path,
        "pgid": os.getpgid(0),
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "sid": os.getsid(0),
    }


def _write(path: Path, text: str) -> None:
    """Never to be seen half written."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(text)
    scratch.rename(path)


def _do(folder: Path, name: str, value: str) -> None:
    world = int(os.environ["WORLD_SIZE"])
    if name == "exit":
        sys.exit(int(value))
    elif name == "die":
        os.kill(os.getpid(), signal.Signals[value])
        _wait()
    elif name == "meet":
        while not all((folder / f"{RESTART}-{rank}.json").exists() for rank in range(world)):
            _pause()
    elif name == "wait":
        _wait()
    elif name == "outlive":
        record = folder / f"{RESTART}-{value}.json"
        while not record.exists():
            _pause()
        while _runs(json.loads(record.read_text())["pid"]):
            _pause()
    elif name in ("note", "defy"):
        _catch(folder / f"signals-{RESTART}-{RANK}", value, name == "note")
    elif name == "child":
        _start_child(folder)
    elif name == "say":
        sys.stdout.write(value + "\n")
        sys.stdout.flush()
    elif name == "cry":
        sys.stderr.write(value + "\n")
        sys.stderr.flush()
    elif name in ("nested", "flat"):
        error = f"Told: rank {RANK}"
        if name == "nested":
            extra = {"py_callstack": f"Traceback of rank {RANK}\n  second line", "timestamp": value}
            document: dict[str, object] = {"message": {"message": error, "extraInfo": extra}}
        else:
            document = {"message": error, "timestamp": int(value)}
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(json.dumps(document))
    elif name == "mark":
        _write(folder / f"{value}-{RANK}", "")
    elif name == "until":
        while not (folder / value).exists():
            _pause()
    else:
        raise SystemExit(f"{name}: no such step")


_caught: list[tuple[Path, str, bool]] = []


def _catch(notes: Path, names: str, end: bool) -> None:
    def caught(number: int, _: FrameType | None) -> None:
        with notes.open("a") as file:
            file.write(signal.Signals(number).name + "\n")
        if end:
            sys.exit(0)

    for name in names.split(","):
        signal.signal(signal.Signals[name], caught)
    _caught.append((notes, names, end))


def _start_child(folder: Path) -> None:
    notes, names, end = _caught[-1]
    code = f"from tests.conformance.jobs import worker; worker.be_child({str(notes) + 'c'!r}, {names!r}, {end!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    started = notes.with_name(notes.name + "c-started")
    while not started.exists():
        _pause()
    _write(folder / f"child-{RESTART}-{RANK}", str(process.pid))


def be_child(notes: str, names: str, end: bool) -> None:
    """The process that the step `child` starts."""
    _catch(Path(notes), names, end)
    _write(Path(notes + "-started"), "")
    _wait()


def _runs(pid: int) -> bool:
    """Whether the process exists and has not ended, even if nobody has asked for its exit code yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _wait() -> None:
    while True:
        _pause()


_deadline = time.monotonic() + LIMIT_S


def _pause() -> None:
    if time.monotonic() > _deadline:
        sys.exit(f"rank {RANK}: nothing came in {LIMIT_S:g} s")
    time.sleep(POLL_S)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
