"""Which nodes serve the store of a job: the rule, and where its steps lead from wherever a job is."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from elaunch.rendezvous.cluster.servers import (
    AddServer,
    EtcdMember,
    EtcdServer,
    EtcdServers,
    PromoteServer,
    RemoveServer,
    ServerOffer,
    ServerStep,
    next_step,
)

PATIENCE_S = 2.0


def offers(names: str, leaving: str = "") -> list[ServerOffer]:
    return [ServerOffer(name, name, name in leaving) for name in names]


def members(names: str) -> list[EtcdMember]:
    """One for each letter: a capital has a vote, a small one is a learner."""
    return [EtcdMember(f"id of {name}", name.lower(), name.lower(), name.isupper()) for name in names]


def step(nodes: str, servers: str, leaving: str = "", lost_s: float = PATIENCE_S, late: str = "") -> str:
    """Returns the next step as a sign and the name of the node."""
    found = next_step(
        offers(nodes, leaving), members(servers), 3, dict.fromkeys("abcdef", lost_s), PATIENCE_S, set(late)
    )
    return as_text(found)


def as_text(found: ServerStep | None) -> str:
    match found:
        case AddServer():
            return f"+{found.offer.peer}"
        case PromoteServer():
            return f"^{found.member.peer}"
        case RemoveServer():
            return f"-{found.member.peer}"
    return ""


@pytest.mark.parametrize(
    ("nodes", "servers", "expected"),
    [
        ("a", "A", ""),
        ("ab", "A", ""),
        ("abc", "A", "+b"),
        ("abc", "Ab", "^b"),
        ("abc", "AB", "+c"),
        ("abcd", "ABc", "^c"),
        ("abcd", "ABC", ""),
        ("dabc", "ABC", ""),
        ("bcd", "ABC", "-a"),
        ("bcd", "BC", "+d"),
        ("bc", "ABC", "-a"),
        ("bc", "BC", "-c"),
        ("b", "B", ""),
        ("c", "ABC", ""),
        ("c", "BC", ""),
        ("ac", "Ab", "-b"),
        ("", "A", ""),
    ],
)
def test_there_are_three_servers_in_jobs_of_three_nodes_and_else_one(nodes: str, servers: str, expected: str) -> None:
    assert step(nodes, servers) == expected


def test_a_server_whose_node_has_only_just_gone_stays() -> None:
    assert step("bcd", "ABC", lost_s=PATIENCE_S - 0.1) == ""


@pytest.mark.parametrize(
    ("nodes", "servers", "leaving", "expected"),
    [
        ("abcd", "ABC", "b", "+d"),
        ("abcd", "ABCD", "b", "-b"),
        ("abc", "ABC", "b", "-b"),
        ("ac", "AC", "", "-c"),
        ("ab", "A", "a", "+b"),
        ("ab", "AB", "a", "-a"),
        ("abc", "ABC", "abc", ""),
    ],
)
def test_another_serves_before_one_leaves(nodes: str, servers: str, leaving: str, expected: str) -> None:
    assert step(nodes, servers, leaving) == expected


def test_the_server_that_leads_stays_where_one_of_several_has_to_go() -> None:
    servers = [replace(one, leads=one.peer == "c") for one in members("BC")]
    assert as_text(next_step(offers("bc"), servers, 3, {}, PATIENCE_S)) == "-b"
    servers = [replace(one, leads=one.peer == "d") for one in members("ABCD")]
    assert as_text(next_step(offers("abcd"), servers, 3, {}, PATIENCE_S)) == "-c"


def test_a_learner_that_does_not_catch_up_is_removed_and_not_asked_again() -> None:
    assert step("abcd", "Ab", late="b") == "-b"
    assert step("abcd", "A", late="b") == "+c"
    assert step("abc", "A", late="b") == ""


def test_only_servers_that_vote_are_told_to_agents() -> None:
    servers = EtcdServers((EtcdServer("a", "a:1", "a:2", True), EtcdServer("b", "b:1", "b:2"), EtcdServer("c", "c:1")))
    assert servers.clients == ("a:2",)
    assert servers.find("b:1") == servers.servers[1]
    assert servers.find("b:2") is None


@pytest.mark.parametrize("seed", range(200))
def test_whatever_comes_and_goes_the_steps_keep_a_quorum_and_come_to_an_end(seed: int) -> None:
    """Nodes die, come and leave at random between steps, as long as those that are left have a quorum."""
    chance = random.Random(seed)
    nodes, leaving, servers, fresh = ["a"], set[str](), members("A"), iter("bcdefghijklmnopqrstuvwxyz")
    for _ in range(200):
        event = chance.random()
        voters = [one.peer for one in servers if one.votes]
        if event < 0.1 and (name := next(fresh, "")):
            nodes.append(name)
        elif event < 0.2 and len(nodes) > 1:
            gone = chance.choice(nodes)
            if sum(peer in nodes and peer != gone for peer in voters) > len(voters) // 2:
                nodes.remove(gone)
        elif event < 0.25:
            leaving.add(chance.choice(nodes))
        servers = _carried_out(servers, nodes, leaving)
    for _ in range(20):
        servers = _carried_out(servers, nodes, leaving)
    assert next_step(_offered(nodes, leaving), servers, 3, {}, 0.0) is None
    usable = [name for name in nodes if name not in leaving]
    assert all(one.votes for one in servers)
    if usable:
        assert len(servers) == (3 if len(usable) >= 3 else 1)
        assert {one.peer for one in servers} <= set(usable)


def _offered(nodes: list[str], leaving: set[str]) -> list[ServerOffer]:
    return [ServerOffer(name, name, name in leaving) for name in nodes]


def _carried_out(servers: list[EtcdMember], nodes: list[str], leaving: set[str]) -> list[EtcdMember]:
    """Takes one step, as etcd would: only with a quorum, and with one learner at a time."""
    found = next_step(_offered(nodes, leaving), servers, 3, dict.fromkeys("abcdefghijklmnopqrstuvwxyz", 9.0), 2.0)
    voters = [one.peer for one in servers if one.votes]
    if found is not None:
        assert sum(peer in nodes for peer in voters) > len(voters) // 2
    match found:
        case AddServer():
            assert all(one.votes for one in servers)
            return [*servers, EtcdMember(found.offer.peer, found.offer.peer, found.offer.peer, False)]
        case PromoteServer():
            return [EtcdMember(one.id, one.peer, one.client, True) if one == found.member else one for one in servers]
        case RemoveServer():
            left = [one for one in servers if one != found.member]
            votes = [one.peer for one in left if one.votes]
            assert sum(peer in nodes for peer in votes) > len(votes) // 2
            return left
    return servers
