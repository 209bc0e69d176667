"""Which nodes cannot be reached, by who answers when; and asking many machines at once."""

from __future__ import annotations

import queue
import socket
import threading
import time
from typing import Any

import pytest

from elaunch.agent.watch import reachability
from elaunch.agent.watch.reachability import CutNodes, Reach, unanswered
from elaunch.rendezvous.membership import Cut
from tests.helpers import mute_address, wait_until

WELL_S = 5.0
B, NOBODY = frozenset("b"), frozenset[str]()


def test_who_does_not_answer_is_cut_off_until_it_has_answered_for_some_time() -> None:
    cut = CutNodes(WELL_S)
    assert not cut.take(["a", "b"], [], 0.0)
    assert cut.take(["a", "b"], ["b"], 1.0)
    assert cut.nodes == {"b"}
    assert not cut.take(["b"], ["b"], 2.0)
    assert not cut.take(["b"], [], 3.0)
    assert not cut.take(["b"], [], 3.0 + WELL_S - 0.1)
    assert cut.take(["b"], [], 3.0 + WELL_S)
    assert cut.nodes == frozenset()


def test_one_that_comes_and_goes_stays_cut_off() -> None:
    cut = CutNodes(WELL_S)
    cut.take(["b"], ["b"], 0.0)
    for turn in range(10):
        assert not cut.take(["b"], [], turn * WELL_S + 1)
        assert not cut.take(["b"], ["b"], turn * WELL_S + 4)
    assert cut.nodes == {"b"}


def test_a_machine_that_refuses_has_answered() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refusing = f"127.0.0.1:{closed.getsockname()[1]}"
    with socket.create_server(("127.0.0.1", 0)) as listening, mute_address() as silent:
        asked = {"listens": f"127.0.0.1:{listening.getsockname()[1]}", "refuses": refusing}
        assert unanswered(asked | {"silent": silent}, 0.05) == {"silent"}
        assert unanswered(asked, 5.0) == set()
        assert unanswered({}, 5.0) == set()
        assert unanswered({"nowhere": "no-such-host.invalid:1"}, 0.05) == {"nowhere"}
        assert unanswered({f"n{number}": refusing for number in range(2 * reachability.AT_ONCE + 1)}, 5.0) == set()


class Asked:
    """Stands for the other machines; `silent` are those that do not answer."""

    def __init__(self) -> None:
        self.silent = set[str]()
        self.asked = queue.SimpleQueue[tuple[str, ...]]()
        self.found = queue.SimpleQueue[tuple[tuple[Cut, ...], frozenset[str]]]()
        self.reach = Reach(lambda cut, well: self.found.put((cut, well)), 0.1, self.answer)

    def answer(self, addresses: object) -> set[str]:
        assert isinstance(addresses, dict)
        self.asked.put(tuple(sorted(addresses)))
        return self.silent & addresses.keys()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "AGAIN_S", 0.01)


def test_a_machine_that_can_be_reached_again_answers_in_the_same_round() -> None:
    """What was lost while it could not be reached would be sent again after a second."""

    def is_heard() -> bool:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
            room = threading.Timer(0.3, lambda: full.accept()[0].close())
            room.start()
            found = unanswered({"a": f"127.0.0.1:{full.getsockname()[1]}"}, 0.95)
            room.join()
        return found == set()

    assert any(is_heard() for _ in range(10)), "on a busy machine a round may be over before it is"


def test_a_name_server_that_takes_its_time_takes_none_of_the_machine_s(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = reachability._target

    def slowly(address: str) -> tuple[int, Any] | None:
        time.sleep(0.1)
        return resolve(address)

    monkeypatch.setattr(reachability, "_target", slowly)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert unanswered({"a": f"127.0.0.1:{listening.getsockname()[1]}"}, 0.05) == set()


@pytest.mark.usefixtures("quick")
def test_all_are_asked_once_and_then_those_that_did_not_answer_until_they_do() -> None:
    others = Asked()
    others.silent = {"b"}
    others.reach.check({"b": "10.0.0.2:1", "c": "10.0.0.3:1"}, "b")
    assert others.found.get(timeout=20) == ((Cut("b", "10.0.0.2"),), NOBODY)
    others.silent = set()
    assert others.found.get(timeout=20) == ((), NOBODY)
    others.reach.close()
    asked = [others.asked.get() for _ in range(others.asked.qsize())]
    assert asked[0] == ("b", "c")
    assert set(asked[1:]) == {("b",)}


@pytest.mark.usefixtures("quick")
def test_who_answers_although_a_worker_heard_nothing_is_named_and_nobody_is_asked_again() -> None:
    others = Asked()
    others.reach.check({"b": "10.0.0.2:1", "c": "10.0.0.3:1"}, "b")
    assert others.found.get(timeout=20) == ((), B)
    time.sleep(0.05)
    assert others.asked.qsize() == 1
    others.reach.check({}, "b")
    assert others.found.get(timeout=20) == ((), B)
    others.reach.close()


def test_the_thread_ends_with_it() -> None:
    others = Asked()
    others.reach.close()
    others = Asked()
    others.silent = {"b"}
    others.reach.check({"b": "10.0.0.2:1"}, "b")
    wait_until(lambda: others.asked.qsize() > 0, 20, "the first question")
    others.reach.close()
    others.reach.check({"b": "10.0.0.2:1"}, "b")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "address", ["", "x", "host:", ":1", "10.0.0.9:0", "10.0.0.9:99999", "10.0.0.9:²", "h:" + "9" * 5000]
)
def test_what_is_no_address_is_not_asked_and_the_others_are(address: str) -> None:
    others = Asked()
    others.silent = {"b"}
    others.reach.check({"a": address, "b": "10.0.0.2:1"}, "a")
    assert others.found.get(timeout=20) == ((Cut("b", "10.0.0.2"),), NOBODY)
    assert others.asked.get() == ("b",)
    others.reach.close()


def test_a_host_that_cannot_be_one_does_not_answer() -> None:
    assert unanswered({"a": "h" * 100 + ".:1"}, 0.05) == {"a"}


@pytest.mark.usefixtures("quick")
def test_a_round_that_fails_is_repeated(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    others = Asked()
    left = iter([1, 2, 3])

    def answer(addresses: object) -> set[str]:
        if next(left, None) is not None:
            raise OSError("too many open files")
        return {"b"}

    others.reach._ask = answer
    others.reach.check({"b": "10.0.0.2:1"}, "b")
    assert others.found.get(timeout=20) == ((Cut("b", "10.0.0.2"),), NOBODY)
    others.reach.close()
    assert capfd.readouterr().err.count("other nodes cannot be asked now") == 1


@pytest.mark.usefixtures("quick")
def test_a_thread_that_died_is_replaced_at_the_next_check(capfd: pytest.CaptureFixture[str]) -> None:
    others = Asked()
    others.silent = {"b"}
    deaths = iter([SystemExit(1)])

    def answer(addresses: object) -> set[str]:
        for death in deaths:
            raise death
        return {"b"}

    others.reach._ask = answer
    others.reach.check({"b": "10.0.0.2:1"}, "b")
    wait_until(lambda: others.reach._thread and not others.reach._thread.is_alive(), 20, "the death")
    others.reach.check({"b": "10.0.0.2:1"}, "b")
    assert others.found.get(timeout=20)[0] == (Cut("b", "10.0.0.2"),)
    others.reach.close()
    assert "thread elaunch-reach died: SystemExit: 1" in capfd.readouterr().err
