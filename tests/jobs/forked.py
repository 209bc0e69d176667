"""What tests/forks.py starts: `python -m tests.jobs.forked serve FD` is a server, `... run FOLDER MODULE ARGS` a fork.

A fork does what `python -m MODULE ARGS` does in FOLDER, and in the network namespace that its environment names.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import sys
import tempfile
from typing import NoReturn

from elaunch.agent import forkserver

NAMESPACE = "ELAUNCH_TEST_NETNS"
"""The variable that names a network namespace; empty for that of the server."""


def serve(link: socket.socket) -> NoReturn:
    """Serves requests until the other end is closed; in a fork, ends with what its program returned."""
    status = 1
    try:
        program = forkserver.ForkServer(link).run()
        status = forkserver._run_program(program) if program is not None else 0
    finally:
        os._exit(status)


def enter(namespace: str) -> None:
    """Moves this process, as long as it has one thread, into a namespace that `ip netns add` has made.

    Raises:
        OSError: there is none of this name, or this process may not enter it.
    """
    with open(f"/run/netns/{namespace}") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {namespace}")


def run(folder: str, module: str) -> None:
    """Runs a module as a fresh interpreter would that was started in this folder."""
    namespace = os.environ.pop(NAMESPACE, "")
    if namespace:
        enter(namespace)
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
