"""The scheduler's daemon on a cluster of one process: what it does, and what is left when it is killed anywhere."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from elaunch.rendezvous.codec import from_json
from elaunch.rendezvous.memory import MemoryStore
from elaunch.scheduler.service.advance import WaitLimits
from elaunch.scheduler.service.daemon import LEASE_S, Daemon, DaemonSettings, LeadLost
from elaunch.scheduler.service.documents import FINAL, JobProgress, JobSpec, JobStage
from elaunch.scheduler.service.known import KnownSpeeds
from elaunch.scheduler.service.stored import Stored, read_all
from elaunch.scheduler.service.submit import cancel, submit
from elaunch.scheduler.settings import SuikaSettings
from elaunch.scheduler.suika import Suika
from tests.helpers import scaled
from tests.unit.scheduler_cluster import Calls, FakeCluster, FakeReports, Killed, Watched, World

RATES = ((1, 1.0), (2, 1.95), (4, 3.8), (8, 7.0))


@dataclass
class Rig:
    """A world, a store, and a daemon that can be killed and started again."""

    world: World
    settings: SuikaSettings = field(default_factory=SuikaSettings)
    lines: list[str] = field(default_factory=list)
    calls: Calls = field(default_factory=Calls)
    count: int = 0

    def __post_init__(self) -> None:
        self.store = MemoryStore(clock=lambda: self.world.now_s)
        self.daemon = self.new_daemon()

    def new_daemon(self) -> Daemon:
        self.count += 1
        store: Any = Watched(self.store, self.calls, ("replace", "create", "delete", "range", "grant"))
        cluster: Any = Watched(FakeCluster(self.world), self.calls, ("look", "start", "stop", "forget"))
        reports: Any = Watched(FakeReports(self.world), self.calls, ("look", "ask_to_leave", "ask_size"))
        return Daemon(
            DaemonSettings("main", f"d{self.count}", "etcd:1", WaitLimits(queue_s=10.0, stop_s=5.0, lost_s=5.0)),
            store,
            cluster,
            reports,
            Suika(self.settings),
            KnownSpeeds(),
            lambda kind, job, text: self.lines.append(f"{job} {text}".strip()),
            clock=lambda: self.world.now_s,
        )

    def submit(self, name: str, basic: int, most: int, steps: int = 60, **values: Any) -> None:
        self.world.steps_of[name] = steps
        given: dict[str, Any] = {"rates": RATES, "start_s": 300.0, "leave_s": 20.0} | values
        spec = JobSpec(name, ("train.py",), "/", basic, most, submitted_t=self.world.now_s, **given)
        spec.check()
        submit(self.store, "main", spec)

    def turn(self) -> None:
        """One turn, and a second."""
        self.store.expire()
        try:
            if self.daemon.lead():
                self.daemon.turn()
        except Killed:
            self.calls.left = -1
            self.daemon = self.new_daemon()
            self.world.pass_time(LEASE_S + 1)  # nobody leads until the lease has ended
        except LeadLost as error:
            pytest.fail(str(error))
        self.world.pass_time(1)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def until_all_ended(self, most: int = 600) -> None:
        for _ in range(most):
            self.turn()
            progress = [self.progress(name) for name in self.world.steps_of]
            if all(one.stage in FINAL for one in progress) and not self.world.agents:
                return
        pytest.fail("jobs have not ended:\n" + "\n".join(self.lines))

    def progress(self, name: str) -> JobProgress:
        return read_all(self.store, "main").progress.get(name, JobProgress())

    def devices(self, name: str) -> dict[str, int]:
        found: dict[str, int] = {}
        for agent in self.world.living():
            if agent.job.startswith(f"{name}."):
                found[agent.request.node] = found.get(agent.request.node, 0) + agent.request.devices
        return found


def rig(nodes: int = 4, devices: int = 1, **settings: Any) -> Rig:
    return Rig(World({f"n{index + 1}": devices for index in range(nodes)}), SuikaSettings(**settings))


def test_jobs_start_grow_give_back_for_a_better_one_and_end() -> None:
    one = rig()
    one.submit("a", 1, 4)
    one.turns(8)
    assert one.devices("a") == {"n1": 1, "n2": 1, "n3": 1, "n4": 1}
    one.submit("b", 2, 2, priority=5)
    one.turns(12)
    assert len(one.devices("a")) == 2
    assert len(one.devices("b")) == 2
    assert one.progress("a").attempt == 0
    assert one.world.held == 0, "nobody waits for members"
    one.until_all_ended()
    assert {name: one.progress(name).stage for name in "ab"} == {"a": JobStage.DONE, "b": JobStage.DONE}
    assert one.world.committed == {"a": 60, "b": 60}
    assert max(one.world.submissions.values()) == 1
    assert {name: one.progress(name).changes for name in "ab"} == {"a": 1, "b": 0}, "a gave two back"


def test_a_job_moves_from_a_drained_node_without_waiting_for_members() -> None:
    one = rig(nodes=3)
    one.submit("a", 2, 2)
    one.turns(8)
    assert set(one.devices("a")) == {"n1", "n2"}
    one.world.drained.add("n1")
    one.turns(15)
    assert set(one.devices("a")) == {"n2", "n3"}
    assert one.world.held == 0
    one.until_all_ended()
    assert one.progress("a").attempt == 0
    assert one.world.committed == {"a": 60}


def test_the_loss_of_a_node_takes_one_agent_and_another_comes() -> None:
    one = rig(nodes=3)
    one.submit("a", 2, 2)
    one.turns(8)
    one.world.lose_node("n2")
    one.turns(10)
    assert set(one.devices("a")) == {"n1", "n3"}
    assert any("lost its agent on n2, which ended with NODE_FAIL" in line for line in one.lines)
    one.until_all_ended()
    assert one.progress("a").attempt == 0


def test_a_job_whose_agents_die_on_arrival_is_given_up_and_others_go_on() -> None:
    one = rig(nodes=2)
    one.world.dies_on_arrival.add("n1")
    one.submit("a", 1, 1, attempts=2)
    one.submit("b", 1, 1)
    one.until_all_ended()
    assert one.progress("a").stage is JobStage.FAILED
    assert one.progress("b").stage is JobStage.DONE
    assert one.progress("a").message == (
        "3 agents in a row did not join; its agent on n1 ended before it joined, with FAILED"
    )
    assert sum(count for name, count in one.world.submissions.items() if name.startswith("a.")) == 6
    assert len([line for line in one.lines if "has failed 2 times in a row without progress" in line]) == 1


def test_growth_that_dies_on_arrival_costs_the_job_nothing() -> None:
    one = rig(nodes=2)
    one.world.dies_on_arrival.add("n2")
    one.submit("a", 1, 2)
    one.until_all_ended()
    assert one.progress("a").stage is JobStage.DONE
    assert one.progress("a").attempt == 0
    assert 2 <= len(one.world.submissions) <= 5


def test_a_job_that_lies_about_its_minimum_is_ended() -> None:
    one = rig()
    one.world.silent.add("a")
    one.submit("a", 1, 1, start_s=20.0, attempts=2)
    one.until_all_ended()
    assert one.progress("a").stage is JobStage.FAILED
    assert one.progress("a").message == ("no step has committed within 20 s on 1 device, its basic demand")


def test_an_agent_that_never_leaves_is_killed_in_the_end() -> None:
    one = rig(nodes=2)
    one.submit("a", 1, 2, steps=200)
    one.turns(8)
    assert set(one.devices("a")) == {"n1", "n2"}
    one.world.stuck.add("n2-1")
    one.submit("b", 1, 1, priority=5)
    one.until_all_ended()
    assert {name: one.progress(name).stage for name in "ab"} == {"a": JobStage.DONE, "b": JobStage.DONE}
    assert "a its agent on n2 has not left within 20 s: it gets SIGTERM, and the job grows no more" in one.lines
    assert "a its agent on n2 is still there 5 s after SIGTERM: killed" in one.lines


def test_a_node_that_the_cluster_does_not_give_is_tried_later() -> None:
    one = rig(nodes=2)
    one.world.queued.add("n1")
    one.submit("a", 1, 1)
    one.turns(14)
    assert any("has not started an agent on n1 within 10 s: Resources" in line for line in one.lines)
    one.world.queued.clear()
    one.until_all_ended()
    assert one.progress("a").stage is JobStage.DONE


def test_a_job_that_the_cluster_refuses_is_given_up_and_others_go_on() -> None:
    one = rig(nodes=2)
    one.world.refused.add("a")
    one.submit("a", 1, 1, attempts=1)
    one.submit("b", 1, 1)
    one.until_all_ended()
    assert {name: one.progress(name).stage for name in "ab"} == {"a": JobStage.FAILED, "b": JobStage.DONE}
    text = "a is refused an agent, which is tried again: sbatch ended with 1: invalid partition"
    assert one.lines.count(text) == 3, "once for each agent, not for each try"
    assert one.progress("a").message == (
        "3 agents in a row did not join; the cluster has not started an agent on n1 within 10 s: "
        "sbatch ended with 1: invalid partition"
    )


def test_a_cancelled_job_leaves_between_two_steps_and_its_name_is_free() -> None:
    one = rig()
    one.submit("a", 2, 2)
    one.turns(8)
    cancel(one.store, "main", ["a"], "ann")
    one.turns(8)
    assert one.progress("a").stage is JobStage.CANCELLED
    assert one.progress("a").message == "cancelled by ann"
    assert not one.world.agents
    one.submit("a", 1, 1, steps=90)
    one.until_all_ended()
    assert one.progress("a").stage is JobStage.DONE
    assert one.progress("a").attempt == 1, "names of agents are never used again"


def test_a_job_without_rates_or_profile_stays_at_its_basic_demand() -> None:
    one = rig()
    one.submit("a", 2, 4, rates=())
    one.turns(10)
    assert len(one.devices("a")) == 2
    one.until_all_ended()


def test_basic_demand_that_is_taken_away_comes_back_with_what_was_saved() -> None:
    one = rig(nodes=2, preempt=True)
    one.submit("a", 2, 2)
    one.turns(10)
    one.submit("b", 2, 2, priority=5)
    one.until_all_ended()
    assert one.progress("a").attempt == 1
    assert one.world.committed == {"a": 60, "b": 60}
    assert {name: one.progress(name).stage for name in "ab"} == {"a": JobStage.DONE, "b": JobStage.DONE}


def test_a_job_that_is_done_while_it_is_stopped_does_not_run_again() -> None:
    one = rig(nodes=2, preempt=True)
    one.submit("a", 2, 2, steps=60)
    one.turns(8)
    one.submit("b", 2, 2, priority=5)
    while one.progress("a").stage is not JobStage.ENDING:
        one.turn()
    one.world.steps_of["a"] = one.world.committed["a"] + 1  # its last step commits before its nodes have left
    one.until_all_ended()
    assert one.progress("a").stage is JobStage.DONE
    assert (one.progress("a").attempt, one.world.committed["a"]) == (0, one.world.steps_of["a"])


def test_of_two_daemons_one_leads_and_the_other_takes_over() -> None:
    one = rig()
    second = one.new_daemon()
    assert one.daemon.lead()
    assert not second.lead()
    one.submit("a", 1, 1)
    one.daemon.turn()
    one.world.pass_time(LEASE_S + 1)
    one.store.expire()
    assert second.lead()
    second.turn()
    with pytest.raises(LeadLost):
        one.daemon._write("schedule", JobProgress(), Stored(revisions={"schedule": 1}))
    assert not one.daemon.lead()
    one.daemon = second
    one.until_all_ended()
    assert max(one.world.submissions.values()) == 1


def test_a_damaged_document_stops_no_other_job() -> None:
    one = rig()
    one.submit("a", 1, 1)
    one.store.put("/elaunch-schedule/main/jobs/b", b"no job")
    one.store.put("/elaunch-schedule/main/progress/c", b"{}")
    one.until_all_ended()
    told = [line for line in one.lines if "is passed over" in line]
    assert len(told) == 2


@pytest.mark.parametrize("seed", range(scaled(25, 400)))
def test_a_daemon_that_is_killed_between_any_two_actions_does_nothing_twice_and_forgets_nothing(seed: int) -> None:
    rng = random.Random(seed)
    world = World({f"n{index}": rng.randint(1, 3) for index in range(rng.randint(3, 5))})
    one = Rig(world, SuikaSettings(preempt=rng.random() < 0.3))
    room = sum(world.devices.values())
    names = [f"job{index}" for index in range(rng.randint(2, 5))]
    coming = list(names)
    world.steps_of = dict.fromkeys(names, 0)
    kills = 0
    for turn in range(150):
        if coming and rng.random() < 0.2:
            basic = rng.randint(1, max(1, room // 3))
            one.submit(coming.pop(), basic, rng.randint(basic, room), rng.randint(10, 60), priority=rng.randint(0, 2))
        if rng.random() < 0.05:
            world.drained ^= {rng.choice(list(world.devices))}
        if rng.random() < 0.25:
            kills += 1
            one.calls.kill_at(rng.randint(1, 25), rng)
        one.turn()
        if turn == 120:
            world.drained.clear()
    for name in coming:
        one.submit(name, 1, 1, 10)
    one.until_all_ended()
    assert one.count > 5, "it was killed"
    for name in names:
        progress = one.progress(name)
        assert progress.stage is JobStage.DONE, "\n".join(one.lines)
        assert world.committed[name] == world.steps_of[name]
        assert progress.failures == 0, "\n".join(one.lines)
    stored = one.store.range("/elaunch-schedule/main/progress/")[0]
    assert all(not from_json(JobProgress, entry.value).agents for entry in stored)
