"""Collectives among threads: right, in a fixed order of addition, the same on every member."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from elaunch.errors import GenerationChanged
from elaunch.workers.comm import group as group_module
from elaunch.workers.comm.group import DIRECT_MEMBERS, SMALL_BYTES, Group, even_counts, neighbours
from elaunch.workers.comm.transport import Transport
from tests.unit.comm_crew import Task, crew, each

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
LENGTHS = [0, 1, 3, 1000, 40_001]


@pytest.fixture(scope="module")
def transports() -> Iterator[list[Transport]]:
    """The transports of nine workers; each test uses them in generations of its own."""
    with crew(9) as made:
        yield made


@pytest.fixture(params=["direct", "ring"])
def algorithm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with both algorithms, whatever the number of members."""
    monkeypatch.setattr(group_module, "DIRECT_MEMBERS", 0 if request.param == "ring" else 1000)
    return str(request.param)


_generations = iter(range(1, 1 << 30))


def groups_of(transports: list[Transport]) -> list[Group]:
    generation = next(_generations)
    return [Group(transport, generation, [one.worker for one in transports]) for transport in transports]


def inputs(size: int, length: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(size * 1_000_003 + length)
    if dtype.is_floating_point:
        return [torch.randn(length, generator=generator, dtype=torch.float64).to(dtype) for _ in range(size)]
    return [torch.randint(0, 10, (length,), generator=generator).to(dtype) for _ in range(size)]


def reference(tensors: list[Tensor], algorithm: str) -> Tensor:
    """The twenty-line version: every element added one contribution after the other, in the order of the docstring."""
    size = len(tensors)
    counts = even_counts(len(tensors[0]), size)
    chunks = []
    for owner, pieces in enumerate(zip(*[tensor.split(counts) for tensor in tensors], strict=True)):
        first = 0 if algorithm == "direct" else owner + 1
        order = [(first + step) % size for step in range(size)]
        total = pieces[order[0]].clone()
        for member in order[1:]:
            total = total + pieces[member]
        chunks.append(total)
    return torch.cat(chunks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_all_reduce_adds_in_the_documented_order(
    transports: list[Transport], algorithm: str, dtype: torch.dtype
) -> None:
    for size in range(1, 10):
        groups = groups_of(transports[:size])
        for length in LENGTHS:
            tensors = inputs(size, length, dtype)
            expected = reference(tensors, algorithm)
            each(Group.all_reduce, groups, tensors)
            assert all(torch.equal(tensor, expected) for tensor in tensors), (size, length)


def test_small_and_big_tensors_are_added_in_the_same_order(
    transports: list[Transport], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for small_bytes in (0, SMALL_BYTES):
        monkeypatch.setattr(group_module, "SMALL_BYTES", small_bytes)
        tensors = inputs(5, 777, torch.float32)
        groups = groups_of(transports[:5])
        each(lambda g, t: g.all_reduce(t, 0.3), groups, tensors)
        results += tensors
    assert all(torch.equal(results[0], other) for other in results)


def test_all_reduce_scales_once(transports: list[Transport], algorithm: str) -> None:
    for size in (1, 2, 4):
        tensors = inputs(size, 40_001, torch.float32)
        expected = reference(tensors, algorithm) * 0.1
        groups = groups_of(transports[:size])
        each(lambda g, t: g.all_reduce(t, 0.1), groups, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("max", [3.0, 2.0]), ("min", [1.0, -1.0]), ("product", [6.0, -2.0]), ("sum", [6.0, 2.0])],
)
def test_other_reductions(
    transports: list[Transport], algorithm: str, reduction: group_module.Reduction, expected: list[float]
) -> None:
    tensors = [torch.tensor([1.0, 2.0]), torch.tensor([2.0, 1.0]), torch.tensor([3.0, -1.0])]
    groups = groups_of(transports[:3])
    each(lambda g, t: g.all_reduce(t, reduction=reduction), groups, tensors)
    assert all(tensor.tolist() == expected for tensor in tensors)


def test_seventeen_members_need_few_links_and_make_others_when_they_use_them() -> None:
    members = [f"a/{index}#0" for index in range(DIRECT_MEMBERS + 1)]
    few = {member: neighbours(members, member) for member in members}
    assert few["a/0#0"] == tuple(members[index] for index in (1, 2, 3, 4, 5, 6, 7, 8, 16))
    assert few["a/1#0"] == tuple(members[index] for index in (0, 2, 9, 10, 11, 12, 13, 14, 15, 16))
    assert few["a/7#0"] == tuple(members[index] for index in (0, 6, 8))
    assert few["a/16#0"] == tuple(members[index] for index in (0, 1, 15))
    with crew(len(members), connected=False) as transports:
        by_name = {transport.worker: transport for transport in transports}

        def connect(transport: Transport) -> None:
            near = {*neighbours(members, transport.worker), transport.worker}
            transport.connect(
                {name: by_name[name].address for name in members if name in near}, generation=1, timeout_s=60
            )

        each(connect, transports)
        groups = [Group(transport, 1, members) for transport in transports]
        tensors = inputs(len(members), 40_001, torch.float32)
        expected = reference(tensors, "ring")
        each(Group.all_reduce, groups, tensors)
        assert all(torch.equal(tensor, expected) for tensor in tensors)
        said = each(Group.all_gather_bytes, groups, [b"%d" % index for index in range(17)])
        assert said == [[b"%d" % index for index in range(17)]] * 17
        assert all(transport.peers == tuple(sorted(few[transport.worker])) for transport in transports)

        everybody = {name: by_name[name].address for name in members}
        for transport in transports:
            transport.introduce(everybody)
        got = [[bytearray() for _ in members] for _ in members]

        def all_to_all(group: Group) -> None:
            others = [member for member in range(17) if member != group.rank]
            group.exchange(
                [(other, memoryview(b"%d to %d" % (group.rank, other))) for other in others],
                [(other, got[group.rank][other]) for other in others],
            )

        each(all_to_all, groups)
        assert all(got[to][of] == (b"%d to %d" % (of, to) if of != to else b"") for to in range(17) for of in range(17))
        assert all(len(transport.peers) == 16 for transport in transports)


def test_who_waits_for_a_link_hears_of_a_newer_generation() -> None:
    with crew(2, connected=False) as (a, b):
        a.introduce({a.worker: a.address, b.worker: b.address})
        task = Task(lambda: a.exchange(1, 1, receives=[(b.worker, 0, bytearray())]))  # the later one, b, would dial
        a.interrupt(2)
        with pytest.raises(GenerationChanged):
            task.result()


def test_payloads_of_any_size_reach_all_members_of_any_group(transports: list[Transport], algorithm: str) -> None:
    for size in range(1, len(transports) + 1):
        payloads = [os.urandom(17 * index % 5 * 40_000 + index) for index in range(size)]
        assert each(Group.all_gather_bytes, groups_of(transports[:size]), payloads) == [payloads] * size


@pytest.mark.parametrize("branches", [1, 2, 3])
def test_payloads_reach_all_members_through_trees_of_any_depth(
    transports: list[Transport], branches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_module, "DIRECT_MEMBERS", 0)
    monkeypatch.setattr(group_module, "BRANCHES", branches)
    for size in range(1, len(transports) + 1):
        payloads = [os.urandom(index) for index in range(size)]
        groups = groups_of(transports[:size])
        for _ in range(2):
            assert each(Group.all_gather_bytes, groups, payloads) == [payloads] * size


@pytest.mark.parametrize("size", [18, 64, 74])
def test_neighbourhood_is_mutual_and_a_loss_makes_few_new_neighbours(size: int) -> None:
    members = [f"a/{index}#0" for index in range(size)]
    before = pairs_of_neighbours(members)
    assert all((other, member) in before for member, other in before)
    new = [pairs_of_neighbours([one for one in members if one != lost]) - before for lost in members]
    assert sum(map(len, new)) / size < size / 2


def pairs_of_neighbours(members: list[str]) -> set[tuple[str, str]]:
    return {(member, near) for member in members for near in neighbours(members, member)}


def test_up_to_sixteen_members_everyone_is_a_neighbour() -> None:
    members = [f"a/{index}#0" for index in range(DIRECT_MEMBERS)]
    assert neighbours(members, members[3]) == tuple(member for member in members if member != members[3])
    assert neighbours(members[:1], members[0]) == ()


def test_reduce_scatter_and_all_gather_with_uneven_counts(transports: list[Transport], algorithm: str) -> None:
    counts = [5, 0, 70_000, 1]
    groups = groups_of(transports[:4])
    tensors = [torch.full((sum(counts),), float(member + 1)) for member in range(4)]

    def run(group: Group, tensor: Tensor) -> Tensor:
        own = group.reduce_scatter(tensor, counts, scale=0.5)
        assert own.data_ptr() == tensor.split(counts)[group.rank].data_ptr() or not own.numel()
        owned = own.clone()
        own += group.rank
        group.all_gather(tensor, counts)
        return owned

    owned = each(run, groups, tensors)
    assert [len(own) for own in owned] == counts
    assert all(bool((own == 5.0).all()) for own in owned)
    expected = torch.cat([torch.full((count,), 5.0 + member) for member, count in enumerate(counts)])
    assert all(torch.equal(tensor, expected) for tensor in tensors)


def test_all_gather_bytes_returns_payloads_of_any_length(transports: list[Transport], algorithm: str) -> None:
    groups = groups_of(transports[:5])
    payloads = [b"x" * length for length in (0, 1, 100, 100_000, 7)]
    gathered = each(Group.all_gather_bytes, groups, payloads)
    assert gathered == [payloads] * 5


def test_all_gather_json_returns_the_values_of_all_as_json_has_them(
    transports: list[Transport], algorithm: str
) -> None:
    values: list[object] = [None, {"a": (1, 2)}, [], "text", 0.5]
    told = each(Group.all_gather_json, groups_of(transports[:5]), values)
    assert told == [[None, {"a": [1, 2]}, [], "text", 0.5]] * 5


@pytest.mark.parametrize("late", [0, 3, 6])
@pytest.mark.parametrize("operation", [Group.barrier, lambda group: group.all_reduce(torch.ones(7 << 19))])
def test_who_waits_for_one_that_has_entered_the_next_generation_enters_it_as_well(
    transports: list[Transport],
    algorithm: str,
    operation: Callable[[Group], None],
    late: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The root of the tree, a leaf, and the last in the ring, whose neighbour is another one with an eighth member.

    Nobody hears of the generation but by links. Chunks are above what a link holds that nobody reads.
    """
    monkeypatch.setattr(group_module, "BRANCHES", 2)
    before, after = groups_of(transports[:7]), groups_of(transports[:8])

    def run(place: int) -> list[int]:
        if place not in (late, 7):
            with pytest.raises(GenerationChanged) as raised:
                operation(before[place])
            assert raised.value.generation == after[place].generation
        transports[place].interrupt(after[place].generation)
        return after[place].gather_on_entry(place)

    assert each(run, range(8)) == [list(range(8))] * 8
    assert each(Group.all_gather_json, after, range(8)) == [list(range(8))] * 8, "what was told is in nobody's way"


def test_broadcast_from_every_root(transports: list[Transport], algorithm: str) -> None:
    for size in (1, 2, 5):
        for root in range(size):
            groups = groups_of(transports[:size])
            for length in (0, 1, 700, 600_000):
                tensors = [torch.full((length,), float(member)) for member in range(size)]
                each(Group.broadcast, groups, tensors, [root] * size)
                assert all(bool((tensor == root).all()) for tensor in tensors)


def test_send_and_receive_between_collectives(transports: list[Transport]) -> None:
    groups = groups_of(transports[:3])

    def run(group: Group) -> list[float]:
        group.barrier()
        got = torch.zeros(2, 3)
        if group.rank == 0:
            group.send(torch.full((2, 3), 1.0), 2)
            group.send(torch.full((2, 3), 2.0), 2)
        elif group.rank == 2:
            group.receive(got, 0)
            other = torch.zeros(2, 3)
            group.receive(other, 0)
            got += 10 * other
        total = torch.ones(1)
        group.all_reduce(total)
        return [float(got[1, 2]), float(total)]

    assert each(run, groups) == [[0.0, 3.0], [0.0, 3.0], [21.0, 3.0]]


def test_a_pair_exchanges_big_buffers_both_ways_at_once(transports: list[Transport]) -> None:
    groups = groups_of(transports[:2])
    ours = [bytes([member + 1]) * (9 << 20) for member in range(2)]
    got = [bytearray(9 << 20), bytearray()]
    views = [memoryview(got[0]), got[1]]
    each(
        lambda g: g.exchange([(1 - g.rank, memoryview(ours[g.rank]))], [(1 - g.rank, views[g.rank])]),
        groups,
    )
    assert got == [ours[1], ours[0]]


def test_contributions_that_require_gradients_are_reduced_in_place(transports: list[Transport]) -> None:
    groups = groups_of(transports[:2])
    tensors = [torch.ones(40_000, requires_grad=True) for _ in groups]
    each(lambda g, t: g.all_reduce(t, 0.5), groups, tensors)
    assert all(bool((tensor == 1).all()) for tensor in tensors)


def test_unsuitable_tensors_are_refused_with_their_shape(transports: list[Transport]) -> None:
    (group,) = groups_of(transports[:1])
    with pytest.raises(ValueError, match=r"1-D contiguous.*\(2, 2\)"):
        group.all_reduce(torch.ones(2, 2))
    with pytest.raises(ValueError, match="cannot be scaled"):
        group.all_reduce(torch.ones(2, dtype=torch.int64), 0.5)
    with pytest.raises(ValueError, match="do not cut 3 elements"):
        group.all_gather(torch.ones(3), [1, 1])


def test_a_worker_outside_the_members_has_no_group(transports: list[Transport]) -> None:
    with pytest.raises(ValueError, match="not in"):
        Group(transports[0], 1, ["b/0#0"])


def test_groups_of_one_generation_with_members_in_common_take_turns(
    transports: list[Transport], algorithm: str
) -> None:
    """As the axes of a mesh do: each member has the same order of operations as every other, where both take part."""
    generation = next(_generations)
    workers = [transport.worker for transport in transports]
    sets = [workers, workers[:4], workers[2:7], workers[::2], workers[::-1]]
    order = torch.randint(len(sets), (40,), generator=torch.Generator().manual_seed(5)).tolist()

    def run(transport: Transport) -> dict[int, list[float]]:
        groups = {
            number: Group(transport, generation, members, number)
            for number, members in enumerate(sets)
            if transport.worker in members
        }
        found: dict[int, list[float]] = {number: [] for number in groups}
        for turn, number in enumerate(order):
            if number in groups:
                tensor = torch.full((3,), float(turn * 100 + workers.index(transport.worker)))
                groups[number].all_reduce(tensor)
                found[number].append(tensor[0].item())
        return found

    for found in each(run, transports):
        for number, sums in found.items():
            places = [workers.index(worker) for worker in sets[number]]
            turns = [turn for turn, chosen in enumerate(order) if chosen == number]
            assert sums == [float(sum(100 * turn + place for place in places)) for turn in turns]
