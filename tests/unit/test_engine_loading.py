"""Samples of a model in layers that are loaded ahead: the same as without, each once, and by whoever needs them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from elaunch.errors import StateError
from elaunch.plan.build import symmetric
from elaunch.plan.tiling import MicroBatch, Plan
from elaunch.workers.comm.group import Group
from elaunch.workers.data.source import DataSource
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.samples import Samples
from elaunch.workers.layers.settings import EngineSettings
from tests.helpers import is_running, scaled, wait_until
from tests.unit.comm_crew import crew, outcomes
from tests.unit.engine_crew import LENGTH, WORDS, Sentences, loss, model, train

CPU = torch.device("cpu")
BATCH, UNIT = 12, 3
PLAN = Plan.parse(
    f"""plan layers 2 batch {BATCH} micro-batch {UNIT} zero interleaved
    layers 0:2 samples 0:12/3 workers w0"""
)


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """Samples that draw random numbers, and write down that they were loaded."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if self.folder is not None:
            with (self.folder / "loaded").open("a") as file:
                file.write(f"{index}\n")
        return torch.tensor([index, random.random()]), torch.rand(1)


class Torn(Sentences):
    """Sentences with a word that is drawn at random."""

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        words, following = super().__getitem__(index)
        words = words.clone()
        words[int(torch.randint(LENGTH, ()))] = random.randrange(WORDS)
        return words, following


def samples(num_workers: int, folder: Path | None = None) -> Samples:
    return Samples(DataSource.of(Numbers(folder), seed=5, loading={"num_workers": num_workers}), CPU)


@pytest.fixture
def two_ways() -> Iterator[tuple[Samples, Samples]]:
    both = samples(0), samples(2)
    yield both
    both[1].close()


RUNS = st.lists(st.tuples(st.integers(0, BATCH - 1), st.integers(1, 5)), min_size=1, max_size=5)


@pytest.mark.parametrize("seed", range(scaled(6, 60)))
def test_any_rows_in_any_order_are_the_same_whoever_loads_them(two_ways: tuple[Samples, Samples], seed: int) -> None:
    # Plans change between steps, steps are begun again or left half done, and units are cut, joined and used twice.
    draw, step = random.Random(seed), 0
    for _ in range(8):
        runs = [draw.randrange(BATCH) for _ in range(draw.randrange(6))]
        micro_batches: list[MicroBatch] = [(range(run, min(run + draw.randrange(1, 6), BATCH)),) for run in runs]
        loads = [one.begin(PLAN, step, micro_batches) for one in two_ways]
        for one in micro_batches[: draw.randrange(len(micro_batches) + 1)]:
            (x, y), (ahead_x, ahead_y) = (load(one) for load in loads)
            assert torch.equal(x, ahead_x)
            assert torch.equal(y, ahead_y)
            assert x[:, 0].tolist() == two_ways[0].order.ids(step * BATCH + one[0].start, len(one[0]))
        step = max(0, step + draw.choice([1, 1, 1, 0, -1]))


@given(RUNS)
def test_a_unit_is_loaded_once_in_a_step_however_often_its_rows_are_used(runs: list[tuple[int, int]]) -> None:
    loaded: list[list[int]] = []

    class Once:
        def __len__(self) -> int:
            return 40

        def __getitems__(self, ids: list[int]) -> list[tuple[Tensor, Tensor]]:
            loaded.append(ids)
            return [(torch.tensor([one]), torch.tensor(one)) for one in ids]

    micro_batches: list[MicroBatch] = [(range(first, min(first + count, BATCH)),) for first, count in runs]
    once = Samples(DataSource.of(Once(), shuffle=False), CPU)
    load = once.begin(PLAN, 1, micro_batches)
    for one in micro_batches:
        assert load(one)[0].flatten().tolist() == [BATCH + sample for sample in one[0]]
    units = dict.fromkeys(sample // UNIT for one in micro_batches for sample in one[0])
    assert loaded == [[BATCH + UNIT * unit + row for row in range(UNIT)] for unit in units]
    assert not once._units, "what is not needed any more is kept"


def test_a_worker_that_needs_no_samples_starts_no_process_until_it_does() -> None:
    one, before = samples(2), psutil.Process().children()

    def loading() -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child not in before]

    one.begin(PLAN, 0, [])
    assert loading() == []
    load = one.begin(PLAN, 1, [(range(3),)])
    assert load((range(3),))[0][:, 0].tolist() == one.order.ids(BATCH, 3)
    children = loading()
    assert len(children) == 2
    one.begin(PLAN, 2, [])
    assert loading() == children
    one.close()
    wait_until(lambda: not any(is_running(child.pid) for child in children), 30, "the loading processes to end")


