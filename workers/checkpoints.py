"""When the state of a job goes to disk: one worker's part in it.

    a step boundary             all members: is the last one written? -> each copies its part of the state
    a thread of each            writes its part into DIR/step-000000200.ATTEMPT.part, and a note when it is there
    that of the first member    waits for the notes of all, then completes the checkpoint

No thread but the training one uses links: the others see in the folder what is there. A member that dies leaves the
folder incomplete, and the job goes on to the next checkpoint.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import secrets
import shutil
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaunch.checkpoints import METADATA, from_environment, newest, outdated, part_of, path_of
from elaunch.detect.pulse import Phase
from elaunch.errors import StateError
from elaunch.wire import Report, Saved
from elaunch.workers import pulse
from elaunch.workers.agent_client import Client
from elaunch.workers.comm.group import Group

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import Part
    from elaunch.workers.state.checkpoint import Saved as SavedState

LOOK_S = 0.05
"""How often the first member looks for the notes of others."""

VISIBLE_S = 30.0
"""So long what others have written may take to be seen, through the caches of a shared file system."""

CLOSE_S = 5.0


@dataclass(eq=False)
class _Attempt:
    """A checkpoint on its way to the disk."""

    step: int
    epoch: int
    members: tuple[str, ...]
    rank: int
    folder: Path
    start_s: float
    written: threading.Event = field(default_factory=threading.Event)
    over: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    gone: frozenset[str] = frozenset()
    failed: bool = False
    thread: threading.Thread | None = None


class Checkpoints:
    """Saves the state of a job every so many steps, and finds the newest checkpoint; without a folder it does nothing.

    Args:
        client: of this worker.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._settings = from_environment(os.environ)
        self._attempt: _Attempt | None = None
        if self._settings is not None:
            # Now rather than between two steps.
            importlib.import_module("elaunch.workers.state.checkpoint")
        self._done = (0, 0)
        self._told: int | None = None

    @property
    def every(self) -> int:
        """Steps from one to the next; 0: there are none."""
        return self._settings.every if self._settings is not None else 0

    def newest(self) -> int | None:
        """The number of steps in the newest complete checkpoint that this worker sees."""
        return newest(self._settings.folder) if self._settings is not None else None

    # -- saving -------------------------------------------------------------------------------------------------------

    def boundary(self, group: Group, step: int, state: Callable[[], Part], due: bool = False) -> None:
        """Begin a checkpoint, if one is due at this step boundary. All members call it at every one.

        Args:
            group: of the members.
            step: number of steps that have committed.
            state: gives this worker's part of the state.
            due: whether it is, whatever the number of the step.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """
        if self._settings is None or not step or self._done == (group.epoch, step):
            return
        if step % self.every and not due:
            return
        pulse.enter(Phase.SAVING)
        busy = self._attempt is not None and not self._attempt.over.is_set()
        failed = self._attempt is not None and self._attempt.failed
        name = f"{group.epoch}-{secrets.token_hex(4)}"
        mine = {"attempt": name, "busy": busy, "failed": failed, "newest": self.newest()}
        said = [json.loads(one) for one in group.all_gather_bytes(json.dumps(mine).encode())]
        self._done = (group.epoch, step)
        first = said[0]
        self._know(first["newest"])
        if self._attempt is not None and any(one["failed"] for one in said):
            self._attempt.abandoned.set()
        if first["newest"] is not None and first["newest"] >= step:
            return
        late = [member for member, one in zip(group.members, said, strict=True) if one["busy"]]
        if late:
            if group.rank == 0:
                _say(f"no checkpoint after {step} steps: {', '.join(late)} still write the one before")
            return
        start_s = time.monotonic()
        part = state().copied()
        folder = part_of(self._settings.folder, step, first["attempt"])
        self._attempt = _Attempt(step, group.epoch, tuple(group.members), group.rank, folder, start_s)
        writing = threading.Thread(
            target=self._write, args=(self._attempt, part), name="elaunch-checkpoint", daemon=True
        )
        self._attempt.thread = writing
        writing.start()

    def entered(self, members: Sequence[str]) -> None:
        """The job goes on with these members: what others have not written yet will not come."""
        if self._attempt is not None:
            self._attempt.gone |= frozenset(self._attempt.members) - frozenset(members)

    def last(self, group: Group, step: int, state: Callable[[], Part]) -> None:
        """All steps of the job are done: as `boundary`, but wait until what has been begun is complete.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """
        self._end(group, step, state, due=False)

    def leave(self, group: Group, step: int, state: Callable[[], Part]) -> None:
        """All members leave at this boundary, before the last step: save the state, and wait until it is complete.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """
        self._end(group, step, state, due=True)

    def _end(self, group: Group, step: int, state: Callable[[], Part], due: bool) -> None:
        if self._settings is not None:
            pulse.enter(Phase.SAVING)
            self._settle(group)
            self.boundary(group, step, state, due)
            self._settle(group)

    def _settle(self, group: Group) -> None:
        if self._attempt is not None:
            self._attempt.written.wait()
        group.barrier()
        # All parts are there, so the first member only has to see them.
        if self._attempt is not None and not self._attempt.over.wait(VISIBLE_S):
            _say(f"the checkpoint after {self._attempt.step} steps is not complete: not all parts of it are seen here")

    def close(self) -> None:
        """This worker ends."""
        if self._attempt is not None:
            self._attempt.abandoned.set()
            # To its very end: a thread in C++ code, freeing its tensors, would abort the process that ends around it.
            if self._attempt.thread is not None:
                self._attempt.thread.join(CLOSE_S)

    def _write(self, attempt: _Attempt, part: Part) -> None:
        from elaunch.workers.state.checkpoint import write_part

        try:
            write_part(attempt.folder, attempt.rank, part)
            attempt.written.set()
            if attempt.rank == 0:
                self._complete(attempt)
        except Exception as error:
            # Training goes on: there will be another one.
            attempt.failed = True
            _say(f"the checkpoint after {attempt.step} steps was not written: {type(error).__name__}: {error}")
        finally:
            attempt.written.set()
            attempt.over.set()

    def _complete(self, attempt: _Attempt) -> None:
        """In the thread of the first member: make it a checkpoint, once all parts are there."""
        from elaunch.workers.state.checkpoint import complete, notes

        while True:
            # In this order: who was there when it wrote its note has written all.
            gone, abandoned = attempt.gone, attempt.abandoned.is_set()
            said = notes(attempt.folder, len(attempt.members))
            missing = [member for rank, member in enumerate(attempt.members) if rank not in said]
            if not missing:
                break
            if abandoned or not gone.isdisjoint(missing):
                _say(
                    f"the checkpoint after {attempt.step} steps is left incomplete: {', '.join(missing)} did not write"
                )
                return
            attempt.abandoned.wait(LOOK_S)
        path = complete(attempt.folder, attempt.step, [said[rank] for rank in range(len(attempt.members))])
        seconds = time.monotonic() - attempt.start_s
        fields = {
            "epoch": attempt.epoch,
            "step": attempt.step,
            "bytes": sum(note["bytes"] for note in said.values()),
            "seconds": round(seconds, 6),
            "path": str(path),
        }
        self._client.send(Report("checkpoint", fields))
        self._know(attempt.step)
        for old in outdated(path.parent, attempt.step):
            shutil.rmtree(old, ignore_errors=True)

    def _know(self, step: int | None) -> None:
        """Tell the agent of a checkpoint: it decides with it what becomes of a job that has lost its state."""
        if step is not None and step != self._told:
            self._told = step
            self._client.send(Saved(step))

    # -- going back ---------------------------------------------------------------------------------------------------

    def open(self, step: int) -> SavedState:
        """The checkpoint of so many steps, which the first member has seen.

        Raises:
            StateError: this worker does not see it, or it is damaged.
        """
        from elaunch.workers.state.checkpoint import Saved as SavedState

        if self._settings is None:
            raise StateError(
                f"{self._client.worker} has no --checkpoint-dir, and the first member goes on from a checkpoint; give "
                "the same to all nodes"
            )
        path = path_of(self._settings.folder, step)
        end_s = time.monotonic() + VISIBLE_S
        while not (path / METADATA).exists():
            if time.monotonic() > end_s:
                raise StateError(
                    f"{self._client.worker} does not see the checkpoint {path}, from which the first member goes on; "
                    f"is {self._settings.folder} on a shared file system, and mounted there?"
                )
            # Looking at the folder makes file systems look anew.
            with contextlib.suppress(OSError):
                os.listdir(self._settings.folder)
            time.sleep(LOOK_S)
        return SavedState(path)

    def resumed(self, group: Group, saved: SavedState, had: int, read_bytes: int, seconds: float) -> None:
        """Tell of a return to a checkpoint; `had` steps had committed before, as far as anybody knows."""
        self._know(saved.step)
        if group.rank != 0:
            return
        again = max(0, had - saved.step)
        fields: dict[str, Any] = {
            "epoch": group.epoch,
            "step": saved.step,
            "again": again,
            "bytes": read_bytes,
            "seconds": round(seconds, 6),
            "path": str(saved.path),
        }
        self._client.send(Report("resume", fields))
        steps = "1 step is" if again == 1 else f"{again} steps are"
        lost = f"; parts of the state were lost, {steps} done again" if had else ""
        _say(f"the job goes on from the checkpoint {saved.path}, at step {saved.step}{lost}")


def _say(text: str) -> None:
    print(f"[elaunch] {text}", file=sys.stderr, flush=True)
