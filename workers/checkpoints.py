"""When the state of a job goes to disk: one worker's part in it.

    a step boundary             all members: is the last one written? -> each copies its part of the state
    a thread of each            writes its part into DIR/step-000000200.ATTEMPT.part, and a note when it is there
    that of the first member    waits for the notes of all, then completes the checkpoint

No thread but the training one uses links: the others see in the folder what is there. Who cannot go on removes the
folder, which all others take for the end of the attempt, and the job goes on to the next checkpoint. Of members that
died the first member sees that they will not write; if it died itself, the first of those that are left removes it.

    going back                  all members read the newest checkpoint, and tell each other whether it is whole
    one is damaged for any      the first member sets it aside; all read the one before
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from elaunch import threads
from elaunch.checkpoints import (
    ABOUT,
    METADATA,
    before,
    complete,
    discard,
    discard_all,
    from_environment,
    newest,
    outdated,
    part_of,
    parts,
    path_of,
    set_aside,
)
from elaunch.detect.heartbeat import Phase
from elaunch.detect.host import size
from elaunch.errors import CheckpointDamaged, StateError, StepInterrupted
from elaunch.wire import Report, Saved
from elaunch.workers import heartbeat
from elaunch.workers.agent_client import Client
from elaunch.workers.comm.group import Group
from elaunch.workers.member import saving
from elaunch.workers.member.saving import SaveAttempt

# torch.distributed.checkpoint is imported by jobs that have checkpoints only.
if TYPE_CHECKING:
    from elaunch.workers.state.checkpoint import CheckpointShard, Read, Restored, SavedCheckpoint

T = TypeVar("T")

LOOK_S = 0.05  # how often the first member looks for the notes of others

VISIBLE_S = 30.0
"""So long what others have written may take to be seen, through the caches of a shared file system."""

COMPLETE_S = 30.0
"""So long the first member may take to see all parts, and to complete the checkpoint, after everybody has written."""

WRITE_S = 1800.0
"""So long a member waits at the end of the job until its part is on the disk; then it goes without this checkpoint."""

CLOSE_S = 5.0


class _Unseen(StateError):
    """This worker does not see the checkpoint that the first member sees."""


class Checkpoints:
    """Saves the state of a job every so many steps, and finds the newest checkpoint; without a folder it does nothing.

    Args:
        client: of this worker.
    """

    def __init__(self, client: Client) -> None:
        self._client = client
        self._settings = from_environment(os.environ)
        self._attempt: SaveAttempt | None = None
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
        """Returns the number of steps in the newest complete checkpoint that this worker sees."""
        return newest(self._settings.folder) if self._settings is not None else None

    # -- saving -------------------------------------------------------------------------------------------------------

    def is_due(self, group: Group, step: int, now: bool = False) -> bool:
        """Returns whether a checkpoint begins at this step boundary; where nobody asks for it `now`, by the step."""
        is_open = self._settings is not None and step > 0 and self._done != (group.generation, step)
        return is_open and (now or step % self.every == 0)

    def boundary(self, group: Group, step: int, state: Callable[[], CheckpointShard], due: bool = False) -> None:
        """Begins a checkpoint, if one is due at this step boundary. All members call it at every one.

        Args:
            group: of the members.
            step: number of steps that have committed.
            state: gives this worker's part of the state.
            due: whether it is, whatever the number of the step.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """
        if self._settings is None or not self.is_due(group, step, due):
            return
        heartbeat.enter(Phase.SAVING)
        busy = self._attempt is not None and not self._attempt.over.is_set()
        failed = self._attempt is not None and self._attempt.failed
        name = f"{group.generation}-{secrets.token_hex(4)}"
        part, folder = state(), self._settings.folder
        before_it, problem = self._look() if group.rank == 0 else (None, "")
        begins = group.rank == 0 and not busy and not problem and (before_it is None or before_it < step)
        if begins:
            # Only here and now: a folder that one member has removed must not be made again by another.
            problem = saving.make_folder(part_of(folder, step, name))
        last = self._attempt.folder.name if self._attempt is not None else ""
        local = {
            "attempt": name,
            "last": last,
            "busy": busy,
            "failed": failed,
            "newest": before_it,
            "problem": problem,
            "bytes": saving.bytes_on_disk(part),
            "free": saving.free_bytes(folder) if begins else None,
        }
        try:
            notes = group.all_gather_json(local)
        except StepInterrupted:
            if begins:
                discard(part_of(folder, step, name))
            raise
        self._done = (group.generation, step)
        first = notes[0]
        self._know(first["newest"])
        if self._attempt is not None and any(
            # Or it was interrupted before it had heard that one begins.
            one["failed"] or (member in self._attempt.members and one["last"] != last)
            for member, one in zip(group.members, notes, strict=True)
        ):
            self._attempt.abandoned.set()
        if first["newest"] is not None and first["newest"] >= step:
            return
        attempted = part_of(folder, step, first["attempt"])
        late = [member for member, one in zip(group.members, notes, strict=True) if one["busy"]]
        needed, free = sum(one["bytes"] for one in notes), first["free"]
        problem = first["problem"]
        if late:
            problem = f"{', '.join(late)} still write the one before"
        elif not problem and free is not None and free < needed:
            problem = _room(folder, free, needed)
        if problem:
            if group.rank == 0:
                _say(f"no checkpoint after {step} steps: {problem}")
                # What others left behind may fill the disk; where nobody is late, nobody writes to it.
                _discard_later([attempted] if late else parts(folder))
            return
        start_s = time.monotonic()
        part = part.copied()
        attempt = self._attempt = SaveAttempt(
            step, group.generation, tuple(group.members), group.rank, attempted, needed, start_s
        )
        # Whatever ends the thread ends the attempt, and training goes on.
        attempt.thread = threads.prepare("elaunch-checkpoint", lambda: self._write(attempt, part), lambda error: None)
        attempt.thread.start()

    def _look(self) -> tuple[int | None, str]:
        """What `newest` says, or why the folder cannot be read."""
        try:
            return self.newest(), ""
        except OSError as error:
            return None, f"{type(error).__name__}: {error}"

    def entered(self, members: Sequence[str], begins: bool = False) -> None:
        """Goes on with these members: what others have not written yet will not come.

        Args:
            members: by rank.
            begins: whether the job begins with them, and not from a checkpoint.
        """
        attempt = self._attempt
        if attempt is None:
            if begins and self._settings is not None and members[0] == self._client.worker:
                # An earlier run left them, and nobody of this one has begun to write.
                _discard_later(parts(self._settings.folder))
            return
        gone = frozenset(attempt.members) - frozenset(members)
        first = attempt.members[0]
        if first in gone - attempt.gone:
            attempt.reason = f"{first} did not complete it"
            attempt.abandoned.set()
            if next(member for member in attempt.members if member not in gone) == attempt.members[attempt.rank]:
                _in_background(lambda: self._leave_out(attempt, attempt.reason))
        attempt.gone |= gone

    def last(self, group: Group, step: int, state: Callable[[], CheckpointShard]) -> None:
        """Does as `boundary` after the last step of the job, but waits until what has been begun is complete.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """
        self._end(group, step, state, due=False)

    def leave(self, group: Group, step: int, state: Callable[[], CheckpointShard]) -> None:
        """Saves the state at the boundary where all members leave before the last step, and waits until it is complete.

        Raises:
            StepInterrupted: a link broke, or the membership changes.
        """
        self._end(group, step, state, due=True)

    def _end(self, group: Group, step: int, state: Callable[[], CheckpointShard], due: bool) -> None:
        if self._settings is not None:
            heartbeat.enter(Phase.SAVING)
            self._settle(group)
            self.boundary(group, step, state, due)
            self._settle(group)
            if due and self._attempt is not None and group.rank:
                self._see(self._attempt)

    def _see(self, attempt: SaveAttempt) -> None:
        """Waits until the first member has completed a checkpoint or dropped it: the agent says what is left."""
        end_s = time.monotonic() + COMPLETE_S
        while os.path.exists(attempt.folder) and time.monotonic() < end_s:
            time.sleep(LOOK_S)
        self._know(self.newest())

    def _settle(self, group: Group) -> None:
        if self._attempt is not None and not self._attempt.written.wait(WRITE_S):
            self._attempt.reason = f"{self._client.worker} had not written its part within {WRITE_S:g} s"
            self._attempt.failed = True
            self._attempt.abandoned.set()
            self._leave_out(self._attempt, self._attempt.reason)
        group.barrier()
        # All parts are there, so the first member only has to see them.
        if self._attempt is not None and not self._attempt.over.wait(COMPLETE_S):
            _say(f"the checkpoint after {self._attempt.step} steps is not complete: not all parts of it are seen here")

    def close(self) -> None:
        """Ends what this worker does about checkpoints: it is about to end itself."""
        if self._attempt is not None:
            self._attempt.reason = f"{self._client.worker} ended before it was written"
            self._attempt.abandoned.set()
            # To its very end: a thread in C++ code, freeing its tensors, would abort the process that ends around it.
            if self._attempt.thread is not None:
                self._attempt.thread.join(CLOSE_S)

    def _write(self, attempt: SaveAttempt, part: CheckpointShard) -> None:
        from elaunch.workers.state.checkpoint import write_shard

        try:
            if attempt.rank == 0:
                # Nobody writes to these any more.
                discard_all(each for each in parts(attempt.folder.parent) if each != attempt.folder)
            whole = write_shard(attempt.folder, attempt.rank, part, attempt.is_wanted)
            attempt.written.set()
            if not whole:
                self._leave_out(attempt, attempt.reason)
            elif attempt.rank == 0:
                self._complete(attempt)
        except Exception as error:
            # Training goes on: there will be another one.
            attempt.failed = True
            what = f"{self._client.worker} could not write the checkpoint after {attempt.step} steps"
            no_room = isinstance(error, OSError) and error.errno in saving.NO_ROOM
            self._drop(attempt, f"{what}: {type(error).__name__}: {error}", no_room)
        finally:
            attempt.written.set()
            attempt.over.set()

    def _leave_out(self, attempt: SaveAttempt, reason: str) -> None:
        self._drop(attempt, f"the checkpoint after {attempt.step} steps is left incomplete: {reason}")

    def _drop(self, attempt: SaveAttempt, why: str, no_room: bool = False) -> None:
        """Removes what is there of a checkpoint; who does so says why, and how much room there is then."""
        if discard(attempt.folder):
            folder = attempt.folder.parent
            free = saving.free_bytes(folder) if no_room else None
            room = (
                "" if free is None else f"; {folder} has {size(free)} free, and it takes {size(attempt.needed_bytes)}"
            )
            _say(f"{why}; its files were removed{room}")

    def _complete(self, attempt: SaveAttempt) -> None:
        """In the thread of the first member: make it a checkpoint, once all parts are there."""
        from elaunch.workers.state import checkpoint

        while True:
            # In this order: who was there when it wrote its note has written all.
            gone, abandoned = attempt.gone, attempt.abandoned.is_set()
            notes = checkpoint.notes(attempt.folder, len(attempt.members))
            missing = [member for rank, member in enumerate(attempt.members) if rank not in notes]
            if not missing:
                break
            if abandoned or not gone.isdisjoint(missing):
                who = ", ".join(missing)
                self._leave_out(attempt, f"{who} did not write")
                return
            attempt.abandoned.wait(LOOK_S)
        path = checkpoint.complete(attempt.folder, attempt.step, [notes[rank] for rank in range(len(attempt.members))])
        seconds = time.monotonic() - attempt.start_s
        fields = {
            "generation": attempt.generation,
            "step": attempt.step,
            "bytes": sum(note["bytes"] for note in notes.values()),
            "seconds": round(seconds, 6),
            "path": str(path),
        }
        self._know(attempt.step)  # before it is logged: who reads the log may rely on it
        self._client.send(Report("checkpoint", fields))
        discard_all(outdated(path.parent))

    def _know(self, step: int | None) -> None:
        """Tells the agent of a checkpoint: it decides with it what becomes of a job that has lost its state.

        With 0, that there is none that can be read.
        """
        if step is not None and step != self._told:
            self._told = step
            self._client.send(Saved(step))

    # -- going back ---------------------------------------------------------------------------------------------------

    def restore(self, group: Group, step: int, read: Read[T]) -> Restored[T]:
        """Reads the newest checkpoint that is whole for all members, which all call this alike.

        Args:
            group: of the members.
            step: of the newest checkpoint, as the first member sees it.
            read: reads this worker's part; nothing of it counts before all members have read theirs.

        Raises:
            StateError: no checkpoint is whole, this worker does not see the one that the first member sees, or it is
                of another job.
            StepInterrupted: a link broke, or the membership changes.
        """
        begin_s = time.monotonic()
        passed: list[str] = []
        while True:
            found: Restored[T] | str | _Unseen = ""  # what was read for nothing is free before more is read
            found = self._try(step, group.rank == 0, read, begin_s)
            notes = self._outcomes(group, step, found if isinstance(found, str) else None)
            damaged = next(
                (f"{one['problem']} (seen by {member})" for member, one in notes.items() if one["problem"] is not None),
                "",
            )
            if not damaged:
                break
            older = next(iter(notes.values()))["older"]
            passed.append(f"{self._path(step)}: {damaged}")
            if older is None:
                self._know(0)
                raise StateError(
                    f"no checkpoint is whole, nothing older than these is left: {'; '.join(passed)}. Give another "
                    "--checkpoint-dir to begin anew, or put a copy of a whole one there"
                )
            if group.rank == 0:
                self._pass_over(group, step, damaged, older)
            step = older
        assert not isinstance(found, str)
        if isinstance(found, _Unseen):
            raise found
        if passed:
            self._know(step)
        if group.rank == 0:
            if not found.saved.checked:
                _say(f"the checkpoint {found.saved.path} has no checksums: it was read without checks")
            # Those of this run may still be written, or are removed by who finds out that nobody completes them.
            ours = {one["attempt"] for one in notes.values()}
            _discard_later([path for path in parts(self._path(step).parent) if path.name not in ours])
        return found

    def _try(self, step: int, first: bool, read: Read[T], begin_s: float) -> Restored[T] | str | _Unseen:
        """What this worker reads of a checkpoint, or where that is damaged."""
        from elaunch.workers.state.checkpoint import Restored

        try:
            saved = self._open(step, first)
            state, read_bytes = read(saved)
        except CheckpointDamaged as error:
            return error.problem
        except _Unseen as error:
            return error  # where the first member does not see it any more either, the one before counts
        return Restored(saved, state, read_bytes, time.monotonic() - begin_s)

    def _path(self, step: int) -> Path:
        assert self._settings is not None
        return path_of(self._settings.folder, step)

    def _outcomes(self, group: Group, step: int, problem: str | None) -> dict[str, dict[str, Any]]:
        """What all members have found in a checkpoint, by member."""
        local = {
            "problem": problem,
            "older": before(self._path(step).parent, step) if group.rank == 0 else None,
            "attempt": self._attempt.folder.name if self._attempt is not None else "",
        }
        return dict(zip(group.members, group.all_gather_json(local), strict=True))

    def _open(self, step: int, first: bool) -> SavedCheckpoint:
        """The checkpoint of so many steps, which the first member has seen.

        Raises:
            CheckpointDamaged: it is not what was written.
            StateError: this worker does not see it, or cannot read it at present.
        """
        from elaunch.workers.state.checkpoint import SavedCheckpoint

        if self._settings is None:
            raise StateError(
                f"{self._client.worker} has no --checkpoint-dir, and the first member goes on from a checkpoint; give "
                "the same to all nodes"
            )
        path = self._path(step)
        if first and step not in complete(self._settings.folder):
            raise CheckpointDamaged(path, "it is not there any more")
        end_s = time.monotonic() + VISIBLE_S
        with threads.telling(_say, f"the checkpoint {path} to be seen by {self._client.worker}", VISIBLE_S):
            while not all(os.path.exists(path / name) for name in (METADATA, ABOUT)):
                if time.monotonic() > end_s:
                    if path.is_dir():
                        break
                    raise _Unseen(
                        f"{self._client.worker} does not see the checkpoint {path}, from which the first member goes "
                        f"on; is {self._settings.folder} on a shared file system, and mounted there?"
                    )
                # Looking at the folder makes file systems look anew.
                with contextlib.suppress(OSError):
                    os.listdir(self._settings.folder)
                time.sleep(LOOK_S)
        return SavedCheckpoint(path)

    def _pass_over(self, group: Group, step: int, problem: str, older: int) -> None:
        """As the first member: take a damaged checkpoint out of the way, and say so."""
        path = self._path(step)
        try:
            kept = set_aside(path)
            where = f"kept as {kept.name}"
        except OSError as error:
            kept, where = path, f"left where it is ({error})"
        _say(
            f"the checkpoint {path} is damaged, and passed over: {problem}. It is {where}; the job goes back to "
            f"{self._path(older).name}"
        )
        fields = {"generation": group.generation, "step": step, "path": str(kept), "problem": problem, "older": older}
        self._client.send(Report("checkpoint_damaged", fields))

    def resumed(self, group: Group, found: Restored[Any], had: int) -> None:
        """Tells of a return to a checkpoint; `had` steps had committed before, as far as anybody knows."""
        saved = found.saved
        self._know(saved.step)
        if group.rank != 0:
            return
        again = max(0, had - saved.step)
        fields: dict[str, Any] = {
            "generation": group.generation,
            "step": saved.step,
            "again": again,
            "bytes": found.read_bytes,
            "seconds": round(found.seconds, 6),
            "path": str(saved.path),
        }
        self._client.send(Report("resume", fields))
        steps = "1 step is" if again == 1 else f"{again} steps are"
        lost = f"; parts of the state were lost, {steps} done again" if had else ""
        _say(f"the job goes on from the checkpoint {saved.path}, at step {saved.step}{lost}")


def _room(folder: Path, free: int, needed: int) -> str:
    return f"{folder} has {size(free)} free, and it takes {size(needed)}"


def _discard_later(folders: Sequence[Path]) -> None:
    if folders:
        _in_background(lambda: discard_all(folders))


def _in_background(act: Callable[[], object]) -> None:
    threads.start("elaunch-checkpoint-removal", act, lambda error: None)  # what it leaves goes before the next save


def _say(text: str) -> None:
    print(f"[elaunch] {text}", file=sys.stderr, flush=True)
