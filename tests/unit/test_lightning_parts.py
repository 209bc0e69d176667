"""Parts of Lightning's adapter: metrics over members, orders of samplers, rows of tables, modules that were sharded."""

from __future__ import annotations

import csv
import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning
import pytest
import torch
from lightning.fabric.loggers.csv_logs import CSVLogger
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchmetrics import CatMetric, MaxMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix

from elaunch.errors import GenerationChanged, UsageError
from elaunch.integrations.lightning import Fabric, Trainer, elastic, loggers
from elaunch.integrations.lightning.configured import GivenModule
from elaunch.integrations.lightning.data import Dealer
from elaunch.integrations.lightning.metrics import EpochMetrics, metrics_of
from elaunch.integrations.lightning.parts import ElasticEnvironment, fit_mesh, make_elastic, why_not_elastic
from elaunch.integrations.lightning.trainer import ELASTIC, ElasticFit


class Scored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.largest = MaxMetric()
        self.all = MetricCollection([MeanSquaredError(), MulticlassConfusionMatrix(3)])
        self.list, self.curve = CatMetric(), BinaryAUROC()


def test_sums_come_back_to_one_member_and_largest_values_to_all() -> None:
    module = Scored()
    found = metrics_of(module)
    assert sorted(type(one).__name__ for one in found.values()) == [
        "MaxMetric",
        "MeanSquaredError",
        "MulticlassConfusionMatrix",
    ]
    module.largest.update(torch.tensor([2.0, 7.0]))
    found["all.MeanSquaredError"].update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    found["all.MulticlassConfusionMatrix"].update(torch.tensor([0, 2]), torch.tensor([0, 1]))
    committed = EpochMetrics(found, True)
    committed.add_up(torch.device("cpu"))
    expected = {name: one.compute() for name, one in found.items()}
    for metric in found.values():
        metric.update(*([torch.tensor([9.0])] if isinstance(metric, MaxMetric) else [torch.tensor([2])] * 2))
    first, other = Scored(), Scored()
    for copy, is_first in ((first, True), (other, False)):
        EpochMetrics(metrics_of(copy), is_first).load_state_dict(committed.state_dict())
    for name, one in metrics_of(first).items():
        assert torch.equal(one.compute(), expected[name]), name
        assert one.update_called
    others: Any = metrics_of(other)
    assert others["largest"].compute() == 7.0
    assert others["all.MeanSquaredError"].total == 0
    assert int(others["all.MulticlassConfusionMatrix"].confmat.sum()) == 0


def test_a_sampler_of_ones_own_gives_all_members_the_same_order_whatever_they_have_drawn() -> None:
    def orders(drawn: int) -> list[list[list[int]]]:
        torch.rand(drawn)
        found = []
        for epoch in (0, 1):
            sampler = DistributedSamplerWrapper(SubsetRandomSampler(list(range(20, 32))), num_replicas=3, rank=0)
            dealer = Dealer(sampler, 2, False, 3, 0, 1)
            dealer.epoch = epoch
            found.append(list(dealer))
        return found

    before = torch.get_rng_state(), random.getstate()
    first, second = orders(0), orders(5)
    assert first == second
    assert first[0] != first[1]
    assert sorted(one for batch in first[0] for one in batch) == list(range(20, 32))
    torch.set_rng_state(before[0])
    torch.rand(5)
    expected = torch.get_rng_state()
    torch.set_rng_state(before[0])
    orders(5)
    assert torch.equal(torch.get_rng_state(), expected)
    assert random.getstate() == before[1]


def test_a_row_that_is_logged_again_replaces_the_one_of_the_lost_update(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, version=0, prefix="run")
    for step in range(3):
        logger.log_metrics({"loss": float(step)}, step)
        logger.log_metrics({"rate": 0.5}, step)
    loggers.save([logger])
    successor = CSVLogger(tmp_path, prefix="run")
    loggers.take_over([successor], [0], writes=True)
    assert loggers.last_step([successor]) == 2
    loggers.forget_row([successor], 2, ["loss"])
    successor.log_metrics({"loss": 9.0}, 2)
    loggers.save([successor])
    with Path(successor.log_dir, "metrics.csv").open(newline="") as file:
        rows = [(row["step"], row["run-loss"], row["run-rate"]) for row in csv.DictReader(file)]
    assert rows == [
        ("0", "0.0", ""),
        ("0", "", "0.5"),
        ("1", "1.0", ""),
        ("1", "", "0.5"),
        ("2", "", "0.5"),
        ("2", "9.0", ""),
    ]


def test_in_a_plain_process_it_is_fabric_as_it_was() -> None:
    @elastic
    def train(count: int) -> list[Any]:
        fabric = Fabric(accelerator="cpu", devices=1)
        fabric.launch()
        model, optimizer = fabric.setup(nn.Linear(1, 1), torch.optim.SGD([nn.Parameter(torch.ones(1))]))
        loader = fabric.setup_dataloaders(DataLoader(range(4), batch_size=2))  # type: ignore[arg-type]
        found = []
        for epoch in fabric.epochs(1, count, rate=torch.optim.lr_scheduler.StepLR(optimizer, 1)):
            for number, batch in fabric.enumerate(loader):
                fabric.backward(model(batch[:1].float()))
                found.append((epoch, number, batch.tolist()))
        return found

    assert train(3) == [(1, 0, [0, 1]), (1, 1, [2, 3]), (2, 0, [0, 1]), (2, 1, [2, 3])]


