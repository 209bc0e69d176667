"""Whoever looks at a job from outside goes on where its server has left with its node."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from elaunch.errors import StoreUnavailable
from elaunch.rendezvous import observer as module
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import JobSize, NodeDoc
from elaunch.rendezvous.memory import MemoryStore
from elaunch.rendezvous.observer import Observer
from elaunch.rendezvous.store import WatchEvent


class Servers(MemoryStore):
    """Some of which the store can lose: then the watch ends, and a few calls get no answer."""

    def __init__(self) -> None:
        super().__init__()
        self.unanswered = 0
        self.lost: Callable[[StoreUnavailable], Any] = lambda why: None

    def range(self, prefix: Any) -> Any:
        if self.unanswered:
            self.unanswered -= 1
            raise StoreUnavailable("no answer came")
        return super().range(prefix)

    def watch(
        self,
        prefix: Any,
        start: int,
        notify: Callable[[list[WatchEvent]], Any],
        lost: Callable[[StoreUnavailable], Any],
    ) -> Any:
        self.lost = lost
        return super().watch(prefix, start, notify, lost)

    def says(self, node: str) -> None:
        self.put(f"/elaunch/job/nodes/{node}", to_json(NodeDoc(node, f"host-{node}", 1)))


@pytest.fixture
def seen() -> tuple[Servers, Observer]:
    store = Servers()
    for node in "ab":
        store.says(node)
    store.put("/elaunch/job/size", to_json(JobSize("1", 1, 2, 0.0)))
    return store, Observer(store, "job")


def test_an_observer_goes_on_with_another_server(seen: tuple[Servers, Observer]) -> None:
    store, observer = seen
    store.unanswered = 2
    store.lost(StoreUnavailable("the server hung up"))
    store.delete("/elaunch/job/nodes/a")  # it learns of what it has missed
    store.delete("/elaunch/job/size")  # which counts on
    store.says("c")
    while [doc.node for doc in observer.documents.nodes] != ["b", "c"]:
        assert observer.wait(time.monotonic() + 20), "nothing changed"
    assert observer.documents.size is not None
    store.says("d")
    while observer.documents.node("d") is None:
        assert observer.wait(time.monotonic() + 20), "it follows no more"


@pytest.mark.parametrize("first", ["its caller's time", "its own time"])
def test_an_observer_that_finds_no_other_says_what_it_has_lost(
    seen: tuple[Servers, Observer], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, observer = seen
    store.unanswered = 1_000_000
    store.lost(StoreUnavailable("the server hung up"))
    if first == "its own time":
        monkeypatch.setattr(module, "BACK_S", 0.3)
    with pytest.raises(StoreUnavailable, match="the server hung up"):
        observer.wait(time.monotonic() + (0.3 if first == "its caller's time" else 3600.0))
