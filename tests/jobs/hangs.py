"""Ways in which a worker of a test job stops going on.

    loop      Python code that calls nothing
    call      one call of a C function that keeps the interpreter's lock
    sleep     a sleep
    lock      a lock that nobody will release
    child     waits for a process that it has started, which sleeps
    stop      its process stops after all, as if somebody had sent SIGSTOP
    work      Python code that calls functions, without an end

`--hang SLOT:STEP:KIND` is for the first worker of that slot; `--busy SLOT:STEP:SECONDS` has it do something else for a
while, as an evaluation would, and `--pause SLOT:STEP:SECONDS` do nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time


def hang(kind: str) -> None:
    """Do so; it never returns."""
    {"loop": loop, "call": call, "sleep": sleep, "lock": lock, "child": child, "stop": stop, "work": work}[kind]()


def loop() -> None:
    while True:
        pass


def call() -> None:
    sum(range(10**15))


def sleep() -> None:
    time.sleep(10**6)


def lock() -> None:
    held = threading.Lock()
    held.acquire()
    held.acquire()


def child() -> None:
    subprocess.run([sys.executable, "-c", "import time; time.sleep(600)"], check=False)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def work() -> None:
    while True:
        evaluate(1.0)


def evaluate(seconds: float) -> None:
    """Compute for so long, in calls of several functions."""
    end_s = time.monotonic() + seconds
    while time.monotonic() < end_s:
        sum(square(number) for number in range(1000))


def square(number: int) -> int:
    return number * number


class Hangs:
    """What one worker was asked for on the command line, of the form SLOT:STEP:WHAT."""

    def __init__(self, hangs: list[str], busy: list[str], pauses: list[str], worker: str) -> None:
        slot, first = os.environ.get("LOCAL_RANK", "0"), worker.endswith("#0")
        self.asked = {
            name: {int(step): what for who, step, what in (one.split(":") for one in asked) if who == slot and first}
            for name, asked in (("hang", hangs), ("busy", busy), ("pause", pauses))
        }

    def at(self, step: int) -> None:
        """Called in each step; each request is met once."""
        if what := self.asked["busy"].pop(step, ""):
            evaluate(float(what))
        if what := self.asked["pause"].pop(step, ""):
            time.sleep(float(what))
        if what := self.asked["hang"].pop(step, ""):
            hang(what)
