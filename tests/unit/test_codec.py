"""State as a manifest and tensors, and back."""

from __future__ import annotations

import copy
import enum
import json
import math
from collections import Counter, OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer, lr_scheduler

from elaunch.errors import ProtocolError, StateError
from elaunch.workers.state.codec import describe, digest, restore

Pair = namedtuple("Pair", ["x", "y"])


class Colour(enum.IntEnum):
    RED = 1


class Holder:
    """Has the state it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def same(a: Any, b: Any) -> bool:
    """Equal in type and value, bit by bit, also in order; NaN equals NaN."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return False
        x, y = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return torch.equal(x, y)
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes())
    if isinstance(a, dict):
        return len(a) == len(b) and all(same(x, y) for pairs in zip(a.items(), b.items()) for x, y in zip(*pairs))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float):
        return str(a) == str(b)
    if isinstance(a, complex):
        return same((a.real, a.imag), (b.real, b.imag))
    return bool(a == b)


def through_json(state: Any) -> Any:
    """`state` after a journey to another process."""
    manifest, tensors = describe({"it": Holder(state)})
    manifest = json.loads(json.dumps(manifest, allow_nan=False))
    received = Holder()
    restore({"it": received}, manifest, [tensor.clone() for tensor in tensors])
    return received.state


def hand_over(source: dict[str, Any], target: dict[str, Any]) -> None:
    manifest, tensors = describe(source)
    restore(target, json.loads(json.dumps(manifest, allow_nan=False)), [tensor.clone() for tensor in tensors])


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text() | st.binary()
keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
values = st.recursive(
    plain | st.builds(torch.tensor, st.lists(st.floats(width=32), max_size=4)),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
        | st.dictionaries(keys, inner, max_size=3).map(OrderedDict)
        | st.sets(keys, max_size=3)
        | st.frozensets(keys, max_size=3)
    ),
    max_leaves=12,
)


@given(values)
def test_any_nesting_of_plain_values_and_tensors_comes_back_as_it_was(value: Any) -> None:
    assert same(through_json(value), value)


