"""Frozen parameters and buffers are state: whoever has a layer after a change, a death or a restart has its values."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from elaunch import checkpoints
from elaunch.errors import StateError, StateLost
from elaunch.plan import Plan, symmetric
from elaunch.plan.views import holders
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.layers.untrained import copies
from elaunch.workers.layers.untrained.copies import HostCopies
from elaunch.workers.layers.untrained.duties import CopiedBox, duties
from elaunch.workers.replicas import ReplicasDiffer
from elaunch.workers.state.checkpoint import SavedCheckpoint
from tests.helpers import soak
from tests.unit.engine_crew import WIDTH, Head, Sentences, Words, loss, train
from tests.unit.test_checkpoints import crew
from tests.unit.test_engine_change import WAYS, Setting, W, check_close, check_same, train_through

RANK = 2


class Adapted(nn.Module):
    """A frozen perceptron with a low-rank adapter, and buffers of several kinds."""

    placements: ClassVar = {"up.weight": Shard(0), "up.bias": Shard(0), "down.weight": Shard(1)}

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        for parameter in (*self.up.parameters(), *self.down.parameters()):
            parameter.requires_grad = False
        self.inward, self.outward = nn.Linear(WIDTH, RANK, bias=False), nn.Linear(RANK, WIDTH, bias=False)
        self.running_mean = nn.Buffer(torch.zeros(WIDTH))
        self.seen = nn.Buffer(torch.zeros((), dtype=torch.int64))
        self.mask = nn.Buffer(torch.ones(1, dtype=torch.bool).expand(WIDTH), persistent=False)
        self.nothing = nn.Buffer(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        normed = (x - self.running_mean) * self.mask / (1 + self.seen * self.seen)
        base: Tensor = self.down(torch.tanh(self.up(normed)))
        return x + F.dropout(base + self.outward(self.inward(x)), 0.1)


class Frozen(nn.Module):
    """Nothing of it is trained, and the same weight is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.other(torch.tanh(self.one(x)))
        return y