def test_nothing_is_loaded_for_steps_that_will_not_come(tmp_path: Path) -> None:
    one = samples(1, tmp_path)
    with one.until(3):
        for step in range(3):
            load = one.begin(PLAN, step, [(range(3, 6),)])
            load((range(3, 6),))
    ids = [sample for step in range(3) for sample in one.order.ids(step * BATCH + 3, 3)]
    assert sorted(map(int, (tmp_path / "loaded").read_text().split())) == sorted(ids)
    assert one._loader is None


def engine(plan: Plan, group: Group | None = None, **settings: Any) -> Engine:
    given = EngineSettings.of(seed=3, dtype=torch.float64, snapshots=0, **settings)
    return Engine(model(plan.n_layers), loss, lambda named: torch.optim.AdamW(named, lr=0.01), plan, given, group=group)


@pytest.mark.parametrize("given", [{"num_workers": 2}, {"num_workers": 1, "prefetch_factor": 3}, "a DataLoader"])
def test_an_engine_trains_alike_whoever_loads(given: Any) -> None:
    plan = symmetric(["w0"], 3, BATCH, UNIT)
    plain, ahead = engine(plan, dataset=Torn()), None
    if given == "a DataLoader":
        ahead = engine(plan, dataset=DataLoader(Torn(), batch_size=7, shuffle=True, num_workers=2))
    else:
        ahead = engine(plan, dataset=Torn(), **given)
    children = set(psutil.Process().children())
    expected = [plain.train_step() for _ in range(4)]
    assert set(psutil.Process().children()) == children
    assert [ahead.train_step() for _ in range(4)] == expected
    assert len(set(psutil.Process().children()) - children) == (1 if "prefetch_factor" in given else 2)
    ahead.close()
    assert set(psutil.Process().children()) <= children


def test_a_pipeline_whose_first_and_last_layers_one_worker_has_trains_alike_too() -> None:
    texts = (
        "layers 0:4 samples 0:12/3 workers w0",
        "layers 0:1 samples 0:12/3 workers w0\n layers 1:3 samples 0:12/3 workers w1\n"
        " layers 3:4 samples 0:12/3 workers w0",
    )
    header = f"plan layers 4 batch {BATCH} micro-batch {UNIT} zero interleaved\n"
    whole, cut = (Plan.parse(header + text) for text in texts)
    assert train(cut, 2, dataset=Torn())[0] == train(whole, 2, dataset=Torn())[0]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"num_workers": -1}, ValueError, "num_workers must be 0 or more, got -1"),
        ({"n_workers": 2}, TypeError, "unexpected keyword argument 'n_workers'"),
        ({"dataset": DataLoader(Numbers(), batch_size=None)}, ValueError, "batch_size=None"),
        ({"dataset": DataLoader([1, 2])}, StateError, "the items of list must be pairs"),  # type: ignore[arg-type]
    ],
)
def test_what_cannot_be_loaded_is_said_when_the_engine_is_made(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        engine(PLAN, **{"dataset": Sentences(), **settings})


def test_workers_with_samplers_of_different_orders_are_refused_and_so_is_a_checkpoint_of_another_order() -> None:
    plan, orders = symmetric(["a/0#0", "a/1#0"], 3, BATCH, UNIT, dp=2), (range(60), range(59, -1, -1))
    described = [engine(PLAN, dataset=DataLoader(Sentences(), sampler=list(order))).builder for order in orders]
    assert described[0].cursor(PLAN) != described[1].cursor(PLAN)
    with crew(2) as transports:

        def make(place: int) -> Engine:
            group = Group(transports[place], 1, plan.workers)
            return engine(plan, group, dataset=DataLoader(Sentences(), sampler=list(orders[place])))

        for outcome in outcomes([lambda: make(0), lambda: make(1)]):
            assert isinstance(outcome, StateError)
            assert "a/0#0 and a/1#0 were given different samples: {'samples in the data set': 60" in str(outcome)
