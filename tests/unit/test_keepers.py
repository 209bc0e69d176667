"""Who keeps copies of whose state, where workers are on nodes, and nodes in failure domains."""

from __future__ import annotations

from collections import Counter
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.rendezvous.membership import node_of
from elaunch.workers.member.keepers import KeeperRing, place_in

repeatable = settings(deadline=None, derandomize=True)


def workers(**nodes: int) -> list[str]:
    return [f"{node}/{rank}#0" for node, count in nodes.items() for rank in range(count)]


def kept(workers: list[str], domains: dict[str, str], copies: int = 1) -> dict[str, tuple[str, ...]]:
    by_worker = {worker: domains[node_of(worker)] for worker in workers if node_of(worker) in domains}
    ring = KeeperRing(workers, place_in(workers, by_worker))
    return {worker: ring.keepers(worker, copies) for worker in workers}


def test_without_domains_the_jth_worker_of_a_node_is_kept_by_the_jth_of_the_next() -> None:
    assert kept(workers(a=2, b=2), {}) == {
        "a/0#0": ("b/0#0",),
        "a/1#0": ("b/1#0",),
        "b/0#0": ("a/0#0",),
        "b/1#0": ("a/1#0",),
    }


def test_copies_go_to_another_domain_although_another_node_is_nearer() -> None:
    found = kept(workers(a=1, b=1, c=1, d=1), {"a": "left", "b": "left", "c": "right", "d": "right"})
    assert {node_of(one): node_of(keepers[0]) for one, keepers in found.items()} == {
        "a": "c",
        "b": "d",
        "c": "a",
        "d": "b",
    }


def test_members_of_a_domain_need_not_stand_together() -> None:
    found = kept(workers(a=1, b=1, c=1, d=1), {"a": "left", "b": "right", "c": "left", "d": "right"})
    assert sorted(keepers[0] for keepers in found.values()) == sorted(found), "each keeps one"
    assert all({node_of(one), node_of(keepers[0])} not in ({"a", "c"}, {"b", "d"}) for one, keepers in found.items())


def test_a_domain_with_most_of_the_workers_is_kept_evenly_by_the_others() -> None:
    found = kept(workers(a=2, b=2, c=1, d=1), {"a": "left", "b": "left", "c": "right", "d": "right"})
    left = [node_of(found[one][0]) for one in workers(a=2, b=2)]
    assert Counter(left) == {"c": 2, "d": 2}
    assert {node_of(found[one][0]) for one in workers(c=1, d=1)} <= {"a", "b"}


def test_several_copies_go_to_several_domains_then_nodes_then_workers() -> None:
    found = kept(workers(a=1, b=1, c=1, d=2), {"a": "1", "b": "2", "c": "2", "d": "3"}, copies=4)
    places = [node_of(one) for one in found["a/0#0"]]
    assert {*places[:2]} in ({"b", "d"}, {"c", "d"})
    assert {*places[:3]} == {"b", "c", "d"}
    assert places[3] == "d"


def test_one_domain_is_none_and_a_node_without_one_is_one_of_its_own() -> None:
    one = dict.fromkeys("ab", "left")
    assert kept(workers(a=1, b=1), one) == kept(workers(a=1, b=1), {})
    found = kept(workers(a=1, b=1, c=1), {"a": "left", "b": "left"})
    assert node_of(found["a/0#0"][0]) == node_of(found["b/0#0"][0]) == "c"


def test_who_is_alone_has_no_keeper() -> None:
    assert kept(["a/0#0"], {}, copies=2) == {"a/0#0": ()}
    assert kept(workers(a=3), {}) == {"a/0#0": ("a/1#0",), "a/1#0": ("a/2#0",), "a/2#0": ("a/0#0",)}


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[str], dict[str, str]]:
    counts = draw(st.lists(st.integers(1, 4), min_size=1, max_size=8))
    members = workers(**{f"n{number}": count for number, count in enumerate(counts)})
    names = [f"n{number}" for number in range(len(counts))]
    domains = {name: draw(st.sampled_from(["", "x", "y", "z"])) for name in names}
    return list(draw(st.permutations(members))), {name: domain for name, domain in domains.items() if domain}


@repeatable
@given(jobs(), st.integers(1, 4))
def test_no_copy_is_lost_with_its_owner_if_that_can_be_avoided_and_the_load_is_even(
    job: tuple[list[str], dict[str, str]], copies: int
) -> None:
    members, domains = job
    place = place_in(members, {one: domains.get(node_of(one), "") for one in members})
    found = kept(members, domains, copies)
    places, nodes = Counter(map(place, members)), set(map(node_of, members))
    for owner, keepers in found.items():
        assert owner not in keepers
        assert len(set(keepers)) == len(keepers) == min(copies, len(members) - 1)
        assert len({place(one) for one in keepers} - {place(owner)}) == min(copies, len(places) - 1)
        assert len({node_of(one) for one in keepers} - {node_of(owner)}) >= min(copies, len(places) - 1, len(nodes) - 1)
    if copies == 1 and len(places) > 1:
        load = Counter(keepers[0] for keepers in found.values())
        largest = max(places.values())
        assert max(load.values()) == max(1, ceil(largest / (len(members) - largest)))
