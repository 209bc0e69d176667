"""A job that meets its faults, one after the other, and what is checked after each and at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.helpers import Spawner, wait_until
from tests.jobs.watch import elaunch
from tests.soak.faults import Faults, patience_s
from tests.soak.growth import Growth
from tests.soak.rig import END_S, SCRIPT, SLOW_END, SLOW_SLEEP_S, Rig, end_quietly, with_rig
from tests.soak.schedule import HOSTS, Fault, Round
from tests.soak.steps import Steps, Unmet, check_steps, done_again

POLL_S = 0.01
ON = 2
"""So many steps after the one that was the newest have committed once the job goes on: one may have been committing."""


@dataclass(frozen=True)
class Met:
    """A fault that a job has met: after how long it went on, and after how long all were there again."""

    fault: Fault
    on_s: float
    whole_s: float


@dataclass(frozen=True)
class Findings:
    """What a job has shown.

    Attributes:
        met: the faults that it has met.
        twice: steps with a line more, of an agent that was lost (`tests.soak.steps`).
        again: steps that were done again, since the job went back.
        judged: how many processes were seen often enough to tell whether they grow, by kind.
    """

    met: list[Met] = field(default_factory=list)
    twice: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    judged: dict[str, int] = field(default_factory=dict)


def undisturbed(folder: Path, api: str, steps: int) -> Steps:
    """Runs a job of one worker to its end, as fast as it can."""
    folder.mkdir()
    (folder / "control").mkdir()
    spawn = Spawner(folder)
    try:
        script = (SCRIPT, f"--api={api}", f"--steps={steps}", f"--control={folder / 'control'}")
        node = elaunch(spawn, folder, "--standalone", script=script)
        if code := node.agent.wait(2 * END_S):
            raise Unmet(f"the undisturbed job ended with {code}\n{node.agent.tail()}")
        return {event["step"]: (event["digest"], event["loss"]) for event in node.events("step")}
    finally:
        end_quietly(spawn, folder / "logs")


def run_round(folder: Path, round_: Round, expected: Steps, findings: Findings) -> None:
    """Runs a job through its faults to its end.

    Args:
        folder: for logs and files, one of its own.
        round_: which job.
        expected: the steps of the undisturbed job.
        findings: gets what the job shows, as soon as it does: all of its faults, unless its steps run out.

    Raises:
        Unmet: something is not as it must be.
    """

    def use(rig: Rig) -> None:
        try:
            _through(rig, findings)
            logs = [node.log for node in rig.all]
            again = done_again([node.agent.text() for node in rig.all], logs)
            findings.again.extend(again)
            findings.twice.extend(check_steps(logs, again, expected))
            if parts := rig.parts():
                raise Unmet(f"the job has left checkpoints unfinished: {', '.join(parts)}")
        except (Unmet, pytest.fail.Exception) as error:
            raise Unmet(f"{error}\n{rig.tails()}") from None

    folder.mkdir()
    with_rig(folder, round_, use)
    left = sorted(str(path.relative_to(folder)) for path in (folder / "tmp").rglob("*") if path.is_file())
    if left:
        raise Unmet(f"the job has left files behind: {', '.join(left[:10])}")


def _through(rig: Rig, findings: Findings) -> None:
    for host in HOSTS:
        rig.start(host)
    wait_until(lambda: _has_begun(rig), END_S, "the job to begin")
    faults, growth, steps = Faults(rig), Growth(), rig.round.steps
    for fault in rig.round.faults:
        if rig.last_step() > steps - SLOW_END // 5:
            break
        if rig.last_step() > steps - SLOW_END:
            rig.pace(SLOW_SLEEP_S)
        time.sleep(fault.pause_s)
        findings.met.append(_meet(rig, faults, fault))
        with (rig.folder / "met").open("a") as file:
            file.write(f"{findings.met[-1]}\n")
        for node in rig.hosts.values():
            growth.look("agent", node.name, node.agent.pid)
            for worker, pid in node.pids.items():
                growth.look("worker", worker, pid)
    (rig.folder / "growth").write_text(growth.told())
    findings.judged.update(growth.judged())
    if lines := growth.found():
        raise Unmet("\n".join(lines))
    rig.pace(0.0)
    for node in rig.hosts.values():
        if code := node.agent.wait(END_S):
            raise Unmet(f"the agent of {node.name} ended with {code}")
    rig.look()


def _has_begun(rig: Rig) -> bool:
    rig.look()
    if not all(node.runs for node in rig.hosts.values()):
        raise Unmet("an agent has ended before the job began")
    return rig.is_whole()


def _meet(rig: Rig, faults: Faults, fault: Fault) -> Met:
    """Does one fault, and waits until the job is whole again."""
    rig.look()
    before, newest = rig.workers(), rig.last_step()
    begin_s = time.monotonic()
    on_s = 0.0
    parts = faults.do(fault)
    due_s, condition, done_at = begin_s, None, newest
    under_way = True
    while True:
        rig.look()
        now_s = time.monotonic()
        if not on_s and rig.last_step() >= newest + ON:
            on_s = now_s - begin_s
        while under_way and now_s >= due_s and (condition is None or condition()):
            wait = next(parts, None)
            under_way = wait is not None
            due_s, condition = now_s + (wait if isinstance(wait, float) else 0.0), wait if callable(wait) else None
            done_at = rig.last_step()
            if not under_way:
                break
        if not under_way and on_s and rig.last_step() >= done_at + ON and rig.is_whole():
            break
        if now_s - begin_s > patience_s():
            where = "under way" if under_way else "over"
            raise Unmet(f"{fault} is {where}, and the job is not whole after {now_s - begin_s:.0f} s: {rig.workers()}")
        if not any(node.runs for node in rig.hosts.values()):
            raise Unmet(f"{fault}: all agents have ended")
        time.sleep(POLL_S)
    after = rig.workers()
    lost = {worker: pid for worker, pid in before.items() if worker not in faults.victims and after.get(worker) != pid}
    if lost:
        raise Unmet(f"{fault}: survivors have lost their processes: {lost}; now there are {after}")
    return Met(fault, on_s, time.monotonic() - begin_s)
