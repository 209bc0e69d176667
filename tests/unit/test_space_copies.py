"""Copies of what one worker alone holds: complete or not, taken by the next move, and what is gone back to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Shard

from elaunch.errors import GenerationChanged, StateLost, UsageError
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.transport import Transport
from elaunch.workers.frameworks.attach import attach
from elaunch.workers.frameworks.copies import CopyKey, SpaceCopies
from elaunch.workers.state.placement.layouts import AnyLayout, FlatBuffer, Layout, LayoutUnion
from elaunch.workers.state.tensors import TensorSpace
from tests.unit.comm_crew import crew, each, introduce_all, outcomes

MEMBERS = ("a/0#0", "a/1#0", "a/2#0")
A, B, C = MEMBERS
CUT = Layout((3,), MEMBERS, {"w": (Shard(0),)})
FLAT = Layout((3,), MEMBERS, flat=(FlatBuffer(0, 24, {"w": 0}, ("", "m")),))
STAGES = LayoutUnion(tuple(Layout((1,), (member,)).only([name]) for member, name in zip(MEMBERS, "uvw", strict=True)))


class Crew:
    """Workers with spaces, whose tensors say of which step they are."""

    def __init__(self, transports: Sequence[Transport], layout: AnyLayout) -> None:
        self.transports, self.layout = transports, layout
        introduce_all(transports)  # messages beside the links are dialled
        self.spaces = [TensorSpace(worker) for worker in MEMBERS]
        self.copies = [SpaceCopies() for _ in MEMBERS]
        self.live: list[dict[str, Tensor]] = [{} for _ in MEMBERS]
        self.made: dict[int, list[Group]] = {}

    def groups(self, members: Sequence[str] = MEMBERS, generation: int = 1) -> list[Group]:
        if generation not in self.made:
            self.made[generation] = [
                Group(one, generation, members) for one in self.transports if one.worker in members
            ]
        return self.made[generation]

    def hold(self, step: int) -> None:
        """Has the tensors be of a step, in place as an optimizer changes them."""
        for worker, space, live in zip(MEMBERS, self.spaces, self.live, strict=True):
            for name, tensor in local(self.layout, worker, step).items():
                live.setdefault(name, torch.empty_like(tensor)).copy_(tensor)
            space.hold(self.layout, live, {"step": step}, dict.fromkeys(live, (8, 3)))

    def begin(self, step: int) -> None:
        self.hold(step)
        each(lambda c, g, s: c.begin(g, s, step), self.copies, self.groups(), self.spaces)

    def finish(self) -> None:
        each(lambda c: c.finish(), self.copies)

    def check(self, step: int) -> None:
        """That the first worker has everything, as it was after a step."""
        names = {name for worker in MEMBERS for name in local(self.layout, worker, step)}
        for name in names:
            assert torch.equal(self.spaces[0].local(name), whole(name, step)), name
        assert self.spaces[0].values == {"step": step}


def whole(name: str, step: int) -> Tensor:
    return torch.arange(24.0).view(8, 3) + 100 * "uvw".index(name[0]) + 1000 * step + (50 if "@" in name else 0)


def local(layout: AnyLayout, worker: str, step: int) -> dict[str, Tensor]:
    place = MEMBERS.index(worker)
    if layout is STAGES:
        return {"uvw"[place] + key: whole("uvw"[place] + key, step) for key in ("", "@m")}
    if layout is FLAT:
        return {name: whole(name, step).flatten().chunk(3)[place] for name in ("w", "w@m")}
    return {name: whole(name, step).chunk(3)[place] for name in ("w", "w@m")}


TO_FIRST = Layout((1,), (A,))


@pytest.mark.parametrize("layout", [CUT, FLAT, STAGES])
@pytest.mark.parametrize("lost", [B, C])
def test_what_a_lost_worker_alone_had_comes_from_who_keeps_it(layout: AnyLayout, lost: str) -> None:
    with crew(3) as transports:
        job = Crew(transports, layout)
        for step in (1, 2, 3):
            job.begin(step)
            job.finish()
        left = [place for place, member in enumerate(MEMBERS) if member != lost]
        groups = job.groups([member for member in MEMBERS if member != lost], 2)

        def survive(place: int, group: Group) -> CopyKey | None:
            newest = job.copies[place].offer(group, job.spaces[place], 3)
            job.spaces[place].move(group, TO_FIRST)
            job.spaces[place].install()
            return newest

        assert each(survive, left, groups) == [CopyKey(1, 3)] * 2
        job.check(3)


def test_without_a_copy_it_is_lost() -> None:
    with crew(3) as transports:
        job = Crew(transports, CUT)
        job.hold(1)
        groups = job.groups(MEMBERS[:2], 2)
        moves = [partial(s.move, g, TO_FIRST) for s, g in zip(job.spaces, groups, strict=False)]
        for error in outcomes(moves):
            assert isinstance(error, StateLost)


def test_where_a_copy_is_not_complete_all_go_back_to_the_one_before_and_what_is_newer_comes_back_until_then() -> None:
    with crew(3) as transports:
        job = Crew(transports, CUT)
        for step in (1, 2):
            job.begin(step)
            job.finish()
        job.hold(3)

        def begin(copies: SpaceCopies, group: Group, space: TensorSpace) -> None:
            if group.rank == 2:
                # It takes part in what all tell each other, and is lost before it sends.
                held = {f"w{key}#0": (space.items[f"w{key}"], space.chunks(f"w{key}")[0][0]) for key in ("", "@m")}
                copies._hear(group, held)
            else:
                copies.begin(group, space, 3)

        each(begin, job.copies, job.groups(), job.spaces)
        for transport in transports:
            transport.interrupt(2)
        for error in outcomes([copies.finish for copies in job.copies[:1]]):
            assert isinstance(error, GenerationChanged)
        transports[2].close()
        for copies in job.copies[:2]:
            copies.pause()
        job.hold(3)
        rest = job.groups(MEMBERS[:2], 3)

        def offer(copies: SpaceCopies, space: TensorSpace, group: Group) -> CopyKey | None:
            key = copies.offer(group, space, 3)
            with pytest.raises(StateLost):
                space.move(group, TO_FIRST)
            assert key is not None
            copies.go_back(space, key)
            space.hold(CUT, {}, {})  # says nothing new now
            space.move(group, TO_FIRST)
            return key

        assert each(offer, job.copies[:2], job.spaces[:2], rest) == [CopyKey(1, 2)] * 2
        # Another change of members comes before it is installed.
        for place in (0, 1):
            job.spaces[place].stay()
            assert torch.equal(job.spaces[place].local("w"), whole("w", 3).chunk(3)[place])
            assert job.spaces[place].values == {"step": 3}
        each(offer, job.copies[:2], job.spaces[:2], job.groups(MEMBERS[:2], 4))
        for copies, space in zip(job.copies[:2], job.spaces[:2], strict=True):
            space.install()
            copies.resumed(2)
        job.check(2)
        job.spaces[0].local("w").zero_()
        assert torch.equal(next(iter(job.copies[0]._made[-1].tensors().values())), whole("w", 2).chunk(3)[0]), "a copy"


def test_what_is_copied_is_the_state_when_the_step_began() -> None:
    with crew(3) as transports:
        job = Crew(transports, CUT)
        job.begin(1)
        job.finish()
        job.begin(2)
        job.finish()
        job.hold(3)
        kept = job.copies[0]._made[-1]
        assert kept.complete
        assert torch.equal(kept.tensors()["w#0"], whole("w", 2).chunk(3)[0])
        ((item, chunk), _) = kept.kept
        assert (item.name, chunk.box) == ("w", ((6, 8), (0, 3)))
        assert torch.equal(chunk.tensors[0], whole("w", 2).chunk(3)[2])


def test_copies_that_cannot_be_made_are_refused() -> None:
    with pytest.raises(UsageError, match=r"elaunch\.attach\(copies=2\): expected 0 or 1"):
        attach(object(), copies=2)  # type: ignore[arg-type]
    with pytest.raises(
        UsageError, match=r"elaunch\.attach\(copies=1\) was called, and the hooks .* no method hold\(\)"
    ):
        attach(object(), copies=1)  # type: ignore[arg-type]
