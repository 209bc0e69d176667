"""Micro-batches that are loaded ahead, by whom, and what becomes of them when the samples are dealt out anew."""

from __future__ import annotations

import ctypes
import os
import random
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torch.utils.data.distributed import DistributedSampler

from elaunch.workers.data.ahead import LoadedAhead, Place
from elaunch.workers.data.loader import Loader, MicroBatches, loader_of
from elaunch.workers.data.order import SampleOrder
from elaunch.workers.data.source import DataSource, Loading
from tests.helpers import is_running, soak, wait_until

SHARES = st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True)


def cut(units: Sequence[int]) -> tuple[range, ...]:
    return tuple(range(2 * unit, 2 * unit + 2) for unit in sorted(units))


# -- what is asked for ------------------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(SHARES, st.booleans(), st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=12),
    st.integers(1, 6),
)
def test_each_micro_batch_is_taken_whatever_is_dealt_out_and_no_more_is_asked_for_than_allowed(
    turns: list[tuple[list[int], bool, int, int]], depth: int
) -> None:
    ahead, step, steps = LoadedAhead(steps=len(turns)), 0, len(turns)
    queue: deque[tuple[int, Place | None]] = deque()
    wanted_before: set[Place] = set()
    for units, commits, taken, back in turns:
        share = cut(units)
        dropped = set(ahead.begin(step, share))
        wanted_before -= {place for number, place in queue if number in dropped}
        while len(queue) < depth:
            queue.append(ahead.ask())
        for samples in share if commits else share[:taken]:
            place = Place(step, samples.start, samples.stop)
            while not ahead.has(place):
                number, brought = queue.popleft()
                ahead.arrived(number, brought)
                queue.append(ahead.ask())
            assert ahead.take(place) == place
        assert {number for number, _ in queue} == set(ahead.coming)
        assert all(place is None or place.step < steps for _, place in queue)
        # After a commit the next step follows; else the same one again, or an older one from a checkpoint.
        step = min(step + 1, steps - 1) if commits else max(0, step - back)


def test_an_undisturbed_worker_asks_for_each_micro_batch_once_in_the_order_of_their_use() -> None:
    ahead, share = LoadedAhead(steps=3), cut([1, 4])
    asked = []
    for step in range(3):
        assert ahead.begin(step, share) == []
        for samples in share:
            number, place = ahead.ask()
            asked.append(place)
            ahead.arrived(number, "batch")
            assert ahead.take(Place(step, samples.start, samples.stop)) == "batch"
    assert asked == [Place(step, samples.start, samples.stop) for step in range(3) for samples in share]
    assert ahead.ask()[1] is None


def test_what_is_still_its_own_is_kept_and_the_rest_is_dropped() -> None:
    ahead = LoadedAhead(steps=9)
    ahead.begin(0, cut([0, 1]))
    asked = {place: number for number, place in (ahead.ask() for _ in range(6)) if place is not None}
    ahead.arrived(asked[Place(0, 0, 2)], "here")
    dropped = ahead.begin(0, cut([0, 2]))
    assert dropped == [asked[Place(step, 2, 4)] for step in range(3)]
    assert ahead.take(Place(0, 0, 2)) == "here"
    assert [ahead.ask()[1] for _ in range(4)] == [Place(0, 4, 6), Place(1, 4, 6), Place(2, 4, 6), Place(3, 0, 2)]


# -- who loads it -----------------------------------------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Samples that draw random numbers as transforms do."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index), torch.rand(2), random.random(), np.random.rand()


class Quiet(Noisy):
    def __getitem__(self, index: int) -> Any:
        return torch.tensor(index)


class Witness(Quiet):
    """Samples that say where they were loaded."""

    def __getitem__(self, index: int) -> Any:
        signal_at_parents_end = ctypes.c_int(0)
        ctypes.CDLL(None).prctl(2, ctypes.byref(signal_at_parents_end))
        info = get_worker_info()
        own = info is not None and isinstance(info.dataset, Witness)
        return torch.tensor([os.getpid(), signal_at_parents_end.value, own])


