"""Engines that change their plan: what comes of it is what the plan at the end would have given from the start."""

from __future__ import annotations

import json
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import DataObject
from torch import Tensor

from elaunch.errors import StateError, StepInterrupted
from elaunch.plan import Plan, symmetric
from elaunch.plan.views import unit_of
from elaunch.workers.barrier import StepRecord, reduce
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native import groups as groups_module
from elaunch.workers.comm.native.gloo import GlooBulk
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.transport import Transport
from elaunch.workers.layers.change.held_state import StepReport
from elaunch.workers.layers.engine import Engine
from elaunch.workers.layers.settings import EngineSettings
from elaunch.workers.state import reshard as reshard_module
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.paths.choice import LINKS, NATIVE, PATH
from elaunch.workers.state.paths.in_step import NativeStepPath
from elaunch.workers.state.paths.offers import Offers
from elaunch.workers.state.routes import Router
from tests.helpers import scaled, soak
from tests.unit.comm_crew import PATIENCE_S, addresses, outcomes, switching_often, together
from tests.unit.engine_crew import TRAIN_S, Sentences, loss, model, train, whole
from tests.unit.plan_strategies import valid_plans

pytestmark = pytest.mark.job

Setting = Any


class InStep:
    """What a crew's members may move state over: groups of Gloo, as asked for by `ELAUNCH_STATE_PATH`."""

    def __init__(self, make: Callable[[str], GlooBulk]) -> None:
        self._make, self._store = make, dist.HashStore()
        self.offers: dict[str, Offers] = {}
        self._natives: dict[str, NativeGroups] = {}

    def enter(self, transport: Transport, group: Group) -> None:
        """Leaves the groups of the generation before, and has state of this one move over others."""
        worker = transport.worker
        if worker not in self._natives:
            self._natives[worker] = NativeGroups(partial(self._make, worker))
            self.offers[worker] = Offers(self._natives[worker])
            transport.watch(self._natives[worker].poison)
        self._natives[worker].pause()
        group.barrier()
        self._natives[worker].settled(())
        facts = [json.loads(one) for one in group.all_gather_bytes(json.dumps(self.offers[worker].facts()).encode())]
        self.offers[worker].agreed(facts, lambda: self._store)
        group.paths = self.offers[worker]

    def passed(self, worker: str) -> None:
        """Takes note that all members have come to a commit barrier."""
        self._natives[worker].passed((0, 0))

    def close(self) -> None:
        """Leaves all groups."""
        for native in self._natives.values():
            native.close()


