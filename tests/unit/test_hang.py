"""Who hangs: limits that are learnt, evidence, witnesses, deadlocks; and no false alarm."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.detect.hang import (
    CHANGE_S,
    FIRST_STEPS_S,
    FLOOR_S,
    LEAVE_S,
    LONG_S,
    MIN_STEPS,
    Hang,
    HangDetector,
    HangTimeout,
    Sight,
    parse,
)
from elaunch.detect.heartbeat import BEAT_S, Awaited, HeartbeatReading, OnDevice, Phase, Still
from elaunch.errors import UsageError
from elaunch.rendezvous.membership import Deadlock
from elaunch.rendezvous.rules.holders import KEEPER_S, LAST_S
from tests.helpers import scaled

LOOK_S = 0.25
SELDOM_S = 0.9
"""For what takes long; as seldom as it may look without believing that it was stopped itself."""

RECORDED = json.loads((Path(__file__).parent / "step_times.json").read_text())
NEVER = math.inf


@dataclass
class World:
    """Workers of one node that train in step: each computes, then waits for the slowest.

    Attributes:
        works_s: by step and worker, the time until it waits.
        is_still: whether a worker shows nothing while it computes in a step.
        hangs: step and worker that never ends its part, and what it shows: asleep, spins or lock.
        steps_here: by step, how many have committed since a change before it.
        incarnation: of all workers.
        look_s: from look to look.
    """

    works_s: Sequence[Sequence[float]]
    is_still: Callable[[int, int], bool] = lambda step, worker: False
    hangs: tuple[int, int, str] | None = None
    detector: HangDetector = field(default_factory=HangDetector)
    begin_s: float = 1000.0
    steps_here: Callable[[int], int] = lambda step: step
    incarnation: int = 0
    look_s: float = LOOK_S

    @property
    def names(self) -> list[str]:
        return [f"n/{worker}#{self.incarnation}" for worker in range(len(self.works_s[0]))]

    def work_s(self, step: int, worker: int) -> float:
        return NEVER if self.hangs is not None and self.hangs[:2] == (step, worker) else self.works_s[step][worker]

    def heartbeat(self, now_s: float, step: int, start_s: float, worker: int) -> HeartbeatReading:
        end_s = start_s + self.work_s(step, worker)
        waits = now_s >= end_s
        still = Still.ASLEEP if self.is_still(step, worker) else Still.MOVES
        beat_s = now_s - now_s % BEAT_S
        if self.hangs is not None and self.hangs[:2] == (step, worker):
            kind = self.hangs[2]
            still = {"asleep": Still.ASLEEP, "spins": Still.SPINS, "lock": Still.MOVES, "works": Still.MOVES}[kind]
            if kind == "lock":
                beat_s = start_s
        first_beat_s = start_s - start_s % BEAT_S + BEAT_S  # only then is the time since the last one seen to be still
        if now_s < first_beat_s + BEAT_S:
            still = Still.MOVES
        return HeartbeatReading(
            pid=100 + worker,
            thread=1,
            training_tid=1,
            beating_tid=2,
            beat_s=beat_s,
            still=Still.MOVES if waits else still,
            still_since_s=first_beat_s,
            step=step,
            step_since_s=start_s,
            steps_here=self.steps_here(step),
            phase=Phase.STEP,
            since_s=end_s if waits else start_s,
            waits=waits,
            awaited=Awaited(tuple(name for name in self.names if name != self.names[worker]) if waits else ()),
        )

    def run(self, until_s: float = NEVER) -> tuple[Hang, float] | None:
        """Go on until somebody is blamed; returns that, and the time from the start of the step in which it was."""
        start_s = look_s = self.begin_s
        for step in range(len(self.works_s)):
            end_s = start_s + max(self.work_s(step, worker) for worker in range(len(self.names)))
            while look_s < min(end_s, start_s + until_s):
                sights = {
                    name: Sight(self.heartbeat(look_s, step, start_s, worker)) for worker, name in enumerate(self.names)
                }
                found = self.detector.look(look_s, sights, 1, self.names)
                if found is not None:
                    return found, look_s - start_s
                look_s += self.look_s
            if end_s == NEVER:
                return None
            start_s = end_s
        return None


def steady(step_s: float, steps: int = 40, workers: int = 3) -> list[list[float]]:
    return [[step_s * (0.8 + 0.2 * worker / workers) for worker in range(workers)] for _ in range(steps)]


@settings(deadline=None, max_examples=scaled(20, 40))
@given(
    step_s=st.floats(0.1, 30),
    kind=st.sampled_from(["asleep", "spins", "lock"]),
    worker=st.integers(0, 2),
    step=st.integers(MIN_STEPS + 4, 39),
)
def test_a_hang_is_found_within_three_steps_and_two_seconds(step_s: float, kind: str, worker: int, step: int) -> None:
    found = World(steady(step_s), hangs=(step, worker, kind)).run(600)
    assert found is not None
    hang, after_s = found
    assert hang.worker == f"n/{worker}#0"
    assert hang.step == step
    assert after_s <= 3 * step_s + 2.0 + LOOK_S
    assert hang.typical_step_s == pytest.approx(step_s, rel=0.3, abs=LOOK_S)


def test_busy_workers_have_the_long_limit() -> None:
    found = World(steady(0.2), hangs=(30, 1, "works"), look_s=SELDOM_S).run(2 * LONG_S)
    assert found is not None
    assert found[0].worker == "n/1#0"
    assert LONG_S < found[1] <= LONG_S + 2 * SELDOM_S
    assert "busy" in found[0].doing


@settings(deadline=None, max_examples=scaled(7, 15))
@given(st.lists(st.tuples(*[st.floats(0.01, LONG_S * 0.9)] * 3), min_size=1, max_size=4))
def test_no_series_of_steps_in_which_they_work_is_an_alarm_below_the_long_limit(works_s: list[list[float]]) -> None:
    assert World([*steady(0.1, 12), *works_s], look_s=SELDOM_S).run() is None


def heavy(rng: random.Random) -> float:
    return 0.3 * min(100.0, rng.paretovariate(1.2))


def doubled(rng: random.Random) -> float:
    return 1.0 * rng.choice([1, 1, 1, 1, 2])


def tenfold(rng: random.Random) -> float:
    return rng.uniform(0.1, 1.0)


@pytest.mark.parametrize("series", [heavy, doubled, tenfold])
def test_an_hour_of_noisy_steps_with_evaluations_is_no_alarm(series: Callable[[random.Random], float]) -> None:
    """Every hundredth step takes as long as five more, on all workers; every 250th on the first one alone."""
    rng = random.Random(7)
    works_s: list[list[float]] = []
    total_s = 0.0
    while total_s < 3600:
        step = [series(rng) for _ in range(4)]
        if len(works_s) % 100 == 99:
            step = [one + 5 * max(step) for one in step]
        if len(works_s) % 250 == 249:
            step[0] += 40.0
        works_s.append(step)
        total_s += max(step)
    assert World(works_s).run() is None


@pytest.mark.parametrize("seed", range(3))
def test_an_hour_of_steps_that_sleep_for_times_that_vary_tenfold_is_no_alarm(seed: int) -> None:
    """A step may be a sleep as a whole, an emulated one for example."""
    rng = random.Random(seed)
    works_s = [[tenfold(rng) for _ in range(3)] for _ in range(4500)]
    assert World(works_s, is_still=lambda step, worker: True).run() is None


@pytest.mark.parametrize("still", [False, True])
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_recorded_steps_are_no_alarm(name: str, still: bool) -> None:
    times_s = RECORDED[name]
    assert len(times_s) > 100
    # The first one of a job pays for what is done once; `steps_here` leaves it out.
    works_s = [[0.5 * time_s, time_s, 0.9 * time_s] for time_s in times_s]
    assert World(works_s, is_still=lambda step, worker: still).run() is None


@pytest.mark.parametrize("name", sorted(RECORDED))
def test_a_hang_among_recorded_steps_is_found_in_time(name: str) -> None:
    times_s = RECORDED[name]
    works_s = [[time_s, 0.9 * time_s] for time_s in times_s]
    median_s = sorted(times_s)[len(times_s) // 2]
    found = World(works_s, hangs=(100, 0, "lock")).run(600)
    assert found is not None
    assert found[0].worker == "n/0#0"
    assert found[1] <= 3 * 1.5 * median_s + 2 + LOOK_S


def test_a_rare_sleep_that_ended_well_makes_room_for_the_next_one() -> None:
    def series(second_s: float) -> World:
        works_s = steady(0.5, 60)
        works_s[20] = [2.5, 0.5, 0.5]
        works_s[50] = [second_s, 0.5, 0.5]
        return World(works_s, is_still=lambda step, worker: step in (20, 50) and worker == 0)

    assert series(6.0).run() is None
    found = series(12.0).run()
    assert found is not None
    assert found[0].worker == "n/0#0"
    assert found[0].limit_s > 6.0


def test_before_enough_steps_only_the_users_limit_counts() -> None:
    early = (MIN_STEPS - 2, 1, "asleep")
    assert World(steady(0.5), hangs=early).run(60) is None
    fixed = World(steady(0.5), hangs=early, detector=HangDetector(HangTimeout("seconds", 7.0))).run(60)
    assert fixed is not None
    assert 7.0 < fixed[1] <= 7.0 + 1.0
    assert World(steady(0.5), hangs=(30, 1, "asleep"), detector=HangDetector(HangTimeout("off"))).run(60) is None


@pytest.mark.parametrize("kind", ["asleep", "spins", "lock", "works"])
def test_before_enough_steps_a_worker_for_which_others_wait_has_the_limit_of_first_steps(kind: str) -> None:
    detector = HangDetector(first_steps_s=100.0)
    found = World(steady(0.5), hangs=(2, 1, kind), detector=detector).run(200)
    assert found is not None
    hang, after_s = found
    assert (hang.worker, hang.step, hang.limit_s, hang.is_early) == ("n/1#0", 2, 100.0, True)
    assert 100.0 < after_s <= 101.0
    again = World(steady(0.5), hangs=(2, 1, kind), detector=detector, incarnation=1, begin_s=2000.0)
    assert again.run(390) is None, "the script may do something there that takes long: it has four times as long"
    assert HangDetector().first_steps_s == FIRST_STEPS_S == 1800.0
    late = World(steady(0.5), hangs=(30, 1, "asleep"), detector=HangDetector(first_steps_s=100.0)).run(60)
    assert late is not None
    assert not late[0].is_early


def test_first_steps_have_no_limit_where_nobody_waits_or_the_user_wants_none() -> None:
    alone = HangDetector(first_steps_s=100.0)
    assert World(steady(0.5, workers=1), hangs=(2, 0, "asleep"), detector=alone).run(600) is None
    off = HangDetector(HangTimeout("off"), 100.0)
    assert World(steady(0.5), hangs=(2, 1, "asleep"), detector=off).run(600) is None
    assert (alone.early_s, off.early_s) == (None, None)


def test_a_deadlock_in_first_steps_has_their_limit() -> None:
    fresh = HangDetector(first_steps_s=100.0)
    assert watch(circle(), 99, BOTH[3:], fresh) is None
    found = watch(circle(), 5, BOTH[3:], fresh, BEGIN_S + 99)
    assert found is not None
    assert (found.limit_s, found.is_early) == (100.0, True)
    assert stalled(HangDetector(first_steps_s=100.0), circle(), 103) == list(BOTH[3:]), "others are elsewhere"


def test_the_users_limit_takes_no_account_of_work() -> None:
    world = World(steady(0.5), hangs=(30, 1, "works"), detector=HangDetector(HangTimeout("seconds", 20.0)))
    found = world.run(60)
    assert found is not None
    assert found[0].limit_s == 20.0


def test_the_first_step_after_a_change_has_more_time() -> None:
    world = World(steady(0.5), hangs=(30, 1, "asleep"), steps_here=lambda step: step if step < 30 else 0)
    found = world.run(120)
    assert found is not None
    assert CHANGE_S < found[1] < CHANGE_S + 3 * 0.5 + 3


def test_all_at_once_have_more_time_than_one_that_the_others_wait_for() -> None:
    works_s = steady(0.5)
    works_s[30] = [20.0] * 3
    assert World(works_s, is_still=lambda step, worker: step == 30).run() is None
    works_s[30] = [20.0, 0.5, 0.5]
    found = World(works_s, is_still=lambda step, worker: step == 30 and worker == 0).run()
    assert found is not None
    assert found[0].worker == "n/0#0"


def test_in_the_same_step_the_next_one_has_four_times_as_long() -> None:
    world = World(steady(0.5), hangs=(30, 0, "asleep"))
    first = world.run(60)
    assert first is not None
    again = World(steady(0.5), hangs=(30, 1, "asleep"), detector=world.detector, incarnation=1).run(600)
    assert again is not None
    assert again[0].worker == "n/1#1"
    assert again[0].limit_s == pytest.approx(4 * first[0].limit_s)


# -- evidence ---------------------------------------------------------------------------------------------------------


def a_heartbeat(now_s: float = 1000.0, **changes: object) -> HeartbeatReading:
    base = HeartbeatReading(
        pid=1,
        thread=1,
        training_tid=1,
        beating_tid=2,
        beat_s=now_s,
        still=Still.MOVES,
        still_since_s=now_s,
        step=50,
        step_since_s=now_s,
        steps_here=20,
        phase=Phase.STEP,
        since_s=now_s,
    )
    awaited = {name: changes.pop(name) for name in ("peers", "operation") if name in changes}
    return replace(base, awaited=Awaited(**awaited), **changes)  # type: ignore[arg-type]


def learnt(step_s: float = 0.2) -> HangDetector:
    world = World(steady(step_s, 40))
    assert world.run() is None
    return world.detector


def watch(
    sight: Callable[[float], dict[str, Sight]],
    seconds: float,
    members: Sequence[str] = (),
    detector: HangDetector | None = None,
    begin_s: float = 5000.0,
) -> Hang | None:
    """Look at the same thing for so long; a detector that is not given knows of steps of 0.2 s."""
    detector, now_s = detector or learnt(), begin_s
    look_s = SELDOM_S if seconds > 60 else LOOK_S
    for _ in range(int(seconds / look_s)):
        found = detector.look(now_s, sight(now_s), 7, members or list(sight(now_s)))
        if found is not None:
            return found
        now_s += look_s
    return None


BEGIN_S = 5000.0
ASLEEP = {"still": Still.ASLEEP, "still_since_s": BEGIN_S, "since_s": BEGIN_S}
WAITS = {"waits": True, "since_s": BEGIN_S, "peers": ("n/0#0",)}


def beside_a_witness(sight: Callable[[float], Sight]) -> Callable[[float], dict[str, Sight]]:
    return lambda now_s: {"n/0#0": sight(now_s), "n/1#0": Sight(a_heartbeat(now_s, **WAITS))}


def test_a_worker_that_sleeps_and_has_no_excuse_hangs() -> None:
    found = watch(beside_a_witness(lambda now_s: Sight(a_heartbeat(now_s, **ASLEEP))), 10)
    assert found is not None
    assert found.worker == "n/0#0"
    assert "asleep" in found.doing


@pytest.mark.parametrize(
    "excuse",
    [
        pytest.param({"training": "R"}, id="it lacks a processor"),
        pytest.param({"training": "D"}, id="the kernel reads for it"),
        pytest.param({"children_work": True}, id="a process that it started works"),
    ],
)
def test_a_worker_that_sleeps_for_a_reason_does_not(excuse: dict[str, object]) -> None:
    sight = lambda now_s: replace(Sight(a_heartbeat(now_s, **ASLEEP)), **excuse)  # type: ignore[arg-type]  # noqa: E731
    assert watch(beside_a_witness(sight), LONG_S / 2) is None
    found = watch(beside_a_witness(sight), 2 * LONG_S)
    assert found is not None
    assert found.limit_s == LONG_S


@pytest.mark.parametrize("knows_steps", [False, True])
def test_a_function_is_left_in_time_or_what_it_waits_for_never_ends(knows_steps: bool) -> None:
    def limit_s(phase: Phase, **shown: object) -> float | None:
        detector = learnt() if knows_steps else HangDetector()
        sight = beside_a_witness(lambda now_s: Sight(a_heartbeat(now_s, phase=phase, steps_here=0, **shown)))
        found = watch(sight, 2 * LONG_S, detector=detector)
        return None if found is None else found.limit_s

    assert limit_s(Phase.LEAVING, **ASLEEP) == LEAVE_S
    assert limit_s(Phase.LEAVING) is None  # it computes
    assert limit_s(Phase.FUNCTION, **ASLEEP) is None


def test_a_beat_that_lacks_a_processor_is_no_lock_that_is_held() -> None:
    def held(state: str) -> Callable[[float], Sight]:
        return lambda now_s: Sight(a_heartbeat(now_s, beat_s=BEGIN_S, since_s=BEGIN_S), beating=state)

    assert watch(beside_a_witness(held("R")), LONG_S / 2) is None
    found = watch(beside_a_witness(held("S")), 10)
    assert found is not None
    assert "interpreter's lock" in found.doing


@pytest.mark.parametrize("every", [2, 3, 5, 7])
@pytest.mark.parametrize(
    ("shown", "runs"),
    [
        pytest.param({"beat_s": BEGIN_S, "since_s": BEGIN_S}, {"beating": "R"}, id="tries to get the lock"),
        pytest.param(ASLEEP, {"training": "R"}, id="wakes up and sleeps again"),
    ],
)
def test_threads_that_run_at_some_looks_are_no_sign_that_a_worker_went_on(
    shown: dict[str, object], runs: dict[str, str], every: int
) -> None:
    def sight(now_s: float) -> Sight:
        found = Sight(a_heartbeat(now_s, **shown))
        return replace(found, **runs) if round((now_s - BEGIN_S) / LOOK_S) % every == 0 else found  # type: ignore[arg-type]

    found = watch(beside_a_witness(sight), 10)
    assert found is not None
    assert found.limit_s == pytest.approx(FLOOR_S + 3 * 0.2, abs=0.1)
    assert found.since_s < found.limit_s + 3 * LOOK_S


OWN = (Phase.BETWEEN, Phase.SCRIPT)


@pytest.mark.parametrize("phase", OWN)
@pytest.mark.parametrize("lock_is_held", [False, True])
def test_in_the_scripts_own_code_it_has_more_time(phase: Phase, lock_is_held: bool) -> None:
    def sight(now_s: float) -> Sight:
        return Sight(a_heartbeat(now_s, phase=phase, **ASLEEP, **({"beat_s": BEGIN_S} if lock_is_held else {})))

    assert watch(beside_a_witness(sight), CHANGE_S) is None
    found = watch(beside_a_witness(sight), CHANGE_S + 5)
    assert found is not None
    assert CHANGE_S < found.limit_s < CHANGE_S + FLOOR_S + 1
    assert found.doing.startswith({Phase.BETWEEN: "before step 50,", Phase.SCRIPT: "in the script's own code,"}[phase])


@pytest.mark.parametrize("phase", OWN)
def test_what_a_script_usually_waits_for_is_no_measure_for_its_steps(phase: Phase) -> None:
    detector = learnt()

    def pauses(now_s: float) -> Sight:
        over = now_s >= BEGIN_S + 6
        return Sight(a_heartbeat(now_s) if over else a_heartbeat(now_s, phase=phase, **ASLEEP))

    assert watch(beside_a_witness(pauses), 7, detector=detector) is None
    after = a_heartbeat(BEGIN_S + 7)
    assert detector.limits(after)[0] < FLOOR_S + 1
    assert detector.limits(replace(after, phase=phase))[0] >= CHANGE_S + 3 * 5.5


def test_what_a_worker_does_before_it_is_a_member_and_after_the_end_is_its_own_matter() -> None:
    for phase in (Phase.LOADING, Phase.AGREEING, Phase.ENDED):
        changes = {**ASLEEP, "phase": phase}
        assert watch(beside_a_witness(lambda now_s: Sight(a_heartbeat(now_s, **changes))), 2 * LONG_S) is None  # noqa: B023


def test_the_last_that_holds_the_state_is_waited_for() -> None:
    """The other one is its replacement, which waits to be filled."""

    def watch_holders(seconds: float, *holders: str) -> Hang | None:
        detector, now_s = learnt(), BEGIN_S
        sights = beside_a_witness(lambda now_s: Sight(a_heartbeat(now_s, **ASLEEP)))
        while now_s < BEGIN_S + seconds:
            found = detector.look(now_s, sights(now_s), 7, ["n/0#0", "n/1#0"], holders)
            if found is not None:
                return found
            now_s += SELDOM_S if seconds > 60 else LOOK_S
        return None

    assert watch_holders(LAST_S, "n/0#0") is None
    gone = watch_holders(LAST_S + 5, "n/0#0")
    assert gone is not None, "it will not come back"
    assert gone.limit_s > LAST_S
    filled = watch_holders(60, "n/0#0", "n/1#0")
    assert filled is not None
    assert filled.limit_s < CHANGE_S, "the other one holds it, too"


def test_of_two_nodes_with_one_worker_each_the_second_goes_first() -> None:
    def limit_s(worker: str) -> float:
        detector, now_s, found = learnt(), BEGIN_S, None
        while found is None:
            sights = {worker: Sight(a_heartbeat(now_s, **ASLEEP))}
            found = detector.look(now_s, sights, 7, ["m/0#0", "n/0#0"], ["m/0#0", "n/0#0"])
            now_s += LOOK_S
        return found.limit_s

    assert limit_s("m/0#0") == limit_s("n/0#0") + KEEPER_S


def test_an_agent_that_could_not_look_starts_all_clocks_anew() -> None:
    """It was stopped, or the machine was; its workers may have been, too."""
    detector = learnt()
    sights = beside_a_witness(lambda now_s: Sight(a_heartbeat(BEGIN_S, **ASLEEP)))
    assert detector.look(BEGIN_S, sights(BEGIN_S), 7) is None
    assert detector.look(BEGIN_S + 1000, sights(BEGIN_S), 7) is None
    assert detector.look(BEGIN_S + 1000 + FLOOR_S / 2, sights(BEGIN_S), 7) is None


# -- deadlocks --------------------------------------------------------------------------------------------------------


def circle(**changes: Mapping[str, object]) -> Callable[[float], dict[str, Sight]]:
    """Three workers, each of which waits for the next one."""

    def sights(now_s: float) -> dict[str, Sight]:
        found = {}
        for worker in range(3):
            peers = (f"n/{(worker + 1) % 3}#0",)
            known: dict[str, object] = {"waits": True, "since_s": BEGIN_S, "peers": peers, "operation": 8}
            found[f"n/{worker}#0"] = Sight(a_heartbeat(now_s, **{**known, **changes.get(f"w{worker}", {})}))
        return found

    return sights


def test_a_deadlock_is_told_with_who_waits_for_whom() -> None:
    found = watch(circle(), 10)
    assert found is not None
    assert found.waits == (
        "n/0#0 for n/1#0, in step 50, operation 8",
        "n/1#0 for n/2#0, in step 50, operation 8",
        "n/2#0 for n/0#0, in step 50, operation 8",
    )


@pytest.mark.parametrize(
    ("changes", "blamed"),
    [
        pytest.param({"w1": {"step": 49}}, 1, id="behind in step"),
        pytest.param({"w0": {"operation": 7}}, 0, id="alone in its operation"),
        pytest.param({"w2": {"peers": ("n/1#0",)}}, 0, id="nobody waits for it"),
        pytest.param({}, 2, id="all alike"),
    ],
)
def test_whom_a_deadlock_costs_its_place(changes: dict[str, dict[str, object]], blamed: int) -> None:
    found = watch(circle(**changes), 10)
    assert found is not None
    assert found.worker == f"n/{blamed}#0"


def test_as_long_as_one_computes_nobody_who_waits_is_blamed() -> None:
    sights = circle(w1={"waits": False, "peers": ()})
    assert watch(sights, LONG_S * 0.9) is None
    found = watch(sights, LONG_S * 1.1)
    assert found is not None
    assert found.worker == "n/1#0"


def test_the_state_may_move_for_long() -> None:
    moving = {f"w{worker}": {"phase": Phase.CHANGING} for worker in range(3)}
    assert watch(circle(**moving), LONG_S * 0.9) is None


BOTH = tuple(f"{node}/{worker}#0" for node in "mn" for worker in range(3))


def stalled(
    detector: HangDetector, sights: Callable[[float], dict[str, Sight]], seconds: float, begin_s: float = BEGIN_S
) -> list[str]:
    """Who of this node is stalled after so long, in a job of two nodes; nobody was blamed."""
    assert watch(sights, seconds, BOTH, detector, begin_s) is None
    return [one.worker for one in detector.stalled]


def test_where_others_are_elsewhere_it_is_only_said_that_all_wait() -> None:
    limit_s, detector = FLOOR_S + 3 * 0.2 + CHANGE_S, learnt()
    assert stalled(detector, circle(), limit_s * 0.95) == []
    assert stalled(detector, circle(), limit_s * 0.1, BEGIN_S + limit_s * 0.95) == list(BOTH[3:])
    own = HangDetector(HangTimeout("seconds", 5.0))
    assert stalled(own, circle(), 4.5) == []
    assert stalled(own, circle(), 1.5, BEGIN_S + 4.5) == list(BOTH[3:])


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"waits": False, "peers": ()}, id="one computes"),
        pytest.param({"phase": Phase.AGREEING}, id="one waits for its agent"),
        pytest.param({"phase": Phase.CHANGING}, id="the state moves"),
        pytest.param({"since_s": BEGIN_S + 50}, id="one got something"),
    ],
)
def test_a_node_is_not_stalled_as_long_as_one_of_its_workers_may_go_on(changes: dict[str, object]) -> None:
    assert stalled(learnt(), circle(w1=changes), 60) == []


def test_nor_if_one_cannot_be_seen() -> None:
    """It is stopped, or its stacks are being taken."""

    def without(now_s: float) -> dict[str, Sight]:
        return {worker: sight for worker, sight in circle()(now_s).items() if worker != "n/1#0"}

    assert stalled(learnt(), without, 60) == []


def test_the_worker_that_the_leader_names_is_taken_out_once() -> None:
    detector, found = learnt(), Deadlock("n/2#0", 6, ("m/0#0 for n/2#0, in step 50, operation 8",))
    assert detector.take_out(BEGIN_S, found) is None, "it waits for longer than it may"
    assert stalled(detector, circle(), 40)
    assert detector.take_out(BEGIN_S + 40, replace(found, worker="m/0#0")) is None, "it is of this node"
    hang = detector.take_out(BEGIN_S + 40, found)
    assert hang is not None
    assert (hang.worker, hang.step, hang.waits) == ("n/2#0", 50, found.waits)
    assert hang.doing == "in step 50, waits like all 6 members"
    assert hang.since_s > hang.limit_s > CHANGE_S
    assert detector.take_out(BEGIN_S + 40, found) is None, "it was not asked before"
    assert stalled(detector, circle(), 35, BEGIN_S + 40) == [], "all clocks start anew, and the limit has grown"
    assert stalled(detector, circle(), 10, BEGIN_S + 75) == list(BOTH[3:])


# -- the setting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "mode", "seconds"),
    [("", "auto", 0), ("auto", "auto", 0), ("OFF", "off", 0), ("30", "seconds", 30.0), ("0.5", "seconds", 0.5)],
)
def test_the_setting(text: str, mode: str, seconds: float) -> None:
    found = parse(text)
    assert (found.mode, found.seconds) == (mode, seconds)
    assert parse(str(found)) == found, "what workers are told is what the user said"


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "never", "3 s"])
def test_another_setting_is_refused(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert str(caught.value) == f"--hang-timeout={text}: expected auto, off, or a number of seconds above 0"


def of_device(device: OnDevice, beat_s: float = NEVER) -> tuple[Hang, float] | None:
    """The devices of two workers wait for the third, which is busy for ever; so the two sleep."""

    class OfDevice(World):
        def heartbeat(self, now_s: float, step: int, start_s: float, worker: int) -> HeartbeatReading:
            found = super().heartbeat(now_s, step, start_s, worker)
            if worker == 2 or step < 30 or now_s < start_s + 2 * BEAT_S:
                return found
            beat_s_ = min(found.beat_s, start_s + beat_s)
            waits = device is OnDevice.PEERS
            return replace(found, waits=waits, device=device, still=Still.ASLEEP, still_since_s=start_s, beat_s=beat_s_)

    return OfDevice(steady(0.2), hangs=(30, 2, "works"), look_s=SELDOM_S).run(2 * LONG_S)


@pytest.mark.parametrize(
    ("device", "beat_s"),
    [(OnDevice.PEERS, NEVER), (OnDevice.PEERS, 0.0), (OnDevice.ISSUED, 0.0), (OnDevice.COMPUTES, 0.0)],
)
def test_who_waits_for_a_hung_peer_by_its_device_is_not_blamed(device: OnDevice, beat_s: float) -> None:
    """Whether its training thread is in a call that keeps the interpreter's lock or not."""
    found = of_device(device, beat_s)
    assert found is not None
    assert found[0].worker == "n/2#0"
    assert LONG_S < found[1] <= LONG_S + 2 * SELDOM_S


