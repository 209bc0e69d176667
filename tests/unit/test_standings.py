"""How agents tell each other how they stand to the store, over real connections."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from elaunch.rendezvous.cluster import standings
from elaunch.rendezvous.cluster.standings import AGAIN_S, ANSWER_S, PATIENT_EVERY, Rounds, answer, ask, listens
from elaunch.rendezvous.rules.founding import Standing
from tests.helpers import find_free_port

B = Standing("b", epoch=1, newest=2, store="10.0.0.2:1", founder="b", generation=7, away=True, ended=("a:1",))


@pytest.fixture
def agent_b() -> Iterator[str]:
    """The address of an agent that tells everybody how it stands."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                while True:
                    answer(listener.accept()[0], B)
            except OSError:
                pass  # closed

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join(10)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of an agent that is stopped: the kernel accepts for it, and nothing comes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_agents_answer_have_ended_or_are_silent(agent_b: str, silent: str) -> None:
    nobody = f"127.0.0.1:{find_free_port()}"
    seats = {"b": agent_b, "c": silent, "d": nobody, "e": "no address", "f": agent_b}
    answers = ask(seats, (agent_b, nobody))
    assert answers.standings == {"b": B}, "what another one says at the address of f does not count for f"
    assert answers.ended == {nobody}
    assert answers.listening == {agent_b}


def test_who_only_looks_whether_an_agent_lives_does_not_disturb_it(agent_b: str) -> None:
    for _ in range(3):
        host, port = agent_b.split(":")
        socket.create_connection((host, int(port)), 10).close()
    assert listens(agent_b)
    assert ask({"b": agent_b}).standings == {"b": B}


def test_those_that_did_not_answer_hold_up_the_next_rounds_less(
    agent_b: str, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: dict[str, list[float]] = {"b": [], "c": [], "server": []}
    names = {agent_b: "b", silent: "c", "server:1": "server"}

    def look(address: str, within_s: float) -> object:
        waited[names[address]].append(within_s)
        return {"b": B, "c": "it is silent", "server": False}[names[address]]

    monkeypatch.setattr(standings, "_ask", look)
    monkeypatch.setattr(standings, "listens", look)
    now = 0.0
    rounds = Rounds(lambda: now)
    for _ in range(PATIENT_EVERY + 2):
        now += 1.0
        answers = rounds.ask({"b": agent_b, "c": silent}, ("server:1",))
        assert answers is not None
        assert answers.standings == {"b": B}
        assert answers.silent == {silent, "server:1"}
        assert rounds.ask({"b": agent_b, "c": silent}, ("server:1",)) is None, "it is not due"
    expected = [ANSWER_S, *[AGAIN_S] * (PATIENT_EVERY - 1), ANSWER_S, AGAIN_S]
    assert waited == {"b": [ANSWER_S] * len(expected), "c": expected, "server": expected}
    rounds.begin()
    now += 1.0
    rounds.ask({"c": silent}, ())
    assert waited["c"][-1] == ANSWER_S, "of another loss than before"
