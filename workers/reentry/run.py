"""The loop around an elastic function: entered, left when the members change, entered again."""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import sys
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from elaunch.detect.heartbeat import Phase
from elaunch.errors import CollectiveFailed, GenerationChanged, StepInterrupted, UsageError
from elaunch.rendezvous.membership import Generation, node_of
from elaunch.workers import agent_client, heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.random.rng import continue_generators, read_generators
from elaunch.workers.reentry.copies import Copies, StateCopy, is_sharded
from elaunch.workers.reentry.groups import FunctionGroups
from elaunch.workers.reentry.guards import Guards
from elaunch.workers.reentry.shares import check_alike, move_copies, shares
from elaunch.workers.reentry.state import ElasticState
from elaunch.workers.runtime import Member
from elaunch.workers.state.codec import Manifest, restore

Result = TypeVar("Result")

NEWS_S = 1.0
"""An error of the script is a consequence of a change of members that is told of within this time."""

LOOK_S = 0.01


class Reentry:
    """The runtime of an elastic function on one worker; its hooks are those of `Member`.

    Attributes:
        member: this worker in its job.
        step: number of commits that count.
        entry: how often the function has been entered here.
        bound: whether the function has bound its state in this entry.
    """

    def __init__(self, every: int) -> None:
        self._client = agent_client.connect()
        transport = Transport(self._client.worker, self._client.token, self._client.host)
        transport.watch(self._free_below)
        self._groups = FunctionGroups()
        self._entered_in = 0  # the generation in which the function runs
        self._every, self._calls = every, 0
        self._copies, self._guards = Copies(), Guards()
        self._generators: dict[int, bytes] = {}
        self._objects: dict[str, Any] = {}
        self._brought: dict[str, Any] = {}
        self._holds = self._is_sharded = False
        self.step, self.entry, self.bound = 0, 0, False
        self.member = Member(self._client, self, transport=transport)

    def run(self, function: Callable[[ElasticState], Result]) -> Result:
        """Enters the function until it returns with the members that it was entered with; returns what it returned.

        Raises:
            StateError: the state of the job is lost.
            Exception: whatever the function raises, unless that follows from a change of members.
        """
        member = self.member
        member.join()
        while True:
            member.begin_step()
            result = self._enter(function)
            if result is not None:
                number = member.generation.number
                if member.finish(lambda: member.generation.number == number):  # noqa: B023 (called at once)
                    return result[0]

    def _enter(self, function: Callable[[ElasticState], Result]) -> tuple[Result] | None:
        """Enters the function; returns what it returned, or None where it was left because the members change."""
        generation = self.member.generation
        _tell_environment(generation, self.member.group, self._client.elastic)
        self.entry += 1
        self.bound, self._calls = False, 0
        heartbeat.enter(Phase.FUNCTION, self.step)
        try:
            with self._groups.watching(f"entry/{generation.attempt}/{generation.number}"):
                self._entered_in = generation.number
                self.check()  # whoever told of a change before could free nothing
                return (function(ElasticState(self, {})),)
        except StepInterrupted as error:
            left = error
        except Exception as error:
            left = self._consequence(error)
        finally:
            self._entered_in = 0
        self._say_why(left)
        traceback.clear_frames(left.__traceback__)
        left.__traceback__ = left.__context__ = left.__cause__ = None
        if self.member.generation.number == generation.number:
            self.member.agree(left)
        self._objects = {}
        gc.collect()  # models and groups are full of cycles
        return None

    def _consequence(self, error: Exception) -> StepInterrupted:
        """Returns what interrupted the function, if that is what an error follows from; else raises the error."""
        if not self._client.elastic:
            raise error
        end_s = time.monotonic() + NEWS_S
        while time.monotonic() < end_s:
            if (newest := self._interrupting()) is not None:
                return GenerationChanged(newest).with_traceback(error.__traceback__)
            time.sleep(LOOK_S)
        if not _is_of_a_group(error):
            raise error
        failed = CollectiveFailed(self.member.generation.number, f"{type(error).__name__}: {error}")
        return failed.with_traceback(error.__traceback__)

    def _interrupting(self) -> int | None:
        newest = self._client.newest()
        return newest.number if newest is not None and self.member.interrupted else None

    def _say_why(self, left: StepInterrupted) -> None:
        if isinstance(left, CollectiveFailed):
            line = f"worker {self._client.worker} leaves its function: {' '.join(left.why.split())[:300]}"
            print(f"[elaunch] {line}", file=sys.stderr, flush=True)

    def _free_below(self, generation: int) -> None:
        if 0 < self._entered_in < generation:
            self._groups.free()

    # -- what the function calls --------------------------------------------------------------------------------

    def check(self) -> None:
        """Leaves the function if the members change.

        Raises:
            GenerationChanged: they do.
        """
        if (newest := self._interrupting()) is not None:
            raise GenerationChanged(newest)

    def last_values(self) -> dict[str, Any] | None:
        """Returns a copy of the values of the last commit; None where this worker has none, as one that joins."""
        copy = self._copies.newest
        return json.loads(json.dumps(copy.values)) if copy is not None else None

    def continue_random(self) -> None:
        """Sets the generators of random numbers to where they were at the last commit, if this worker was there."""
        continue_generators(self._generators.get(self.step, b""))

    def bind(self, objects: dict[str, Any]) -> dict[str, Any] | None:
        """Takes the objects that make up the state, and gives them that of the last commit; returns its values.

        Returns:
            None where there has been no commit.
        """
        if self.bound:
            raise UsageError("state.bind() was called before in this entry: bind everything in one call")
        self.check()
        group = self.member.group
        copy = self._copies.newest
        forms = zlib.crc32(repr(_forms(copy.manifest)).encode()) if copy is not None else None
        notes = group.all_gather_json({"names": sorted(objects), "forms": forms})
        names = [note["names"] for note in notes]
        if any(one != names[0] for one in names):
            raise UsageError(f"the members bind different objects: {names}")
        holders = [rank for rank, note in enumerate(notes) if note["forms"] is not None]
        values = None
        if holders:
            check_alike([notes[rank]["forms"] for rank in holders])
            first = group.rank == holders[0]
            told = group.all_gather_bytes(_packed(copy) if first and copy is not None else b"")
            manifest, values = json.loads(told[holders[0]])
            self._restore(group, objects, manifest)
        self._copies.gate(objects)
        self._objects, self.bound = objects, True
        self._is_sharded = any(map(is_sharded, objects.values()))
        return values

    def _restore(self, group: Group, objects: dict[str, Any], manifest: Manifest) -> None:
        begin_s = time.monotonic()
        needed = shares(objects, manifest)
        copy = self._copies.newest
        held = [*copy.parts, *self._guards.newest] if copy is not None else []
        tensors, received_bytes = move_copies(group, held, manifest, needed)
        restore(objects, manifest, [share.wrap(tensor) for share, tensor in zip(needed, tensors, strict=True)])
        self.continue_random()
        if group.rank == 0:
            seconds = round(time.monotonic() - begin_s, 6)
            self.member.send("restored", {"step": self.step, "bytes_moved": received_bytes, "seconds": seconds})

    def commit(self, values: dict[str, Any], loss: float | None, ids: Sequence[int]) -> None:
        """Makes the present state the one that counts; leaves the function if a change of members is due."""
        self._calls += 1
        if self._calls % self._every:
            self.check()
            return
        try:
            values = json.loads(json.dumps(values))  # what the function changes later is of a later commit
        except TypeError as error:
            raise UsageError(f"state.values holds what JSON cannot: {error}") from error
        self._copies.finish()
        self._brought = values
        before = self.member.generation.number
        if self._is_sharded:
            # What only this worker has must be elsewhere, too, before the step counts.
            copy = self._copy(self.step + 1)
            self._copies.finish()
            self._guards.exchange(self.member.group, copy)
        self.member.commit()
        self._keep()
        self.member.report(self.step - 1, loss=loss, sample_ids=ids)
        self.member.begin_step()
        heartbeat.enter(Phase.FUNCTION, self.step)
        if self.member.generation.number != before:
            raise GenerationChanged(self.member.generation.number)

    def _keep(self) -> None:
        """Goes on to the next step; copies the state of the one that has just committed, unless that is there."""
        self.step += 1
        if self._copies.newest is None or self._copies.newest.step < self.step:
            self._copy(self.step)
        self._holds = True

    def _copy(self, step: int) -> StateCopy:
        self._generators = {**dict(list(self._generators.items())[-1:]), step: read_generators()}
        return self._copies.begin(step, self._objects, self._brought)

    # -- hooks --------------------------------------------------------------------------------------------------

    def vote(self) -> Vote:
        """Says how far it is."""
        return Vote(self.step, self.member.entered, self._holds)

    def pause(self) -> None:
        """Frees the groups of the generation left behind."""
        self._groups.free()
        self._copies.finish()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """Keeps the state of the step in flight, if it has committed: its objects are as they were at the barrier."""
        if self._holds and self.step < verdict.step:
            self._keep()
        if self._copies.newest is not None and self._copies.newest.step > verdict.step:
            self._copies.forget_newest()
            self._guards.forget_newest()

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        """Chooses nothing: the function makes its own layout."""
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        """Moves nothing yet: what is needed where, the function says when it binds its objects."""
        return 0

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        """Goes on from the last commit, or from the beginning."""
        self.step = verdict.step
        if verdict.fresh:
            self._holds = True


