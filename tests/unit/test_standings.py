"""How agents tell each other how they stand to the store, over real connections, and what strangers get and can do."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.agent.watch import liveness
from elaunch.agent.watch.liveness import LivenessPort
from elaunch.errors import ProtocolError
from elaunch.rendezvous.cluster import standings
from elaunch.rendezvous.cluster.inquiry import (
    HEAD,
    QUESTION_BYTES,
    answer_line,
    new_challenge,
    question_line,
    read_answer,
    read_question,
)
from elaunch.rendezvous.cluster.standings import (
    AGAIN_S,
    ANSWER_S,
    LOST_S,
    PATIENT_EVERY,
    NoAnswer,
    Rounds,
    ask,
    listens,
)
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.rules.founding import Standing
from elaunch.rendezvous.security.contexts import AgentContexts
from tests.helpers import find_free_port, wait_until
from tests.hostile import KINDS, PIECES, mutated

TOKEN = "7bf57aa6b2e4576295e99a9c3fb1c6e2"
B = Standing("b", epoch=1, newest=2, store="10.0.0.2:1", founder="b", generation=7, away=True, ended=("a:1",))
FORGED = replace(B, epoch=9, newest=9, store="10.0.0.66:1", away=False)
PATIENCE_S = 20.0


class AgentPort:
    """The liveness port of an agent `b` of this job, in a thread that turns its loop."""

    def __init__(self, token: str = TOKEN, host: str = "127.0.0.1", contexts: AgentContexts | None = None) -> None:
        self.said: list[str] = []
        self.standing, self.token = B, token
        self._selector = selectors.DefaultSelector()
        listening = socket.create_server((host, 0), backlog=1024)
        self.address = f"127.0.0.1:{listening.getsockname()[1]}"
        self.port = LivenessPort(
            self._selector,
            listening,
            self.address,
            lambda: (self.standing, self.token),
            self.said.append,
            lambda: contexts.get(self.address, True) if contexts is not None else None,
        )
        self._ends = False
        self._thread = threading.Thread(target=self._turn, daemon=True)
        self._thread.start()

    @property
    def held(self) -> int:
        """The number of connections that it keeps."""
        return len(self.port._askers)

    @property
    def has_ended(self) -> bool:
        return self._ends

    def connect(self) -> socket.socket:
        host, port = self.address.split(":")
        link = socket.create_connection((host, int(port)), PATIENCE_S)
        link.settimeout(PATIENCE_S)
        return link

    def hear(self, said: bytes) -> bytes:
        """What it answers to this before it hangs up."""
        heard = b""
        with self.connect() as link, contextlib.suppress(ConnectionError):
            link.sendall(said)
            while part := link.recv(1 << 16):
                heard += part
        return heard

    def close(self) -> None:
        self._ends = True
        self._thread.join(PATIENCE_S)
        self.port.close()
        self._selector.close()
        assert not self._thread.is_alive()

    def _turn(self) -> None:
        while not self._ends:
            for key, _ in self._selector.select(0.01):
                key.data.serve()
            self.port.on_time(time.monotonic())


@pytest.fixture
def agent_b() -> Iterator[AgentPort]:
    made = AgentPort()
    yield made
    if not made.has_ended:
        made.close()


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of an agent that is stopped: the kernel accepts for it, and nothing comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def stranger(serve: Callable[[socket.socket], None], port: int = 0) -> Iterator[str]:
    """The address at which somebody who is not of the job answers whoever connects."""
    ends = threading.Event()

    def accept(listener: socket.socket) -> None:
        while not ends.is_set():
            with contextlib.suppress(OSError):
                link, _ = listener.accept()
                with link:
                    link.settimeout(PATIENCE_S)
                    serve(link)

    with socket.create_server(("127.0.0.1", port)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=accept, args=(listener,), daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        ends.set()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


# -- agents of one job ------------------------------------------------------------------------------------------------


def test_agents_answer_have_ended_or_are_silent(agent_b: AgentPort, silent: str) -> None:
    nobody = f"127.0.0.1:{find_free_port()}"
    seats = {"b": agent_b.address, "c": silent, "d": nobody, "e": "no address", "f": agent_b.address}
    answers = ask(seats, TOKEN, (agent_b.address, nobody))
    assert answers.standings == {"b": B}, "what another one says at the address of f does not count for f"
    assert answers.ended == {nobody}
    assert answers.listening == {agent_b.address}
    assert answers.strangers == {}
    assert agent_b.said == []


def test_who_only_looks_whether_an_agent_lives_does_not_disturb_it(agent_b: AgentPort) -> None:
    for _ in range(3):
        agent_b.connect().close()
    assert listens(agent_b.address)
    assert ask({"b": agent_b.address}, TOKEN).standings == {"b": B}
    wait_until(lambda: agent_b.held == 0, PATIENCE_S, "the connections to be closed")
    assert agent_b.said == []


def test_an_answer_that_does_not_fit_into_the_socket_comes_whole(
    agent_b: AgentPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "ANSWER_S", PATIENCE_S)
    agent_b.standing = replace(B, ended=tuple(f"10.{number >> 8}.{number & 255}.1:29400" for number in range(40_000)))
    assert ask({"b": agent_b.address}, TOKEN).standings == {"b": agent_b.standing}


@pytest.mark.parametrize("here", ["", "another"])
@pytest.mark.parametrize("there", ["", TOKEN])
def test_nodes_that_do_not_have_the_same_token_are_silent_to_each_other(here: str, there: str) -> None:
    """One that has not joined has none; one that began a job of its own, and will find the real one, has another."""
    other = AgentPort(there)
    try:
        answers = ask({"b": other.address}, here)
    finally:
        other.close()
    assert (answers.standings, answers.ended, answers.strangers) == ({}, set(), {})
    assert answers.silent == {other.address}
    assert len(other.said) == (1 if here and there else 0)


def test_those_that_did_not_answer_hold_up_the_next_rounds_less(silent: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: dict[str, list[float]] = {"b": [], "c": [], "server": []}
    names = {"b:1": "b", silent: "c", "server:1": "server"}

    def look(address: str, within_s: float) -> bool:
        waited[names[address]].append(within_s)
        return False

    def look_at_seat(node: str, address: str, token: str, within_s: float, tls: object) -> object:
        look(address, within_s)
        return B if node == "b" else NoAnswer.SILENT

    monkeypatch.setattr(standings, "_ask", look_at_seat)
    monkeypatch.setattr(standings, "listens", look)
    now = 0.0
    rounds = Rounds(lambda: now)
    for _ in range(PATIENT_EVERY + 2):
        now += 1.0
        answers = rounds.ask({"b": "b:1", "c": silent}, TOKEN, ("server:1",))
        assert answers is not None
        assert answers.standings == {"b": B}
        assert answers.silent == {silent, "server:1"}
        assert rounds.ask({"b": "b:1", "c": silent}, TOKEN, ("server:1",)) is None, "it is not due"
    expected = [ANSWER_S, *[AGAIN_S] * (PATIENT_EVERY - 1), ANSWER_S, AGAIN_S]
    assert waited == {"b": [ANSWER_S] * len(expected), "c": expected, "server": expected}
    rounds.begin()
    now += 1.0
    rounds.ask({"c": silent}, TOKEN, ())
    assert waited["c"][-1] == ANSWER_S, "of another loss than before"


def test_who_has_been_silent_for_long_has_not_only_paused(monkeypatch: pytest.MonkeyPatch) -> None:
    answering = {"b"}

    def look(node: str, address: str, token: str, within_s: float, tls: object) -> object:
        return replace(B, node=node) if node in answering else NoAnswer.SILENT

    monkeypatch.setattr(standings, "_ask", look)
    now = 0.0
    rounds = Rounds(lambda: now)

    def paused(after_s: float) -> set[str]:
        nonlocal now
        now += after_s
        answers = rounds.ask({"b": "b:1", "c": "c:1"}, TOKEN, ())
        assert answers is not None
        return answers.paused

    assert paused(10.0) == {"c:1"}
    assert paused(LOST_S - 0.1) == {"c:1"}
    answering.clear()
    assert paused(0.1) == {"b:1"}, "c has not answered for long"
    answering.update("bc")
    assert paused(0.1) == set()
    answering.remove("c")
    assert paused(LOST_S) == {"c:1"}, "it has answered meanwhile"
    rounds.begin()
    assert paused(LOST_S) == {"c:1"}, "that is another loss"


# -- a stranger that asks ---------------------------------------------------------------------------------------------


def question(address: str, token: str = TOKEN) -> bytes:
    return question_line(token, address, new_challenge())


HOSTILE: dict[str, Callable[[str], bytes]] = {
    "garbage": lambda address: b"\xff" * QUESTION_BYTES,
    "HTTP": lambda address: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n".ljust(QUESTION_BYTES, b"\n"),
    "too much": lambda address: b"x" * (1 << 20),
    "another token": lambda address: question(address, "another"),
    "no token": lambda address: question(address, ""),
    "the question to another address": lambda address: question("10.0.0.3:1"),
    "a proof of nothing": lambda address: HEAD + b"0" * 32 + b" " + b"0" * 32 + b"\n",
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_stranger_is_told_nothing_and_the_others_are_answered(agent_b: AgentPort, what: str) -> None:
    for _ in range(3):
        assert agent_b.hear(HOSTILE[what](agent_b.address)) == b""
        assert ask({"b": agent_b.address}, TOKEN).standings == {"b": B}
    (line,) = agent_b.said
    assert line.startswith(f"127.0.0.1 asked this agent, at {agent_b.address}, how it stands, and was told nothing: ")


def test_a_question_that_comes_in_parts_is_answered(agent_b: AgentPort) -> None:
    challenge = new_challenge()
    line = question_line(TOKEN, agent_b.address, challenge)
    with agent_b.connect() as link:
        for part in (line[:7], line[7:60], line[60:]):
            link.sendall(part)
            time.sleep(0.03)
        heard = b"".join(iter(partial(link.recv, 1 << 16), b""))
    assert read_answer(heard, TOKEN, agent_b.address, challenge) == B


def test_strangers_that_say_nothing_or_come_to_no_end_are_bounded_in_number(
    agent_b: AgentPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent_b.port._most = 8
    monkeypatch.setattr(liveness, "ASK_S", 60.0)
    with contextlib.ExitStack() as stack:
        for number in range(40):
            link = stack.enter_context(agent_b.connect())
            link.sendall(HEAD if number % 2 else b"")
        wait_until(lambda: agent_b.held == 8, PATIENCE_S, "all to be accepted")
        assert ask({"b": agent_b.address}, TOKEN).standings == {"b": B}
        assert agent_b.held <= 8
    wait_until(lambda: agent_b.held == 0, PATIENCE_S, "all to be closed")
    assert agent_b.said == []


@pytest.mark.parametrize("said", [b"", HEAD])
def test_a_stranger_that_says_nothing_or_comes_to_no_end_is_hung_up_on(
    agent_b: AgentPort, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(liveness, "ASK_S", 0.2)
    with agent_b.connect() as link:
        link.sendall(said)
        assert link.recv(1) == b""
    assert agent_b.held == 0
    assert agent_b.said == []


def test_the_port_is_due_when_the_oldest_has_taken_too_long(agent_b: AgentPort) -> None:
    with agent_b.connect():
        wait_until(lambda: agent_b.held, PATIENCE_S, "the connection")
        due_s = agent_b.port.due_s
        assert due_s is not None
        assert time.monotonic() < due_s <= time.monotonic() + liveness.ASK_S
    wait_until(lambda: agent_b.held == 0, PATIENCE_S, "its end")
    assert agent_b.port.due_s is None


# -- a stranger that answers in the place of an agent -----------------------------------------------------------------


def replies(line: bytes, link: socket.socket) -> None:
    """Says this, whatever was asked; whether it comes with the question or before it."""
    link.sendall(line)
    link.recv(1 << 16)


def relayed(agent: AgentPort, link: socket.socket) -> None:
    """Gives the question to a real agent that lives elsewhere, and its answer to the asker."""
    link.sendall(agent.hear(link.recv(1 << 16)))


def proven_by_another(link: socket.socket) -> None:
    """Answers as one who has another token, for whatever address."""
    challenge = link.recv(1 << 16)[len(HEAD) : len(HEAD) + 32]
    host, port = link.getsockname()
    link.sendall(answer_line("another", f"{host}:{port}", challenge, FORGED))


def reflected(link: socket.socket) -> None:
    """Takes the proof that the asker has shown for its own."""
    asked = link.recv(1 << 16)
    link.sendall(HEAD + asked[-33:-1] + b" " + to_json(FORGED) + b"\n")


PLACES: dict[str, Callable[[socket.socket], None]] = {
    "says how it stands, unasked": partial(replies, to_json(FORGED)),
    "has no proof": partial(replies, HEAD + b"0" * 32 + b" " + to_json(FORGED) + b"\n"),
    "says something else": partial(replies, b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "has another token": proven_by_another,
    "reflects": reflected,
}


@pytest.mark.parametrize("what", PLACES)
def test_a_forged_standing_is_not_believed_and_the_real_ones_are(agent_b: AgentPort, what: str) -> None:
    with stranger(PLACES[what]) as place:
        answers = ask({"b": agent_b.address, "c": place}, TOKEN)
        forged = ask({"b": place}, TOKEN)
    assert answers.standings == {"b": B}
    assert answers.strangers == {"c": place}
    assert forged.standings == {}
    assert answers.ended == forged.ended == set(), "a stranger's answer does not prove that the agent has ended"
    assert place in answers.silent


def test_an_answer_that_was_overheard_is_of_no_use_later(agent_b: AgentPort) -> None:
    old = agent_b.hear(question(agent_b.address))
    assert to_json(B) in old
    agent_b.close()
    with stranger(partial(replies, old), int(agent_b.address.split(":")[1])) as place:
        assert place == agent_b.address
        assert ask({"b": place}, TOKEN).strangers == {"b": place}


def test_an_agent_that_was_started_again_elsewhere_does_not_answer_for_the_one_that_has_ended(
    agent_b: AgentPort,
) -> None:
    with stranger(partial(relayed, agent_b)) as place:
        answers = ask({"b": place}, TOKEN)
    assert (answers.standings, answers.silent, answers.ended) == ({}, {place}, set())


def drips(link: socket.socket) -> None:
    """Sends a byte now and then, and never an end."""
    end_s = time.monotonic() + 5.0
    with contextlib.suppress(OSError):
        for byte in HEAD.ljust(1000, b"0"):
            link.send(bytes([byte]))
            time.sleep(0.05)
            assert time.monotonic() < end_s, "whoever asked is still there"


def pours(link: socket.socket) -> None:
    """Sends without an end."""
    with contextlib.suppress(OSError):
        link.sendall(HEAD)
        for _ in range(1000):
            link.sendall(b"0" * (1 << 16))
        raise AssertionError("whoever asked reads all of it")


def closes(link: socket.socket) -> None:
    """Hangs up at once, as an agent does whose token is another one."""


@pytest.mark.parametrize(
    ("serve", "is_stranger"), [(drips, False), (pours, True), (partial(replies, HEAD), False), (closes, False)]
)
def test_whoever_asks_waits_for_no_stranger_and_reads_no_more_than_an_answer(
    serve: Callable[[socket.socket], None], is_stranger: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if serve is pours:
        monkeypatch.setattr(standings, "ANSWER_S", PATIENCE_S)  # what ends it is its size
    with stranger(serve) as place:
        answers = ask({"b": place}, TOKEN)
    assert answers.silent == {place}
    assert (answers.standings, answers.ended) == ({}, set())
    assert answers.strangers == ({"b": place} if is_stranger else {})


# -- the lines --------------------------------------------------------------------------------------------------------

CHALLENGE = new_challenge()
ADDRESS = "10.0.0.2:4711"
QUESTION = question_line(TOKEN, ADDRESS, CHALLENGE)
ANSWER = answer_line(TOKEN, ADDRESS, CHALLENGE, B)
MUTATIONS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.floats(0, 1), st.sampled_from(PIECES)), min_size=1, max_size=3
)


def test_a_question_and_an_answer_are_read_by_who_has_the_same_token_and_address() -> None:
    assert len(QUESTION) == QUESTION_BYTES
    assert read_question(QUESTION, TOKEN, ADDRESS) == CHALLENGE
    assert read_answer(ANSWER, TOKEN, ADDRESS, CHALLENGE) == B
    assert TOKEN.encode() not in QUESTION + ANSWER


@pytest.mark.parametrize(("token", "address"), [("another", ADDRESS), ("", ADDRESS), (TOKEN, "10.0.0.2:4712")])
def test_they_are_refused_by_who_has_not(token: str, address: str) -> None:
    with pytest.raises(ProtocolError):
        read_question(QUESTION, token, address)
    with pytest.raises(ProtocolError):
        read_answer(ANSWER, token, address, CHALLENGE)


def test_without_a_token_nobody_believes_a_proof_of_no_token() -> None:
    with pytest.raises(ProtocolError):
        read_question(question_line("", ADDRESS, CHALLENGE), "", ADDRESS)
    with pytest.raises(ProtocolError):
        read_answer(answer_line("", ADDRESS, CHALLENGE, B), "", ADDRESS, CHALLENGE)


def test_an_answer_to_another_question_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no proof of the job's token"):
        read_answer(ANSWER, TOKEN, ADDRESS, new_challenge())


@given(MUTATIONS)
def test_nothing_but_the_line_itself_is_read(mutations: list[tuple[str, float, bytes]]) -> None:
    asked, answered = mutated(QUESTION, mutations), mutated(ANSWER, mutations)
    if asked != QUESTION:
        with pytest.raises(ProtocolError):
            read_question(asked, TOKEN, ADDRESS)
    if answered != ANSWER:
        with pytest.raises(ProtocolError):
            read_answer(answered, TOKEN, ADDRESS, CHALLENGE)
