"""A job that meets its faults, one after the other, and what is checked after each and at the end."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers import Spawner, wait_until
from tests.jobs.watch import elaunch
from tests.soak.faults import Faults, patience_s
from tests.soak.growth import Growth
from tests.soak.rig import END_S, SCRIPT, SLOW_END, SLOW_SLEEP_S, STEPS, Event, Rig, Unmet, end_quietly, with_rig
from tests.soak.schedule import HOSTS, Fault, Round

POLL_S = 0.01
ROUNDING = 1e-9
ON = 2
"""So many steps after the one that was the newest have committed once the job goes on: one may have been committing."""

WENT_BACK = r"copies of step \d+ were not complete when a worker was lost: going on from step (\d+)"

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
            events = [event for node in rig.all for event in node.events]
            check_steps(events, _went_back(rig), expected)
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


def _went_back(rig: Rig) -> set[int]:
    """Returns the steps from which the job has gone on anew, as its members have told."""
    return {int(step) for node in rig.all for step in re.findall(WENT_BACK, node.node.agent.text())}


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


def check_steps(events: Iterable[Event], went_back: Collection[int], expected: Steps) -> None:
    """Checks that each step was done once, with the samples and the loss of the undisturbed job.

    Args:
        events: of all agents.
        went_back: steps to which the job went back, as the copies of the next one were not complete: each was done
            again, by other members, so its loss may differ in its last bits.
        expected: of the undisturbed job.

    Raises:
        Unmet: they were not.
    """
    found: dict[int, list[tuple[str, float]]] = {}
    for event in events:
        if event["kind"] == "step":
            found.setdefault(event["step"], []).append((event["digest"], event["loss"]))
    for step, done in sorted(found.items()):
        if step not in went_back and len(set(done)) > 1:
            raise Unmet(f"step {step} was done twice: {' and '.join(map(str, done))}")
    if sorted(found) != sorted(expected):
        raise Unmet(f"steps are missing, or too many: {sorted(set(found) ^ set(expected))}")
    for step, (digest, loss) in expected.items():
        for found_digest, found_loss in found[step]:
            if found_digest != digest:
                raise Unmet(f"step {step} was done with other samples")
            if abs(found_loss - loss) > ROUNDING * abs(loss):
                raise Unmet(f"step {step} has the loss {found_loss!r}, in the undisturbed job it is {loss!r}")
