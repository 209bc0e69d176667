"""Re-entry, part by part: who keeps copies for whom, copies that are whole, and batches for any number of members."""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from elaunch.errors import StateError, StateLost, UsageError
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.bulk import end_kept, keep_until_over
from elaunch.workers.reentry import copier, gloo_waits, run
from elaunch.workers.reentry import groups as reentry_groups
from elaunch.workers.reentry.copies import Copies, StateCopy, _Copying, device_of
from elaunch.workers.reentry.data import Batches
from elaunch.workers.reentry.forms import elastic
from elaunch.workers.reentry.groups import FunctionGroups
from elaunch.workers.reentry.guards import Guards, alone, guards_of
from elaunch.workers.reentry.sampler import deal_samples
from elaunch.workers.reentry.shares import TensorShare, move_copies, shares
from elaunch.workers.reentry.state import POSITION
from elaunch.workers.state.codec import restore
from tests.unit.comm_crew import crew, each

LOW, HIGH = ((0, 2), (0, 4)), ((2, 4), (0, 4))


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_each_member_has_a_guard_on_another_node_and_where_no_node_has_most_members_guards_one(
    counts: list[int],
) -> None:
    members = [f"n{node}/{slot}#0" for node, count in enumerate(counts) for slot in range(count)]
    guards = guards_of(members)
    if len(members) > 1:
        assert all(rank != guard for rank, guard in enumerate(guards))
    if len(counts) > 1:
        nodes = [member.partition("/")[0] for member in members]
        assert all(nodes[rank] != nodes[guard] for rank, guard in enumerate(guards))
    if 2 * max(counts) <= len(members):
        assert sorted(guards) == list(range(len(members)))


def test_who_guards_several_has_the_parts_of_all_of_them_when_their_domain_is_lost() -> None:
    rows = [((rank, rank + 1), (0, 4)) for rank in range(5)]
    specs = [{"path": "model.weight", "dtype": "torch.float32", "shape": [5, 4]}]
    manifest = {"version": 1, "objects": {}, "tensors": specs}
    with crew(5) as transports:
        names = [transport.worker for transport in transports]
        where = dict(zip(names, ["left", "left", "left", "right", "right"], strict=True))
        groups = [Group(transport, 1, names, domains=where) for transport in transports]
        guards = [Guards() for _ in names]
        copies = [
            StateCopy(1, manifest, {}, [torch.full((1, 4), float(rank))], {0: box}) for rank, box in enumerate(rows)
        ]
        for _ in range(2):  # the second time into memory that is there
            each(lambda guard, group, copy: guard.tell(group, copy.boxes), guards, groups, copies)
            each(lambda guard, group, copy: guard.ship(group, copy, lambda: None).wait(), guards, groups, copies)
        right = [part for rank in (3, 4) for part in (*copies[rank].parts, *guards[rank].newest)]
        assert sorted(part[1] for part in right) == rows, "a, b and c lost, all of the state is left"
        assert all(torch.equal(part[2], torch.full((1, 4), float(part[1][0][0]))) for part in right)


def test_what_another_node_has_as_well_needs_no_guard() -> None:
    held = [{0: LOW, 1: LOW}, {0: HIGH}, {0: LOW}]
    assert alone(0, held, ["a/0#0", "a/1#0", "b/0#0"]) == [1]
    assert alone(0, held, ["a/0#0", "b/0#0", "a/1#0"]) == [0, 1], "the same node may be lost as a whole"
    assert alone(0, held, ["a/0#0", "a/1#0", "a/2#0"]) == [1]
    assert alone(0, [{0: ((0, 0), (0, 4))}, {}], ["a/0#0", "a/1#0"]) == [], "it has no elements"


def state_copy(step: int, box: Any, value: float) -> StateCopy:
    specs = [{"path": "model.weight", "dtype": "torch.float32", "shape": [4, 4]}]
    manifest = {"version": 1, "objects": {}, "tensors": specs}
    shape = [stop - start for start, stop in box]
    return StateCopy(step, manifest, {}, [torch.full(shape, value)], {0: box})


