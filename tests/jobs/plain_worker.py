"""A worker that knows nothing of elaunch: it reports what it was given, then waits, fails or ends as it was told.

Its report is the file `FOLDER/<pid>.json`; with `--wait` it ends well once `FOLDER/go` exists.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(600)"


def together(folder: Path, size: int, restart: int) -> bool:
    """Whether all workers of this attempt have reported."""
    reports = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    return len([report for report in reports if (report["size"], report["restart"]) == (size, restart)]) == size


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--fail", default="0:0", help="RANK:TIMES: this rank fails in so many attempts")
    parser.add_argument("--child", action="store_true", help="start a child that ignores SIGTERM")
    parser.add_argument("--deaf", action="store_true", help="ignore SIGTERM")
    args = parser.parse_args()

    if args.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = 0
    if args.child:
        process = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        child = process.pid
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    restart = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    report = {
        "pid": os.getpid(),
        "child": child,
        "rank": rank,
        "restart": restart,
        "size": size,
        "node": int(os.environ["GROUP_RANK"]),
        "nodes": int(os.environ["GROUP_WORLD_SIZE"]),
        "address": os.environ["MASTER_ADDR"],
        "port": os.environ["MASTER_PORT"],
    }
    part = args.folder / f"{os.getpid()}.part"
    part.write_text(json.dumps(report))
    part.rename(args.folder / f"{os.getpid()}.json")

    failing, times = map(int, args.fail.split(":"))
    if restart < times:
        while rank != failing or not together(args.folder, size, restart):
            time.sleep(0.005)
        sys.exit(3)
    while args.wait and not (args.folder / "go").exists():
        time.sleep(0.005)


if __name__ == "__main__":
    main()
