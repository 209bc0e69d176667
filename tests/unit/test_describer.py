"""Descriptions that hold what was said of tensors before: like those made anew, whatever has changed in between."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations
from torch.nn.utils.parametrize import is_parametrized, remove_parametrizations

from elaunch.errors import StateError
from elaunch.workers.reentry.describer import Describer
from elaunch.workers.reentry.encoding import Description, describe_shards
from elaunch.workers.state.codec import where
from tests.helpers import scaled

pytestmark = pytest.mark.filterwarnings("ignore:.*lr_scheduler.step.*:UserWarning")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(3, 3), nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.extra: Any = {"calls": 0}

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Holder:
    def __init__(self) -> None:
        self.state: dict[str, Any] = {"a": torch.zeros(4, 4), "b": [torch.ones(3), 1.0, (2, None)], "c": torch.zeros(0)}
        self.state |= {
            "tied": self.state["a"],
            "z": torch.full((4,), 1j),
            "deep": {"d": torch.ones(2)},
        }

    def state_dict(self) -> dict[str, Any]:
        return self.state


def two_groups(ones: list[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": ones[:2]}, {"params": ones[2:], "lr": 0.2}]


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda ones: torch.optim.AdamW(ones, lr=0.1),
    "fused": lambda ones: torch.optim.Adam(ones, lr=0.1, fused=True, amsgrad=True),
    "foreach": lambda ones: torch.optim.NAdam(ones, lr=0.1, foreach=True),
    "lr": lambda ones: torch.optim.Adam(ones, lr=torch.tensor(0.1), foreach=False),
    "SGD": lambda ones: torch.optim.SGD(two_groups(ones), lr=0.1, momentum=0.9),
    "Adafactor": lambda ones: torch.optim.Adafactor(ones, lr=0.1),
}


class Job:
    """What a script binds, and ways in which it may change that."""

    def __init__(self, net: nn.Module | None = None) -> None:
        self.net: Any = net or Net()
        self.holder = Holder()
        self.scaler = torch.amp.GradScaler("cpu")
        self.optimizer: Any = None
        self.optimize("AdamW")
        self.objects: dict[str, Any] = {}
        self.bind("net", "optimizer", "scheduler", "scaler", "holder")

    def bind(self, *names: str) -> None:
        self.objects = {name: getattr(self, name) for name in names}

    def optimize(self, kind: str) -> None:
        self.optimizer = OPTIMIZERS[kind]([one for one in self.net.parameters() if one.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        if hasattr(self, "objects"):
            self.bind(*self.objects)

    def train(self) -> None:
        for group in self.optimizer.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        self.optimizer.step()
        with torch.no_grad():
            for name, buffer in self.net.named_buffers():
                if "running" in name:
                    buffer.add_(1)

    def schedule(self) -> None:
        with warnings.catch_warnings(action="ignore"):  # the optimizer may have taken no step yet
            self.scheduler.step()

    def add_parameter(self) -> None:
        name = f"more{len(list(self.net.parameters()))}"
        self.net.register_parameter(name, nn.Parameter(torch.ones(2)))
        self.optimizer.add_param_group({"params": [getattr(self.net, name)]})

    def move_parameter(self) -> None:
        """It comes to another place in the last group."""
        parameters = self.optimizer.param_groups[-1]["params"]
        parameters.append(parameters.pop(0))

    def swap(self, of: Callable[[Tensor], Tensor]) -> None:
        weight = self.net.first.weight
        weight.data = of(weight.data)

    def strip(self) -> None:
        weight = self.net.norm.weight
        weight.untyped_storage().resize_(0)
        weight.untyped_storage().resize_(weight.numel() * weight.element_size())
        weight.data.fill_(1)

    def load(self, assign: bool) -> None:
        state = {key: one.clone() if isinstance(one, Tensor) else one for key, one in self.net.state_dict().items()}
        self.net.load_state_dict(state, strict=False, assign=assign)  # hooks may write keys that none reads

    def keep_number(self) -> None:
        """As optimizers do that count their steps in Python."""
        for kept in self.optimizer.state.values():
            kept["count"] = kept.get("count", 0) + 1

    def note(self, value: Any) -> None:
        self.optimizer.param_groups[0]["note"] = value

    def toggle(self, one: Any, other: Any) -> None:
        self.note(other if repr(self.optimizer.param_groups[0].get("note")) == repr(one) else one)

    def double(self) -> None:
        self.swap(torch.Tensor.double)
        self.optimize("AdamW")

    def add_to_set(self) -> None:
        kept = self.holder.state["deep"].setdefault("set", set())
        kept.add(len(kept))

    def override(self) -> None:
        self.net.state_dict = lambda **_: {"only": self.net.second.bias}

    def parametrize(self) -> None:
        if not is_parametrized(self.net.second):
            parametrizations.weight_norm(self.net.second)

    def weigh(self, weight: nn.Parameter) -> None:
        if is_parametrized(self.net.second):
            remove_parametrizations(self.net.second, "weight")
        self.net.second.weight = weight


def add_key(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}hooked"] = torch.ones(1)


def replace_mask(module: Any, prefix: str, keep_vars: bool) -> None:
    module.norm.running_mean = torch.full((3,), 7.0)


CHANGES: dict[str, Callable[[Job], object]] = {
    "nothing": lambda job: None,
    "train": Job.train,
    "schedule": Job.schedule,
    "freeze": lambda job: job.net.first.requires_grad_(False),
    "add a parameter": Job.add_parameter,
    "drop a parameter": lambda job: job.net.norm.register_parameter("bias", None),
    "move a parameter": Job.move_parameter,
    "tie": lambda job: job.weigh(job.net.first.weight),
    "untie": lambda job: job.weigh(nn.Parameter(torch.ones(3, 3))),
    "swap for other data": lambda job: job.swap(torch.clone),
    "swap for the same data": lambda job: job.swap(lambda data: data),
    "transpose": lambda job: job.swap(torch.t),
    "widen": lambda job: job.swap(lambda data: data.new_zeros(3, 6)[:, ::2]),
    "double": Job.double,
    "strip": Job.strip,
    "load": lambda job: job.load(False),
    "assign": lambda job: job.load(True),
    "load the optimizer": lambda job: job.optimizer.load_state_dict(job.optimizer.state_dict()),
    "forget in the optimizer": lambda job: job.optimizer.state.clear(),
    "count in Python": Job.keep_number,
    "zero or minus zero": lambda job: job.toggle(0.0, -0.0),
    "one or true": lambda job: job.toggle(1, True),
    "nan": lambda job: job.note(float("nan")),
    "other buffer": lambda job: setattr(job.net.norm, "running_mean", torch.ones(3)),
    "other mask": lambda job: setattr(job.net, "mask", torch.zeros(3)),
    "keep the mask": lambda job: job.net.register_buffer("mask", job.net.mask, persistent=True),
    "extra": lambda job: job.net.extra.update(calls=job.net.extra["calls"] + 1),
    "extra tensor": lambda job: job.net.extra.update(seen=torch.ones(2)),
    "extra array": lambda job: job.net.extra.update(array=np.ones(3)),
    "parametrize": Job.parametrize,
    "hook": lambda job: job.net.norm.register_state_dict_post_hook(add_key),
    "hook before": lambda job: job.net.register_state_dict_pre_hook(replace_mask),
    "override": Job.override,
    "own another class": lambda job: setattr(job.net, "first", nn.Linear(3, 3, bias=False)),
    "version": lambda job: setattr(job.net.first, "_version", 2),
    "hold others": lambda job: job.holder.state.update(a=torch.ones(4, 4)),
    "hold with gaps": lambda job: job.holder.state.update(a=torch.zeros(8, 8)[::2, ::2]),
    "turn": lambda job: job.holder.state["a"].t_(),
    "hold tied": lambda job: job.holder.state.update(tied=job.net.first.weight),
    "hold conjugated": lambda job: setattr(job.holder.state["z"], "data", job.holder.state["z"].data.conj()),
    "hold negated": lambda job: job.holder.state.update(n=torch.ones(2, dtype=torch.complex64).conj().imag),
    "hold an array": lambda job: job.holder.state.update(array=np.ones(3)),
    "hold a set": lambda job: job.holder.state.update(deep={"d": torch.ones(2), "set": {1, 2}}),
    "add to the set": Job.add_to_set,
    "hold in another order": lambda job: job.holder.state.update(c=job.holder.state.pop("c")),
    "bind in another order": lambda job: job.bind("holder", "scaler", "optimizer", "net"),
    "bind less": lambda job: job.bind("net", "optimizer"),
    **{f"optimize with {kind}": lambda job, kind=kind: job.optimize(kind) for kind in OPTIMIZERS},  # type: ignore[misc]
}


def check_alike(described: Description, expected: Description, changed: str) -> None:
    texts = [json.dumps(one.manifest) for one in (described, expected)]  # which tells 1 from True
    assert texts[0] == texts[1], changed
    assert described.boxes == expected.boxes, changed
    for one, other, spec in zip(described.tensors, expected.tensors, expected.manifest["tensors"], strict=True):
        what = changed, spec["path"]
        assert where(one)[1:] == where(other)[1:], what
        assert (one.is_conj(), one.is_neg()) == (other.is_conj(), other.is_neg()), what
        assert torch.equal(one, other), what
        if one.data_ptr() != other.data_ptr():  # what has no plain memory is copied in each description
            continue
        assert one._version == other._version, what


def follow(job: Job, changes: list[str]) -> None:
    describer = Describer()
    former: Description | None = None
    for change in changes:
        CHANGES[change](job)
        expected = describe_shards(job.objects)
        described = describer.describe(job.objects)
        check_alike(described, expected, change)
        if former is not None and described.form is former.form:
            assert list(map(where, described.tensors)) == list(map(where, former.tensors)), change
            assert described.manifest["tensors"] == former.manifest["tensors"], change
            assert described.boxes == former.boxes, change
        former = described


@settings(max_examples=scaled(25, 300), deadline=None)
@given(st.lists(st.sampled_from(sorted(CHANGES)), max_size=8), st.integers(0, 3))
def test_what_is_described_again_is_described_as_if_anew(changes: list[str], still: int) -> None:
    job = Job()
    quiet = ["train", "nothing", "nothing"][:still]
    follow(job, [*quiet, *(one for change in changes for one in (change, *quiet))])


@pytest.mark.parametrize("change", sorted(CHANGES))
def test_a_change_is_noticed_whatever_was_held_before(change: str) -> None:
    follow(Job(), ["train", "nothing", "nothing", change, change, "train", "nothing", change, "schedule"])


def test_what_stays_is_not_described_again_and_a_number_does_not_change_that() -> None:
    job, describer = Job(), Describer()
    for _ in range(3):
        job.train()
        before = describer.describe(job.objects)
    for change in ("train", "schedule", "nothing", "freeze", "other mask"):
        CHANGES[change](job)
        after = describer.describe(job.objects)
        assert after.form is before.form, change
        states = [dict(one.manifest["objects"]["optimizer"]["v"])["state"] for one in (before, after)]
        assert states[0] is states[1], change
        assert before.manifest["objects"]["net"] is after.manifest["objects"]["net"], change
        assert all(one is other for one, other in zip(before.tensors, after.tensors, strict=True)), change
        before = after


def test_what_cannot_be_described_is_refused_again_and_again() -> None:
    job, describer = Job(), Describer()
    circle: dict[str, Any] = {}
    circle["self"] = circle
    for wrong, message in ((object(), r"holder\.b: type object"), (circle, r"holder\.b[.self]*: nested more than")):
        job.train()
        describer.describe(job.objects)
        kept, job.holder.state["b"] = job.holder.state["b"], wrong
        for _ in range(2):
            with pytest.raises(StateError, match=message):
                describer.describe(job.objects)
        job.holder.state["b"] = kept
        check_alike(describer.describe(job.objects), describe_shards(job.objects), "again")


@pytest.fixture
def one_member() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_parts_of_fsdp_are_described_as_if_anew(one_member: None) -> None:
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
    fully_shard(net[0])
    fully_shard(net)
    job = Job(net)
    describer = Describer()

    def train() -> None:
        net(torch.randn(4, 3)).square().sum().backward()
        job.optimizer.step()
        job.optimizer.zero_grad()

    def swap() -> None:
        state = job.optimizer.state[net[2].weight]
        state["exp_avg"] = state["exp_avg"] + 1

    def move_local() -> None:
        state = job.optimizer.state[net[2].bias]
        state["exp_avg"]._local_tensor = state["exp_avg"]._local_tensor.clone()

    changes: list[Callable[[], object]] = [
        train,
        train,
        train,
        lambda: net(torch.randn(4, 3)),  # whose parameters are whole until the state is asked for
        lambda: net.unshard(),
        train,
        job.scheduler.step,
        swap,
        train,
        train,
        move_local,
        train,
        lambda: job.load(False),
        lambda: net[2].requires_grad_(False),
        train,
        train,
    ]
    forms = []
    for number, change in enumerate(changes):
        change()
        described = describer.describe(job.objects)
        check_alike(described, describe_shards(job.objects), str(number))
        assert described.boxes
        forms.append(described.form)
    assert forms[2] is forms[6], "what FSDP does in a step leaves the parts where they lie"
    assert forms[6] is not forms[7]
