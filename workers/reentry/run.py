"""The loop around an elastic function: entered, left when the members change, entered again."""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from elaunch.detect.heartbeat import Phase
from elaunch.errors import CollectiveFailed, GenerationChanged, JobFailed, StateLost, StepInterrupted, UsageError
from elaunch.rendezvous.membership import Generation
from elaunch.workers import agent_client, heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.member.reports import READY_STEP, step_report
from elaunch.workers.random.rng import Generators, read_generators, set_generators
from elaunch.workers.reentry.copies import Copies, StateCopy, forms_of
from elaunch.workers.reentry.encoding import Description, is_sharded
from elaunch.workers.reentry.environment import tell_environment
from elaunch.workers.reentry.groups import FunctionGroups, is_of_a_group
from elaunch.workers.reentry.guards import Guards, Shipment
from elaunch.workers.reentry.shares import check_alike, load_shares, move_copies, shares
from elaunch.workers.reentry.state import ElasticState
from elaunch.workers.runtime import Member
from elaunch.workers.state.codec import Manifest, restore

Result = TypeVar("Result")
Reset = Callable[[], object]

NEWS_S = 1.0
"""An error of the script is a consequence of a change of members that is told of within this time."""

LOOK_S = 0.01


@dataclass(frozen=True)
class Pending:
    """A commit that does not count yet: the guards do not have all of it.

    Attributes:
        step: number of steps that will have committed with it.
        shipment: of this worker.
        loss: of the step.
        ids: of its samples, over all members.
        report: of the step, where this worker has to tell the others.
    """

    step: int
    shipment: Shipment
    loss: float | None
    ids: Sequence[int]
    report: dict[str, Any]


@dataclass
class Bound:
    """What one entry of the function has bound.

    Attributes:
        objects: by name.
        is_late: whether a commit counts with the next one: a guard gets parts, or a device comes to its end later.
        step: number of commits that counted then.
        calls: of `commit` since.
    """

    objects: dict[str, Any]
    is_late: bool
    step: int
    calls: int = 0


