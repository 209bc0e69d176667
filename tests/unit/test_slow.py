"""Who is slow, who waits, and who only had a hiccup: the statistics, on series with all kinds of noise."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.policy.stragglers.slow import Detector
from elaunch.policy.stragglers.slow_links import LIKE_LINKS, LINK_BYTES, LinkDetector, LinkWatch, Slower
from elaunch.policy.stragglers.track import SPAN_STEPS, Change, centre, describe, mad
from tests.helpers import scaled, soak
from tests.unit.slow_series import (
    Bursts,
    Job,
    Noise,
    collecting,
    drifting,
    gaussian,
    heavy,
    recorded,
)

W24 = [f"n{number // 8}/{number % 8}#0" for number in range(24)]
WORKS = {
    "replicas": None,
    "a stage for each": {worker: f"stage {number}" for number, worker in enumerate(W24)},
    "six stages": {worker: f"stage {number % 6}" for number, worker in enumerate(W24)},
    "a stage for each node": {worker: f"stage {number // 8}" for number, worker in enumerate(W24)},
}
NOISES: dict[str, Callable[[], Noise]] = {
    "gaussian": lambda: gaussian(0.03),
    "wide gaussian": lambda: gaussian(0.1),
    "heavy tails": lambda: heavy(0.05),
    "wide heavy tails": lambda: heavy(0.1),
    "bursts": Bursts,
    "garbage collection": lambda: collecting(20),
    "garbage collection as often as looks": lambda: collecting(4),
    "drift": lambda: drifting(3600),
}
HOUR = 3600
CALM = ["gaussian", "heavy tails", "garbage collection", "drift"]

repeatable = settings(deadline=None, derandomize=True, max_examples=scaled(8, 40))


@pytest.mark.parametrize("works", ["replicas", *map(soak, ["a stage for each", "six stages", "a stage for each node"])])
@pytest.mark.parametrize("noise", NOISES)
def test_in_an_hour_of_noisy_steps_nobody_is_slow(works: str, noise: str) -> None:
    job = Job(W24, WORKS[works])
    assert job.run(HOUR, NOISES[noise](), seed=1) == []


@pytest.mark.parametrize("works", WORKS)
@pytest.mark.parametrize("noise", [*NOISES])
def test_nor_at_the_start_of_many_jobs(works: str, noise: str) -> None:
    for seed in range(scaled(2, 4)):
        assert Job(W24, WORKS[works]).run(150, NOISES[noise](), seed=100 + seed) == []


def slow_from(step: int, factor: float, *names: str) -> Callable[[str, int], float]:
    return lambda worker, now: factor if worker in names and now >= step else 1.0


@pytest.mark.parametrize("works", WORKS)
@pytest.mark.parametrize("noise", CALM)
@pytest.mark.parametrize("factor", [1.5, 2.0])
def test_who_is_half_as_fast_again_is_found_within_twenty_steps_and_nobody_else(
    works: str, noise: str, factor: float
) -> None:
    for seed in range(scaled(2, 4)):
        job, begin = Job(W24, WORKS[works]), 100 + seed
        job.run(begin + 20, NOISES[noise](), slow_from(begin, factor, "n1/3#0"), seed)
        (change,) = job.changes
        assert (change.state, change.kind, change.names) == ("slow", "worker", ("n1/3#0",))
        assert change.factor == pytest.approx(factor, rel=0.1)
        assert begin - 1 <= change.since_step <= change.step < begin + 20


@pytest.mark.parametrize("works", WORKS)
def test_a_fifth_is_found_where_steps_are_alike(works: str) -> None:
    for seed in range(4):
        job, begin = Job(W24, WORKS[works]), 100 + seed
        job.run(begin + 40, gaussian(0.03), slow_from(begin, 1.2, "n1/3#0"), seed)
        (change,) = job.changes
        assert change.names == ("n1/3#0",)
        assert change.factor == pytest.approx(1.2, rel=0.05)


def test_a_twentieth_is_not_slow() -> None:
    job = Job(W24)
    assert job.run(1000, gaussian(0.02), slow_from(100, 1.05, "n1/3#0")) == []


@pytest.mark.parametrize("number", [2, 3, 4])
@pytest.mark.parametrize("same", [True, False])
def test_few_workers_are_enough(number: int, same: bool) -> None:
    workers = [f"n{index}/0#0" for index in range(number)]
    job = Job(workers, None if same else {worker: worker for worker in workers})
    job.run(140, gaussian(0.03), slow_from(100, 1.5, "n1/0#0"))
    assert [change.names for change in job.changes] == [("n1/0#0",)]


def test_who_is_slow_from_the_start_shows_beside_who_does_the_same() -> None:
    job = Job(W24[:4])
    job.run(40, gaussian(0.03), slow_from(0, 1.5, "n0/2#0"))
    (change,) = job.changes
    assert change.names == ("n0/2#0",)
    assert change.evidence["basis"] == "peers"


def test_where_all_become_slower_it_is_nobodys_fault() -> None:
    for works in WORKS.values():
        job = Job(W24, works)
        assert job.run(400, gaussian(0.03), slow_from(100, 1.7, *W24)) == []


@pytest.mark.parametrize("works", ["replicas", "a stage for each", "a stage for each node"])
def test_a_node_whose_workers_all_are_slow_is_named(works: str) -> None:
    node = W24[8:16]
    job = Job(W24, WORKS[works])
    job.run(160, gaussian(0.03), slow_from(100, 1.5, *node))
    (change,) = job.changes
    assert (change.kind, change.names, sorted(change.workers)) == ("node", ("n1",), sorted(node))
    assert change.step < 130
    job.run(100, gaussian(0.03))
    assert [(one.state, one.kind, one.names) for one in job.changes[1:]] == [("recovered", "node", ("n1",))]


def test_the_workers_of_the_only_node_are_workers() -> None:
    job = Job(W24[:8])
    job.run(160, gaussian(0.03), slow_from(100, 1.5, *W24[:3]))
    assert {change.names for change in job.changes} == {(worker,) for worker in W24[:3]}
    assert {change.kind for change in job.changes} == {"worker"}


@pytest.mark.parametrize("works", WORKS)
def test_a_worker_that_is_fast_again_has_recovered_once(works: str) -> None:
    job = Job(W24, WORKS[works])
    job.run(160, gaussian(0.03), slow_from(100, 1.5, "n1/3#0"))
    assert job.detector.speeds() == {"n1/3": pytest.approx(0.67, abs=0.04)}
    job.run(300, gaussian(0.03))
    assert [change.state for change in job.changes] == ["slow", "recovered"]
    assert job.changes[1].names == ("n1/3#0",)
    assert job.detector.speeds() == {}


def test_what_lies_between_slow_and_recovered_changes_nothing() -> None:
    job = Job(W24)
    job.run(100, gaussian(0.005))
    for factor in (1.2, 1.08, 1.12, 1.08):
        job.run(60, gaussian(0.005), slow_from(0, factor, "n1/3#0"))
    assert [change.state for change in job.changes] == ["slow"]
    job.run(60, gaussian(0.005), slow_from(0, 1.04, "n1/3#0"))
    assert [change.state for change in job.changes] == ["slow", "recovered"]


def test_who_becomes_still_slower_is_told_of_again() -> None:
    job = Job(W24)
    job.run(160, gaussian(0.03), slow_from(100, 1.5, "n1/3#0"))
    job.run(100, gaussian(0.03), slow_from(0, 3.0, "n1/3#0"))
    assert [round(change.factor, 1) for change in job.changes] == [
        pytest.approx(1.5, abs=0.1),
        pytest.approx(3, abs=0.2),
    ]


def test_one_that_only_drifts_is_slow_in_the_end() -> None:
    for works in WORKS.values():
        job = Job(W24, works)
        job.run(1000, gaussian(0.02), lambda worker, step: 1 + step / 2500 if worker == "n1/3#0" else 1.0)
        assert {change.names for change in job.changes} == {("n1/3#0",)}


@repeatable
@given(
    begin=st.integers(30, 60),
    steps=st.integers(1, 8),
    factor=st.floats(1.2, 50),
    other=st.integers(0, 40),
    works=st.sampled_from(sorted(WORKS)),
)
def test_what_lasts_for_less_than_nine_steps_is_no_event(
    begin: int, steps: int, factor: float, other: int, works: str
) -> None:
    def slow(worker: str, step: int) -> float:
        # A second worker makes the job look at every step.
        if worker == "n2/0#0" and begin - 9 <= step < begin - 1:
            return 1.5
        hit = worker == "n1/3#0" and any(at <= step < at + steps for at in (begin, begin + 30 + other))
        return factor if hit else 1.0

    assert Job(W24, WORKS[works]).run(180, gaussian(0.01), slow) == []


@repeatable
@given(st.integers(1, 40), st.floats(1.5, 5), st.sampled_from(sorted(WORKS)), st.integers(0, 1000))
def test_no_moment_to_become_slow_is_missed(begin: int, factor: float, works: str, seed: int) -> None:
    job = Job(W24, WORKS[works])
    job.run(60 + begin + 20, gaussian(0.02), slow_from(60 + begin, factor, "n0/1#0"), seed)
    assert [change.names for change in job.changes] == [("n0/1#0",)]


def test_where_steps_take_milliseconds_a_hiccup_of_many_is_none() -> None:
    job = Job(W24, step_s=0.002)
    assert (
        job.run(2000, gaussian(0.03), lambda worker, step: 3.0 if worker == W24[5] and 500 <= step < 560 else 1) == []
    )
    job.run(400, gaussian(0.03), slow_from(0, 1.5, W24[5]))
    assert [change.names for change in job.changes] == [(W24[5],)]


@pytest.mark.parametrize(("busy", "slower"), [(False, 1.5), (True, 2.5)])
def test_on_recorded_steps_nobody_is_slow_and_who_is_made_slow_is_found(busy: bool, slower: float) -> None:
    series = recorded(busy)
    draw = random.Random(0)
    crew = [f"n{number // 4}/{number % 4}#0" for number in range(12)]
    sources = {worker: list(series.values())[number % len(series)] for number, worker in enumerate(crew)}
    # Each begins at a step of its own, so that a busy moment of the machine is not everybody's.
    offsets = {worker: draw.randrange(len(sources[worker])) for worker in crew}
    for slow_worker in (None, crew[7]):
        job = Job(crew)
        for step in range(HOUR):
            factor = slower if step >= 1000 else 1.0
            seconds = {worker: sources[worker][(step + offsets[worker]) % len(sources[worker])] for worker in crew}
            if slow_worker is not None:
                seconds[slow_worker] *= factor
            job.step(seconds)
            if slow_worker is not None and job.changes:
                break
        assert [change.names for change in job.changes] == ([] if slow_worker is None else [(slow_worker,)])
        if slow_worker is not None and not busy:
            assert job.changes[0].step < 1020


def test_a_new_process_in_a_slow_slot_is_judged_anew_and_told_of_by_its_own_name() -> None:
    for factor, state in ((1.0, "recovered"), (1.5, "slow")):
        job = Job(W24[:4])
        job.run(100, gaussian(0.02), slow_from(50, 1.5, "n0/2#0"))
        crew = [*W24[:2], "n0/2#1", W24[3]]
        job.detector.entered([*W24[:2], W24[3]])  # the others go on until it comes
        job.detector.entered(crew)
        job.workers, job.works = crew, dict.fromkeys(crew, "layer")
        job._told = {worker: [] for worker in crew}
        assert job.detector.speeds() == {"n0/2": pytest.approx(0.67, abs=0.03)}
        job.run(60, gaussian(0.02), slow_from(0, factor, "n0/2#1"))
        assert [(change.state, change.names) for change in job.changes[1:]] == [(state, ("n0/2#1",))]


def test_who_joins_knows_who_is_slow_and_tells_of_nobody_again() -> None:
    job = Job(W24[:6])
    job.run(100, gaussian(0.02), slow_from(50, 2.0, "n0/2#0"))
    later = Job(W24[:6])
    later.detector.adopt(job.detector.known())
    assert later.detector.speeds() == job.detector.speeds()
    later.run(100, gaussian(0.02), slow_from(0, 2.0, "n0/2#0"))
    assert later.changes == []
    later.run(60, gaussian(0.02))
    assert [change.state for change in later.changes] == ["recovered"]


def test_who_has_other_work_after_a_change_of_plan_is_as_slow_as_before() -> None:
    job = Job(W24[:4], {worker: worker for worker in W24[:4]})
    job.run(100, gaussian(0.02), slow_from(50, 2.0, "n0/2#0"))
    job.works = {worker: f"less for {worker}" for worker in job.workers}
    job._told = {worker: [] for worker in job.workers}
    job.detector.entered(job.workers)
    job.run(60, gaussian(0.02), slow_from(0, 2.0, "n0/2#0"))
    assert len(job.changes) == 1
    assert job.detector.speeds() == {"n0/2": pytest.approx(0.5, abs=0.04)}


def test_the_evidence_has_the_figures_by_which_it_was_found() -> None:
    job = Job(W24)
    job.run(130, gaussian(0.03), slow_from(100, 2.0, "n1/3#0"))
    (change,) = job.changes
    fields = change.fields()
    assert fields["worker"] == "n1/3#0"
    assert fields["own_s"] == pytest.approx(2, rel=0.1)
    assert fields["usual_s"] == pytest.approx(1, rel=0.05)
    assert 0 < fields["mad_s"] < 0.1
    assert fields["peers"] == 23
    assert fields["looks"] >= 8
    assert fields["agreeing"] >= 7 / 8 * fields["looks"]
    assert fields["step"] - fields["since_step"] <= SPAN_STEPS + 3
    assert describe(fields | {"action": "rebalance"}).startswith("worker n1/3#0 is ")
    assert describe({"link": ["a/0#0", "b/0#0"], "state": "recovered"}) == (
        "the link from a/0#0 to b/0#0 is as fast as before"
    )
    assert describe({"device": 3}) == ""


def test_a_look_costs_about_as_much_for_each_of_many_workers() -> None:
    """By counting, not by a clock: work is compared once for all who do it."""
    detector = Detector()
    many = [f"n{number // 8}/{number % 8}#0" for number in range(512)]
    detector.entered(many)
    for worker in many:
        detector.told(worker.partition("#")[0], {("layer", 1): 1.0})
    paces = {worker.partition("#")[0]: 1.0 for worker in many}
    assert detector.look(0, 0.0, paces) == []
    assert not detector._stale
    assert len(detector._usual) == 1


# -- links ------------------------------------------------------------------------------------------------------------


class Net:
    """Links of which each is looked at by its sender, and what the first member makes of it."""

    def __init__(self, links: list[tuple[str, str]]) -> None:
        self.links = links
        self.watches = {source: LinkWatch() for source, _ in links}
        self.detector = LinkDetector()
        self.detector.entered(sorted({f"{slot}#0" for link in links for slot in link}))
        self.totals = dict.fromkeys(links, (0, 0.0))
        self.changes: list[Change] = []
        self.slow: set[str] = set()
        self.tell = True

    def step(self, number: int, rates: dict[tuple[str, str], float], rtt_s: float = 1e-4, sent: int = 4 << 20) -> None:
        for link, rate in rates.items():
            total, busy_s = self.totals[link]
            self.totals[link] = total + sent, busy_s + sent / rate
        slower: dict[tuple[str, str], Slower] = {}
        for source, watch in self.watches.items():
            carried = {link[1]: (*self.totals[link], rtt_s) for link in self.links if link[0] == source}
            slower |= {(source, other): found for other, found in watch.look(carried).items()}
            if self.tell:
                self.detector.told(source, watch.usual())
        self.changes += self.detector.look(number, float(number), self.watches, slower, self.slow.__contains__)


RING = [(f"n{number}/0", f"n{(number + 1) % 6}/0") for number in range(6)]


def rates(draw: random.Random, bad: dict[tuple[str, str], float] | None = None) -> dict[tuple[str, str], float]:
    return {link: 1e9 * math.exp(draw.gauss(0, 0.2)) / (bad or {}).get(link, 1.0) for link in RING}


@pytest.mark.parametrize("tell", [True, False])
def test_a_link_that_becomes_slow_is_found_and_its_recovery_too(tell: bool) -> None:
    net, draw = Net(RING), random.Random(1)
    net.tell = tell  # usual figures are told with others, and so may come late
    for step in range(40):
        net.step(step, rates(draw))
    assert net.changes == []
    for step in range(40, 60):
        net.step(step, rates(draw, {RING[2]: 8.0}))
    (change,) = net.changes
    assert (change.kind, change.state, change.names) == ("link", "slow", ("n2/0#0", "n3/0#0"))
    assert change.factor == pytest.approx(8, rel=0.3)
    assert change.evidence["usual_bytes_per_s"] == pytest.approx(1e9, rel=0.2)
    assert net.detector.factors() == {RING[2]: pytest.approx(8, rel=0.3)}
    for step in range(60, 90):
        net.step(step, rates(draw))
    assert [one.state for one in net.changes] == ["slow", "recovered"]
    assert net.detector.factors() == {}


def test_nothing_is_said_of_the_links_of_a_slow_worker() -> None:
    net, draw = Net(RING), random.Random(1)
    for step in range(40):
        net.step(step, rates(draw))
    net.slow = {"n3/0"}
    for step in range(40, 80):
        net.step(step, rates(draw, {RING[2]: 8.0}))
    assert net.changes == []


def test_a_link_that_was_always_slow_shows_beside_like_ones() -> None:
    assert len(RING) > LIKE_LINKS
    net, draw = Net(RING), random.Random(1)
    for step in range(40):
        net.step(step, rates(draw, {RING[4]: 10.0}))
    assert [change.names for change in net.changes] == [("n4/0#0", "n5/0#0")]
    assert net.changes[0].evidence["basis"] == "peers"


@pytest.mark.parametrize("seed", range(5))
def test_links_that_waver_are_not_slow(seed: int) -> None:
    net, draw = Net(RING), random.Random(seed)
    for step in range(1000):
        net.step(step, {link: rate * draw.choice([1, 1, 1, 0.3]) for link, rate in rates(draw).items()})
    assert net.changes == []


def test_a_link_that_carries_next_to_nothing_tells_nothing() -> None:
    net, draw = Net(RING), random.Random(1)
    for step in range(40):
        net.step(step, rates(draw, {RING[4]: 10.0 if step > 20 else 1.0}), sent=LINK_BYTES - 1)
    assert net.changes == []


def test_a_latency_far_above_the_past_counts_as_slow() -> None:
    watch = LinkWatch()
    totals = itertools.count(LINK_BYTES, LINK_BYTES)
    for total in itertools.islice(totals, 20):
        assert watch.look({"b/0": (total, total / 1e9, 1e-4)}) == {}
    total = next(totals)
    # Three times as long, and by more than a millisecond.
    assert watch.look({"b/0": (total, total / 1e9, 5e-4)}) == {}
    total = next(totals)
    ((factor, *_),) = watch.look({"b/0": (total, total / 1e9, 5e-3)}).values()
    assert factor == pytest.approx(50, rel=0.01)


# -- medians ----------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20))
def test_the_median_deviation_is_that_of_the_definition(values: list[float]) -> None:
    def middle(some: list[float]) -> float:
        some = sorted(some)
        half = len(some) // 2
        return some[half] if len(some) % 2 else (some[half - 1] + some[half]) / 2

    assert mad(values) == middle([abs(value - middle(values)) for value in values])
    assert centre(values) in values


@given(st.lists(st.floats(1, 5), min_size=1, max_size=20), st.lists(st.floats(-0.05, 0.05), min_size=10, max_size=20))
def test_the_centre_stays_while_a_third_does(far: list[float], near: list[float]) -> None:
    assert abs(centre([*far, *near], 0.0)) <= 0.05
