"""A job that meets its faults, one after the other, and what is checked after each and at the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import Spawner, wait_until
from tests.jobs.watch import elaunch
from tests.soak.faults import Faults, patience_s
from tests.soak.growth import Growth
from tests.soak.rig import END_S, SCRIPT, SLOW_END, SLOW_SLEEP_S, STEPS, Rig, Unmet, end_quietly, with_rig
from tests.soak.schedule import HOSTS, Fault, Round

POLL_S = 0.01
ROUNDING = 1e-9
ON = 2
"""So many steps after the one that was the newest have committed once the job goes on: one may have been committing."""

Steps = dict[int, tuple[str, float]]
"""Of each step, the digest of its samples and its loss."""


@dataclass(frozen=True)
class Met:
    """A fault that a job has met: after how long it went on, and after how long all were there again."""

    fault: Fault
    on_s: float
    whole_s: float


def undisturbed(folder: Path, api: str) -> Steps:
    """Runs a job of one worker to its end, as fast as it can."""
    folder.mkdir()
    (folder / "control").mkdir()
    spawn = Spawner(folder)
    try:
        script = (SCRIPT, f"--api={api}", f"--steps={STEPS}", f"--control={folder / 'control'}")
        node = elaunch(spawn, folder, "--standalone", script=script)
        if code := node.agent.wait(2 * END_S):
            raise Unmet(f"the undisturbed job ended with {code}\n{node.agent.tail()}")
        return {event["step"]: (event["digest"], event["loss"]) for event in node.events("step")}
    finally:
        end_quietly(spawn, folder / "logs")


def run_round(folder: Path, round_: Round, expected: Steps, say: Callable[[Met], None]) -> list[Met]:
    """Runs a job through its faults to its end.

    Returns:
        Those that it has met: all of them, unless its steps ran out.

    Raises:
        Unmet: something is not as it must be.
    """
    met: list[Met] = []

    def use(rig: Rig) -> None:
        try:
            _through(rig, met, say)
            _check(rig, expected)
        except (Unmet, pytest.fail.Exception) as error:
            raise Unmet(f"{error}\n{rig.tails()}") from None

    folder.mkdir()
    with_rig(folder, round_, use)
    left = sorted(str(path.relative_to(folder)) for path in (folder / "tmp").rglob("*") if path.is_file())
    if left:
        raise Unmet(f"the job has left files behind: {', '.join(left[:10])}")
    return met


def _through(rig: Rig, met: list[Met], say: Callable[[Met], None]) -> None:
    for host in HOSTS:
        rig.start(host)
    wait_until(lambda: _has_begun(rig), END_S, "the job to begin")
    faults, growth = Faults(rig), Growth()
    for fault in rig.round.faults:
        if rig.last_step() > STEPS - SLOW_END // 5:
            break
        if rig.last_step() > STEPS - SLOW_END:
            rig.pace(SLOW_SLEEP_S)
        time.sleep(fault.pause_s)
        met.append(_meet(rig, faults, fault))
        say(met[-1])
        with (rig.folder / "met").open("a") as file:
            file.write(f"{met[-1]}\n")
        for node in rig.hosts.values():
            growth.look("agent", node.name, node.agent.pid)
            for worker, pid in node.pids.items():
                growth.look("worker", worker, pid)
    (rig.folder / "growth").write_text(growth.told())
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


def _check(rig: Rig, expected: Steps) -> None:
    """That each step was done once, with the samples and the loss of the undisturbed job."""
    found: Steps = {}
    for node in rig.all:
        for event in node.events:
            if event["kind"] != "step":
                continue
            step, done = event["step"], (event["digest"], event["loss"])
            if found.setdefault(step, done) != done:
                raise Unmet(f"step {step} was done twice: {found[step]} and {done}")
    if sorted(found) != sorted(expected):
        raise Unmet(f"steps are missing, or too many: {sorted(set(found) ^ set(expected))}")
    for step, (digest, loss) in expected.items():
        if found[step][0] != digest:
            raise Unmet(f"step {step} was done with other samples")
        if abs(found[step][1] - loss) > ROUNDING * abs(loss):
            raise Unmet(f"step {step} has the loss {found[step][1]!r}, in the undisturbed job it is {loss!r}")
