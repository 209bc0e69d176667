"""How a node opens the rendezvous store again and again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from elaunch.rendezvous.cluster.opener import MOST_PATIENCE, SHORT_S, StoreOpener


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