class Slow(Quiet):
    """Writes down what is loaded; waits for a file at all samples but the first two."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __getitem__(self, index: int) -> Any:
        with (self.folder / "loaded").open("a") as file:
            file.write(f"{index}\n")
        if index > 1:
            wait_until((self.folder / "go").exists, 30, "the test to let samples go")
        return torch.tensor(index)


def loader(dataset: Any, num_workers: int, steps: int = 5, shuffle: bool = True, **loading: Any) -> Loader:
    source = DataSource.of(dataset, seed=3, shuffle=shuffle, loading={"num_workers": num_workers, **loading})  # type: ignore[arg-type]
    order = SampleOrder(source.n_samples, source.seed, source.shuffle)
    return loader_of(MicroBatches(source, order, 8, 2, steps, torch.device("cpu")))


def drawn() -> Any:
    """What a model would draw after the micro-batch was loaded."""
    return torch.rand(1).item(), random.random(), np.random.rand()


def course(by: Loader, deals: Sequence[tuple[int, Sequence[int]]]) -> list[Any]:
    found = []
    for step, units in deals:
        by.begin(step, cut(units))
        for samples in cut(units):
            batch = by.take(step, samples)
            found.append(([one.tolist() for one in batch] if isinstance(batch, list) else batch.tolist(), drawn()))
    by.close()
    return found


DEALS = [(0, [0, 1]), (1, [0, 1]), (2, [1, 2, 3]), (2, [0]), (3, [0]), (1, [0]), (2, [3]), (3, [2, 3]), (4, [2, 3])]


@pytest.mark.parametrize("dataset", [Noisy(), Quiet()], ids=["noisy", "quiet"])
@pytest.mark.parametrize("method", ["fork", soak("spawn")])
def test_processes_load_the_same_micro_batches_with_the_same_random_numbers(dataset: Any, method: str) -> None:
    expected = course(loader(dataset, 0), DEALS)
    before = torch.get_rng_state()
    found = course(loader(dataset, 2, multiprocessing_context=method), DEALS)
    assert found == expected
    torch.set_rng_state(before)


def test_the_kernel_ends_a_loading_process_with_its_parent_and_scripts_see_their_own_data_set() -> None:
    by = loader(Witness(), 2)
    by.begin(0, cut([0, 1, 2]))
    seen = torch.cat([by.take(0, samples) for samples in cut([0, 1, 2])])
    pids = set(seen[:, 0].tolist())
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert set(seen[:, 1].tolist()) == {9}
    assert set(seen[:, 2].tolist()) == {1}
    by.close()
    assert not any(map(is_running, pids))


def test_micro_batches_of_another_member_are_not_loaded_any_more(tmp_path: Path) -> None:
    by = loader(Slow(tmp_path), 1, shuffle=False, prefetch_factor=4)
    by.begin(0, cut([0]))
    assert by.take(0, range(2)).tolist() == [0, 1]
    wait_until(lambda: "8\n" in (tmp_path / "loaded").read_text(), 30, "the next step to be loaded ahead")
    by.begin(0, cut([3]))
    (tmp_path / "go").touch()
    assert by.take(0, range(6, 8)).tolist() == [6, 7]
    by.close()
    loaded = Counter(map(int, (tmp_path / "loaded").read_text().split()))
    # The process was at sample 8.
    assert {9, 16, 17, 24, 25} & set(loaded) == set(), loaded


def test_an_error_of_the_data_set_reaches_the_script() -> None:
    by = loader([1, 2, 3, 4, 5, None], 1, shuffle=False)
    by.begin(0, cut([0, 2]))
    assert by.take(0, range(2)).tolist() == [1, 2]
    with pytest.raises(RuntimeError, match="NoneType"):
        by.take(0, range(4, 6))
    by.close()


def test_closing_leaves_no_process_behind() -> None:
    by = loader(Quiet(), 2)
    before = psutil.Process().children()
    by.begin(0, cut([0]))
    children = [one for one in psutil.Process().children() if one not in before]
    assert len(children) == 2
    by.close()
    wait_until(lambda: not any(is_running(one.pid) for one in children), 30, "the loading processes to end")


# -- what a script hands over -----------------------------------------------------------------------------------------


class Backwards(Sampler[int]):
    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        return iter(range(39, -1, -1))


class Whim(Backwards):
    def __iter__(self) -> Iterator[int]:
        return iter(random.sample(range(40), 40))


class Endless(Backwards):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 1


class Epochs(Backwards):
    def set_epoch(self, epoch: int) -> None: ...


def handed(**arguments: Any) -> DataSource:
    return DataSource.of(DataLoader(Quiet(), **arguments))


def begin(worker: int) -> None: ...


def test_all_that_a_data_loader_has_is_taken_from_it() -> None:
    source = handed(
        batch_size=5,
        collate_fn=tuple,
        num_workers=2,
        prefetch_factor=3,
        pin_memory=True,
        timeout=7,
        worker_init_fn=begin,
        multiprocessing_context="spawn",
        persistent_workers=True,
    )
    assert (source.batch_size, source.collate, source.num_workers, source.prefetch_factor) == (5, tuple, 2, 3)
    assert (source.pin_memory, source.timeout, source.worker_init_fn) == (True, 7, begin)
    assert source.multiprocessing_context.get_start_method() == "spawn"
    assert (source.seed, source.shuffle, source.order, source.n_samples) == (0, False, "", 40)


def test_what_the_call_says_replaces_what_the_loader_has() -> None:
    data = DataLoader(Quiet(), batch_size=5, num_workers=2, collate_fn=tuple)
    source = DataSource.of(data, seed=4, shuffle=True, collate_fn=list, loading=Loading(num_workers=0))
    assert (source.seed, source.shuffle, source.collate, source.num_workers) == (4, True, list, 0)


@pytest.mark.parametrize(
    ("arguments", "shuffle", "seed"),
    [
        ({}, False, 0),
        ({"shuffle": True}, True, 0),
        ({"sampler": DistributedSampler(Quiet(), 4, 1, shuffle=True, seed=6)}, True, 6),
        ({"sampler": DistributedSampler(Quiet(), 4, 1, shuffle=False)}, False, 0),
        ({"batch_sampler": BatchSampler(RandomSampler(Quiet()), 3, drop_last=True)}, True, 0),
        ({"batch_sampler": BatchSampler(SequentialSampler(Quiet()), 3, drop_last=False)}, False, 0),
    ],
)
def test_samplers_that_stand_for_an_order_are_replaced_by_ours(arguments: Any, shuffle: bool, seed: int) -> None:
    source = handed(**arguments)
    assert (source.shuffle, source.seed, source.order) == (shuffle, seed, "")
    assert source.batch_size == (3 if "batch_sampler" in arguments else 1)


def test_a_sampler_with_an_order_of_its_own_keeps_it_and_members_compare_it() -> None:
    source = handed(sampler=Backwards())
    assert [source.dataset[index].item() for index in (0, 1, 39)] == [39, 38, 0]
    assert torch.stack(source.dataset.__getitems__([0, 2])).tolist() == [39, 37]
    assert (source.n_samples, source.shuffle) == (40, False)
    assert source.order == handed(sampler=Backwards()).order != handed(sampler=[3, 1, 1]).order
    assert handed(sampler=[3, 1, 1]).n_samples == 3
    assert handed(sampler=torch.tensor([3, 1])).dataset[0].item() == 3


def test_a_random_subset_is_shuffled_by_our_order() -> None:
    source = handed(sampler=SubsetRandomSampler([5, 7, 9]))
    assert (source.n_samples, source.shuffle) == (3, True)
    assert sorted(source.dataset[index].item() for index in range(3)) == [5, 7, 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": None}, "a DataLoader with batch_size=None chooses its batches itself"),
        ({"batch_sampler": [[0, 1], [2]]}, "a DataLoader with the batch sampler list chooses its batches itself"),
        ({"sampler": RandomSampler(Quiet(), replacement=True)}, "RandomSampler.replacement=True, num_samples=40."),
        ({"sampler": RandomSampler(Quiet(), num_samples=7)}, "num_samples=7. of 40 samples draws some of them twice"),
        ({"sampler": WeightedRandomSampler([0.5] * 40, 40)}, "WeightedRandomSampler gives another order each time"),
        ({"sampler": Whim()}, "the sampler Whim gives another order each time"),
        ({"sampler": Endless()}, "the sampler Endless gives another order each time, or no end"),
        ({"sampler": Epochs()}, "the sampler Epochs shares out its samples among ranks, or changes its order"),
        ({"sampler": [3, 40]}, "the sampler list gives 40; expected numbers of samples, 0 to 39"),
        ({"sampler": []}, "the sampler list gives no samples"),
    ],
)
def test_an_order_that_cannot_be_dealt_out_is_refused_with_what_to_do(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        handed(**arguments)


def test_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match=r"no argument 'workers'; of DataLoader's it takes num_workers, "):
        DataSource.of(Quiet(), loading={"workers": 3})  # type: ignore[arg-type]
    for name, value, least in (("num_workers", -1, 0), ("prefetch_factor", 0, 1), ("timeout", -2, 0)):
        with pytest.raises(ValueError, match=f"{name} must be {least} or more, got {value}"):
            DataSource.of(Quiet(), loading={name: value})  # type: ignore[arg-type]


def test_prefetch_factor_none_and_persistent_workers_are_taken_as_data_loader_takes_them() -> None:
    source = DataSource.of(Quiet(), loading=Loading(prefetch_factor=None, persistent_workers=True, num_workers=1))
    assert (source.prefetch_factor, source.num_workers) == (2, 1)


def test_the_random_sampler_of_a_stateful_data_loader_is_taken_as_torchs() -> None:
    class OfTorchdata(Sampler[int]):
        """As torchdata's stands in a StatefulDataLoader: no subclass of torch's."""

        replacement = False

        def __init__(self, num_samples: int) -> None:
            self.num_samples = num_samples

        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(self.num_samples).tolist())

    n = len(Quiet())
    with pytest.raises(ValueError, match="the sampler OfTorchdata gives another order each time"):
        handed(sampler=OfTorchdata(n))
    OfTorchdata.__name__, OfTorchdata.__module__ = "RandomSampler", "torchdata.stateful_dataloader.sampler"
    assert handed(sampler=OfTorchdata(n)).shuffle
    with pytest.raises(ValueError, match="draws some of them twice or never in a pass"):
        handed(sampler=OfTorchdata(n - 1))
