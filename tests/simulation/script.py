"""The training script of simulated workers: a framework over the real runtime, whose state shows each mistake.

The value of each part of the state is a chain over all steps: one that was applied twice, left out or applied with
another gradient gives another value for ever.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Any

import torch

from elaunch.errors import StateLost
from elaunch.rendezvous.membership import Generation
from elaunch.workers import replicas
from elaunch.workers.comm.group import Group
from elaunch.workers.data_parallel.reducer import Reducer
from elaunch.workers.hooks import Verdict, Vote
from elaunch.workers.runtime import Member

if TYPE_CHECKING:
    from tests.simulation.worker import Worker

N_PARTS = 3
N_SAMPLES = 6
COPIES = 2
COMPARE_EVERY = 3
_WORD = (1 << 61) - 1


def sample_gradient(step: int, sample: int) -> int:
    """Returns what one sample adds to the gradient of a step."""
    return (step * 1_000_003 + sample * 7919 + 12345) % 999_983


def gradient(step: int) -> int:
    """Returns the gradient of a step, over all samples."""
    return sum(sample_gradient(step, sample) for sample in range(N_SAMPLES))


def advanced(value: int, step: int, summed: int) -> int:
    """Returns the value of a part after one more step."""
    return (value * 31 + step * 17 + summed) % _WORD


class Expected:
    """The values of parts after so many steps of an undisturbed job."""

    def __init__(self) -> None:
        self._values = [list(range(1, N_PARTS + 1))]

    def value(self, part: int, steps: int) -> int:
        while len(self._values) <= steps:
            step = len(self._values) - 1
            self._values.append([advanced(value, step, gradient(step)) for value in self._values[-1]])
        return self._values[steps][part]


EXPECTED = Expected()


class Framework:
    """Hooks of a framework whose members hold parts of the state: all of them, or by a layout that each change turns.

    Attributes:
        parts: the values that this worker holds, after `step` steps.
        staged: what has come for the next layout.
    """

    def __init__(self, worker: Worker, whole: bool) -> None:
        self.worker, self.whole = worker, whole
        self.member: Member
        self.parts: dict[int, int] = {}
        self.staged: dict[int, int] | None = None
        self.staged_for = (0, 0)  # generation, activation in it
        self.step = 0
        self.holds = False
        self.summed = 0
        self.flat = torch.zeros(1, dtype=torch.float64)
        self.reducer = Reducer(lambda generation: self.member.native.failed(generation))
        self.compared = (0, 0)

    # -- a step -------------------------------------------------------------------------------------------------

    def compute(self) -> None:
        """Computes this member's part of the gradient, and sums it over the members."""
        member, step = self.member, self.step
        generation = member.generation
        share = range(member.rank, N_SAMPLES, len(generation.working))
        own = sum(sample_gradient(step, sample) for sample in share if self.worker.id not in generation.standby)
        self.flat.fill_(own)
        self.worker.pass_step()
        if not self.worker.world.native:
            self.summed = sum(member.group.all_gather_json(own))
            return
        bulk = member.native.current
        self.worker.world.sums(self.worker.id, step, member.generation, bulk is not None)
        self.reducer.begin(member.group, 1.0, bulk)
        if bulk is not None:
            self.reducer.launch(self.flat)
            self.worker.pass_time()
            self.worker.waits_since_s = self.worker.world.now_s
            self.reducer.wait()
            self.worker.waits_since_s = inf
            self.reducer.raise_error()
        else:
            self.flat.fill_(sum(member.group.all_gather_json(int(self.flat))))
        self.summed = int(self.flat)

    def apply(self) -> None:
        """Does the update of the step whose gradient is here."""
        self.parts = {part: advanced(value, self.step, self.summed) for part, value in self.parts.items()}
        self.step += 1
        for part, value in self.parts.items():
            assert value == EXPECTED.value(part, self.step), (
                f"{self.worker.id} has another value of part {part} after step {self.step - 1} than an undisturbed job"
            )

    def boundary(self, group: Group, saving: bool) -> None:
        """Compares the state with the other members every so many steps, as data-parallel jobs do."""
        if (saving or self.step % COMPARE_EVERY == 0) and self.compared != (group.generation, self.step):
            digest = self.step * 1000 + hash(tuple(self.parts.values())) % 1000 if self.whole else self.step
            assert replicas.agree(group, digest), f"members differ after {self.step} steps"
            self.compared = (group.generation, self.step)

    # -- the hooks ----------------------------------------------------------------------------------------------

    def vote(self) -> Vote:
        return Vote(self.step, self.member.entered, self.holds, {"parts": sorted(self.parts)})

    def pause(self) -> None:
        self.reducer.cancel()
        self.worker.pass_time()

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        if self.holds and self.step < verdict.step:
            self.worker.applies(self.step, generation)
            self.apply()
        self.staged = None

    def owners(self, part: int, generation: Generation, verdict: Verdict) -> list[str]:
        """Returns who is to hold a part from now on."""
        staying = [one for one in generation.ids if one not in verdict.leaving]
        if self.whole:
            return staying
        turned = generation.number * 5 + part * 3 + len(verdict.leaving)
        return [staying[(turned + copy) % len(staying)] for copy in range(min(COPIES, len(staying)))]

    def plan(self, generation: Generation, group: Group, verdict: Verdict) -> dict[str, Any]:
        self.worker.pass_time()
        self._layout = {part: self.owners(part, generation, verdict) for part in range(N_PARTS)}
        return {}

    def transfer(self, group: Group, verdict: Verdict) -> int:
        me, members = group.members[group.rank], group.members
        staged: dict[int, int] = {}
        sends, receives, coming = [], [], {}
        for part, owners in self._layout.items():
            sources = [member for member, facts in zip(members, verdict.facts) if part in facts["parts"]]
            if not sources:
                if not verdict.fresh:
                    self.worker.world.check_lost(self.worker, part, members)
                    raise StateLost(f"no member has part {part}")
                if me in owners:
                    staged[part] = EXPECTED.value(part, 0)
                continue
            for turn, owner in enumerate(owners):
                if owner in sources:
                    if owner == me:
                        staged[part] = self.parts[part]
                    continue
                source = sources[(part + turn) % len(sources)]
                if source == me:
                    sends.append((members.index(owner), memoryview(self.parts[part].to_bytes(8, "little"))))
                elif owner == me:
                    coming[part] = buffer = bytearray()
                    receives.append((members.index(source), buffer))
        if sends or receives:
            group.exchange(sends, receives)
        self.worker.pass_time(moves=bool(receives))
        for part, buffer in coming.items():
            staged[part] = int.from_bytes(buffer, "little")
        self.staged, recovery = staged, self.member._recovery
        self.staged_for = (group.generation, recovery._activations)
        return 8 * len(coming)

    def resume(self, generation: Generation, group: Group, verdict: Verdict) -> None:
        assert self.staged is not None
        self.parts, self.staged = self.staged, None
        self.step, self.holds = verdict.step, True
        for part, value in self.parts.items():
            assert value == EXPECTED.value(part, self.step), (
                f"{self.worker.id} got another value of part {part} after {self.step} steps than an undisturbed job has"
            )
        self.worker.resumed(generation)


def train(worker: Worker, steps: int, whole: bool) -> None:
    """The script: trains until so many steps have committed."""
    hooks = Framework(worker, whole)
    member = hooks.member = worker.attach(hooks)
    try:
        worker.pass_import()
        member.join()
        while hooks.step < steps or not member.finish():
            with member.attempt():
                hooks.compute()
                member.commit()
                step, generation = hooks.step, member.generation
                hooks.apply()
                worker.committed(step, generation)
                member.report(step, sample_ids=range(step * N_SAMPLES, (step + 1) * N_SAMPLES))
    finally:
        if worker.alive:
            member.close()
