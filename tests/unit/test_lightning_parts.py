"""Parts of Lightning's adapter: metrics over members, orders of samplers of the script's own, rows of tables."""

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
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler
from torchmetrics import CatMetric, MaxMetric, MeanSquaredError, MetricCollection
from torchmetrics.classification import BinaryAUROC, MulticlassConfusionMatrix

from elaunch.errors import GenerationChanged, UsageError
from elaunch.integrations.lightning import Fabric, Trainer, elastic, loggers
from elaunch.integrations.lightning.data import Dealer
from elaunch.integrations.lightning.metrics import EpochMetrics, metrics_of
from elaunch.integrations.lightning.trainer import ElasticFit


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