class Tied(nn.Module):
    """A trained weight that is used twice, and a frozen one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.base = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.other.weight = self.one.weight
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.other(torch.tanh(self.one(x))) + self.base(x)
        return y


LAYERS = [Words, Adapted, Frozen, Adapted, Tied, Head]


def pretrained(name: str, index: int, value: Tensor) -> Tensor:
    """Values that no seed gives, the same wherever the layer is; of a whole tensor."""
    numbers = torch.arange(value.numel(), dtype=torch.float64).view(value.shape)
    drawn = torch.sin(numbers * 0.7 + index + len(name))
    if value.dtype == torch.bool:
        return drawn > -0.9
    return drawn.mul(3).to(value.dtype) if not value.is_floating_point() else drawn.mul(0.2).to(value.dtype)


def load(engine: Engine) -> None:
    """Puts pretrained values into all layers, as scripts do: some by `load_state_dict`, some by `.data`."""
    if not engine.holds:
        return
    for (index, _), layer in engine.layers.items():
        place = layer.tp_rank
        with torch.device("meta"):  # it draws no numbers: other engines of this process draw theirs meanwhile
            whole = LAYERS[index]()
        values = {}
        for name, value in (*whole.named_parameters(), *whole.named_buffers()):
            found = pretrained(name, index, value.to(torch.float64) if value.is_floating_point() else value)
            dim = layer.spec.cuts.get(name)
            values[name] = found if dim is None else found.chunk(place.size, dim)[place.rank]
        kept = {name: value for name, value in values.items() if name in layer.module.state_dict()}
        layer.module.load_state_dict(kept, strict=False)
        for name, buffer in layer.module.named_buffers():
            buffer.data.copy_(values[name])


pytestmark = pytest.mark.job

CHANGES = {
    "layers move": (symmetric(W, 6, 12, 2, pp=2, dp=2), symmetric(W[:3], 6, 12, 2, pp=3)),
    "replicas": (symmetric(W[:3], 6, 12, 2, pp=3), symmetric(W[:3], 6, 12, 2, dp=3)),
    "newcomers": (symmetric(W[:2], 6, 12, 2, pp=2), symmetric(W, 6, 12, 2, dp=2, pp=2)),
}


def check_through(course: Sequence[tuple[Plan, int]], **kind: Setting) -> None:
    """That nothing, frozen parameters and buffers included, differs from what an undisturbed run has."""
    kind = {"layers": LAYERS, "script": load, **kind}
    reports, weights, _ = train_through(course, **kind)
    kind = {name: value for name, value in kind.items() if name not in ("lost", "snapshots")}
    expected, undisturbed = train(symmetric(["a"], 6, 12, course[0][0].micro_batch_size), len(reports), **kind)
    assert {"1.up.weight", "1.running_mean", "1.seen", "1.mask", "2.one.weight", "4.base.bias"} <= undisturbed.keys()
    if all(len(tile.workers) == 1 for plan, _ in course for tile in plan.tiles):
        assert reports == expected
        check_same(weights, undisturbed)
    else:
        check_close(reports, weights, expected, undisturbed)


@pytest.mark.parametrize("way", [*WAYS])
@pytest.mark.parametrize("change", ["layers move", soak("replicas"), "newcomers"])
def test_what_is_frozen_moves_with_its_layers(change: str, way: str) -> None:
    first, second = CHANGES[change]
    check_through([(first, 2), (second, 1), (first, 1)], **WAYS[way])


@pytest.mark.parametrize("way", ["in a step", "pausing"])
def test_so_it_does_where_tensor_parallelism_cuts_it_otherwise(way: str) -> None:
    before, after = symmetric(W, 6, 12, 3, pp=2, tp=2), symmetric(W, 6, 12, 3, pp=4)
    twice = Plan.parse(
        f"""
        plan layers 6 batch 12 micro-batch 3 zero interleaved
        layers 0:6 samples 0:6/3 workers {W[0]},{W[1]}
        layers 0:6 samples 6:12/3 workers {W[0]}
        idle {W[2]}
        idle {W[3]}
        """
    )
    check_through([(before, 1), (after, 1), (twice, 1), (before, 1)], **WAYS[way])


@pytest.mark.parametrize("script", [load, soak(lambda engine: None)])
@pytest.mark.parametrize(
    ("plan", "victim"),
    [
        (symmetric(W, 6, 12, 2, pp=4), 1),
        (symmetric(W, 6, 12, 2, pp=2, dp=2), 3),
        (symmetric(W, 6, 12, 2, pp=2, tp=2), 2),
    ],
    ids=["PP", "DP x PP", "PP x TP"],
)
def test_a_death_loses_nothing_of_it(plan: Plan, victim: int, script: Callable[[Engine], None]) -> None:
    left = [worker for worker in W if worker != W[victim]]
    course = [(plan, 2), (symmetric(left, 6, 12, 2, pp=3), 2), (symmetric(left[:2], 6, 12, 2, pp=2), 1)]
    check_through(course, lost={1: [W[victim]], 2: [left[2]]}, script=script)


def test_what_the_script_changes_between_steps_is_copied_again() -> None:
    """A buffer by `.data`, which no version counter sees, one in place, and one by another tensor in its place."""

    def script(engine: Engine) -> None:
        load(engine)
        original = engine.train_step

        def step(*args: Any) -> Any:
            for (index, _), layer in engine.layers.items():
                if isinstance(layer.module, Adapted):
                    layer.module.running_mean.data.add_(0.1 + index)
                    layer.module.seen.add_(1)
                    layer.module.mask = layer.module.mask.roll(1)  # type: ignore[assignment]
            return original(*args)

        engine.train_step = step  # type: ignore[method-assign, assignment]

    first, second = symmetric(W, 6, 12, 2, pp=4), symmetric(W[1:], 6, 12, 2, pp=3)
    check_through([(first, 3), (second, 2)], lost={1: W[:1]}, script=script)


def test_without_copies_what_only_the_dead_had_is_named() -> None:
    plan = symmetric(W[:3], 6, 12, 2, pp=3)
    lost = r"no surviving worker has all of layers\.2\.one\.weight, layers\.2\.one\.bias, layers\.2\.other\.bias"
    with pytest.raises(StateLost, match=lost):
        train_through(
            [(plan, 2), (symmetric([W[0], W[2]], 6, 12, 2, pp=2), 1)],
            lost={1: W[1:2]},
            layers=[Words, Frozen, Frozen, Frozen, Words, Head][:2] + [Frozen, Frozen, Adapted, Head],
            snapshots=0,
        )


def test_large_values_are_copied_in_batches_and_only_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, "BATCH_BYTES", 3000)
    sent: list[CopiedBox] = []
    original = HostCopies.put

    def put(self: HostCopies, box: CopiedBox, tensor: Tensor) -> None:
        sent.append(box)
        original(self, box, tensor)

    monkeypatch.setattr(HostCopies, "put", put)
    engines: list[Engine] = []

    def script(engine: Engine) -> None:
        load(engine)
        engines.append(engine)

    plan = symmetric(W[:2], 6, 12, 2, pp=2)
    # The layers change places: the same worker keeps copies of other ones, and of the same ones again.
    check_through([(plan, 12), (plan, 3)], script=script)
    assert all(engine._here.copies.complete for engine in engines[:2])
    assert len(sent) == len(set(sent))
    assert max(math.prod(stop - start for start, stop in box) for _, box in sent) * 8 <= 3000


def test_a_tower_that_all_replicas_hold_is_not_copied() -> None:
    plan = symmetric(W, 6, 12, 2, dp=4)
    specs = Engine(LAYERS, loss, torch.optim.AdamW, plan, EngineSettings(dataset=Sentences()), joining=True).specs
    assert duties(holders(plan), specs, W, 1) == {}
    # On one node only, it is copied to the other one.
    near = symmetric(W[:2], 6, 12, 2, dp=2)
    assert set(duties(holders(near), specs, W, 1)) == {(W[0], W[2])}
    assert duties(holders(near), specs, W, 0) == {}


def test_what_a_script_loads_into_a_job_that_goes_on_does_not_count() -> None:
    """A worker that joins runs the script from its beginning, and so loads the first values again."""

    def script(engine: Engine) -> None:
        original = engine.install

        def install() -> None:
            original()
            engine.guard()
            load(engine)

        load(engine) if engine.holds else setattr(engine, "install", install)

    first, second = CHANGES["newcomers"]
    check_through([(first, 2), (second, 2)], script=script, blocking=True)
    check_through([(first, 2), (second, 2)], script=script)


def test_replicas_that_begin_with_different_values_are_named() -> None:
    def script(engine: Engine) -> None:
        for layer in engine.layers.values():
            if isinstance(layer.module, Adapted) and W[1] in engine._here.worker:
                layer.module.running_mean.fill_(1)

    with pytest.raises(StateError, match=r"n0/0#0 and n0/1#0 begin with different values of layer 1 \(Adapted\)"):
        train(symmetric(W[:2], 6, 12, 2, dp=2), 1, layers=LAYERS, script=script)


def test_what_is_trained_may_not_be_frozen_or_replaced_later() -> None:
    def freeze(engine: Engine) -> None:
        engine.layers[1, 0].module.requires_grad_(False)

    def replace(engine: Engine) -> None:
        engine.layers[1, 0].module.get_submodule("inward").weight = nn.Parameter(torch.zeros(RANK, WIDTH))

    alone = symmetric(W[:1], 6, 12, 2)
    with pytest.raises(
        StateError, match=r"layer 1 \(Adapted\): inward.weight was frozen after the layer had been made"
    ):
        train(alone, 1, layers=LAYERS, script=freeze)
    with pytest.raises(StateError, match=r"layer 1 \(Adapted\): inward.weight was replaced after the layer had been"):
        train(alone, 1, layers=LAYERS, script=replace)


def test_a_buffer_must_keep_its_shape() -> None:
    def script(engine: Engine) -> None:
        engine.layers[1, 0].module.seen = torch.zeros(2)

    with pytest.raises(
        StateError, match=r"seen was \(\) torch.int64 when the layer was made, and is \(2,\) torch.float32"
    ):
        train(symmetric(W[:1], 6, 12, 2), 1, layers=LAYERS, script=script)


@pytest.mark.parametrize("kind", ["in place", "by another tensor"])
def test_a_layer_may_not_change_what_is_frozen_in_forward(kind: str) -> None:
    class Counting(Frozen):
        seen: Tensor

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if kind == "in place":
                with torch.no_grad():
                    self.one.bias.add_(1)
            else:
                self.seen = torch.add(self.seen, 1)
            return y

        def __init__(self) -> None:
            super().__init__()
            self.seen = nn.Buffer(torch.zeros(()))

    with pytest.raises(StateError, match=r"layer 1 \(Counting\) changes (one.bias|seen) in forward"):
        train(symmetric(W[:1], 3, 12, 2), 1, layers=[Words, Counting, Head])


@pytest.mark.parametrize("dtype", [torch.float64, soak(torch.bfloat16)])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (symmetric(W, 6, 12, 2, dp=2, pp=2), symmetric(W[:3], 6, 12, 2, pp=3)),
        (symmetric(W[:2], 6, 12, 2, tp=2), symmetric(W, 6, 12, 2, tp=2, pp=2)),
    ],
    ids=["DP x PP to PP", "TP to TP x PP"],
)
def test_a_checkpoint_has_it(tmp_path: Path, first: Plan, second: Plan, dtype: torch.dtype) -> None:
    kind: dict[str, Setting] = {"layers": LAYERS, "dtype": dtype}
    _, before = crew(first, 2, tmp_path, None, save=True, script=load, **kind)
    _, after = crew(second, 0, tmp_path, 2, save=False, **kind)
    check_same(after, before)
    shapes = SavedCheckpoint(checkpoints.path_of(tmp_path, 2)).shapes()
    assert shapes["model.layers.1.up.weight"] == (2 * WIDTH, WIDTH)
    assert shapes["model.layers.1.seen"] == ()
    assert "optimizer.layers.1.up.weight.exp_avg" not in shapes


def test_a_checkpoint_in_which_it_is_trained_or_of_another_shape_is_refused(tmp_path: Path) -> None:
    class Thawed(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(True)

    class Other(Frozen):
        def __init__(self) -> None:
            super().__init__()
            self.more = nn.Buffer(torch.zeros(3))

    plan = symmetric(W[:1], 3, 12, 2)
    crew(plan, 1, tmp_path, None, save=True, layers=[Words, Frozen, Head])
    with pytest.raises(StateError, match=r"layers\.1\.one\.weight is frozen there and trained here"):
        crew(plan, 0, tmp_path, 1, save=False, layers=[Words, Thawed, Head])
    with pytest.raises(StateError, match=r"layers\.1\.more is missing there and \[3\] here"):
        crew(plan, 0, tmp_path, 1, save=False, layers=[Words, Other, Head])


def test_a_factory_may_load_its_values(tmp_path: Path) -> None:
    """They are loaded on the meta device too, where they go nowhere, and nothing warns of that."""
    values = {name: torch.full_like(value, 0.3) for name, value in Frozen().state_dict().items()}

    def made() -> Frozen:
        layer = Frozen()
        layer.load_state_dict(values)
        return layer

    _, weights = train(symmetric(W[:1], 3, 12, 2), 1, layers=[Words, made, Head])
    assert torch.equal(weights["1.one.weight"], torch.full((WIDTH, WIDTH), 0.3, dtype=torch.float32).double())


def comparing(
    engine: Engine, spoil: Callable[[Engine], None], told: list[str | None] | None = None, repair: bool = False
) -> None:
    """Has the engine compare its replicas after each step; `spoil` is called after the second."""
    original = engine.train_step

    def step(*args: Any, **kwargs: Any) -> Any:
        report = original(*args, **kwargs)
        if engine.step == 2:
            spoil(engine)
        differ = engine.check_replicas(engine.step - 1 or None, repair)
        if told is not None:
            told.append(differ)
        return report

    engine.train_step = step  # type: ignore[method-assign]


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"dp": 2, "tp": 2}, {"pp": 2, "dp": 2}])
def test_replicas_are_the_same_after_each_step(sizes: dict[str, Any]) -> None:
    plan = symmetric(W[: math.prod(sizes.values())], 6, 12, 2, **sizes)
    train(plan, 3, layers=LAYERS, script=partial(comparing, spoil=lambda engine: None))


@pytest.mark.parametrize("name", ["inward.weight", "up.weight", "running_mean"])
def test_one_that_a_worker_has_changed_is_named(name: str) -> None:
    def spoil(engine: Engine) -> None:
        if engine._here.worker == W[1]:
            engine.layers[1, 1].tensors()[name].view(-1)[0] += 1

    expected = rf"replicas of layer 1 differ after 2 steps \(after 1 they were the same\): `{name}` is not the same"
    with pytest.raises(ReplicasDiffer, match=expected):
        train(symmetric(W[:2], 6, 12, 2, dp=2), 3, layers=LAYERS, script=partial(comparing, spoil=spoil))


@pytest.mark.parametrize("name", ["inward.weight", "up.weight", "running_mean"])
@pytest.mark.parametrize(("spoilt", "right"), [({1}, True), ({0}, True), ({1, 2}, False)])
def test_one_that_differs_gets_the_state_of_most_others(name: str, spoilt: set[int], right: bool) -> None:
    plan = symmetric(W[:3], 6, 12, 2, dp=3)
    _, expected = train(plan, 4, layers=LAYERS)
    values: dict[int, Tensor] = {}

    def spoil(engine: Engine) -> None:
        rank = W.index(engine._here.worker)
        value = engine.layers[1, rank].tensors()[name].view(-1)
        if rank in spoilt:
            value[0] += 1
        values[rank] = value[:1].clone()

    told: list[str | None] = []
    _, found = train(plan, 4, layers=LAYERS, script=partial(comparing, spoil=spoil, told=told, repair=True))
    differ = [text for text in told if text is not None]
    assert len(differ) == 3, "on all workers, after one step"
    assert len(set(differ)) == 1
    assert f"layer 1 differ after 2 steps (after 1 they were the same): `{name}` is not the same on" in differ[0]
    # Most may have the wrong value; but of what is trained the optimizer knows the right one.
    if right or name == "inward.weight":
        assert set(found) == set(expected)
        assert all(torch.equal(found[one], expected[one]) for one in expected)
    else:
        assert torch.equal(found[f"1.{name}"].view(-1)[:1], values[1])
