"""Buffers of a model that is wrapped: whichever they are at the time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from elaunch.workers.data_parallel.buffers import FoundBuffers, ModelBuffers


class Counter(nn.Module):
    """Has a buffer that it counts in."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(2))


class Own(Counter):
    """Finds its buffers itself."""

    kept: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.__dict__["kept"] = torch.zeros(1)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        yield "kept", self.kept


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Sequential(Counter(), nn.Sequential()))


def counter_of(made: nn.Sequential) -> Counter:
    counter = made.get_submodule("2.0")
    assert isinstance(counter, Counter)
    return counter


def assign(made: nn.Sequential) -> None:
    made[1].running_mean = torch.ones(2)


def register(made: nn.Sequential) -> None:
    made[0].register_buffer("more", torch.zeros(3))


def take_away(made: nn.Sequential) -> None:
    made[1]._buffers["running_var"] = None


def add_a_module(made: nn.Sequential) -> None:
    made.append(Counter())


def delete_a_module(made: nn.Sequential) -> None:
    del made[1]


def replace_a_module(made: nn.Sequential) -> None:
    made[1] = nn.BatchNorm1d(2)


def move_a_module(made: nn.Sequential) -> None:
    inner = made[2]
    assert isinstance(inner, nn.Sequential)
    counter, other = inner
    made[2] = nn.Sequential(nn.Sequential(counter), other)


def share_a_buffer(made: nn.Sequential) -> None:
    made[1]._buffers["running_var"] = made[1]._buffers["running_mean"]


def do_nothing(made: nn.Sequential) -> None:
    pass


def let_a_module_find_its_own(made: nn.Sequential) -> None:
    made.append(Own())


CHANGES = (
    assign,
    register,
    take_away,
    add_a_module,
    delete_a_module,
    replace_a_module,
    move_a_module,
    share_a_buffer,
    do_nothing,
    let_a_module_find_its_own,
)


@pytest.mark.parametrize("change", CHANGES)
def test_they_are_those_of_the_moment_however_the_model_was_changed(change: Callable[[nn.Sequential], None]) -> None:
    made = model()
    found = FoundBuffers(made)
    for _ in range(2):
        assert list(map(id, found.now())) == list(map(id, made.buffers()))
        change(made)
    assert list(map(id, found.now())) == list(map(id, made.buffers()))


def test_a_model_that_stays_as_it_is_is_not_walked_through_again(monkeypatch: pytest.MonkeyPatch) -> None:
    made = model()
    found = FoundBuffers(made)
    before = list(found.now())
    for parameter in made.parameters():
        parameter.data.zero_()
    counter_of(made).count.add_(1)
    monkeypatch.setattr(made, "buffers", lambda: pytest.fail("the model was walked through"))
    assert list(map(id, found.now())) == list(map(id, before))


def test_one_that_finds_its_buffers_itself_is_asked_each_time() -> None:
    made = Own()
    found = FoundBuffers(made)
    assert found.now()[0] is made.kept
    made.__dict__["kept"] = torch.ones(1)
    assert found.now()[0] is made.kept


def test_a_dropped_step_leaves_no_trace_in_a_buffer() -> None:
    made = model()
    buffers = ModelBuffers(made)
    buffers.begin()
    counter_of(made).count.add_(1)
    buffers.drop()
    assert counter_of(made).count.tolist() == [0.0, 0.0]