def train_through(
    course: Sequence[tuple[Plan, int]], lost: Mapping[int, Sequence[str]] | None = None, **extra: Setting
) -> tuple[list[StepReport], dict[str, Tensor], list[int]]:
    """Train some steps under one plan after the other; the workers of a later plan may be others.

    Args:
        course: plans, and steps under each.
        lost: workers that die before the plan of this place in the course.
        extra: settings of the engine; `optimizer` and `layers`; `script`, which gets each engine at its beginning; and
            `paths`, over which state may move.

    Returns:
        The reports, the whole parameters at the end, and the bytes that all workers received in each change.
    """
    everybody = list(dict.fromkeys(worker for plan, _ in course for worker in plan.workers))
    transports = {worker: Transport(worker, "secret") for worker in everybody}
    engines: dict[str, Engine] = {}
    settings = {"dtype": torch.float64, "seed": 3, "dataset": Sentences(), **extra}
    optimizer = settings.pop("optimizer", lambda named: torch.optim.AdamW(named, lr=0.01))
    layers = settings.pop("layers", None) or model(course[0][0].n_layers)
    script = settings.pop("script", lambda engine: None)
    paths: InStep | None = settings.pop("paths", None)
    reports: list[StepReport] = []
    received: list[int] = []

    def all_at_once(work: Callable[[str], Any], workers: Sequence[str]) -> list[Any]:
        errors: list[BaseException] = []

        def guarded(worker: str) -> Any:
            try:
                return work(worker)
            except BaseException as error:
                errors.append(error)
                for transport in transports.values():
                    transport.interrupt(1 << 60)
                raise

        try:
            with switching_often():
                return together([partial(guarded, worker) for worker in workers], TRAIN_S)
        except StepInterrupted:
            # By the first one, whose error is the cause.
            raise errors[0] from None

    def connect(worker: str, generation: int, members: Sequence[str]) -> Group:
        transport = transports[worker]
        transport.interrupt(generation)
        known = {who: address for who, address in addresses(list(transports.values())).items() if who in members}
        transport.retain(members)
        transport.connect(known, generation=generation, timeout_s=PATIENCE_S)
        group = Group(transport, generation, list(members))
        if paths is not None:
            paths.enter(transport, group)
        return group

    def stepped(worker: str, group: Group) -> StepReport:
        def barrier(record: StepRecord) -> StepRecord:
            whole = reduce(group, record)
            if paths is not None:
                paths.passed(worker)
            return whole

        return engines[worker].train_step(barrier)

    def begin(worker: str) -> list[StepReport]:
        plan, steps = course[0]
        group = connect(worker, 1, plan.workers)
        engines[worker] = Engine(layers, loss, optimizer, plan, EngineSettings(**settings), group=group)
        script(engines[worker])
        return [stepped(worker, group) for _ in range(steps)]

    def go_on(generation: int, plan: Plan, steps: int, step: int, there: Sequence[str], worker: str) -> Any:
        # Whoever leaves still gives what it has.
        members = [*plan.workers, *(who for who in there if who not in plan.workers)]
        group = connect(worker, generation, members)
        idle = Plan.parse("\n".join([str(plan), *(f"idle {who}" for who in members if who not in plan.workers)]))
        got = engines[worker].change(group, idle, step)
        engines[worker].install()
        if not steps:
            engines[worker].arrive()
        return got, [stepped(worker, group) for _ in range(steps)]

    try:
        said = all_at_once(begin, course[0][0].workers)
        assert all(one == said[0] for one in said)
        reports += said[0]
        present = list(course[0][0].workers)
        for generation, (plan, steps) in enumerate(course[1:], 2):
            for worker in plan.workers:
                if worker not in engines:
                    chosen = EngineSettings(**settings)
                    engines[worker] = Engine(layers, loss, optimizer, plan, chosen, joining=True)
                    script(engines[worker])
            dead = (lost or {}).get(generation - 1, ())
            for worker in dead:
                engines.pop(worker).close()
                transports.pop(worker).close()
                transports[worker] = Transport(worker, "secret")
            there = [who for who in dict.fromkeys([*present, *plan.workers]) if who not in dead]
            ends = all_at_once(partial(go_on, generation, plan, steps, len(reports), there), there)
            assert all(one == ends[0][1] for _, one in ends)
            reports += ends[0][1]
            received.append(sum(got for got, _ in ends))
            present = there
    finally:
        for engine in engines.values():
            engine.close()
        for transport in transports.values():
            transport.interrupt(1 << 60)
            transport.close()
        if paths is not None:
            paths.close()
    check_snapshots(engines)
    return reports, whole(list(engines.values())), received


@cache
def undisturbed(batch: int, unit: int, steps: int, **kind: Setting) -> tuple[list[StepReport], dict[str, Tensor]]:
    """What one worker that nobody joins gets: where no tensor is cut, that is what any plan gives, bit by bit."""
    return train(symmetric(["alone"], 4, batch, unit), steps, **kind)


def check_as_undisturbed(reports: list[StepReport], weights: dict[str, Tensor], *plans: Plan, **kind: Setting) -> None:
    """That one worker gets the same: up to rounding where a plan cuts tensors, whose sums then have another order."""
    expected, values = undisturbed(plans[0].global_batch_size, plans[0].micro_batch_size, len(reports), **kind)
    if all(len(tile.workers) == 1 for plan in plans for tile in plan.tiles):
        assert reports == expected
        check_same(weights, values)
    else:
        check_close(reports, weights, expected, values)


