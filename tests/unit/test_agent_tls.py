"""Agents of different machines ask each other over TLS, with certificates of the job on both sides."""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from elaunch.agent.watch import liveness
from elaunch.rendezvous.cluster import standings
from elaunch.rendezvous.cluster.inquiry import HEAD, new_challenge, question_line, read_answer
from elaunch.rendezvous.cluster.standings import Answers, ask, listens
from elaunch.rendezvous.security.contexts import AgentContexts
from elaunch.rendezvous.security.identity import AUTHORITY, NODE, NodeIdentity
from elaunch.rendezvous.security.secret import LinkEncryption, SecuritySettings
from tests.helpers import wait_until
from tests.unit.test_standings import FORGED, HOSTILE, PATIENCE_S, TOKEN, AgentPort, B, closes, drips, stranger

OTHER_TOKEN = "00000000000000000000000000000000"


@pytest.fixture
def identities() -> Iterator[Callable[..., NodeIdentity]]:
    made: list[NodeIdentity] = []

    def make(token: str = TOKEN, links: LinkEncryption = "on") -> NodeIdentity:
        """What a node of a job without a secret has after it has joined."""
        identity = NodeIdentity(SecuritySettings(links=links), "job", f"node{len(made)}", encrypts=True)
        made.append(identity)
        if token:
            identity.make_of_token(token, time.time())
        return identity

    yield make
    for identity in made:
        identity.remove()


@pytest.fixture
def agent_b(identities: Callable[..., NodeIdentity]) -> Iterator[AgentPort]:
    made = AgentPort(contexts=AgentContexts(identities()))
    yield made
    if not made.has_ended:
        made.close()


def asked(identity: NodeIdentity, *places: str) -> Answers:
    """What a node hears that asks for b at these addresses."""
    contexts = AgentContexts(identity)
    seats = {"b" if number == 0 else f"b{number}": place for number, place in enumerate(places)}
    return ask(seats, TOKEN, tls=lambda address: contexts.get(address, False))


