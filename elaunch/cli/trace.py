"""The command `elaunch trace`: event logs of a job as a trace for Perfetto."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from elaunch.cli.commands import run_command
from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.errors import RequestRefused


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `elaunch trace`."""
    p = FlagParser(
        prog="elaunch trace",
        description="Make a trace of a job's event logs, which https://ui.perfetto.dev and chrome://tracing show: "
        "generations, steps, each recovery by phase, the lives of all workers, and the schedules of its plans, as "
        "executed where the logs have that.\n\n"
        f"{VERBATIM}elaunch trace events-a.jsonl events-b.jsonl -o trace.json",
    )
    p.add_argument("logs", metavar="LOG", nargs="+", help="what --events wrote, of one node or of all of them")
    p.add_argument("-o", "--output", default="", metavar="FILE", help="where the trace goes; default: standard output")
    return p


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0 when the trace is written, 1 when it cannot be, 2 for a command line that cannot be used.
    """
    return run_command("elaunch trace", _trace, parser().parse_args(argv))


def _trace(args: argparse.Namespace) -> None:
    from elaunch.telemetry.log import read_events
    from elaunch.telemetry.trace import trace_of

    text = json.dumps(trace_of(read_events(args.logs)), separators=(",", ":"))
    if not args.output:
        print(text)
        return
    try:
        Path(args.output).write_text(text + "\n")
    except OSError as error:
        raise RequestRefused(f"--output {args.output}: {error.strerror}") from error
    print(f"{args.output}: {len(text) + 1:,} bytes; open it at https://ui.perfetto.dev", file=sys.stderr)