def check_snapshots(engines: Mapping[str, Engine]) -> None:
    """That all copies in host memory are bitwise what their owners have."""
    for engine in engines.values():
        copies = engine._here.snapshots
        for copy in copies._copies:
            owner = engines[copy.owner]._here.zero.shards
            for place in range(copies.pieces().get(copy.owner, 0)):
                assert copy.state is not None
                mine, its = copy.state.tensors(place), owner.tensors(place)
                assert len(mine) == len(its)
                assert all(map(torch.equal, mine, its)), f"{copy.owner}'s {copy.pieces[place]}"


def check_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def check_close(
    reports: list[StepReport], weights: dict[str, Tensor], expected: list[StepReport], values: dict[str, Tensor]
) -> None:
    """Up to rounding."""
    assert [report.loss for report in reports] == pytest.approx([report.loss for report in expected], rel=1e-10)
    for name, value in values.items():
        assert torch.allclose(weights[name], value, rtol=1e-8, atol=1e-10), name


W = ["n0/0#0", "n0/1#0", "n1/0#0", "n1/1#0"]


WAYS: dict[str, dict[str, Setting]] = {
    "in a step": {},
    "pausing": {"blocking": True},
    "in little memory": {"blocking": True, "max_extra_bytes": 1 << 18},
}


CHANGES = {
    "DP x PP to DP": (symmetric(W, 4, 12, 2, dp=2, pp=2), symmetric(W, 4, 12, 2, dp=4)),
    "PP to DP x TP": (symmetric(W, 4, 12, 2, pp=4), symmetric(W, 4, 12, 2, dp=2, tp=2)),
    "four to two": (symmetric(W, 4, 12, 2, tp=4), symmetric(W[:2], 4, 12, 2, pp=2)),
    "two to four": (symmetric(W[:2], 4, 12, 2, dp=2), symmetric(W, 4, 12, 2, dp=2, pp=2, zero="contiguous")),
}
OFTEN_DONE = [
    ("DP x PP to DP", "pausing"),
    ("PP to DP x TP", "in a step"),
    ("four to two", "pausing"),
    ("two to four", "in little memory"),
]


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


@pytest.mark.parametrize(
    ("first", "second", "way"),
    [
        pytest.param(*plans, way, id=f"{name}-{way}", marks=[] if (name, way) in OFTEN_DONE else [pytest.mark.soak])
        for name, plans in CHANGES.items()
        for way in WAYS
    ],
)
def test_a_change_of_plan_changes_no_bit(first: Plan, second: Plan, way: str) -> None:
    kind: dict[str, Setting] = {"scheduler": cosine, "clip_norm": 0.5}
    reports, weights, received = train_through([(first, 2), (second, 2), (first, 1)], **WAYS[way], **kind)
    assert all(received)
    check_as_undisturbed(reports, weights, first, second, **kind)


class Counting(GlooBulk):
    """A group that counts the exchanges of its member, and may refuse to open."""

    def __init__(self, worker: str, exchanges: Counter[str], refuses: Sequence[str] = ()) -> None:
        super().__init__("127.0.0.1")
        self._worker, self._exchanges, self._refuses = worker, exchanges, refuses

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        if self._worker in self._refuses:
            raise RuntimeError("no interface that others reach")
        super().open(store, rank, size, messages)

    def exchange(self, outgoing: Sequence[Tensor], incoming: Sequence[Tensor]) -> Sequence[dist.Work]:
        self._exchanges[self._worker] += 1
        return super().exchange(outgoing, incoming)