def test_a_part_comes_back_from_the_guard_of_who_had_it() -> None:
    with crew(2) as transports:
        members = ["a/0#0", "a/1#0"]
        groups = [Group(transport, 1, members) for transport in transports]
        guards = [Guards(), Guards()]
        copies = [state_copy(1, LOW, 1.0), state_copy(1, HIGH, 2.0)]
        each(lambda guard, group, copy: guard.tell(group, copy.boxes), guards, groups, copies)
        each(lambda guard, group, copy: guard.ship(group, copy, lambda: None).wait(), guards, groups, copies)
        whole = [TensorShare(((0, 4), (0, 4)), lambda tensor: tensor)]
        alone_again = Group(transports[0], 1, members[:1])
        ((found,), received_bytes) = move_copies(
            alone_again, [*copies[0].parts, *guards[0].newest], copies[0].manifest, whole
        )
        assert found.tolist() == [[1.0] * 4] * 2 + [[2.0] * 4] * 2
        assert received_bytes == 0
        with pytest.raises(StateLost, match=r"no surviving worker has all of 0 model\.weight"):
            move_copies(alone_again, copies[0].parts, copies[0].manifest, whole)
        guards[0].forget_newest()
        assert guards[0].newest == []


def test_what_travels_to_a_guard_in_one_message_comes_out_as_it_was() -> None:
    boxes: list[dict[int, Any]] = [{0: LOW, 1: ((0, 1),), 2: ((0, 3),)}, {0: HIGH, 1: ((1, 3),), 2: ((3, 5),)}]
    specs = [
        {"path": "a", "dtype": "torch.float32", "shape": [4, 4]},
        {"path": "b", "dtype": "torch.float64", "shape": [3]},
        {"path": "c", "dtype": "torch.int16", "shape": [5]},
    ]
    dtypes = torch.float32, torch.float64, torch.int16

    def copy_of(step: int, rank: int) -> StateCopy:
        shapes = [[stop - start for start, stop in box] for box in boxes[rank].values()]
        tensors = [torch.full(shape, 10 * step + rank, dtype=dtype) for shape, dtype in zip(shapes, dtypes)]
        tensors[0] = tensors[0].t().contiguous().t()  # in another order than it travels in
        return StateCopy(step, {"version": 1, "objects": {}, "tensors": specs}, {}, tensors, boxes[rank])

    with crew(2) as transports:
        members = ["a/0#0", "a/1#0"]
        groups = [Group(transport, 1, members) for transport in transports]
        guards = [Guards(), Guards()]
        each(lambda guard, group, own: guard.tell(group, own), guards, groups, boxes)
        memory = set()
        for step in (1, 2, 3):
            copies = [copy_of(step, rank) for rank in (0, 1)]
            each(lambda guard, group, copy: guard.ship(group, copy, lambda: None).wait(), guards, groups, copies)
            for rank, guard in enumerate(guards):
                assert [(place, box) for place, box, _ in guard.newest] == list(boxes[1 - rank].items())
                for (_, _, found), sent in zip(guard.newest, copies[1 - rank].tensors, strict=True):
                    assert found.dtype == sent.dtype
                    assert torch.equal(found, sent)
            memory.add(guards[0].newest[0][2].data_ptr())
        assert len(memory) == 2, "two commits are kept, in turn in the same memory"
        guards[0].forget_newest()
        assert guards[0].newest[0][2].unique().tolist() == [21.0]


