"""The process that makes plans for `elaunch.policy.ahead`, from both of its ends.

    parent ──a job: plans, members, profile, events──> process     drops the job before
    parent <──an answer for each event, as it is ready── process

`choose` is up to seconds of pure Python: in a thread it would take the interpreter's lock from training. Jobs and
answers are JSON objects, one on a line. The process has a low priority, loads no torch, and ends when its standard
input does, which is also when its parent ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from queue import SimpleQueue
from typing import Any

from elaunch import threads
from elaunch.errors import ProtocolError
from elaunch.plan.tiling import Plan
from elaunch.policy.profile import Profile
from elaunch.policy.select import SelectorSettings, choose

NICE = 10
"""The lowest priority: training is never to wait for plans, however late they come."""

CLOSE_S = 1.0
"""For which the threads of a process that was killed are waited for."""

MOST_BYTES = 256 << 20
"""Of answers to a job; the parent keeps them in memory. For a thousand workers, one takes a third of a million."""


@dataclass(frozen=True)
class MembershipChange:
    """A change of membership.

    Attributes:
        lost: who goes.
        joined: who comes; the last in the order of ranks.
    """

    lost: tuple[str, ...] = ()
    joined: tuple[str, ...] = ()

    def members(self, before: Sequence[str]) -> tuple[str, ...]:
        """Returns the members afterwards, in order of ranks."""
        return (*(worker for worker in before if worker not in self.lost), *self.joined)


@dataclass(frozen=True)
class PlanningRequest:
    """A request to the process.

    Attributes:
        number: of the job, for its answers.
        now: text of the plan before the events.
        preferred_plan: text of the plan to which the job returns.
        members: before the events, in order of ranks.
        profile: in its JSON form.
        settings: in their JSON form.
        events: the first one first.
    """

    number: int
    now: str
    preferred_plan: str
    members: tuple[str, ...]
    profile: str
    settings: str
    events: tuple[MembershipChange, ...]

    def to_json(self) -> str:
        """Returns the JSON form, on one line; `from_json` gives the same job."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> PlanningRequest:
        """Reads the JSON form; on other text it raises whatever error results."""
        fields = json.loads(text)
        events = [MembershipChange(tuple(one["lost"]), tuple(one["joined"])) for one in fields["events"]]
        return cls(**fields | {"members": tuple(fields["members"]), "events": tuple(events)})


@dataclass(frozen=True)
class Answer:
    """The process's answer for one event.

    Attributes:
        number: of the job.
        event: its place in the job.
        choice: in its JSON form; None: there is no plan.
        refused: why there is none.
    """

    number: int
    event: int
    choice: str | None = None
    refused: str = ""

    def to_json(self) -> str:
        """Returns the JSON form, on one line; `from_json` gives the same answer."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Answer:
        """Reads the JSON form.

        Raises:
            ProtocolError: it is none.
        """
        try:
            found = cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ProtocolError(f"expected an answer of the planning process, found {text[:80]!r}") from error
        fits = isinstance(found.number, int) and isinstance(found.event, int)
        if not fits or not isinstance(found.choice, str | None):
            raise ProtocolError(f"expected an answer of the planning process, found {text[:80]!r}")
        return found


def answers(job: PlanningRequest) -> Iterator[Answer]:
    """Makes the plans for the events of a job, one after the other; an error becomes that event's answer."""
    for place, event in enumerate(job.events):
        try:
            now, preferred_plan = Plan.parse(job.now), Plan.parse(job.preferred_plan)
            profile, settings = Profile.from_json(job.profile), SelectorSettings.from_json(job.settings)
            choice = choose(now, preferred_plan, event.members(job.members), profile, settings)
        except Exception as error:
            yield Answer(job.number, place, refused=f"{type(error).__name__}: {error}")
        else:
            yield Answer(job.number, place, choice.to_json())


# -- the parent's end -------------------------------------------------------------------------------------------------


class Process:
    """A running process. Two threads write to it and read from it, so that nobody waits for it.

    Args:
        took: is given each line that the process writes, by a thread. It must not raise.
        nice: priority of the process, below that of this one.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, took: Callable[[bytes], None], nice: int = NICE) -> None:
        self._took = took
        self._jobs: SimpleQueue[PlanningRequest | None] = SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "elaunch.policy.ahead_process", str(nice)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=threads.with_elaunch(os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}),
        )
        self._threads = [
            threads.prepare(f"elaunch-ahead-{name}", target, self._died)
            for name, target in (("read", self._read), ("write", self._write))
        ]
        try:
            for thread in self._threads:
                thread.start()
        except RuntimeError as error:
            with self._process:
                self._process.kill()
            raise OSError(f"cannot plan ahead: {error}") from error

    @property
    def pid(self) -> int:
        """Returns its process id."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Returns whether it was seen to end: then whatever it is sent is lost."""
        return not self._threads[0].is_alive()

    def send(self, job: PlanningRequest) -> None:
        """Gives it a job, in place of earlier ones."""
        self._jobs.put(job)

    def close(self) -> None:
        """Ends it at once: nobody wants its answers, and at the lowest priority it may take long to end by itself."""
        self._jobs.put(None)
        self._process.kill()
        for thread in self._threads:
            thread.join(CLOSE_S)

    def _died(self, error: BaseException) -> None:
        # Its reader then sees the end, so that the next job has a process of its own.
        self._process.kill()

    def _write(self) -> None:
        stdin = self._process.stdin
        assert stdin is not None
        try:
            with contextlib.suppress(OSError):
                while (job := _newest(self._jobs)) is not None:
                    stdin.write(f"{job.to_json()}\n".encode())
                    stdin.flush()
        finally:
            with contextlib.suppress(OSError):
                stdin.close()

    def _read(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        try:
            for line in stdout:
                self._took(line)
        finally:
            self._jobs.put(None)
            self._process.kill()
            self._process.wait()
            stdout.close()


def _newest(queue: SimpleQueue[Any]) -> Any:
    """Returns the item that was put last; waits until there is one."""
    found = queue.get()
    while not queue.empty():
        found = queue.get()
    return found


# -- its own end ------------------------------------------------------------------------------------------------------


def main(nice: int) -> None:
    """Does the newest job, again and again."""
    os.nice(nice)
    lines: SimpleQueue[bytes] = SimpleQueue()
    threads.start("elaunch-ahead-listen", lambda: _listen(lines), lambda error: os._exit(1))
    while True:
        job = PlanningRequest.from_json(_newest(lines))
        n_bytes = 0
        for answer in answers(job):
            text = f"{answer.to_json()}\n"
            n_bytes += len(text)
            if not lines.empty() or n_bytes > MOST_BYTES:
                break
            sys.stdout.write(text)
            sys.stdout.flush()


def _listen(lines: SimpleQueue[bytes]) -> None:
    for line in sys.stdin.buffer:
        lines.put(line)
    # In the middle of a plan, too.
    os._exit(0)


if __name__ == "__main__":
    try:
        main(int(sys.argv[1]))
    finally:
        # Not by the interpreter's own way, on which it would meet the thread that reads.
        os._exit(1)
