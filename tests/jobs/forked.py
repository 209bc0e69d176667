"""What tests/forks.py starts: `python -m tests.jobs.forked serve FD` is a server, `... run FOLDER MODULE ARGS` a fork.

A fork does what `python -m MODULE ARGS` does in FOLDER.
"""

from __future__ import annotations

import os
import runpy
import socket
import sys
import tempfile
from typing import NoReturn

from elaunch.agent import forkserver


def serve(link: socket.socket) -> NoReturn:
    """Serves requests until the other end is closed; in a fork, ends with what its program returned."""
    status = 1
    try:
        program = forkserver.ForkServer(link).run()
        status = forkserver._run_program(program) if program is not None else 0
    finally:
        os._exit(status)


def run(folder: str, module: str) -> None:
    """Runs a module as a fresh interpreter would that was started in this folder."""
    os.chdir(folder)
    sys.path[0] = folder
    tempfile.tempdir = None  # TMPDIR may be another one here
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "serve":
        serve(socket.socket(fileno=int(rest[0])))
    sys.argv[1:] = rest[2:]
    run(rest[0], rest[1])
