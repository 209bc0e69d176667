"""Parts of tensors of engines: found in what objects keep, copied, guarded and put together for other members."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elaunch.workers.comm.group import Group
from elaunch.workers.reentry.copies import Copies, StateCopy
from elaunch.workers.reentry.encoding import is_sharded
from elaunch.workers.reentry.guards import Guards
from elaunch.workers.reentry.shares import move_copies, shares
from elaunch.workers.reentry.tensor_shard import TensorShard, empty_shard, fill, form_of
from elaunch.workers.state.codec import restore
from tests.unit.comm_crew import crew, each


class Kept:
    """An engine's state: a range of a flat tensor of seven, and a matrix that only some members have."""

    def __init__(self, start: int, stop: int, matrix: torch.Tensor | None, value: float = 0.0) -> None:
        self.flat = torch.arange(7.0)[start:stop] + value
        self.matrix = matrix
        self.box = (start, stop)

    def _shards(self) -> dict[str, TensorShard]:
        shards = {"flat": TensorShard(self.flat, (self.box,), (7,))}
        if self.matrix is not None:
            # It lies where the flat range does, as the master copy of a parameter may.
            shards["matrix"] = TensorShard(self.matrix, ((0, 2), (0, 2)), (2, 2))
        return shards

    def state_dict(self) -> dict[str, Any]:
        own = self._shards()
        return {
            "shards": {**own, "matrix": own.get("matrix", empty_shard(("torch.float32", (2, 2)), self.flat.device))}
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        fill(self._shards(), state["shards"])


def copy_of(kept: Kept) -> StateCopy:
    copies = Copies()
    copy = copies.begin(1, {"kept": kept}, {})
    copies.finish()
    return copy


def test_parts_of_a_lost_member_come_back_cut_for_those_who_are_left() -> None:
    before = [Kept(0, 3, torch.eye(2)), Kept(3, 7, None), Kept(7, 7, None)]
    assert all(is_sharded(kept) for kept in before)
    copies = [copy_of(kept) for kept in before]
    assert len({repr(copy.manifest) for copy in copies}) == 1
    with crew(3) as transports:
        members = ["a/0#0", "a/1#0", "a/2#0"]
        guards = [Guards() for _ in members]
        groups = [Group(transport, 1, members) for transport in transports]
        each(lambda guard, group, copy: guard.tell(group, copy.boxes), guards, groups, copies)
        each(lambda guard, group, copy: guard.ship(group, copy, lambda: None).wait(), guards, groups, copies)
        left = [1, 2]  # whoever guarded the first member is the second one
        after = [Kept(0, 4, None, value=9.0), Kept(4, 7, torch.zeros(2, 2), value=9.0)]
        again = [Group(transports[rank], 2, [members[rank] for rank in left]) for rank in left]

        def enter(kept: Kept, group: Group, rank: int) -> None:
            manifest = copies[rank].manifest
            needed = shares({"kept": kept}, manifest)
            tensors, _ = move_copies(group, [*copies[rank].parts, *guards[rank].newest], manifest, needed)
            wrapped = [share.wrap(tensor) for share, tensor in zip(needed, tensors, strict=True)]
            restore({"kept": kept}, manifest, wrapped)

        each(enter, after, again, left)
    assert after[0].flat.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert after[1].flat.tolist() == [4.0, 5.0, 6.0]
    assert after[1].matrix is not None
    assert after[1].matrix.tolist() == [[1.0, 0.0], [0.0, 1.0]]


def test_two_shards_at_the_same_place_are_two() -> None:
    one = torch.arange(4.0)

    class Tied:
        def state_dict(self) -> dict[str, Any]:
            return {"a": TensorShard(one, ((0, 4),), (4,)), "b": TensorShard(one, ((4, 8),), (8,))}

    copies = Copies()
    copy = copies.begin(1, {"tied": Tied()}, {})
    assert [spec["shape"] for spec in copy.manifest["tensors"]] == [[4], [8]]
    assert copy.boxes == {0: ((0, 4),), 1: ((4, 8),)}


def test_a_part_that_is_not_its_box_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a tensor of shape \(3,\) is not the box \(\(0, 4\),\)"):
        TensorShard(torch.zeros(3), ((0, 4),), (8,))
    assert form_of(TensorShard(torch.zeros(3), ((0, 3),), (8,))) == ("torch.float32", (8,))