def test_what_does_not_change_travels_to_the_guard_once() -> None:
    boxes: list[dict[int, Any]] = [{0: LOW, 1: ((0, 2),)}, {0: HIGH, 1: ((2, 5),)}]
    specs = [
        {"path": "a", "dtype": "torch.float32", "shape": [4, 4]},
        {"path": "b", "dtype": "torch.float32", "shape": [5]},
    ]

    def copy_of(step: int, rank: int) -> StateCopy:
        shapes = [[stop - start for start, stop in box] for box in boxes[rank].values()]
        tensors = [torch.full(shape, 10.0 * step + rank) for shape in shapes]
        return StateCopy(step, {"version": 1, "objects": {}, "tensors": specs}, {}, tensors, boxes[rank], {0})

    with crew(2) as transports:
        members = ["a/0#0", "a/1#0"]
        guards = [Guards(), Guards()]
        for generation in (1, 2):  # each entry has its own
            groups = [Group(transport, generation, members) for transport in transports]
            for guard in guards:
                guard.enter()
            each(lambda guard, group, own: guard.tell(group, own), guards, groups, boxes)
            for step in range(10 * generation, 10 * generation + 3):
                copies = [copy_of(step, rank) for rank in (0, 1)]
                each(lambda guard, group, copy: guard.ship(group, copy, lambda: None).wait(), guards, groups, copies)
                for rank, guard in enumerate(guards):
                    found = {place: (box, tensor.unique().tolist()) for place, box, tensor in guard.newest}
                    other = 1 - rank
                    assert found == {
                        0: (boxes[other][0], [100.0 * generation + other]),
                        1: (boxes[other][1], [10.0 * step + other]),
                    }
        guards[0].forget_newest()
        assert sorted(tensor.unique().item() for _, _, tensor in guards[0].newest) == [201.0, 211.0]


def test_what_does_not_change_is_copied_once() -> None:
    frozen, trained = nn.Linear(3, 3).requires_grad_(False), nn.Linear(3, 3)
    net = nn.Sequential(frozen, trained)
    optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
    copies = Copies()
    copies.gate({"net": net, "optimizer": optimizer}, ["net.0"])
    made = []
    for step in range(4):
        train_a_step(net, optimizer)
        made.append(copies.begin(step, {"net": net, "optimizer": optimizer}, {}))
        copies.finish()
        assert sorted(made[step].constant) == [0, 1]
        assert made[step].tensors[0] is made[0].tensors[0]
        assert torch.equal(made[step].tensors[0], frozen.weight)
        assert torch.equal(made[step].tensors[2], trained.weight)
    assert not torch.equal(made[3].tensors[2], made[2].tensors[2])
    # Who enters again has other objects, and what is kept of the last commit must stay as it is.
    before, other = frozen.weight.clone(), nn.Linear(3, 3)
    copies.gate({"net": other}, ["net"])
    again = copies.begin(4, {"net": other}, {})
    copies.finish()
    assert copies.former is made[3]
    assert torch.equal(made[3].tensors[0], before)
    assert torch.equal(again.tensors[0], other.weight)
    with torch.no_grad():
        other.bias.add_(1.0)
    with pytest.raises(StateError, match=r"net\.bias changed, but state\.bind\(constant=\.\.\.\) says"):
        copies.begin(5, {"net": other}, {})


def test_replicas_keep_what_they_have_and_one_that_joins_gets_it() -> None:
    whole = [TensorShare(((0, 4), (0, 4)), lambda tensor: tensor)]
    copy = state_copy(3, ((0, 4), (0, 4)), 7.0)
    with crew(3) as transports:
        for held in ((True, True, True), (True, True, False)):
            groups = [Group(transport, 1, ["a/0#0", "a/1#0", "a/2#0"]) for transport in transports]
            found: list[Any] = [None] * 3

            def move(group: Group, holds: bool, found: list[Any] = found) -> None:
                found[group.rank] = move_copies(group, copy.parts if holds else [], copy.manifest, whole)

            each(move, groups, held)
            assert [received for _, received in found] == [0 if holds else 64 for holds in held]
            for (tensor,), _ in found:
                assert tensor.tolist() == [[7.0] * 4] * 4
                assert tensor.data_ptr() != copy.tensors[0].data_ptr(), "an object may keep it"


def test_what_an_object_takes_is_not_the_copy_itself() -> None:
    with crew(1) as transports:
        group = Group(transports[0], 1, ["a/0#0"])
        net = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        objects: dict[str, Any] = {"net": net, "optimizer": optimizer}
        train_a_step(net, optimizer)
        copies = Copies()
        copies.gate(objects)
        copy = copies.begin(1, objects, {})
        copies.finish()
        kept = [tensor.clone() for tensor in copy.tensors]
        tensors, _ = move_copies(group, copy.parts, copy.manifest, shares(objects, copy.manifest))
        restore(objects, copy.manifest, tensors)
        train_a_step(net, optimizer)
        assert all(torch.equal(tensor, before) for tensor, before in zip(copy.tensors, kept, strict=True))