@pytest.mark.parametrize(
    "value",
    [
        2**200,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        complex(math.nan, -math.inf),
        b"\x00\xff",
        bytearray(b"abc"),
        torch.Size([1, 2]),
        torch.bfloat16,
        torch.device("cuda", 3),
        Counter("hello"),
        defaultdict(int, a=1),
        defaultdict(None, {(1, "x"): [None]}),
        {1: "int", "1": "text", True and 2.5: "float", (0, (1,)): "tuple", None: "none"},
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.datetime64("2020-01-01"),
        np.arange(6, dtype=">i2").reshape(2, 3),
        np.array(2.5),
        np.array(["ab", "c"]),
        np.zeros((0, 3)),
        np.broadcast_to(np.arange(3.0), (2, 3)),
        np.random.default_rng(3).bit_generator.state,
    ],
    ids=repr,
)
def test_special_values_come_back_as_they_were(value: Any) -> None:
    back = through_json(value)
    assert same(back, value)
    assert getattr(back, "default_factory", 0) == getattr(value, "default_factory", 0)


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8]
DTYPES += [torch.int16, torch.int32, torch.int64, torch.uint16, torch.complex64, torch.complex128, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tensors_of_any_dtype_come_back_as_they_were(dtype: torch.dtype) -> None:
    whole = (torch.arange(24.0).reshape(2, 3, 4) % 3).to(dtype)
    for tensor in (whole, whole[0, 0, 0], whole[:, :0], whole.mT, whole[:, ::2], whole[:1].expand(4, 3, 4)):
        assert same(through_json(tensor), tensor)


def test_conjugated_and_negated_views_come_back_with_their_values() -> None:
    tensor = torch.tensor([1 + 2j, 3 - 4j])
    assert same(through_json(tensor.conj()), tensor.conj().resolve_conj())
    assert same(through_json(tensor.conj().imag), tensor.conj().imag.resolve_neg())


def test_the_order_of_dimensions_in_memory_is_kept() -> None:
    tensor = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    manifest, tensors = describe({"it": Holder(tensor)})
    assert tensors[0].data_ptr() == tensor.data_ptr()
    assert manifest["tensors"][0]["strides"] == list(tensor.stride())


def test_a_tensor_that_appears_twice_is_listed_once_and_stays_shared() -> None:
    shared = torch.arange(3.0)
    assert len(describe({"a": Holder([shared, shared]), "b": Holder(shared)})[1]) == 1
    back = through_json([shared, shared, shared[:2], shared.clone()])
    assert back[0] is back[1]
    assert back[3] is not back[0]


def test_temporary_tensors_are_never_taken_for_each_other() -> None:
    class Fresh(Holder):
        def state_dict(self) -> Any:
            return torch.full((1000, 2), float(self.state))[:, 0]

    _, tensors = describe({str(number): Fresh(number) for number in range(20)})
    assert [tensor[0].item() for tensor in tensors] == list(range(20))


def test_tensors_are_described_without_a_copy() -> None:
    model = nn.Linear(3, 2)
    _, tensors = describe({"model": model})
    assert [tensor.data_ptr() for tensor in tensors] == [model.weight.data_ptr(), model.bias.data_ptr()]


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"state": {0: {"foo": object()}}}, "it.state.0.foo: type object; give it a state_dict of plain"),
        ([Colour.RED], "it.0: type Colour"),
        ((Pair(1, 2),), "it.0: type Pair"),
        ({"f": len}, "it.f: type builtin_function_or_method"),
        ({Colour.RED: 1}, "type Colour"),
        ({torch.ones(1): 1}, "a tensor as a key"),
        (defaultdict(lambda: 3), "it: defaultdict of <function"),
        ([np.array([None])], "it.0: numpy array of object"),
        ([np.zeros(2, dtype=[("a", "i4")])], r"it.0: numpy array of \[\('a'"),
        ([torch.eye(2).to_sparse()], r"it.0: a tensor without plain memory \(torch.sparse_coo\)"),
        ([torch.ones(2, device="meta")], r"it.0: a tensor without plain memory \(meta\)"),
    ],
)
def test_what_cannot_be_described_is_named_with_its_path(state: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        describe({"it": Holder(state)})


def test_a_state_that_contains_itself_is_refused() -> None:
    state: list[Any] = []
    state.append(state)
    with pytest.raises(StateError, match="does it contain itself"):
        describe({"it": Holder(state)})


def test_an_object_without_a_state_dict_is_refused() -> None:
    with pytest.raises(StateError, match=r"lr: float has no state_dict\(\)"):
        describe({"lr": 0.1})


def test_other_names_than_the_peers_are_refused() -> None:
    manifest, tensors = describe({"model": nn.Linear(1, 1), "ema": Holder(1)})
    with pytest.raises(StateError, match="registered here: model; registered by the peers: ema, model"):
        restore({"model": nn.Linear(1, 1)}, manifest, tensors)


@pytest.mark.parametrize(
    ("mine", "message"),
    [
        (nn.Linear(3, 3), r"weight is torch.float32 \[3, 3\] here, torch.float32 \[3, 2\] at the peers"),
        (nn.Linear(2, 3, bias=False), "bias only at the peers"),
        (nn.Linear(2, 3).double(), "weight is torch.float64"),
        (nn.Sequential(*(nn.Linear(2, 3) for _ in range(5))), r"0.weight only here; .* and 7 more"),
    ],
)
def test_another_model_than_the_peers_is_refused_and_nothing_is_changed(mine: nn.Module, message: str) -> None:
    manifest, tensors = describe({"a": Holder(1), "model": nn.Linear(2, 3)})
    holder, before = Holder(0), copy.deepcopy(mine.state_dict())
    with pytest.raises(StateError, match=f"model is not what its peers have: .*{message}"):
        restore({"a": holder, "model": mine}, manifest, tensors)
    assert holder.state == 0
    assert same(dict(mine.state_dict()), dict(before))


def test_an_optimizer_with_other_groups_than_the_peers_is_refused() -> None:
    model = nn.Linear(2, 3)
    manifest, tensors = describe({"optimizer": SGD(model.parameters(), lr=1)})
    groups: list[dict[str, Any]] = [{"params": [model.weight]}, {"params": [model.bias]}]
    mine = SGD(groups, lr=1)
    with pytest.raises(StateError, match=r"optimizer .* parameters per group: \[1, 1\] here, \[2\] at the peers"):
        restore({"optimizer": mine}, manifest, tensors)


def test_an_object_that_refuses_its_state_is_named() -> None:
    class Picky(Holder):
        def load_state_dict(self, state: Any) -> None:
            raise RuntimeError("not mine")

    manifest, tensors = describe({"it": Picky(1)})
    with pytest.raises(StateError, match="it: Picky does not take the state of the peers: not mine"):
        restore({"it": Picky(1)}, manifest, tensors)


def test_tensors_that_do_not_fit_the_manifest_are_refused() -> None:
    manifest, tensors = describe({"it": Holder([torch.zeros(2), torch.ones(3)])})
    with pytest.raises(StateError, match="got 1 tensors for a manifest of 2"):
        restore({"it": Holder()}, manifest, tensors[:1])
    with pytest.raises(StateError, match=r"it.1: got torch.float32 \[2\], the manifest says torch.float32 \[3\]"):
        restore({"it": Holder()}, manifest, [tensors[0], tensors[0]])


@pytest.mark.parametrize(
    "damage",
    [
        lambda m: m.update(version=99),
        lambda m: m["objects"].update(it={"k": "pickle", "v": "x"}),
        lambda m: m["objects"].update(it={"v": 1}),
        lambda m: m["objects"].update(it={"k": "tensor", "i": 7}),
        lambda m: m["objects"].update(it={"k": "dtype", "v": "torch.load"}),
    ],
)
def test_a_manifest_of_another_version_or_a_damaged_one_is_refused(damage: Callable[[Any], None]) -> None:
    manifest, tensors = describe({"it": Holder(1)})
    damage(manifest)
    with pytest.raises(ProtocolError):
        restore({"it": Holder()}, manifest, tensors)


def test_a_digest_tells_manifests_apart() -> None:
    first = describe({"it": Holder({"lr": 0.1, "x": torch.zeros(2)})})[0]
    assert digest(first) == digest(json.loads(json.dumps(first)))
    assert digest(first) != digest(describe({"it": Holder({"lr": 0.2, "x": torch.zeros(2)})})[0])


class Training:
    """A small model with everything that has a state, trained for some steps."""

    def __init__(
        self,
        seed: int,
        make_optimizer: Callable[[nn.Module], Optimizer],
        make_scheduler: Callable[[Any], Any] = lambda o: Holder(),
    ) -> None:
        torch.manual_seed(seed)
        self.model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = make_optimizer(self.model)
        self.scheduler = make_scheduler(self.optimizer)

    def parts(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}

    def train(self, start: int, stop: int) -> list[float]:
        losses = []
        for step in range(start, stop):
            loss = self.model((torch.arange(24.0).reshape(6, 4) * (step + 1)).sin()).square().mean()
            loss.backward()
            self.optimizer.step()
            if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
                self.scheduler.step(1.0)
            elif not isinstance(self.scheduler, Holder):
                self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    parameters = list(model.parameters())
    return [{"params": parameters[:2], "lr": 0.1, "betas": (0.8, 0.9)}, {"params": parameters[2:]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda m: AdamW(m.parameters(), lr=0.05),
    "adamw amsgrad in groups": lambda m: AdamW(two_groups(m), lr=0.05, amsgrad=True),
    "adam with a tensor for lr": lambda m: Adam(m.parameters(), lr=torch.tensor(0.05), foreach=False),
    "adam with names": lambda m: Adam(m.named_parameters(), lr=0.05),
    "fused adamw": lambda m: AdamW(m.parameters(), lr=0.05, fused=True),
    "sgd": lambda m: SGD(m.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), lr=0.05),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_fresh_worker_gets_bitwise_the_optimizer_of_its_peers_and_trains_as_they_do(name: str) -> None:
    peer, joiner = Training(0, OPTIMIZERS[name]), Training(1, OPTIMIZERS[name])
    peer.train(0, 5)
    hand_over(peer.parts(), joiner.parts())
    for part in ("model", "optimizer"):
        assert same(joiner.parts()[part].state_dict(), peer.parts()[part].state_dict())
    assert joiner.train(5, 10) == peer.train(5, 10)
    assert same(joiner.optimizer.state_dict(), peer.optimizer.state_dict())


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3, cycle_momentum=False),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [2, 6]),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=3), lr_scheduler.CosineAnnealingLR(o, 8)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, 4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_fresh_worker_goes_on_with_the_learning_rates_of_its_peers(name: str) -> None:
    peer, joiner = (Training(seed, OPTIMIZERS["adamw"], SCHEDULERS[name]) for seed in (0, 1))
    peer.train(0, 4)
    hand_over(peer.parts(), joiner.parts())
    for _ in range(3):
        assert [g["lr"] for g in joiner.optimizer.param_groups] == [g["lr"] for g in peer.optimizer.param_groups]
        assert joiner.train(4, 6) == peer.train(4, 6)
    assert same(joiner.scheduler.state_dict(), peer.scheduler.state_dict())


