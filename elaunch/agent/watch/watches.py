"""All that watches this node's workers, its machine and the way to other nodes, and what follows from what it finds."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf

from elaunch.agent.config import AgentConfig
from elaunch.agent.decisions.actions import Action, Signal, signal_name
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.inbox import Inbox
from elaunch.agent.output.journal import Journal
from elaunch.agent.watch.hang_watch import Found, HangWatch, describe
from elaunch.agent.watch.monitor import Monitor, Running
from elaunch.agent.watch.reachability import Reach
from elaunch.detect.health import Finding, HealthVerdict
from elaunch.detect.waiting import WorkerWaits
from elaunch.detect.watchdog import TIMER_FILE, Watchdog, fifo_path, is_enabled, worker_of
from elaunch.rendezvous.membership import Cut, Deadlock, node_of
from elaunch.rendezvous.rules.holders import LAST_S, may_go
from elaunch.wire import Unreachable

STUCK_LIMIT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"  # torchrun's; not set, a sleep in the kernel has no limit


class Watches:
    """Runs the watches of one agent: for hangs, for timers of workers, for health, and for nodes that are cut off.

    What is found in a thread reaches the agent's loop by its inbox; all methods are for the loop.

    Args:
        config: the settings.
        life: of the node.
        selector: of the loop; where workers may set timers, the pipe of those is registered there.
        directory: for that pipe.
        stacks_path: returns the file for the stacks of a worker that hangs; empty where it has none.
        journal: tells what is found.
        inbox: of the loop.
    """

    def __init__(
        self,
        config: AgentConfig,
        life: Lifecycle,
        selector: selectors.BaseSelector,
        directory: str,
        stacks_path: Callable[[str], str],
        journal: Journal,
        inbox: Inbox,
    ) -> None:
        self._life = life
        self._stacks_path = stacks_path
        self._journal = journal
        self._inbox = inbox
        self._policy = config.detection.health.policy
        self._timers: Watchdog | None = None
        if is_enabled(os.environ):
            self._timers = Watchdog(fifo_path(os.environ, directory))
            selector.register(self._timers, selectors.EVENT_READ, self._timers)
        conf = config.rendezvous.conf
        stop_limits_s = {"T": conf.workers.stop_timeout}
        with contextlib.suppress(ValueError):
            if (stuck_s := float(os.environ.get(STUCK_LIMIT, ""))) > 0:
                stop_limits_s["D"] = stuck_s
        self._hangs = HangWatch(
            config.detection.hang, stop_limits_s, self._found_hang, conf.workers.first_steps_timeout
        )
        self._waits = WorkerWaits()
        self._monitor = Monitor(
            config.detection.health,
            config.node,
            config.nproc_per_node,
            os.environ,
            _folders(config),
            lambda: [Running(slot.local_rank, slot.worker, slot.pid) for slot in life.running if slot.pid],
            lambda findings: inbox.post(partial(self._on_findings, findings)),
            journal.say,
        )
        self._reach = Reach(lambda cut, well: inbox.post(partial(self._on_reach, cut, well)), conf.link_timeout)

    @property
    def variables(self) -> dict[str, str]:
        """What the environment of workers says of the watches."""
        return {} if self._timers is None else {TIMER_FILE: self._timers.path}

    def start(self) -> None:
        """Begins to look after the node's health."""
        self._monitor.start()

    def close(self) -> None:
        """Ends all watches."""
        self._monitor.stop()
        self._hangs.close()
        self._reach.close()
        if self._timers is not None:
            self._timers.close()

    # -- workers come and go ------------------------------------------------------------------------------------

    def attached(self, worker: str, pid: int, fds: Sequence[int]) -> None:
        """Watches a worker for hangs, by the descriptors that it has sent."""
        unwatched = self._hangs.attached(worker, pid, fds)
        if unwatched:
            self._journal.say(f"worker {worker} is not watched for hangs: {unwatched}")

    def ended(self, worker: str, pid: int) -> None:
        """Watches a worker no more."""
        self._hangs.forget(worker)
        if self._timers is not None:
            for line in self._timers.forget(pid):
                self._journal.say(line)

    # -- hangs --------------------------------------------------------------------------------------------------

    def wait_s(self, now_s: float) -> float:
        """Returns how long the loop may wait before it looks again, in seconds."""
        wait_s = self._hangs.due_s - now_s if self._life.running else inf
        if self._timers is not None and (expiry_s := self._timers.due_s()) is not None:
            wait_s = min(wait_s, expiry_s - time.time())
        return max(0.0, wait_s)

    def is_due(self, now_s: float) -> bool:
        """Returns whether it is time for a look at the workers."""
        return now_s >= self._hangs.due_s

    def check_hangs(self) -> list[Action]:
        """Finds workers that do not go on, or cannot: they would hold the others up for ever."""
        generation = self._life.generation
        running = [(slot.worker, slot.pid) for slot in self._life.running]
        number, members = (generation.number, generation.ids) if generation is not None else (0, ())
        actions: list[Action] = []
        for one in self._hangs.look(running, number, members, self._holders, self._stacks_path):
            self._journal.log("hang", worker=one.worker, state=one.state, stopped_s=round(one.stopped_s, 3))
            what = "stopped" if one.state == "T" else "in uninterruptible sleep"
            why = ", without its stacks: a stopped process shows none" if one.state == "T" else ""
            self._journal.say(f"worker {one.worker} has been {what} for {one.stopped_s:.1f} s; it is killed{why}")
            self._life.workers.holders.note_end(one.worker)
            actions.append(Signal(one.worker, signal.SIGKILL))
        self._life.on_stalled(self._hangs.stalled)
        if line := self._waits.look(time.monotonic(), self._hangs.heartbeats, self._hangs.early_s):
            self._journal.say(line)
        return actions

    @property
    def _holders(self) -> tuple[str, ...]:
        """The members that hold the state, by rank; none where no other worker could be waited for."""
        return () if self._life.settings.is_alone else self._life.workers.holders.ids

    def take_out(self, found: Deadlock) -> None:
        """Takes the stacks of the worker to go: the leader says that all members wait for each other."""
        self._hangs.take_out(found, self._stacks_path)

    def _found_hang(self, found: Found) -> None:
        """In another thread: a worker hangs, and its stacks have been taken."""
        self._inbox.post(partial(self._end_hung, found))

    def _end_hung(self, found: Found, life: Lifecycle) -> list[Action]:
        hang = found.hang
        self._hangs.done(hang.worker)
        if life.find(hang.worker) is None:
            self._hangs.forget(hang.worker)
            return []
        # While its stacks were taken, others may have been lost.
        is_last = hang.since_s < LAST_S and not may_go(hang.worker, self._holders)
        self._journal.say(describe(found, is_last))
        if found.moved or is_last:
            return []
        life.workers.holders.note_end(hang.worker)
        typical_s = hang.typical_step_s
        self._journal.log(
            "hang",
            worker=hang.worker,
            step=hang.step,
            doing=hang.doing,
            since_s=round(hang.since_s, 3),
            limit_s=round(hang.limit_s, 3),
            typical_step_s=None if typical_s is None else round(typical_s, 6),
            waits=list(hang.waits),
            place=found.stacks.place(),
            stacks=found.path or None,
        )
        return [Signal(hang.worker, signal.SIGKILL)]

    # -- timers -------------------------------------------------------------------------------------------------

    def check_timers(self) -> list[Action]:
        """Ends workers that let a timer expire which they had set on themselves."""
        if self._timers is None:
            return []
        actions: list[Action] = []
        workers = {slot.pid: slot.worker for slot in self._life.running if slot.pid}
        for expired in self._timers.expired(time.time()):
            pid = worker_of(expired.pid, workers)
            if pid is None or not expired.signal:
                continue
            worker = workers[pid]
            self._journal.log("hang", worker=worker, timer=expired.scope, pid=expired.pid)
            name = signal_name(expired.signal)
            self._journal.say(f"worker {worker} let its timer {expired.scope!r} expire; it is ended by {name}")
            actions.append(Signal(worker, expired.signal))
        return actions

    # -- health -------------------------------------------------------------------------------------------------

    def _on_findings(self, findings: list[Finding], life: Lifecycle) -> list[Action]:
        """Tells what the monitor has found, and lets the node leave if something of it is about to fail."""
        actions: list[Action] = []
        for found in findings:
            worker = "" if found.local_rank is None else life.slots[found.local_rank].worker
            self._journal.log(
                "health",
                worker=worker or found.evidence.get("worker"),
                subject=found.subject,
                verdict=found.verdict.name.lower(),
                what=found.what,
                text=found.text,
                evidence=dict(found.evidence),
            )
            who = f"{found.subject} of worker {worker}" if worker else found.subject
            self._journal.say(f"{who}: {found.text}")
            if found.verdict >= HealthVerdict.DRAIN and self._policy == "drain":
                actions.extend(life.on_sick(f"{found.subject}: {found.text}"))
        return actions

    # -- other nodes --------------------------------------------------------------------------------------------

    def ask_others(self, found: Unreachable) -> None:
        """Asks whom this node reaches: a worker hears nothing from a peer, nor from its machine."""
        generation = self._life.generation
        if generation is None or found.generation < generation.aborts_step_before:
            return
        own = self._life.settings.node
        addresses = {one.node: one.address for one in generation.workers if one.address and one.node != own}
        self._reach.check(addresses, node_of(found.peer))

    def _on_reach(self, cut: tuple[Cut, ...], well: frozenset[str], life: Lifecycle) -> list[Action]:
        if cut != life.workers.peers.cut:
            self._journal.log("cut", nodes=[one.node for one in cut])
        return life.on_reach(cut, well)


def _folders(config: AgentConfig) -> list[str]:
    """Returns where this node's part of the job writes."""
    checkpoints, events = config.training.checkpoints, config.output.events
    found = [config.output.logs.log_dir, checkpoints.folder if checkpoints is not None else None]
    found.append(os.path.dirname(events) or "." if events else None)
    return [str(folder) for folder in (*found, tempfile.gettempdir()) if folder]