@pytest.mark.parametrize("over", [LINKS, NATIVE])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        (symmetric(W, 4, 12, 2, dp=2, pp=2), symmetric(W, 4, 12, 2, dp=4)),
        (symmetric(W, 4, 12, 2, dp=2, pp=2), symmetric(W, 4, 12, 2, dp=2, pp=2, zero="contiguous")),
        (symmetric(W, 4, 12, 2, dp=2, tp=2), symmetric(W, 4, 12, 2, pp=2, tp=2)),
        (symmetric(W[:1], 4, 12, 2), symmetric(W, 4, 12, 2, dp=4)),
        (symmetric(W, 4, 12, 2, dp=4), symmetric(W[:1], 4, 12, 2)),
    ],
    ids=["layers", "optimizer", "TP groups", "one to four", "four to one"],
)
def test_where_nobody_is_lost_state_moves_during_the_next_step(
    first: Plan, second: Plan, over: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.workers.layers.change.begin.reshard", None)
    monkeypatch.setenv(PATH, over)
    monkeypatch.setattr(NativeStepPath, "message_bytes", 8 << 10)  # several rounds
    exchanges = Counter[str]()
    paths = InStep(lambda worker: Counting(worker, exchanges))
    reports, weights, received = train_through([(first, 2), (second, 2)], clip_norm=0.5, paths=paths)
    assert all(received)
    assert (exchanges.total() > 0) == (over == NATIVE)
    check_as_undisturbed(reports, weights, first, second, clip_norm=0.5)


def test_a_group_that_cannot_be_opened_on_one_member_leaves_the_state_of_a_step_to_links(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PATH, NATIVE)
    monkeypatch.setattr(groups_module, "GIVE_UP_S", 1.0)
    exchanges = Counter[str]()
    paths = InStep(lambda worker: Counting(worker, exchanges, refuses=[W[2]]))
    first, second = symmetric(W, 4, 12, 2, dp=2, pp=2), symmetric(W, 4, 12, 2, dp=4)
    reports, weights, _ = train_through([(first, 2), (second, 2)], paths=paths)
    assert not exchanges
    assert {one.last for one in paths.offers.values()} == {LINKS}
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1, said
    assert "the state of generation 2 moves over links, as gloo cannot be opened for it: " in said[0]
    check_as_undisturbed(reports, weights, first, second)


def test_under_a_bound_old_state_is_let_go_window_by_window(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = symmetric(W, 4, 12, 2, pp=4), symmetric(W, 4, 12, 2, dp=4)
    gone: list[bool] = []
    original = reshard_module._let_go

    def let_go(router: Router, name: str, worker: str, state: dict[str, list[Chunk]], *rest: Any) -> None:
        moments = [weakref.ref(old.tensors[-1]) for old in state.get(name, ()) if old.tensors[-1]._base is None]
        flats = [weakref.ref(old.tensors[-1]._base) for old in state.get(name, ()) if old.tensors[-1]._base is not None]
        guarded = router.lonely(name, worker)
        original(router, name, worker, state, *rest)
        gone.extend(ref() is None for ref in (*moments, *flats) if not guarded)

    monkeypatch.setattr(reshard_module, "_let_go", let_go)
    train_through([(first, 2), (second, 1)], **WAYS["in little memory"])
    # But for the pieces that stay as they are.
    assert sum(gone) > len(gone) / 2


def test_the_first_change_may_come_before_the_first_step() -> None:
    first, second = symmetric(W, 4, 12, 2, dp=2, pp=2), symmetric(W, 4, 12, 2, dp=4)
    reports, weights, _ = train_through([(first, 0), (second, 3)])
    check_as_undisturbed(reports, weights, first, second)


@pytest.mark.parametrize("over", [LINKS, NATIVE])
def test_who_joins_after_the_last_step_has_its_values_too(over: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PATH, over)
    exchanges = Counter[str]()
    first, second = symmetric(W[:2], 4, 12, 2, pp=2), symmetric(W, 4, 12, 2, dp=2, pp=2)
    paths = InStep(lambda worker: Counting(worker, exchanges))
    reports, weights, _ = train_through([(first, 3), (second, 0)], paths=paths)
    assert (exchanges.total() > 0) == (over == NATIVE)
    check_as_undisturbed(reports, weights, first, second)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD with momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "NAdam": partial(torch.optim.NAdam, lr=0.01),
    "AMSGrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "SGD": partial(torch.optim.SGD, lr=0.05),
}


@pytest.mark.parametrize("optimizer", ["SGD with momentum", soak("NAdam"), "AMSGrad", soak("SGD")])
def test_all_that_an_elementwise_optimizer_keeps_moves_with_the_parameters(optimizer: str) -> None:
    first, second = symmetric(W[:2], 4, 8, 2, pp=2), symmetric(W[:2], 4, 8, 2, dp=2)
    reports, weights, _ = train_through([(first, 2), (second, 2)], optimizer=OPTIMIZERS[optimizer])
    check_as_undisturbed(reports, weights, first, second, optimizer=OPTIMIZERS[optimizer])


def test_groups_keep_their_options_where_workers_have_other_groups() -> None:
    def grouped(named: Any) -> torch.optim.Optimizer:
        decayed: list[Tensor] = []
        rest: list[Tensor] = []
        for name, value in named:
            (rest if "bias" in name or "norm" in name else decayed).append(value)
        empty: list[Tensor] = []
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": rest, "weight_decay": 0.0, "lr": 0.02},
            {"params": empty, "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"] or group is groups[-1]], lr=0.01)

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))

    first, second = symmetric(W[:2], 4, 8, 2, pp=2), symmetric(W, 4, 8, 2, dp=4)
    kind: dict[str, Setting] = {"optimizer": grouped, "scheduler": scheduler}
    reports, weights, _ = train_through([(first, 2), (second, 2), (first, 2)], **kind)
    check_as_undisturbed(reports, weights, first, second, **kind)