def train_a_step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(4, 3)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_an_optimizer_waits_for_the_copy_and_two_copies_share_no_memory() -> None:
    net = nn.Linear(300, 300)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    objects: dict[str, Any] = {"net": net, "optimizer": optimizer}
    copies = Copies()
    copies.gate(objects)
    expected = []
    for step in range(4):
        copies.begin(step, objects, {"steps": step})
        expected.append(net.weight.detach().clone())
        net(torch.ones(4, 300)).square().sum().backward()
        optimizer.step()
    copies.finish()
    assert copies.newest is not None
    assert copies.former is not None
    assert (copies.former.step, copies.newest.step) == (2, 3)
    for copy in (copies.former, copies.newest):
        place = [spec["path"] for spec in copy.manifest["tensors"]].index("net.weight")
        assert torch.equal(copy.tensors[place], expected[copy.step])
    copies.forget_newest()
    assert copies.newest.step == 2


def test_what_another_than_the_optimizer_changes_while_it_is_copied_is_an_error() -> None:
    net = nn.Linear(3, 2)
    objects: dict[str, Any] = {"net": net, "optimizer": torch.optim.SGD(net.parameters(), lr=0.1)}
    copies = Copies()
    copies.gate(objects)
    copies.begin(1, objects, {})
    copies._under_way._done.wait(20)  # type: ignore[union-attr]
    copies._under_way._passed = False  # type: ignore[union-attr]  # as if the copy had not ended yet
    with torch.no_grad():
        net.weight.add_(1.0)
    copies._under_way._check()  # type: ignore[union-attr]
    with pytest.raises(StateError, match=r"net\.weight changed after commit\(\), while it was copied"):
        copies.finish()


def test_buffers_and_what_no_optimizer_has_are_copied_at_once() -> None:
    net = nn.BatchNorm1d(4)
    copies = Copies()
    copies.gate({"net": net})
    copy = copies.begin(1, {"net": net}, {})
    net(torch.randn(8, 4))
    copies.finish()
    place = [spec["path"] for spec in copy.manifest["tensors"]].index("net.running_mean")
    assert copy.tensors[place].tolist() == [0.0] * 4


class Device:
    """What a device does, as a copy sees it: done when it is told so, or when it is freed."""

    def __init__(self) -> None:
        self.done, self.wrong = False, ""

    def query(self) -> bool:
        return self.done

    def abort(self) -> None:
        self.done = True


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(_Copying, "_begin_on", lambda copying, of: (copying._copy(), device)[1])
    return device


def copy_on(device: Device) -> tuple[_Copying, Copies]:
    copies = Copies(lambda: device.wrong or None, device.abort)
    copy = state_copy(1, LOW, 1.0)
    copies.newest = copy
    copies._under_way = _Copying(copy, [], torch.device("cuda"), copies._errored, copies._abort)
    return copies._under_way, copies


def test_a_copy_that_a_device_completed_before_a_group_failed_is_good_and_stays_so(device: Device) -> None:
    copying, copies = copy_on(device)
    device.done = True
    copies.copied(RuntimeError)()
    device.wrong = "a process group has COMM_ERROR"
    copies.finish()
    assert copying.copy.spoiled == ""


def test_what_a_device_copies_once_a_group_has_failed_is_no_copy_and_the_device_is_freed(device: Device) -> None:
    copying, copies = copy_on(device)
    device.wrong = "a process group has COMM_ERROR"
    with pytest.raises(ChildProcessError, match="COMM_ERROR"):
        copies.copied(ChildProcessError)()
    copies.finish()
    assert copying.copy.spoiled == device.wrong


def test_whatever_comes_first_what_lies_on_a_device_is_waited_for_there() -> None:
    on_host, on_device = torch.zeros(3), torch.zeros(3, device="meta")
    assert device_of([on_host, on_device]) == on_device.device
    assert device_of([on_host]) is None