def test_agents_of_one_job_answer_and_who_looks_on_reads_nothing(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where each byte comes by itself."""
    monkeypatch.setattr(standings, "ANSWER_S", PATIENCE_S)
    heard = bytearray()

    def relays(link: socket.socket) -> None:
        with agent_b.connect() as onward:
            back = threading.Thread(target=forward, args=(onward, link), daemon=True)
            back.start()
            forward(link, onward)
            back.join(PATIENCE_S)

    def forward(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while part := one.recv(1 << 16):
                heard.extend(part)
                for byte in part:
                    other.send(bytes([byte]))
            other.shutdown(socket.SHUT_WR)

    agent_b.port._address = "placeholder"
    with stranger(relays) as place:
        agent_b.port._address = place  # as behind a forwarded port
        answers = asked(identities(), place)
    assert answers.standings == {"b": B}
    assert len(heard) > 1000
    assert HEAD not in heard
    assert b"Standing" not in heard
    assert agent_b.said == []


def test_an_answer_that_does_not_fit_into_the_socket_comes_whole(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "ANSWER_S", PATIENCE_S)
    ended = tuple(f"10.{number >> 8}.{number & 255}.1:29400" for number in range(40_000))
    agent_b.standing = type(B)("b", generation=7, ended=ended)
    assert asked(identities(), agent_b.address).standings == {"b": agent_b.standing}


def test_who_only_looks_whether_an_agent_lives_does_not_disturb_it(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity]
) -> None:
    for _ in range(3):
        agent_b.connect().close()
    assert listens(agent_b.address)
    assert asked(identities(), agent_b.address).standings == {"b": B}
    wait_until(lambda: agent_b.held == 0, PATIENCE_S, "the connections to be closed")
    assert agent_b.said == []


# -- strangers that ask -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [*HOSTILE, "the token itself, in plain text"])
def test_who_does_not_encrypt_is_told_nothing_whatever_it_knows(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity], what: str
) -> None:
    for _ in range(3):
        right = question_line(TOKEN, agent_b.address, new_challenge())
        heard = agent_b.hear(HOSTILE[what](agent_b.address) if what in HOSTILE else right)
        assert HEAD not in heard
        assert B.store.encode() not in heard
        assert asked(identities(), agent_b.address).standings == {"b": B}
    (line,) = agent_b.said
    assert line.startswith(f"127.0.0.1 asked this agent, at {agent_b.address}, how it stands, and was told nothing: ")


@pytest.mark.parametrize("shows", ["no certificate", "one of another job"])
def test_the_right_question_of_somebody_without_a_certificate_of_the_job_is_not_read(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity], shows: str
) -> None:
    """Each side refuses the other: here the one that asks takes whatever certificate it is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if shows == "one of another job":
        context.load_cert_chain(os.path.join(identities(OTHER_TOKEN).folder, NODE))
    heard = b""
    with contextlib.suppress(OSError), context.wrap_socket(agent_b.connect()) as link:
        link.sendall(question_line(TOKEN, agent_b.address, new_challenge()))
        heard = link.recv(1 << 16)
    assert heard == b""
    wait_until(lambda: agent_b.said, PATIENCE_S, "a line about it")
    assert "certificate" in agent_b.said[0].lower()
    assert asked(identities(), agent_b.address).standings == {"b": B}


def test_a_handshake_that_comes_to_no_end_is_hung_up_on(agent_b: AgentPort, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "ASK_S", 0.2)
    with agent_b.connect() as link:
        link.sendall(b"\x16\x03\x01\x01")
        assert link.recv(1) == b""
    assert agent_b.held == 0
    assert agent_b.said == []


def test_one_that_is_silent_after_the_handshake_is_hung_up_on(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "ASK_S", 0.5)
    context = AgentContexts(identities()).get(agent_b.address, False)
    assert context is not None
    with context.wrap_socket(agent_b.connect()) as link:
        link.sendall(HEAD)
        assert link.recv(1) == b""
    assert agent_b.said == []


def test_a_question_in_many_records_is_answered(agent_b: AgentPort, identities: Callable[..., NodeIdentity]) -> None:
    challenge = new_challenge()
    context = AgentContexts(identities()).get(agent_b.address, False)
    assert context is not None
    with context.wrap_socket(agent_b.connect()) as link:
        for byte in question_line(TOKEN, agent_b.address, challenge):
            link.sendall(bytes([byte]))
        heard = b"".join(iter(partial(link.recv, 1 << 16), b""))
    assert read_answer(heard, TOKEN, agent_b.address, challenge) == B


def test_within_the_job_the_proof_of_the_token_still_counts(
    identities: Callable[..., NodeIdentity],
) -> None:
    """As where a secret makes the certificates, and the node has begun a job of its own."""
    other = AgentPort(OTHER_TOKEN, contexts=AgentContexts(identities()))
    try:
        answers = asked(identities(), other.address)
    finally:
        other.close()
    assert (answers.standings, answers.silent) == ({}, {other.address})
    assert "does not know the token" in other.said[0]


# -- strangers that answer --------------------------------------------------------------------------------------------


def answers_in_plain_text(link: socket.socket) -> None:
    """Says what the agent would have said before it was asked for a certificate."""
    link.sendall(HEAD + b"0" * 32 + b" " + FORGED.store.encode() + b"\n")
    link.recv(1 << 16)


@pytest.mark.parametrize(("serve", "is_stranger"), [(answers_in_plain_text, True), (closes, False), (drips, True)])
def test_who_answers_without_a_handshake_is_not_believed(
    agent_b: AgentPort,
    identities: Callable[..., NodeIdentity],
    serve: Callable[[socket.socket], None],
    is_stranger: bool,
) -> None:
    with stranger(serve) as place:
        answers = asked(identities(), agent_b.address, place)
    assert answers.standings == {"b": B}
    assert (answers.silent, answers.ended) == ({place}, set())
    assert answers.strangers == ({"b1": place} if is_stranger else {})


def test_an_agent_of_another_job_at_the_address_of_a_lost_one_is_not_believed(
    identities: Callable[..., NodeIdentity],
) -> None:
    other = AgentPort(contexts=AgentContexts(identities(OTHER_TOKEN)))
    try:
        answers = asked(identities(), other.address)
    finally:
        other.close()
    assert (answers.standings, answers.ended) == ({}, set())
    assert answers.strangers == {"b": other.address}


def test_one_that_has_not_joined_yet_neither_asks_nor_is_asked(
    agent_b: AgentPort, identities: Callable[..., NodeIdentity]
) -> None:
    assert asked(identities(""), agent_b.address).silent == {agent_b.address}
    newcomer = AgentPort(contexts=AgentContexts(identities("")))
    try:
        answers = asked(identities(), newcomer.address)
    finally:
        newcomer.close()
    assert (answers.silent, answers.strangers) == ({newcomer.address}, {})
    assert agent_b.said == newcomer.said == []


# -- where it is encrypted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("links", "address", "is_encrypted"),
    [
        ("auto", "10.0.0.3:4711", True),
        ("auto", "[fd00::3]:4711", True),
        ("auto", "127.0.0.2:4711", False),
        ("auto", "[::1]:4711", False),
        ("auto", "localhost:4711", False),
        ("on", "127.0.0.2:4711", True),
        ("off", "10.0.0.3:4711", False),
    ],
)
def test_both_sides_decide_by_the_address(
    identities: Callable[..., NodeIdentity], links: LinkEncryption, address: str, is_encrypted: bool
) -> None:
    for is_server in (False, True):
        context = AgentContexts(identities(links=links)).get(address, is_server)
        assert (context is not None) is is_encrypted
        if context is not None:
            assert context.minimum_version is ssl.TLSVersion.TLSv1_3
            assert context.verify_mode is ssl.CERT_REQUIRED


def test_a_node_that_finds_its_job_takes_the_certificate_of_that(identities: Callable[..., NodeIdentity]) -> None:
    identity = identities(OTHER_TOKEN)
    contexts = AgentContexts(identity)
    first = contexts.get("10.0.0.3:1", True)
    identity.make_of_token(TOKEN, time.time())
    agent = AgentPort(contexts=contexts)
    try:
        assert contexts.get("10.0.0.3:1", True) is not first
        assert asked(identities(), agent.address).standings == {"b": B}
    finally:
        agent.close()


def test_nothing_is_read_from_the_working_directory_of_a_node_without_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, identities: Callable[..., NodeIdentity]
) -> None:
    made = identities()
    for name in (AUTHORITY, NODE):
        (tmp_path / name).write_bytes((Path(made.folder) / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    without = NodeIdentity(SecuritySettings(), "job", "a", encrypts=False)
    with pytest.raises(OSError, match="no certificate"):
        AgentContexts(without).get("10.0.0.3:1", True)
