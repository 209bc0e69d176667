"""A worker without torch: reports what it was given to `FOLDER/<pid>.json`, then does as files in FOLDER tell it.

`<pid>.order`, or `all.order` for every worker, holds the exit code with which to end. Until then it appends a dot to
`<pid>.beats` every 0.1 s of its own time, and a `T` for each SIGTERM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import FrameType

BEAT_S = 0.1
KNOCK_S = 5.0
POLLS_PER_BEAT = 5

WAIT = """
import os, sys, time
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


def knock(environment: dict[str, str]) -> str:
    """Whether something listens at MASTER_ADDR:MASTER_PORT: the empty string, or why not."""
    try:
        socket.create_connection((environment["MASTER_ADDR"], int(environment["MASTER_PORT"])), KNOCK_S).close()
    except OSError as error:
        return str(error)
    return ""


def order(folder: Path) -> int | None:
    """The exit code that was asked for."""
    for path in (folder / f"{os.getpid()}.order", folder / "all.order"):
        if path.exists():
            return int(path.read_text())
    return None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("node", help="the name of the launcher that started it")
    parser.add_argument("--child", action="store_true", help="start a child that lives until all are told to end")
    parser.add_argument("--deaf", action="store_true", help="do not end on SIGTERM")
    args = parser.parse_args()

    beats = os.open(args.folder / f"{os.getpid()}.beats", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def terminated(number: int, _frame: FrameType | None) -> None:
        os.write(beats, b"T")
        if not args.deaf:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminated)
    child = 0
    if args.child:
        child = subprocess.Popen([sys.executable, "-c", WAIT, str(args.folder / "all.order")]).pid
    environment = dict(os.environ)
    report = {
        "pid": os.getpid(),
        "node": args.node,
        "child": child,
        "unreachable": knock(environment),
        "environment": environment,
    }
    sys.stdout.write(f"worker {os.getpid()} of node {args.node}\n")
    sys.stdout.flush()
    part = args.folder / f"{os.getpid()}.part"
    part.write_text(json.dumps(report))
    part.rename(args.folder / f"{os.getpid()}.json")

    polls = 0
    while (code := order(args.folder)) is None:
        time.sleep(BEAT_S / POLLS_PER_BEAT)
        polls += 1
        if polls % POLLS_PER_BEAT == 0:
            os.write(beats, b".")
    sys.exit(code)


if __name__ == "__main__":
    main()
