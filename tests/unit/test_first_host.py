"""Whether the first node begins a job, or finds that the others go on with it."""

from __future__ import annotations

import errno
from types import SimpleNamespace
from typing import Any

import pytest

from elaunch.agent import launch


class Network:
    """What connections to an address come to, one after the other; the last for ever."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *outcomes: OSError | None) -> None:
        self.outcomes, self.calls = list(outcomes), 0
        monkeypatch.setattr("socket.create_connection", self._connect)
        monkeypatch.setattr(launch, "PROBE_AGAIN_S", 0.001)

    def _connect(self, address: tuple[str, int], timeout: float) -> Any:
        assert timeout > 0
        self.calls += 1
        outcome = self.outcomes.pop(0) if len(self.outcomes) > 1 else self.outcomes[0]
        if outcome is not None:
            raise outcome
        return SimpleNamespace(close=lambda: None)


def test_a_machine_whose_network_is_not_there_yet_asks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a first node that comes back would begin another job beside the one that goes on (seen in tests.soak)."""
    network = Network(monkeypatch, OSError(errno.ENETUNREACH, "no route"), TimeoutError(), None)
    assert launch._is_served(("10.0.0.3", 29400))
    assert network.calls == 3


def test_a_machine_that_refuses_has_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    network = Network(monkeypatch, ConnectionRefusedError())
    assert not launch._is_served(("10.0.0.3", 29400))
    assert network.calls == 1


def test_one_that_never_answers_is_not_waited_for_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "PROBE_S", 0.05)
    Network(monkeypatch, OSError(errno.EHOSTUNREACH, "no route"))
    assert not launch._is_served(("10.0.0.3", 29400))
