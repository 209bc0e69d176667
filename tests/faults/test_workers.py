"""Workers of one node die, stop and come back; training goes on as if nothing had happened."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import psutil
import pytest

from elaunch.plan import Plan
from tests.helpers import Spawner, once_a_session, soak, wait_until
from tests.jobs.watch import (
    SCRIPT,
    Node,
    assert_gone,
    assert_same,
    digests,
    elaunch,
    kill_node,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)

FOUR = ("--standalone", "--nproc-per-node=4")


Reference = tuple[dict[int, float], list[str], str]


def reference(spawn: Spawner, folder: Path, *arguments: str) -> Reference:
    """An undisturbed run by one worker: losses, digests, and the norm of the final weights; done once a session."""

    def run() -> Reference:
        node = elaunch(spawn, folder, "--standalone", script=(SCRIPT, *arguments), name="reference")
        assert node.agent.wait(100) == 0, node.agent.tail()
        return losses(node), digests(node), ending(node.agent.text())[0]

    return once_a_session((SCRIPT, *arguments), run)


def ending(text: str) -> list[str]:
    """What each worker that finished said of its final weights, schedule and micro-batches."""
    return re.findall(r"norm (\S+) rate", text)


def left(node: Node, worker: str) -> bool:
    return worker not in node.members()


def kill_at_once(node: Node, pids: list[int]) -> None:
    """Let the agent hear of these deaths together, however slowly the kernel ends the processes."""
    holders = {process.pid for process in map(psutil.Process.parent, map(psutil.Process, pids)) if process}
    idle = wait_until(lambda: waiting_in(holders), 20, "the holders of the workers to wait")
    node.agent.signal(signal.SIGSTOP)
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    # Reaped, not only dead; and who reaped them waits where it did before, so it has told the agent.
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 20, "the workers to be reaped")
    wait_until(lambda: waiting_in(holders) == idle, 20, "the agent to be told")
    node.agent.signal(signal.SIGCONT)


def waiting_in(pids: Iterable[int]) -> dict[int, str]:
    """The numbers of the system calls in which processes wait; empty as long as one of them runs."""
    calls = {pid: Path(f"/proc/{pid}/syscall").read_text().split()[0] for pid in pids}
    return {} if "running" in calls.values() else calls


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("dtype", "relative"), [("float64", 1e-9), soak("float32", 1e-3)])
def test_five_kills_and_joins_leave_only_rounding_behind(
    spawn: Spawner, tmp_path: Path, dtype: str, relative: float
) -> None:
    arguments = ("--steps", "200", "--dtype", dtype)
    expected, samples, norm = reference(spawn, tmp_path, *arguments)
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, *arguments, "--sleep", "0.004", "--crew", "4"))
    wait_for_step(node, 5)
    first = node.pids()
    killed = set()
    for turn, slot in enumerate((0, 3, 1, 0, 3)):
        victim = next(worker for worker in node.pids() if f"/{slot}#" in worker)
        killed.add(victim)
        os.kill(node.pids()[victim], signal.SIGKILL)
        wait_for(node, partial(left, node, victim), 30, f"a generation without {victim}")
        wait_for_members(node, 4)
        wait_for_step(node, node.last_step() + 3 + turn)
    untouched = {worker: pid for worker, pid in first.items() if worker not in killed}
    assert untouched, "every first worker was killed"
    assert untouched.items() <= node.pids().items()
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert_same(losses(node), expected, relative)
    assert digests(node) == samples
    assert all(float(each) == pytest.approx(float(norm), rel=relative) for each in ending(node.agent.text()))
    assert len(ending(node.agent.text())) == 4
    # A smaller membership does more micro-batches, not larger ones.
    assert set(re.findall(r"rows (\[.*\])", node.agent.text())) == {"[3]"}


@pytest.mark.parametrize(
    ("slot", "phase"),
    [
        soak(2, "compute"),
        (0, "reduce"),
        soak(2, "reduce"),
        soak(0, "enter"),
        (0, "half"),  # nobody that lives has reported the step
        soak(1, "half"),  # the member that reports the steps has not passed the barrier
        soak(0, "passed"),
        soak(2, "passed"),
    ],
)
def test_a_death_in_any_phase_of_a_step_changes_no_result(
    spawn: Spawner, tmp_path: Path, phase: str, slot: int
) -> None:
    # A width at which the gradients are large enough for a reduction in two rounds.
    arguments = ("--steps", "14", "--width", "128")
    expected, samples, norm = reference(spawn, tmp_path, *arguments)
    die = ("--die", f"{slot}:5:{phase}")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=3", script=(SCRIPT, *arguments, *die))
    assert node.agent.wait(100) == 0, node.agent.tail()
    first = {event["worker"]: event for event in node.events("worker_exited") if event["worker"].endswith("#0")}
    assert first.pop(f"node0/{slot}#0")["signal"] == signal.SIGKILL
    assert [event.get("exitcode") for event in first.values()] == [0, 0], node.agent.tail()
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples
    assert float(ending(node.agent.text())[0]) == pytest.approx(float(norm), rel=1e-9)


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        ("1#0", "5:vote"),
        soak("0#0", "5:barrier"),
        soak("0#0", "6:moving"),
        ("2#1", "0:receive"),
        soak("2#1", "0:barrier"),
        soak("1#0", "30:barrier"),  # at the end of the job
    ],
)
def test_a_second_death_in_any_phase_of_a_transition_changes_no_result(
    spawn: Spawner, tmp_path: Path, victim: str, moment: str
) -> None:
    arguments = ("--steps", "30")
    expected, samples, norm = reference(spawn, tmp_path, *arguments)
    script = (SCRIPT, *arguments, "--die", "2:5:compute", "--die", f"{victim}:{moment}", "--crew", "3")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=3", script=script)
    assert node.agent.wait(100) == 0, node.agent.tail()
    exits = {event["worker"]: event for event in node.events("worker_exited")}
    for worker in ("node0/2#0", f"node0/{victim}"):
        assert exits[worker].get("signal") == signal.SIGKILL
        del exits[worker]
    assert all(exits[f"node0/{slot}#0"].get("exitcode") == 0 for slot in (0, 1) if f"{slot}#0" != victim)
    assert not any(event.get("exitcode") for event in exits.values()), node.agent.tail()
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples
    assert all(float(each) == pytest.approx(float(norm), rel=1e-9) for each in ending(node.agent.text()))


def test_deaths_at_the_same_moment_make_one_generation(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, "--steps", "400", "--sleep", "0.004", "--crew", "4"))
    wait_for_step(node, 5)
    pids = sorted(node.pids().items())
    generations = len(node.events("generation"))
    kill_at_once(node, [pids[0][1], pids[2][1]])
    wait_for(node, lambda: len(node.events("generation")) > generations, 30, "a new generation")
    assert node.events("generation")[generations]["workers"] == [pids[1][0], pids[3][0]]
    wait_for_members(node, 4)
    kill_node(node)


def test_three_of_four_may_die_at_once(spawn: Spawner, tmp_path: Path) -> None:
    expected, samples, _ = reference(spawn, tmp_path, "--steps", "60")
    gate = tmp_path / "gate"
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, "--steps", "60", "--hold", f"20:{gate}"))
    wait_for_step(node, 5)
    survivor, *others = sorted(node.pids().items())[::-1]
    kill_at_once(node, [pid for _, pid in others])
    gate.touch()
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert survivor[1] in node.all_pids()
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples


def test_a_worker_that_is_stopped_is_replaced_while_the_others_train(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, "--steps", "500", "--sleep", "0.004", "--crew", "4"))
    wait_for_step(node, 5)
    worker, pid = sorted(node.pids().items())[1]
    os.kill(pid, signal.SIGSTOP)
    wait_for(node, lambda: node.events("hang"), 30, "the hang to be found")
    assert node.events("hang")[0]["worker"] == worker
    wait_for(node, lambda: worker not in node.members(), 30, "a generation without it")
    wait_for_members(node, 4)
    assert_gone([pid])
    kill_node(node)


def test_a_worker_that_raises_is_replaced_only_while_steps_commit(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--steps", "30", "--fail-at", "1:8")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", script=script)
    # The step itself is sound: whoever redoes it without slot 1 commits it, and the slot's next worker goes on.
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert "the sample that breaks the script" in node.agent.text()
    reason = r"exited with code 1: RuntimeError: the sample that breaks the script \(train\.py:\d+ in main\)"
    assert any(re.search(reason, event["cause"]) for event in node.events("generation")), node.agent.tail()
    assert len(losses(node)) == 30


def test_a_backward_that_raises_between_two_reductions_ends_its_worker(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--steps", "20", "--break-at", "1:8")
    flags = ("--standalone", "--nproc-per-node=3", "--max-restarts", "0")
    node = elaunch(spawn, tmp_path, *flags, script=script)
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert "the backward that breaks the script" in node.agent.text()
    assert len(losses(node)) == 20


def test_when_all_workers_die_the_job_ends_with_the_reason(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=2", script=(SCRIPT, "--steps", "4000"))
    wait_for_step(node, 3)
    kill_at_once(node, list(node.pids().values()))
    assert node.agent.wait(60) == 1, node.agent.tail()
    assert "all 2 workers of the job failed, and the state in memory with them" in node.agent.text()
    assert "checkpoint" in node.agent.text()
    assert_gone(node.all_pids())


def test_when_all_workers_die_max_restarts_starts_the_script_again(spawn: Spawner, tmp_path: Path) -> None:
    flags = ("--standalone", "--nproc-per-node=2", "--max-restarts", "2")
    gate = tmp_path / "gate"
    node = elaunch(spawn, tmp_path, *flags, script=(SCRIPT, "--steps", "40", "--hold", f"20:{gate}"))
    wait_for_step(node, 3)
    kill_at_once(node, list(node.pids().values()))
    gate.touch()
    assert node.agent.wait(100) == 0, node.agent.tail()
    steps = [event["step"] for event in node.events("step")]
    assert steps.count(0) == 2
    assert max(steps) == 39


def test_more_workers_than_micro_batches_share_what_there_is(spawn: Spawner, tmp_path: Path) -> None:
    arguments = ("--steps", "12", "--global-batch-size", "6")
    expected, samples, norm = reference(spawn, tmp_path, *arguments)
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, *arguments))
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples
    assert [float(each) for each in ending(node.agent.text())] == pytest.approx([float(norm)] * 4, rel=1e-9)


def test_workers_that_do_their_share_at_once_share_anew_what_a_dead_one_did(spawn: Spawner, tmp_path: Path) -> None:
    arguments = ("--steps", "60", "--global-batch-size", "22", "--micro-batch-size", "0", "--dropout", "0")
    expected, samples, _ = reference(spawn, tmp_path, *arguments)
    gate = tmp_path / "gate"
    script = (SCRIPT, *arguments, "--hold", f"20:{gate}")
    node = elaunch(spawn, tmp_path, *FOUR, "--max-restarts=0", script=script)
    wait_for_step(node, 5)
    os.kill(node.pids()["node0/1#0"], signal.SIGKILL)
    gate.touch()
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples
    first, *_, last = (Plan.parse(event["plan"]) for event in node.events("decision"))
    assert str(first) == (
        "plan layers 1 batch 22 micro-batch 1 zero interleaved\n"
        "layers 0:1 samples 0:6 workers node0/0#0\n"
        "layers 0:1 samples 6:12 workers node0/1#0\n"
        "layers 0:1 samples 12:17 workers node0/2#0\n"
        "layers 0:1 samples 17:22 workers node0/3#0"
    )
    last.validate(["node0/0#0", "node0/2#0", "node0/3#0"])
    assert all(len(tile.micro_batches) == 1 for tile in last.tiles)


def test_members_without_links_to_all_others_recover_too(spawn: Spawner, tmp_path: Path) -> None:
    """As from 17 members on: collectives in rings, and links for the state made when it moves."""
    arguments = ("--steps", "30", "--width", "128")
    expected, samples, norm = reference(spawn, tmp_path, *arguments)
    script = (SCRIPT, *arguments, "--direct", "2", "--die", "2:5:reduce", "--die", "0:8:moving", "--crew", "6")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=6", script=script)
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert not [event for event in node.events("worker_exited") if event.get("exitcode")], node.agent.tail()
    assert not [event for event in node.events("generation") if "link" in event["cause"]]
    assert_same(losses(node), expected, 1e-9)
    assert digests(node) == samples
    assert all(float(each) == pytest.approx(float(norm), rel=1e-9) for each in ending(node.agent.text()))


def test_buffers_and_the_scripts_own_collectives_survive_a_change(spawn: Spawner, tmp_path: Path) -> None:
    script = (SCRIPT, "--steps", "30", "--extras", "--die", "0:6:reduce", "--die", "2:9:compute")
    node = elaunch(spawn, tmp_path, "--standalone", "--nproc-per-node=3", "--max-restarts", "0", script=script)
    assert node.agent.wait(100) == 0, node.agent.tail()
    said = re.findall(r"extras (.*)", node.agent.text())
    assert len(said) == 1
    assert said[0].endswith("members 1 of 1")
    # The last survivor saw each step's statistics once: 8 micro-batches a step, those of the first member count.
    batches = float(re.findall(r"([\d.]+)\] members", said[0])[0])
    # Of two members it may have been the faster one, and so have had one more.
    assert (batches - 6 * 3 - 21 * 8) / 3 in (3, 4, 5)


def test_killing_the_agent_leaves_no_orphan_and_no_folder(
    spawn: Spawner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, "--steps", "4000"))
    wait_for_step(node, 3)
    assert list(temporary.glob("elaunch-*"))
    kill_node(node)
    wait_until(lambda: not list(temporary.glob("elaunch-*")), 10, "the folders to go")


def test_the_event_log_tells_the_phases_of_a_recovery(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(spawn, tmp_path, *FOUR, script=(SCRIPT, "--steps", "300", "--sleep", "0.004"))
    wait_for_step(node, 5)
    worker, pid = sorted(node.pids().items())[0]
    os.kill(pid, signal.SIGKILL)

    def found() -> dict[str, object] | None:
        return next((event for event in node.events("transition") if worker in event["cause"]), None)

    transition = wait_until(found, 60, "the transition")
    phases = transition["phases"]
    assert isinstance(phases, dict)
    assert set(phases) == {"detect_s", "agree_s", "plan_s", "connect_s", "transfer_s", "resume_s"}
    assert sum(phases.values()) == pytest.approx(transition["total_s"], abs=0.02)
    decision = next(event for event in node.events("decision") if worker in event["reason"])
    best = max((one for one in decision["candidates"] if not one["rejected"]), key=lambda one: one["score"])
    assert decision["policy"] == best["policy"]
    # Samples a second: 24 of them in a step.
    assert 0 < best["score"] <= 24 / best["step_s"] * 1.001
    assert best["score"] > 24 / best["step_s"] / 2
    assert worker not in decision["plan"]
    assert {"policy", "step_s", "transition_s", "peak_bytes", "score", "rejected"} <= best.keys()
    kill_node(node)