def test_who_stops_to_beat_while_its_device_was_told_to_wait_has_the_long_limit() -> None:
    """It may have gone on, and be in a call that keeps the interpreter's lock: nobody waits for it for ever."""

    class Doubtful(World):
        def heartbeat(self, now_s: float, step: int, start_s: float, worker: int) -> HeartbeatReading:
            found = super().heartbeat(now_s, step, start_s, worker)
            return replace(found, device=OnDevice.PEERS, waits=True) if (step, worker) == (30, 1) else found

    found = Doubtful(steady(0.2), hangs=(30, 1, "lock"), look_s=SELDOM_S).run(2 * LONG_S)
    assert found is not None
    assert found[0].worker == "n/1#0"
    assert LONG_S < found[1] <= LONG_S + 2 * SELDOM_S
    assert "keeps the interpreter's lock" in found[0].doing


def test_a_device_that_computes_does_not_wait() -> None:
    """Its own work never ends: others wait for it."""

    class Computes(World):
        def heartbeat(self, now_s: float, step: int, start_s: float, worker: int) -> HeartbeatReading:
            found = super().heartbeat(now_s, step, start_s, worker)
            return replace(found, device=OnDevice.COMPUTES) if (step, worker) == (30, 1) else found

    found = Computes(steady(0.2), hangs=(30, 1, "asleep")).run(60)
    assert found is not None
    assert found[0].worker == "n/1#0"