class Reentry:
    """The runtime of an elastic function on one worker; its hooks are those of `Member`.

    Attributes:
        member: this worker in its job.
        step: number of commits that count.
        entry: how often the function has been entered here.
        over: whether the function is done, on all members.
        resets: called once, before the function is entered again.

    Args:
        every: commits that count.
        resets: called each time before the function is entered again.
    """

    _set_apart = False  # once: what an earlier function left behind must be collected

    def __init__(self, every: int = 1, resets: Sequence[Reset] = ()) -> None:
        self._client = client = agent_client.connect()
        transport = Transport(client.worker, client.token, client.host, client.security)
        transport.watch(self._free_below)
        self._groups = FunctionGroups()
        self._entered_in = 0  # the generation in which the function runs
        self._every = every
        self._copies, self._guards = Copies(self._groups.errored, self._groups.free), Guards()
        self._pending: Pending | None = None
        self._mending: Shipment | None = None  # of the last commit that counts, anew, to the guards of now
        self._bound: Bound | None = None
        self._generators: dict[int, Generators] = {}
        self._brought: dict[str, Any] = {}
        self._holds = self._can_load = False
        self._commit_s = time.monotonic()
        self._always, self.resets = tuple(resets), list[Reset]()
        self.step, self.entry, self.over = 0, 0, False
        self.member = Member(self._client, self, transport=transport)

    def run(self, function: Callable[[ElasticState], Result]) -> Result:
        """Enters the function until it returns with the members that it was entered with; returns what it returned.

        Raises:
            StateError: the state of the job is lost.
            Exception: whatever the function raises, unless that follows from a change of members.
        """
        self.join()
        results: list[Result] = []
        while not self.over:
            with ElasticState(self, {}) as state:
                results[:] = [function(state)]
        return results[0]

    def join(self) -> None:
        """Becomes a member of the job, for the entries that follow.

        Raises:
            StateError: the state of the job is lost.
        """
        if not Reentry._set_apart:
            # What was imported is no garbage, and to look through it again at each change takes longer than all else.
            Reentry._set_apart = True
            gc.collect()
            gc.freeze()
        self.member.join()

    @contextlib.contextmanager
    def entered(self, state: ElasticState) -> Iterator[ElasticState]:
        """Returns a context that is one entry of the function; it ends the entry also where the members change.

        After it `over` says whether the function is done.
        """
        member = self.member
        # Behind the barrier nobody is on the way into this generation. Whoever is goes into a newer one at once, and
        # who waited for it in a group of the function would not be told of that.
        member.begin_step(Group.barrier)
        generation = member.generation
        if self._client.elastic:
            tell_environment(generation, member.group)
        resets, self.resets = [*self._always, *self.resets] if self.entry else [], []
        for reset in resets:
            reset()
        self.entry += 1
        self._bound = None
        self._guards.enter()
        heartbeat.enter(Phase.FUNCTION, self.step)
        hook = sys.excepthook
        try:
            with self._groups.watching(f"entry/{generation.attempt}/{generation.number}"):
                self._entered_in = generation.number
                if (newest := self._interrupting()) is not None:  # whoever told of it before could free nothing
                    self._free_below(newest)
                yield state
                self._count()
                self._let_device_end()
        except StepInterrupted as error:
            left = error
        except Exception as error:
            left = self._consequence(error)
        else:
            self._copies.ungate()
            self.over = member.finish(lambda: member.generation.number == generation.number)
            return
        finally:
            self._entered_in = 0
        sys.excepthook = hook  # init_process_group puts one around that which it finds
        self._say_why(left)
        traceback.clear_frames(left.__traceback__)
        left.__traceback__ = left.__context__ = left.__cause__ = None
        if member.generation.number == generation.number:
            member.agree(left)
        self._bound = None
        self._copies.ungate()
        gc.collect()  # models and groups are full of cycles

    def _consequence(self, error: Exception) -> StepInterrupted:
        """Returns what interrupted the function, if that is what an error follows from; else raises the error."""
        if not self._client.elastic or isinstance(error, StateLost):  # all members find that at once
            raise error
        end_s, past = time.monotonic() + NEWS_S, self.member.generation.number
        with contextlib.suppress(JobFailed):
            while (newest := self._client.wait_beyond(past, end_s - time.monotonic())) is not None:
                if self.member.interrupted:
                    return GenerationChanged(newest.number).with_traceback(error.__traceback__)
                past = newest.number
        if not is_of_a_group(error):
            raise error
        failed = CollectiveFailed(self.member.generation.number, f"{type(error).__name__}: {error}")
        return failed.with_traceback(error.__traceback__)

    def _let_device_end(self) -> None:
        """Returns when the devices of all members have done what the function gave them, as its groups end next."""
        if self._groups.on_device:
            if wrong := self._groups.await_device(self.member.device):
                raise self._lost(wrong)
            self.member.group.barrier()

    def _lost(self, why: str) -> StepInterrupted:
        """Returns the interruption that follows from what went wrong in the groups of a device."""
        newest, own = self._interrupting(), self.member.generation.number
        return GenerationChanged(newest) if newest is not None else CollectiveFailed(own, why)

    def _interrupting(self) -> int | None:
        newest = self._client.newest()
        return newest.number if newest is not None and self.member.interrupted else None

    def _say_why(self, left: StepInterrupted) -> None:
        if isinstance(left, CollectiveFailed):
            line = f"worker {self._client.worker} leaves its function: {' '.join(left.why.split())[:300]}"
            print(f"[elaunch] {line}", file=sys.stderr, flush=True)

    def _free_below(self, generation: int) -> None:
        if 0 < self._entered_in < generation:
            heartbeat.begin_leaving()
            self._groups.free()

    # -- what the function calls --------------------------------------------------------------------------------

    def check(self) -> None:
        """Leaves the function if the members change.

        Raises:
            GenerationChanged: they do.
        """
        if (newest := self._interrupting()) is not None:
            raise GenerationChanged(newest)

    def all_gather(self, value: Any) -> list[Any]:
        """Returns what each member gives, as JSON, by rank, when the links have nothing to bring to guards any more."""
        self.check()
        self._await_mending()
        if self._pending is not None:
            self._pending.shipment.wait()
        return self.member.group.all_gather_json(value)

    @property
    def bound(self) -> bool:
        """Returns whether the function has bound its state in this entry."""
        return self._bound is not None

    @property
    def done(self) -> int:
        """Number of commits that the function has made: one of them may not count yet."""
        return self.step if self._pending is None else self._pending.step

    def wait_for_change(self) -> NoReturn:
        """Waits for other members, and leaves the function then.

        Raises:
            GenerationChanged: they have come, or gone.
        """
        before = self.member.generation.number
        self._count()
        while True:
            newest = self._client.newest()
            if newest is not None and newest.number > before:
                raise GenerationChanged(newest.number)
            time.sleep(LOOK_S)

    def last_values(self) -> dict[str, Any] | None:
        """Returns a copy of the values of the last commit; None where this worker has none, as one that joins."""
        copy = self._copies.newest
        return json.loads(json.dumps(copy.values)) if copy is not None else None

    def continue_random(self) -> None:
        """Sets the generators of random numbers to where they were at the last commit, if this worker was there."""
        if (generators := self._generators.get(self.step)) is not None:
            set_generators(generators)

    def bind(
        self,
        objects: dict[str, Any],
        load: Callable[[], object] | None = None,
        constant: Collection[str] = (),
    ) -> dict[str, Any] | None:
        """Takes the objects that make up the state, and gives them that of the last commit; returns its values.

        Returns:
            None where there has been no commit, or all members have loaded a checkpoint.
        """
        if self._bound is not None:
            raise UsageError("state.bind() was called before in this entry: bind everything in one call")
        self.check()
        group = self.member.group
        copy = self._copies.newest
        forms = forms_of(copy.manifest) if copy is not None else None
        notes = group.all_gather_json({"names": sorted(objects), "forms": forms, "load": load is not None})
        names = [note["names"] for note in notes]
        if any(one != names[0] for one in names):
            raise UsageError(f"the members bind different objects: {names}")
        if len({note["load"] for note in notes}) > 1:
            raise UsageError("state.bind(load=...): give it on all members, or on none")
        self._can_load = load is not None
        holders = [rank for rank, note in enumerate(notes) if note["forms"] is not None]
        values = None
        if holders:
            check_alike([notes[rank]["forms"] for rank in holders])
            first = group.rank == holders[0]
            told = group.all_gather_bytes(copy.packed() if first and copy is not None else b"")
            manifest, values = json.loads(told[holders[0]])
            try:
                self._restore(group, objects, manifest, values)
            except StateLost as lost:  # all members find the same
                if load is None:
                    raise
                values = None
                self._load(group, load, lost)
        elif load is not None:
            self._load(group, load, None)
        self._copies.gate(objects, constant)
        is_late = self.member.device.type != "cpu" or any(map(is_sharded, objects.values()))
        self._bound = Bound(objects, is_late, self.step)
        self._holds = True
        return values

    def _restore(self, group: Group, objects: dict[str, Any], manifest: Manifest, values: dict[str, Any]) -> None:
        begin_s = time.monotonic()
        needed = shares(objects, manifest)
        copy = self._copies.newest
        held = [*self._copies.of_step(self.step), *self._guards.of_step(self.step)]
        tensors, received_bytes = move_copies(group, held, manifest, needed)
        wrapped = [share.wrap(tensor) for share, tensor in zip(needed, tensors, strict=True)]
        restore(objects, manifest, wrapped, load=load_shares)
        self.continue_random()
        is_cut = group.size > 1 and any(map(is_sharded, objects.values()))
        # Parts go by their places in the manifest: those of copies with other manifests are not to be mixed.
        mends = is_cut and all(group.all_gather_json(self._copies.describes(objects, manifest)))
        if mends or copy is None:
            self._brought = json.loads(json.dumps(values))  # the function changes its own before the next commit
            own = self._copy(self.step, objects)
            if mends:
                self._mend(group, own)
        if group.rank == 0:
            seconds = round(time.monotonic() - begin_s, 6)
            self.member.send("restored", {"step": self.step, "bytes_moved": received_bytes, "seconds": seconds})

    def _mend(self, group: Group, copy: StateCopy) -> None:
        """Begins to bring what each member has of the last commit now to its guard: one more may die before the next.
        Until all is there, the parts that were kept before are kept, too.
        """
        self._guards.tell(group, copy.boxes)
        self._mending = self._guards.ship(group, copy, self._copies.copied(self._lost))

    def _await_mending(self) -> None:
        """Returns when the guards have what `_mend` brings them; until then the group is not to be used.

        Raises:
            StepInterrupted: a peer was lost, or the generation changed.
        """
        if self._mending is not None:
            self._mending.wait()
            self._mending = None

    def _load(self, group: Group, load: Callable[[], object], lost: StateLost | None) -> None:
        """Has the script load its newest checkpoint, on all members: nobody has the state, or not all of it."""
        begin_s, had = time.monotonic(), self.step
        self._copies.forget()
        self._guards.forget()
        self._holds, self.step = False, 0
        load()
        found = group.all_gather_json(self.step)
        if len(set(found)) > 1:
            raise UsageError(f"state.bind(load=...): the members loaded checkpoints of different steps: {found}")
        self.member.forget_step()
        if group.rank == 0 and (lost is not None or self.step):
            again = max(0, had - self.step)
            fields = {"step": self.step, "again": again, "bytes": 0, "path": None}
            self.member.send("resume", {**fields, "seconds": round(time.monotonic() - begin_s, 6)})
            why = f"; {again} steps are done again: {str(lost).partition(';')[0]}" if lost is not None else ""
            line = f"the job goes on from step {self.step}, which the script's own load function brought{why}"
            print(f"[elaunch] {line}", file=sys.stderr, flush=True)

    def commit(self, values: dict[str, Any], loss: float | None, ids: Sequence[int]) -> None:
        """Makes the present state the one that counts; leaves the function if a change of members is due."""
        bound = self._bound
        if bound is None:
            raise UsageError("call state.bind() before state.commit(): nothing is bound that could be kept")
        bound.calls += 1
        if bound.calls % self._every:
            self.check()
            return
        try:
            values = json.loads(json.dumps(values))  # what the function changes later is of a later commit
        except TypeError as error:
            raise UsageError(f"state.values holds what JSON cannot: {error}") from error
        self._copies.finish()
        self._brought = values
        before = self.member.generation.number
        if bound.is_late:
            self._ship(bound, loss, ids)
        else:
            self.member.commit()
            self._keep()
            self.member.report(self.step - 1, loss=loss, sample_ids=ids)
        self._groups.stepped()
        self.member.begin_step()
        heartbeat.enter(Phase.FUNCTION, self.step)
        if self.member.generation.number != before:
            raise GenerationChanged(self.member.generation.number)

    def _ship(self, bound: Bound, loss: float | None, ids: Sequence[int]) -> None:
        """Counts the commit before, and begins to bring this one to the guards, while the next step computes."""
        self._await_mending()
        group = self.member.group
        described = self._copies.describe(bound.objects)
        if self._pending is None or self._count(b"" if self._guards.knows(described.boxes) else b"boxes"):
            self._guards.tell(group, described.boxes)
        copy = self._copy(self.step + 1, bound.objects, described)
        shipment = self._guards.ship(group, copy, self._copies.copied(self._lost))
        now_s = time.monotonic()
        report = step_report(group, self.member.generation.number, self.step, loss, ids, now_s - self._commit_s)
        self._pending, self._commit_s = Pending(self.step + 1, shipment, loss, ids, report), now_s
        if self.step == bound.step or self.member.boundary_is_due:
            # A recovery ends with the first one, or some members leave after it, and their parts with them.
            self._count()

    def _count(self, note: bytes = b"") -> bool:
        """Has the commit that is on its way to the guards count; returns whether any member noted something."""
        self._await_mending()
        pending = self._pending
        if pending is None:
            return False
        self._copies.finish()
        pending.shipment.wait()  # of a device's copy, also whether it is of what all members have computed
        notes = self.member.commit(note, pending.step if self.member.size > 1 else None)
        self._pending, self.step = None, pending.step
        self.member.report(self.step - 1, loss=pending.loss, sample_ids=pending.ids)
        return any(notes)

    def _keep(self) -> None:
        """Goes on to the next step, and copies the state of the one that has just committed."""
        assert self._bound is not None
        self.step += 1
        self._copy(self.step, self._bound.objects)

    def _copy(self, step: int, objects: dict[str, Any], described: Description | None = None) -> StateCopy:
        self._generators = {**dict(list(self._generators.items())[-1:]), step: read_generators()}
        return self._copies.begin(step, objects, self._brought, described=described)

    # -- hooks --------------------------------------------------------------------------------------------------

    def vote(self) -> Vote:
        """Says how far it is."""
        pending, entered = self._pending, self.member.entered
        saved = 0 if self._can_load else None
        if pending is None or not pending.shipment.arrived:
            return Vote(self.step, entered, self._holds, saved=saved)
        return Vote(self.step, True, self._holds, {READY_STEP: pending.report}, saved, ready=pending.step)

    def pause(self) -> None:
        """Frees the groups of the generation left behind."""
        self._groups.free()
        self._copies.finish()
        for shipment in (self._mending, self._pending.shipment if self._pending is not None else None):
            if shipment is not None:
                shipment.settle()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        """Keeps the state of the step in flight, if it has committed: its objects are as they were at the barrier."""
        mending, self._mending = self._mending, None
        if mending is not None and not mending.arrived:
            self._guards.forget_newest()
        pending, self._pending = self._pending, None
        if pending is None:
            if self._holds and self.step < verdict.step:
                self._keep()
        elif pending.step == verdict.step:
            self.step = verdict.step
        else:
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
