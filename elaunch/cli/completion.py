"""Answers a shell that completes a command line of `elaunch`, by argcomplete.

The words in `COMMANDS` have parsers of their own, which argcomplete would not see: they are found here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator

from elaunch.agent import local_jobs
from elaunch.agent.config import BACKENDS
from elaunch.cli import ctl, plan, schedule, simulate, trace, ui
from elaunch.cli.flags.launcher import parser
from elaunch.cli.rendezvous import slurm
from elaunch.policy.settings import CONSISTENCIES, POLICIES, SLOW_POLICIES

VARIABLE = "_ARGCOMPLETE"
"""The shell's function sets it to the number of the word that is the command, from 1."""

COMMANDS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "ctl": ctl.parser,
    "plan": plan.parser,
    "schedule": schedule.parser,
    "simulate": simulate.parser,
    "trace": trace.parser,
    "ui": ui.parser,
}

VALUES: dict[str, Callable[[], Iterator[str]]] = {
    "rdzv_backend": lambda: iter((*BACKENDS, slurm.BACKEND)),
    "rdzv_id": lambda: (job.id for job in local_jobs.running()),
    "policy": lambda: iter(POLICIES),
    "consistency": lambda: iter(CONSISTENCIES),
    "slow_policy": lambda: iter(SLOW_POLICIES),
    "health_policy": lambda: iter(("drain", "report", "off")),
    "hang_timeout": lambda: iter(("auto", "off")),
    "nproc_per_node": lambda: iter(("auto", "cpu", "gpu", "npu", "xpu")),
    "event_log_handler": lambda: iter(("null", "console")),
}
"""What a flag can be given, where that is a word."""


def answer() -> None:
    """Writes what the shell can offer, and ends this process."""
    try:
        import argcomplete
        from argcomplete.completers import FilesCompleter
    except ImportError:  # the shell has its function from another environment
        sys.exit(1)
    line = os.environ.get("COMP_LINE", "")[: int(os.environ.get("COMP_POINT", "0"))]
    words = line.split()
    is_over = len(words) > 2 or line.endswith(" ")  # the second word is not the one that is completed
    if len(words) > 1 and words[1] in COMMANDS and is_over:
        os.environ[VARIABLE] = str(int(os.environ[VARIABLE]) + 1)
        asked = COMMANDS[words[1]]()
    else:
        asked = parser()
    files = FilesCompleter()
    for action in _actions(asked):
        if action.dest in VALUES:
            action.completer = _offer(VALUES[action.dest])  # type: ignore[attr-defined]
        elif action.dest == "script":
            action.completer = lambda prefix, **_: [*files(prefix), *COMMANDS]  # type: ignore[attr-defined]
    argcomplete.autocomplete(
        asked, exclude=[name for one in _actions(asked) for name in one.option_strings if "_" in name]
    )


def _offer(values: Callable[[], Iterator[str]]) -> Callable[..., list[str]]:
    return lambda **_: list(values())


def _actions(of: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in of._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for one in action.choices.values():
                yield from _actions(one)