def elastic(function: Callable[..., Any] | None = None, *, every: int = 1) -> Any:
    """Has a function entered by every worker of its job, and entered again whenever the members change.

    The function gets an `ElasticState` before its own arguments. Under torchrun, or in a plain Python process, it is
    entered once.

    Args:
        function: the function.
        every: commits that count; the others are passed over, so that at most so many steps are done again.

    Raises:
        UsageError: `every` is below 1.
    """
    if every < 1:
        raise UsageError(f"elastic(every={every}): expected 1 or more")

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            return Reentry(every).run(lambda state: function(state, *args, **kwargs))

        return call

    return decorate if function is None else decorate(function)


def elastic_script(*, every: int = 1) -> ElasticState:
    """Has the script that calls it run anew from its first line on, in the same process, whenever the members change.

    For scripts that train at their top level. It stands where nothing has been set up yet; modules that were imported
    stay as they are.

    Args:
        every: as for `elastic`.

    Returns:
        The state of this run of the script.

    Raises:
        UsageError: `every` is below 1, or there is no script, as in an interactive session.
        SystemExit: the last run is over; what is left of the first one has been done in it.
    """
    if _Script.state is not None:
        return _Script.state
    main = sys.modules["__main__"]
    spec, path = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if path is None:
        raise UsageError("elastic_script() was called where there is no script; use elaunch.elastic with a function")

    def run(state: ElasticState) -> None:
        _Script.state = state
        try:
            if spec is not None:
                runpy.run_module(spec.name, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code:
                raise
        finally:
            _Script.state = None

    elastic(run, every=every)()
    raise SystemExit(0)


class _Script:
    """The run of the script that is under way."""

    state: ElasticState | None = None


def _tell_environment(generation: Generation, group: Group, elastic: bool) -> None:
    """Sets the variables by which scripts and torch.distributed find the members. RANK and WORLD_SIZE are set."""
    if not elastic:
        return
    nodes = list(dict.fromkeys(map(node_of, group.members)))
    own = node_of(group.members[group.rank])
    here = sum(node_of(member) == own for member in group.members)
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(nodes.index(own)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(group.rank),
        "ROLE_WORLD_SIZE": str(group.size),
        "MASTER_ADDR": generation.master.addr,
        "MASTER_PORT": str(generation.master.port),
    }


def _is_of_a_group(error: Exception) -> bool:
    """Returns whether an error comes from a process group or a store of torch."""
    if isinstance(error, dist.DistError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and any(word in text for word in ("gloo", "nccl", "process group", "peer"))


def _forms(manifest: Manifest) -> list[Any]:
    return [[spec["path"], spec["dtype"], spec["shape"]] for spec in manifest["tensors"]]


def _packed(copy: StateCopy) -> bytes:
    return json.dumps([copy.manifest, copy.values]).encode()
