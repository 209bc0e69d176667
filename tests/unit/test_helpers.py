"""How tests wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests import helpers


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the next pauses take, in seconds, the last one first; those after it take what they should."""
    now, taken = [0.0], list[float]()

    def sleep(seconds: float) -> None:
        now[0] += taken.pop() if taken else seconds

    monkeypatch.setattr(helpers, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=sleep))
    return taken


def test_the_time_in_which_a_process_stood_still_is_no_time_that_it_waited(pauses: list[float]) -> None:
    pauses.append(100.0)
    seen = iter([False, False, True])
    assert helpers.wait_until(lambda: next(seen), 10.0, "what comes once others run again")


@pytest.mark.parametrize("each_s", [0.005, 0.9])
def test_a_wait_ends_however_slowly_the_process_is_run(pauses: list[float], each_s: float) -> None:
    pauses += [each_s] * 10_000
    with pytest.raises(pytest.fail.Exception, match="waited 10 s in vain for what never comes"):
        helpers.wait_until(lambda: False, 10.0, "what never comes")
    assert len(pauses) >= 10_000 - 10.0 / each_s - 2