def test_bfloat16_weights_come_from_their_masters() -> None:
    first, second = symmetric(W, 4, 8, 2, dp=2, pp=2), symmetric(W, 4, 8, 2, dp=4)
    reports, weights, _ = train_through([(first, 2), (second, 2)], dtype=torch.bfloat16)
    check_as_undisturbed(reports, weights, first, second, dtype=torch.bfloat16)


def test_who_was_given_other_settings_is_refused() -> None:
    alone = symmetric(W[:1], 4, 8, 2)
    plan = symmetric(W[:2], 4, 8, 2, dp=2)

    def made(seed: int, joining: bool) -> Engine:
        chosen = EngineSettings(dataset=Sentences(), seed=seed)
        return Engine(model(4), loss, torch.optim.AdamW, alone, chosen, joining=joining)

    def work(transport: Transport) -> None:
        transport.connect(addresses(transports), generation=1, timeout_s=PATIENCE_S)
        engine = made(0 if transport.worker == W[0] else 1, joining=transport.worker != W[0])
        engine.change(Group(transport, 1, W[:2]), plan, 0)

    transports = [Transport(worker, "secret") for worker in W[:2]]
    try:
        for end in outcomes([partial(work, transport) for transport in transports]):
            assert isinstance(end, StateError)
            assert "n0/0#0 and n0/1#0 were given different layers, samples or settings" in str(end)
    finally:
        for transport in transports:
            transport.interrupt(1 << 60)
            transport.close()


