"""A signal in the first moment of a launcher ends it, wherever it strikes."""

from __future__ import annotations

import subprocess
import sys

LOST = """
import signal, time
from elaunch.agent.launch import _stop_early, _strike_no_more
from elaunch.errors import LaunchError

class Callback:
    def __del__(self):  # what is raised in here is only printed, as in what runs after a fork
        signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGTERM, _stop_early)
try:
    Callback()
    time.sleep(30)
except LaunchError as error:
    _strike_no_more()
    print(error)
    time.sleep(0.5)  # as where the end of the interpreter takes long
"""


def test_one_that_strikes_in_a_callback_of_the_interpreter_is_not_lost() -> None:
    told = subprocess.run([sys.executable, "-c", LOST], capture_output=True, text=True, timeout=60, check=True)
    assert "Exception ignored" in told.stderr
    assert told.stdout == "stopped by SIGTERM\n"


AROUND_A_FORK = """
import os, signal, time
from elaunch.agent import launch
from elaunch.errors import LaunchError

def _releaseLock():
    signal.raise_signal(signal.SIGTERM)

os.register_at_fork(after_in_parent=_releaseLock)
signal.signal(signal.SIGTERM, launch._stop_early)
try:
    if os.fork() == 0:
        os._exit(0)
    time.sleep(30)
except LaunchError as error:
    launch._strike_no_more()
    print(error)
    time.sleep(0.5)
"""


def test_one_that_strikes_around_a_fork_prints_no_traceback() -> None:
    command = [sys.executable, "-c", AROUND_A_FORK]
    told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert told.stderr == ""
    assert told.stdout == "stopped by SIGTERM\n"