def test_state_that_an_optimizer_keeps_wider_than_its_parameters_keeps_its_width() -> None:
    class Wide(SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    master = self.state[parameter].setdefault("master", parameter.detach().float() + 1e-4)
                    master.add_(1e-3)

    models = [nn.Linear(2, 2).bfloat16() for _ in range(2)]
    peer, joiner = (Wide(model.parameters(), lr=1) for model in models)
    peer.step()
    hand_over({"optimizer": peer}, {"optimizer": joiner})
    assert same(joiner.state_dict(), peer.state_dict())
    assert joiner.state[models[1].weight]["master"].dtype == torch.float32


def test_the_versions_of_a_modules_parts_are_kept() -> None:
    model = nn.BatchNorm1d(3)
    back = through_json(model.state_dict())
    assert back._metadata == model.state_dict()._metadata  # type: ignore[attr-defined]


def test_modules_with_tied_weights_and_extra_state_are_restored() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(4, 3)
            self.head = nn.Linear(3, 4, bias=False)
            self.head.weight = self.embedding.weight
            self.calls = 0

        def get_extra_state(self) -> Any:
            return {"calls": self.calls}

        def set_extra_state(self, state: Any) -> None:
            self.calls = state["calls"]

    peer, joiner = Tied(), Tied()
    peer.calls = 3
    assert len(describe({"model": peer})[1]) == 1
    hand_over({"model": peer}, {"model": joiner})
    assert torch.equal(joiner.head.weight, peer.embedding.weight)
    assert joiner.head.weight is joiner.embedding.weight
    assert joiner.calls == 3