def test_a_scheduler_that_would_not_come_back_is_refused() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    fabric._optimizers = [optimizer]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with pytest.raises(UsageError, match="scheduler=scheduler"):
        fabric._objects()
    fabric._others["scheduler"] = scheduler
    assert fabric._objects()[0] == {"optimizer0": optimizer, "scheduler": scheduler}


class Stepping(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.error = MeanSquaredError()


@pytest.mark.parametrize("own", [None, lambda value: value])
def test_a_fit_that_is_left_midway_leaves_nothing_of_the_step_on_the_module(own: Any) -> None:
    plain = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    fits = ElasticFit(Trainer(accelerator="cpu", devices=1, **plain))  # type: ignore[arg-type]
    module = Stepping()
    if own is not None:
        module.forward = own  # type: ignore[method-assign]
    before = dict(vars(module))

    def fit(path: Any) -> None:
        module.forward = lambda *_: None  # type: ignore[method-assign]  # as Lightning does for a step
        module.error.update(torch.ones(2), torch.zeros(2))
        raise GenerationChanged(2)

    for entry in (1, 2):
        state: Any = SimpleNamespace(entry=entry, step=0)
        with pytest.raises(GenerationChanged):
            fits.run(state, fit, module, None)
        assert vars(module) == before
        assert not module.error.update_called


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight
        self.later: Any = None
        self.n_heads, self.is_configured, self.seen = 4, False, 0
        self.register_buffer("rope", torch.ones(2), persistent=False)


class ShardedLinear(nn.Linear):
    """Stands for the class that torch gives a module which it shards."""


def configure(module: Tied) -> None:
    """Does to a module what FSDP2, tensor parallelism and users' `configure_model` do."""
    module.first.__class__ = ShardedLinear
    module.first._parameters["weight"] = nn.Parameter(torch.zeros(1, 2))
    module.last._parameters["weight"] = module.first._parameters["weight"]
    module.first.register_forward_pre_hook(lambda *_: None)
    module.last = nn.Sequential(module.last)  # type: ignore[assignment]
    module.later = nn.Linear(2, 1)
    module.n_heads, module.is_configured = 2, True
    module._is_managed = True  # type: ignore[assignment]


@pytest.mark.parametrize("has_values", [True, False])
def test_what_configure_model_did_is_undone(has_values: bool) -> None:
    module = Tied()
    first, rope = module.first, module.get_buffer("rope")
    before = {name: one.clone() for name, one in module.state_dict().items()}
    given = GivenModule(module, has_values)
    with given.configuring():
        configure(module)
    module.seen = 7  # in training; it is not of what was configured
    rope.zero_()
    given.put_back()
    assert type(module.first) is nn.Linear
    assert module.first is first
    assert not first._forward_pre_hooks
    assert type(module.last) is nn.Linear
    assert module.last.weight is first.weight
    assert (module.later, module.n_heads, module.is_configured, module.seen) == (None, 4, False, 7)
    assert not hasattr(module, "_is_managed")
    found = module.state_dict()
    assert {name: one.shape for name, one in found.items()} == {name: one.shape for name, one in before.items()}
    assert not has_values or all(torch.equal(found[name], before[name]) for name in before)
    assert torch.equal(rope, torch.ones(2) if has_values else torch.zeros(2))


def test_a_module_can_be_configured_again_and_again() -> None:
    module = Tied()
    for _ in range(3):
        given = GivenModule(module, False)
        with given.configuring():
            configure(module)
        given.put_back()
    assert sum(one.numel() for one in module.parameters()) == 8


def test_quantized_parameters_are_refused_by_name() -> None:
    class Quantized(nn.Parameter):
        pass

    module = nn.Linear(2, 2)
    module.weight = Quantized(torch.ones(2, 2))
    with pytest.raises(UsageError, match="weight is a Quantized"):
        GivenModule(module, False)


def test_the_tensor_parallel_size_stays_and_members_that_do_not_fit_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    told: list[str] = []

    def wait_for_members(why: str) -> None:
        told.append(why)
        raise GenerationChanged(2)

    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    strategy.cluster_environment = ElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    fit_mesh(strategy, SimpleNamespace(size=6, wait_for_members=wait_for_members))  # type: ignore[arg-type]
    assert (strategy._data_parallel_size, strategy._tensor_parallel_size) == (3, 2)
    with pytest.raises(GenerationChanged):
        fit_mesh(strategy, SimpleNamespace(size=3, wait_for_members=wait_for_members))  # type: ignore[arg-type]
    assert told == ["3 members cannot be divided into groups of tensor_parallel_size=2"]


def test_a_worker_without_a_device_is_told_how_many_lightning_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "2")
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=2)
    strategy.cluster_environment = ElasticEnvironment()
    strategy.parallel_devices = [torch.device("cpu")] * 2
    with pytest.raises(UsageError, match="worker 2 of this node has no device: Lightning was given devices=2; give"):
        fit_mesh(strategy, SimpleNamespace(size=4))  # type: ignore[arg-type]


def test_a_strategy_that_is_not_elastic_is_named_with_the_one_to_use() -> None:
    strategy: Any
    for strategy, line in (
        (FSDPStrategy(), "FSDPStrategy (FSDP 1, whose flat parameters are cut otherwise for other members)"),
        (object.__new__(DeepSpeedStrategy), "DeepSpeedStrategy (DeepSpeed's engine)"),
    ):
        assert not make_elastic(strategy, ELASTIC)
        name, instead = why_not_elastic(strategy)
        assert name == line
        assert "ModelParallelStrategy" in instead
    for kind in (DDPStrategy, ModelParallelStrategy):
        strategy = kind()
        assert make_elastic(strategy, ELASTIC)
        assert type(strategy) is ELASTIC[kind]
        assert make_elastic(strategy, ELASTIC)