def test_groups_of_a_device_tell_of_errors_and_that_they_were_freed() -> None:
    aborted, error = threading.Event(), SimpleNamespace(name="SUCCESS")
    groups = FunctionGroups()
    groups._device_groups = [SimpleNamespace(get_error=lambda: error, abort=aborted.set)]
    assert groups.errored() is None
    error.name = "COMM_ERROR"
    assert groups.errored() == "a process group has COMM_ERROR"
    groups.free()
    assert aborted.wait(10)
    error.name = "SUCCESS"
    assert groups.errored() == "its process groups were freed"
    groups.close()


def test_what_gloo_lost_is_kept_until_its_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real message is lost only now and then: here the work is one that ends when the test says so."""
    over, is_completed = threading.Event(), False

    def never(work: Any, timeout: Any = None) -> Any:
        raise RuntimeError("it is not over")

    monkeypatch.setattr(dist.Work, "wait", never)
    monkeypatch.setattr(gloo_waits, "LOST_S", 0.0)
    waits = gloo_waits.GlooWaits(over, lambda: True)
    work: Any = SimpleNamespace(_get_op_type=lambda: 0, is_completed=lambda: is_completed)
    over.set()
    with waits.in_spells(), pytest.raises(RuntimeError, match="Gloo lost a message when the members changed"):
        dist.Work.wait(work)
    assert waits.left == [work]
    groups = nn.Linear(1, 1)  # of what can be there, something that tells of its end
    ended = weakref.ref(groups)
    keep_until_over(groups, waits.left)
    del groups
    end_kept()
    assert ended() is not None
    is_completed = True
    end_kept()
    assert ended() is None
    with waits.in_spells():
        assert waits.left == []


def test_who_waits_for_a_device_to_be_connected_is_freed_when_the_members_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, released = threading.Event(), threading.Event()

    def sum_once(group: Any, index: int) -> None:
        if group.fails:
            raise RuntimeError("NCCL cannot connect")
        if group.waits:
            begun.set()
            assert released.wait(60)

    monkeypatch.setattr(reentry_groups, "needs_connection", lambda group: True)
    monkeypatch.setattr(reentry_groups, "sum_once", sum_once)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    groups = FunctionGroups()
    device = SimpleNamespace(fails=False, waits=False, abort=lambda: None)
    groups._device_groups = [device]
    groups._connect_devices()
    device.fails = True
    with pytest.raises(RuntimeError, match="NCCL cannot connect"):
        groups._connect_devices()
    device.fails, device.waits = False, True

    def free() -> None:
        begun.wait(60)
        groups.free()

    freeing = threading.Thread(target=free)
    freeing.start()
    with pytest.raises(RuntimeError, match="the members have changed while"):
        groups._connect_devices()
    released.set()
    freeing.join()
    groups.close()


@given(
    st.integers(1, 60),
    st.integers(1, 5),
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=6),
    st.booleans(),
)
def test_each_sample_is_used_once_in_a_pass_whoever_is_a_member(
    n_samples: int, batch_size: int, crews: list[tuple[int, int]], fixed: bool
) -> None:
    loader = DataLoader(TensorDataset(torch.arange(n_samples)), batch_size=batch_size, shuffle=True)
    batches = Batches(loader, 6 if fixed else None, epochs=2)
    position, used = 0, Counter[int]()
    for size, n_steps in [*crews, (1, 10**6)]:
        for _, (stop, step_ids) in zip(range(n_steps), batches.steps(position, size), strict=False):
            step = [batch for rank in range(size) for batch in deal_samples(step_ids, rank, size)]
            ids = [number for batch in step for number in batch.ids]
            assert all(batch.ids for batch in step), "each member takes part in each step"
            assert sum(batch.weight for batch in step) == pytest.approx(size)
            if len(set(ids)) == len(ids):
                used.update(ids)
            else:  # fewer samples left than members
                assert len(set(ids)) < size
                used.update(set(ids))
            assert set(ids) == set(step_ids)
            position = stop
    assert position == 2 * n_samples
    assert used == Counter(dict.fromkeys(range(n_samples), 2))


def test_a_loader_is_loaded_as_it_says() -> None:
    data = TensorDataset(torch.arange(10))
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=4, rank=2, shuffle=False)
    batches = Batches(DataLoader(data, batch_size=2, sampler=sampler), None, epochs=1)
    loaded = [content[0].tolist() for *_, content in batches.load(4, 1, 2)]
    assert loaded == [[6, 7], [9]]
    dropped = Batches(DataLoader(data, batch_size=4, drop_last=True), None, epochs=1)
    assert [content[0].tolist() for *_, content in dropped.load(0, 0, 1)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_cannot_be_dealt_out_is_refused_with_the_cure() -> None:
    with pytest.raises(UsageError, match=r"state\.steps\(\) takes a DataLoader, got list"):
        Batches([1, 2], None, 1)
    few = Batches(DataLoader(TensorDataset(torch.arange(8)), batch_size=2), 2, 1)
    with pytest.raises(UsageError, match="global_batch_size=2 is less than one sample for each of 3 members"):
        next(few.steps(0, 3))
    with pytest.raises(UsageError, match=r"elastic\(every=0\): expected 1 or more"):
        elastic(every=0)


def test_what_a_function_changes_before_its_first_commit_is_not_in_the_copy_that_it_has_joined_with(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "shares", lambda *_: [])
    monkeypatch.setattr(run, "move_copies", lambda *_: ([], 0))
    monkeypatch.setattr(run, "restore", lambda *_, **more: None)
    joined: Any = run.Reentry.__new__(run.Reentry)
    joined._copies, joined._guards, joined.step = Copies(), Guards(), 3
    joined._generators, joined._brought = {}, {}
    values: dict[str, Any] = {POSITION: 5, "passes": [0]}
    joined._restore(SimpleNamespace(rank=1, size=1), {}, {}, values)
    del values[POSITION]
    values["passes"].append(1)
    assert joined.last_values() == {POSITION: 5, "passes": [0]}


def test_a_copy_is_not_made_anew_where_its_parts_would_be_at_other_places_than_those_of_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(run, "shares", lambda *_: [])
    monkeypatch.setattr(run, "move_copies", lambda *_: ([], 0))
    monkeypatch.setattr(run, "restore", lambda *_, **more: None)
    monkeypatch.setattr(run, "is_sharded", lambda thing: True)
    model, shipped = nn.Linear(2, 2), list[StateCopy]()
    survivor: Any = run.Reentry.__new__(run.Reentry)
    survivor._copies, survivor._guards, survivor.step = Copies(), Guards(), 3
    survivor._generators, survivor._brought = {}, {}
    survivor._mend = lambda group, copy: shipped.append(copy)
    former = survivor._copies.begin(3, {"model": model}, {})
    group = SimpleNamespace(rank=1, size=2, all_gather_json=lambda value: [value, True])
    specs = former.manifest["tensors"]
    survivor._restore(group, {"model": model}, {"tensors": specs[::-1]}, {})
    assert shipped == []
    assert survivor._copies.newest is former
    survivor._restore(group, {"model": model}, {"tensors": specs}, {})
    assert shipped == [survivor._copies.newest]
    assert survivor._copies.former is former


def test_copies_are_made_in_turn_by_one_thread_that_keeps_nothing_of_them() -> None:
    class Model:
        def copy(self) -> None:
            threads.append(threading.current_thread())

    threads = list[threading.Thread]()
    errors = list[BaseException]()
    over = threading.Event()
    model = Model()
    gone = weakref.ref(model)
    copier.later(model.copy, errors.append)
    copier.later(lambda: 1 // 0, errors.append)
    del model
    copier.later(lambda: threads.append(threading.current_thread()), errors.append)
    copier.later(over.set, errors.append)
    assert over.wait(10)
    assert threads[0] is threads[1]
    assert threads[0].name == "elaunch-copy"
    assert [type(error) for error in errors] == [ZeroDivisionError]
    assert gone() is None
