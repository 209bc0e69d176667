"""How a node opens the rendezvous store again and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elaunch.rendezvous.cluster.opener import AGAIN_S, MOST_PATIENCE, SHORT_S, StoreOpener


class Words:
    """Stores by their addresses; each has keys."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **stores: dict[str, bytes]) -> None:
        self.stores, self.now_s, self.opened = stores, 100.0, list[str]()
        listens = lambda address: address[0] in stores  # noqa: E731
        monkeypatch.setattr("elaunch.rendezvous.cluster.opener.listens", listens)
        self.opener = StoreOpener("a:1,b:2", cast(Any, self._open), lambda: self.now_s)

    def _open(self, endpoint: str, patience: int) -> Any:
        self.opened.append(endpoint)
        keys = self.stores[endpoint[0]]
        return SimpleNamespace(get=keys.get, create=keys.setdefault, close=lambda: None)

    def leave(self) -> None:
        """Leaves word for those who come to where the job began."""
        self.opener.leave_word("moved", "generation")


def test_word_is_left_where_the_job_began_for_one_that_begins_another_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that comes back may have reached nobody just then (seen in tests.soak)."""
    words = Words(monkeypatch, a={})
    words.leave()
    assert words.opened == [], "the servers are where they were"
    words.opener.use(["b:2", "c:3"])
    words.leave()
    assert words.stores["a"] == {"moved": b"b:2,c:3"}


def test_no_word_is_left_in_the_store_itself_by_another_name_nor_where_a_job_has_begun(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = Words(monkeypatch, a={"generation": b"7"})
    words.opener.use(["10.0.0.1:1"])
    words.leave()
    words.leave()
    assert words.stores["a"] == {"generation": b"7"}
    assert words.opened == ["a:1"], "it is not looked at again at once"
    del words.stores["a"]["generation"]
    words.now_s += 2 * AGAIN_S
    words.leave()
    assert words.stores["a"] == {"moved": b"10.0.0.1:1"}


class Opened:
    """An opener with a clock of its own, and what its connections were given."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.given: list[tuple[str, int]] = []
        self.opener = StoreOpener("a:1,b:2", cast(Any, self._open), lambda: self.now_s)

    def _open(self, endpoint: str, patience: int) -> Any:
        self.given.append((endpoint, patience))
        return SimpleNamespace(is_closed=lambda: True, use=lambda _: None)

    def after(self, seconds: float) -> int:
        """Opens the store after this time, and returns the patience of the connection."""
        self.now_s += seconds
        self.opener()
        return self.given[-1][1]


def test_each_connection_after_one_of_no_use_is_given_twice_the_time() -> None:
    opened = Opened()
    assert [opened.after(1.0) for _ in range(6)] == [1, 2, 4, 8, MOST_PATIENCE, MOST_PATIENCE]


def test_a_patient_connection_is_of_no_use_where_it_lasts_no_longer_than_its_requests_may_take() -> None:
    opened = Opened()
    opened.after(0.0)
    assert opened.after(SHORT_S - 1.0) == 2
    assert opened.after(2 * SHORT_S - 1.0) == 4
    assert opened.after(4 * SHORT_S) == 1


def test_the_next_connection_after_one_that_lasted_is_as_the_first() -> None:
    opened = Opened()
    assert [opened.after(SHORT_S) for _ in range(3)] == [1, 1, 1]


def test_a_connection_leads_to_the_servers_that_there_are_now() -> None:
    opened = Opened()
    opened.after(0.0)
    opened.opener.use(["c:3", "d:4"])
    opened.after(SHORT_S)
    opened.opener.move("e:5")
    opened.after(SHORT_S)
    assert [endpoint for endpoint, _ in opened.given] == ["a:1,b:2", "c:3,d:4", "e:5"]