@settings(max_examples=scaled(4, 15), deadline=None)
@given(st.data())
def test_any_course_of_plans_ends_where_a_single_plan_ends(data: DataObject) -> None:
    batch, size = 12, 3
    plans = valid_plans(4, batch // size, 4, tp=(1, 2), max_unit_rows=size, exact=True)
    course = [data.draw(plans), data.draw(plans), data.draw(plans)]
    kind: dict[str, Setting] = {
        "blocking": data.draw(st.booleans()),
        "consistency": data.draw(st.sampled_from(["bitwise", "fast"])),
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv(PATH, data.draw(st.sampled_from([LINKS, NATIVE])))
        patched.setattr(NativeStepPath, "message_bytes", 8 << 10)
        paths = InStep(lambda worker: GlooBulk("127.0.0.1"))
        reports, weights, _ = train_through([(plan, 1) for plan in course], paths=paths, **kind)
    expected, values = undisturbed(batch, size, 3)
    tiles = [(plan, tile) for plan in course for tile in plan.tiles]
    whole_units = all(unit_of(plan, piece) is not None for plan, tile in tiles for piece in tile.micro_batches)
    if kind["consistency"] == "fast" or not whole_units or any(len(tile.workers) > 1 for _, tile in tiles):
        # Parts of a logical micro-batch, and of a matrix product, are sums in another order.
        check_close(reports, weights, expected, values)
    else:
        assert reports == expected
        check_same(weights, values)


# The first change comes in training, or before the next one.
@pytest.mark.parametrize(("way", "first"), [("in a step", 1), soak("in a step", 0), soak("pausing", 1), ("pausing", 0)])
def test_who_gets_a_layer_twice_gets_both(way: str, first: int) -> None:
    """One worker needs layers 2 and 3 cut, as a member of a TP group, and whole, for a tile of its own."""
    before = symmetric(W, 4, 12, 3, pp=2, tp=2)
    after = Plan.parse(
        f"""
        plan layers 4 batch 12 micro-batch 3 zero interleaved
        layers 0:4 samples 0:6/3 workers {W[0]},{W[1]}
        layers 0:4 samples 6:12/3 workers {W[0]}
        idle {W[2]}
        idle {W[3]}
        """
    )
    reports, weights, _ = train_through([(before, 1), (after, first), (after, 2)], **WAYS[way])
    check_as_undisturbed(reports, weights, before, after)


PAIRS = [
    (symmetric(W, 4, 12, 2, dp=2, pp=2), 1),
    (symmetric(W, 4, 12, 2, dp=4), 2),
    (symmetric(W, 4, 12, 2, pp=4), 3),
    (symmetric(W, 4, 12, 2, dp=2, tp=2), 0),
]


@pytest.mark.parametrize("bound", [None, soak(1 << 18)])
@pytest.mark.parametrize(("plan", "victim"), PAIRS, ids=["DP x PP", "DP", "PP", "DP x TP"])
def test_after_a_death_the_state_comes_from_the_snapshots(plan: Plan, victim: int, bound: int | None) -> None:
    left = [worker for worker in W if worker != W[victim]]
    after = symmetric(left, 4, 12, 2, dp=3)
    reports, weights, _ = train_through(
        [(plan, 3), (after, 2), (plan, 1)], lost={1: [W[victim]]}, max_extra_bytes=bound, clip_norm=0.5
    )
    check_as_undisturbed(reports, weights, plan, clip_norm=0.5)


def test_without_snapshots_what_only_the_dead_had_is_named() -> None:
    plan = symmetric(W, 4, 12, 2, dp=2, pp=2)
    with pytest.raises(StateError, match=r"no surviving worker has all of layers\.0\..*@optimizer"):
        train_through([(plan, 1), (symmetric(W[1:], 4, 12, 2, dp=3), 1)], lost={1: W[:1]}, snapshots=0)


def test_a_copy_is_made_in_batches_while_the_steps_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elaunch.workers.layers.snapshots.BATCH_BYTES", 20_000)
    plan = symmetric(W[:2], 4, 8, 2, dp=2)
    train_through([(plan, 2)])
    train_through([(plan, 9)])
    with pytest.raises(StateError, match="no surviving worker has all of"):
        train_through([(plan, 1), (symmetric(W[:1], 4, 8, 2), 1)], lost={1: W[1:2]})


@pytest.mark.parametrize("optimizer", ["SGD with momentum", soak("NAdam"), "AMSGrad", soak("SGD")])
def test_snapshots_follow_any_elementwise_optimizer(optimizer: str) -> None:
    plan = symmetric(W[:2], 4, 8, 2, dp=2)
    alone = symmetric(W[:1], 4, 8, 2)

    def scheduler(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    kind: dict[str, Setting] = {"optimizer": OPTIMIZERS[optimizer], "scheduler": scheduler, "clip_norm": 0.1}
    reports, weights, _ = train_through([(plan, 3), (alone, 2)], lost={1: W[1:2]}, **kind)
    check_as_undisturbed(reports, weights, alone, **kind)
