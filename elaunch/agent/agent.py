"""The agent: one process a node. A loop that observes, lets `lifecycle` decide, and acts."""

from __future__ import annotations

import contextlib
import math
import os
import reprlib
import selectors
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from elaunch.accepting import Accepting
from elaunch.agent.config import AgentConfig
from elaunch.agent.control import Connection, ControlServer
from elaunch.agent.decisions.actions import Action, Exit, Say, Signal, Start, Tell, Warm, signal_name
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.node_state import NodeSettings
from elaunch.agent.notices import Announcement, Notices
from elaunch.agent.output.events import EventLog
from elaunch.agent.output.outputs import Folders, Outputs
from elaunch.agent.supervisor import (
    Supervisor,
    command,
    fill,
    free_port,
    listen,
    worker_cpus,
    worker_devices,
    worker_env,
)
from elaunch.agent.watch.hang_watch import Found, HangWatch, describe
from elaunch.agent.watch.monitor import Monitor, Running
from elaunch.agent.watch.reachability import Reach
from elaunch.detect.health import Finding, Verdict
from elaunch.detect.host import ancestors
from elaunch.detect.watchdog import TIMER_FILE, Watchdog, fifo_path, is_enabled, worker_of
from elaunch.errors import DeviceError, ElaunchError, ProtocolError
from elaunch.policy.stragglers import track
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.decide import Settings
from elaunch.rendezvous.membership import (
    Cut,
    Deadlock,
    DrainRequest,
    Generation,
    JobConfig,
    Result,
    node_of,
    split_address,
)
from elaunch.rendezvous.participant import Participant
from elaunch.rendezvous.store import Store
from elaunch.threads import describe as describe_error
from elaunch.threads import tell
from elaunch.wire import (
    Announce,
    Attach,
    Evict,
    Finished,
    Joined,
    Leaving,
    Message,
    Profiled,
    Progress,
    Ready,
    Report,
    Saved,
    Unreachable,
    Welcome,
)

ALL_LEAVE = signal.SIGUSR2
ANNOUNCEMENTS = (signal.SIGUSR1, ALL_LEAVE)
"""Sent by schedulers some time before they take this node, or all nodes of the job, away."""

MAX_ADDRESS = 300  # characters of a worker's address; a host's name has at most 253
MAX_WHY = 300  # characters of a worker's reason in a line

STUCK_LIMIT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"  # torchrun's; not set, a sleep in the kernel has no limit


class Agent:
    """Runs this node's workers until the job is over.

    Args:
        config: the settings.
        open_store: connects to the rendezvous store.
        supervisor: the fork server, forked before this process had threads.
        host: the address at which workers of other nodes reach this node.
        folders: where the streams of workers go; by default as the flags say.
        hosts: other nodes use a store that ends with this agent.
        figures: of this node's check, for those that come later.
    """

    def __init__(
        self,
        config: AgentConfig,
        open_store: Callable[[], Store],
        supervisor: Supervisor,
        host: str,
        folders: Folders | None = None,
        hosts: bool = False,
        figures: str = "",
    ) -> None:
        self._hosts = hosts
        self._config = config
        self._supervisor = supervisor
        self._argv, self._program = command(config.program)
        self._selector = selectors.DefaultSelector()
        self._news: deque[tuple[Callable[[Lifecycle], list[Action]], Generation | None]] = deque()
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._selector.register(self._wake_read, selectors.EVENT_READ, self._wake_read)
        self._selector.register(supervisor.link, selectors.EVENT_READ, supervisor)
        self._control = ControlServer(self._selector, self.say)
        self._outputs = Outputs(config, folders)
        self._cpus = worker_cpus(config)
        self._devices = worker_devices(config)
        supervisor.remove_at_the_end(self._control.directory)
        self._watchdog: Watchdog | None = None
        if is_enabled(os.environ):
            self._watchdog = Watchdog(fifo_path(os.environ, self._control.directory))
            self._selector.register(self._watchdog, selectors.EVENT_READ, self._watchdog)
        listener = listen(host)
        self._liveness = Accepting(self._selector, listener, listener, self.say)
        self._events = EventLog(config.output.events, config.node, config.output.events_to_console)
        self.token = ""
        self._exit: Exit | None = None
        self._quiet = False
        self._signals: deque[int] = deque()
        stop_limits_s = {"T": config.rendezvous.conf.stop_timeout}
        with contextlib.suppress(ValueError):
            if (stuck_s := float(os.environ.get(STUCK_LIMIT, ""))) > 0:
                stop_limits_s["D"] = stuck_s
        self._hangs = HangWatch(config.detection.hang, stop_limits_s, self._found)
        self._life = Lifecycle(
            NodeSettings(
                node=config.node,
                host=host,
                slots=config.nproc_per_node,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                max_restarts=config.max_restarts,
                shutdown_s=config.stop.shutdown_timeout,
                role=config.role,
                rank=config.rendezvous.node_rank,
                warm_start=config.start.warm and config.start.warm_start,
            ),
            port=free_port(host),
            liveness_address=f"{host}:{listener.getsockname()[1]}",
        )
        self._monitor = Monitor(
            config.detection.health,
            config.node,
            config.nproc_per_node,
            os.environ,
            _folders(config),
            lambda: [Running(slot.local_rank, slot.worker, slot.pid) for slot in self._life.running if slot.pid],
            lambda findings: self.post(partial(self._on_findings, findings)),
            self.say,
        )
        self._reach = Reach(
            lambda cut, well: self.post(partial(self._on_reach, cut, well)), config.rendezvous.conf.link_timeout
        )
        self._attempt = 0
        conf = config.rendezvous.conf
        self._participant = Participant(
            open_store,
            config.job,
            JobConfig(
                config.min_nodes,
                config.max_nodes,
                config.max_restarts,
                checkpoint_every=config.training.checkpoints.every if config.training.checkpoints is not None else 0,
            ),
            Settings(
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                max_restarts=config.max_restarts,
                last_call_s=conf.last_call_timeout,
                join_s=conf.join_timeout,
                attach_s=conf.attach_timeout,
                ready_s=conf.ready_timeout,
                lease_s=conf.lease_ttl,
            ),
            self._life.doc(),
            _Listener(self),
            connect_s=conf.connect_timeout,
            figures=figures,
        )

    def run(self) -> int:
        """Run the node's part of the job.

        Returns:
            torchrun's exit codes: 0 when the job or this node's part of it ended well, else 1.
        """
        wanted = (*self._config.stop.signals, *(one for one in ANNOUNCEMENTS if one not in self._config.stop.signals))
        handlers = {number: signal.signal(number, self._on_signal) for number in wanted}
        former_wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._participant.start()
        notices = Notices(self._config.stop.notices, self._announced, self.say)
        self._monitor.start()
        try:
            while self._exit is None:
                self._turn()
            self._participant.publish(self._life.doc())
        finally:
            notices.close()
            self._participant.stop(last=self._hosts and self._life.result is not None)
            self._supervisor.close()
            self._outputs.close()
            self._control.close()
            self._monitor.stop()
            self._hangs.close()
            self._reach.close()
            self._liveness.close()
            self._events.close()
            if self._watchdog is not None:
                self._watchdog.close()
            signal.set_wakeup_fd(former_wakeup)
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if self._exit.text:
            self.say(self._exit.text)
        # Not those of a node whose workers ended only because they were told to.
        failed = list(self._life.workers.blame.failures.values())
        failures = failed if any(one.own for one in failed) else []
        self._outputs.report(failures, self._exit.code, self._exit.text)
        return self._exit.code

    # -- observe ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        now_s = time.monotonic()
        due_s = self._life.due_s()
        wait_s = 1.0 if due_s is None else max(0.0, due_s - now_s)
        if self._life.running:
            wait_s = min(wait_s, max(0.0, self._hangs.due_s - now_s))
        if self._watchdog is not None and (expiry_s := self._watchdog.due_s()) is not None:
            wait_s = min(wait_s, max(0.0, expiry_s - time.time()))
        for paused in (self._control, self._liveness):
            if paused.due_s is not None:
                wait_s = min(wait_s, max(0.0, paused.due_s - now_s))
        self._quiet = True
        for key, mask in self._selector.select(wait_s):
            self._serve(key.data, mask)
        self._control.on_time(time.monotonic())
        self._liveness.on_time(time.monotonic())
        self._check_timers()
        if self._quiet and (due_s is None or time.monotonic() < due_s) and time.monotonic() < self._hangs.due_s:
            return
        while self._signals:
            self._act(self._on_number(self._signals.popleft()))
        while self._news:
            decide, generation = self._news.popleft()
            actions = decide(self._life)
            if generation is not None:
                self._log(
                    "generation", workers=list(generation.ids), cause=generation.cause, stage=generation.stage.value
                )
            self._act(actions)
        self._act(self._life.on_time(time.monotonic()))
        if time.monotonic() >= self._hangs.due_s:
            self._check_hangs()
        self._publish()

    def _publish(self) -> None:
        """Report this node as it is now; with the report that it is ready for an attempt goes a port for that."""
        if self._life.attempt != self._attempt:
            self._attempt = self._life.attempt
            self._life.port = free_port(self._life.settings.host)
        self._participant.publish(self._life.doc())

    def _serve(self, source: object, mask: int) -> None:
        """Take what one descriptor brings. Lines for the event log, which come with every step, change nothing else."""
        if not isinstance(source, Connection):
            self._quiet = False
        if source is self._wake_read:
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_read, 4096)
        elif isinstance(source, Supervisor):
            try:
                messages = source.receive()
            except ProtocolError as error:
                self._exit = Exit(
                    1, f"the process that holds this node's workers says what nobody understands: {error}"
                )
                return
            if messages is None:
                self._exit = Exit(1, "the process that holds this node's workers was killed, and the workers with it")
                return
            acts = [self._on_forkserver(message) for message in messages]
            self._publish()  # before all else, because the others wait for it, and at once for all that died together
            for act in acts:
                act()
        elif isinstance(source, ControlServer):
            source.accept()
        elif isinstance(source, Watchdog):
            for line in source.receive():
                self.say(line)
        elif isinstance(source, socket.socket):
            asks = self._liveness.accept()
            if asks is not None:
                asks.close()
        elif isinstance(source, Connection):
            self._serve_worker(source, mask)

    def _serve_worker(self, connection: Connection, mask: int) -> None:
        """Take what a worker sends. Whatever is wrong with that ends its connection, and nothing else."""
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if mask & selectors.EVENT_READ:
                for message in connection.receive():
                    if not connection.closed:
                        self._on_message(connection, message)
        except ProtocolError as error:
            self.say(f"{connection}: {error}; its connection is closed")
            connection.close()
        except Exception as error:  # a defect of ours, or what nobody has thought of
            tell(
                f"{connection}: what it sent cannot be taken, its connection is closed: {describe_error(error)}", error
            )
            connection.close()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _on_number(self, number: int) -> list[Action]:
        """Act on a signal; those that announce an end are not those that make one, if the user did not say so."""
        if number in self._config.stop.signals:
            return self._life.on_signal(number, time.monotonic())
        if number == ALL_LEAVE:
            self._participant.drain_all(f"{signal_name(number)} to node {self._config.node}")
        return self._life.drain(signal_name(number), time.monotonic())

    def post(self, decide: Callable[[Lifecycle], list[Action]], generation: Generation | None = None) -> None:
        """Let the loop apply news; may be called from any thread."""
        self._news.append((decide, generation))
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_write, b"\0")

    def _announced(self, found: Announcement) -> None:
        self.post(lambda life: life.drain(found.reason, time.monotonic(), found.within_s))

    def _on_forkserver(self, message: dict[str, Any]) -> Callable[[], None]:
        """Take one message of the fork server; what is returned logs it and acts on it."""
        if "started" in message:
            self._life.on_started(message["started"], message["pid"])
            return partial(self._log_worker, "worker_started", message["started"], message["pid"])
        if "exited" in message:
            worker, code, number = message["exited"], message["exitcode"], message["signal"]
            ended = {"exitcode": code} if number is None else {"signal": number}
            slot = self._life.find(worker)
            reason = self._outputs.reason(worker) if code != 0 else ""
            actions = self._life.on_exit(worker, code, number, message["t"], time.monotonic(), reason)

            def act() -> None:
                self._outputs.ended(worker)
                self._hangs.forget(worker)
                if self._watchdog is not None:
                    for line in self._watchdog.forget(message["pid"]):
                        self.say(line)
                local_rank = slot.local_rank if slot else None
                if number is not None and self._config.training.policy.allow_dvfs and slot is not None:
                    self._give_back_clock(slot.local_rank)
                self._log(
                    "worker_exited", t=message["t"], worker=worker, pid=message["pid"], local_rank=local_rank, **ended
                )
                self._act(actions)

            return act
        if message.get("warm") is False and message["error"]:
            return partial(self.say, f"workers start from nothing: {message['error']}")
        return lambda: None

    def _give_back_clock(self, local_rank: int) -> None:
        """A worker that was killed cannot unlock the clock of its device."""
        from elaunch.detect.nvml import NvmlClocks, gpu_of

        try:
            NvmlClocks(gpu_of(local_rank, os.environ)).reset()
        except DeviceError as error:
            self.say(
                f"--allow-dvfs: {error}; if the worker of local rank {local_rank} had locked its clock, it still is"
            )

    def _log_worker(self, kind: str, worker: str, pid: int) -> None:
        slot = self._life.find(worker)
        self._log(kind, worker=worker, pid=pid, local_rank=slot.local_rank if slot else None)

    def _on_message(self, connection: Connection, message: Message) -> None:
        """Act on one message.

        Raises:
            ProtocolError: no worker sends this, or not now.
        """
        life, worker = self._life, connection.worker
        if isinstance(message, Attach) == bool(worker):
            raise ProtocolError(f"{type(message).__name__}, but the first message, and no other, is Attach")
        if isinstance(message, Report):
            self._report(message)
            return
        self._quiet = False
        if isinstance(message, Attach):
            self._attach(connection, message.worker)
        elif isinstance(message, Ready):
            life.on_ready(worker, _address(message.address), message.takes_plans)
        elif isinstance(message, Joined):
            newest = life.generation.number if life.generation is not None else 0
            if message.generation > newest:
                raise ProtocolError(f"it is a member of generation {message.generation}, but the newest is {newest}")
            life.on_joined(worker, message.generation)
        elif isinstance(message, Progress):
            life.on_progress(worker, message.generation)
        elif isinstance(message, Saved):
            life.on_saved(message.step)
        elif isinstance(message, Profiled):
            self._participant.leave_profile(message.profile)
        elif isinstance(message, Unreachable):
            if not message.refused:
                life.on_broken(message.generation, worker, message.peer)
            if message.silent:
                self._ask_others(message)
            else:
                life.on_unreachable(message.generation, message.peer, message.refused, time.monotonic())
            if message.refused:
                self._participant.publish(life.doc())
                self._participant.suspect_leader()
        elif isinstance(message, Finished):
            life.on_finished(worker)
        elif isinstance(message, Evict):
            self._act(life.evict(worker, message.replace, " ".join(message.why.split())[:MAX_WHY]))
        elif isinstance(message, Leaving):
            life.on_leaving(worker)

    def _attach(self, connection: Connection, worker: str) -> None:
        """A process says that it is a worker of this node.

        A worker has one connection at a time, and only its own processes may have it: those that descend from the one
        that was started, or are of its session. Before the start of that one was heard of, any process passes for one.

        Raises:
            ProtocolError: this node has no such worker, the process is not of it, or another one is it already.
        """
        slot = self._life.find(worker)
        if slot is None:
            raise ProtocolError(f"it says that it is worker {reprlib.repr(worker)}, which this node does not have")
        if not _belongs_to(connection.pid, slot.pid):
            raise ProtocolError(f"it says that it is worker {worker}, whose process {slot.pid} has not started it")
        former = self._control.connections.get(worker)
        if former is not None and not former.hung_up:
            if _belongs_to(former.pid, slot.pid):
                raise ProtocolError(f"it says that it is worker {worker}, which process {former.pid} is already")
            self.say(f"worker {worker} takes the place of process {former.pid}, which had its name")
        self._control.attach(connection, worker)
        unwatched = self._hangs.attached(worker, connection.pid or slot.pid, connection.take_fds())
        if unwatched:
            self.say(f"worker {worker} is not watched for hangs: {unwatched}")
        settings = self._life.settings
        connection.send(Welcome(self.token, settings.host, settings.node, slot.local_rank, settings.min_nodes))
        self._act(self._life.on_attach(worker))

    def _report(self, report: Report) -> None:
        """Write a worker's event; it may bring its own time and generation."""
        fields = dict(report.fields)
        t, number = fields.pop("t", None), fields.pop("generation", None)
        generation = self._life.generation
        self._events.write(
            report.kind,
            number if type(number) is int else generation.number if generation else 0,
            t if isinstance(t, int | float) and math.isfinite(t) else None,
            **fields,
        )
        if report.kind == "slow" and (line := track.describe(report.fields)):
            self.say(line)

    def _ask_others(self, found: Unreachable) -> None:
        """A worker hears nothing from a peer, nor from its machine: whom does this node reach?"""
        generation = self._life.generation
        if generation is None or found.generation < generation.aborts_step_before:
            return
        own = self._config.node
        addresses = {one.node: one.address for one in generation.workers if one.address and one.node != own}
        self._reach.check(addresses, node_of(found.peer))

    def _on_reach(self, cut: tuple[Cut, ...], well: frozenset[str], life: Lifecycle) -> list[Action]:
        if cut != life.workers.peers.cut:
            self._log("cut", nodes=[one.node for one in cut])
        return life.on_reach(cut, well)

    def _check_hangs(self) -> None:
        """Find workers that do not go on, or cannot: they would hold the others up for ever."""
        generation = self._life.generation
        running = [(slot.worker, slot.pid) for slot in self._life.running]
        number, members = (generation.number, generation.ids) if generation is not None else (0, ())
        for one in self._hangs.look(running, number, members, self._outputs.stacks_path):
            self._log("hang", worker=one.worker, state=one.state, stopped_s=round(one.stopped_s, 3))
            what = "stopped" if one.state == "T" else "in uninterruptible sleep"
            why = ", without its stacks: a stopped process shows none" if one.state == "T" else ""
            self.say(f"worker {one.worker} has been {what} for {one.stopped_s:.1f} s; it is killed{why}")
            self._act([Signal(one.worker, signal.SIGKILL)])
        self._life.on_stalled(self._hangs.stalled)

    def take_out(self, found: Deadlock) -> list[Action]:
        """The leader says that all members wait for each other, and which one of this node is to go."""
        self._hangs.take_out(found, self._outputs.stacks_path)
        return []

    def _found(self, found: Found) -> None:
        """In another thread: a worker hangs, and its stacks have been taken."""
        self.post(lambda life: self._end_hung(life, found))

    def _end_hung(self, life: Lifecycle, found: Found) -> list[Action]:
        hang = found.hang
        self._hangs.done(hang.worker)
        if life.find(hang.worker) is None:
            self._hangs.forget(hang.worker)
            return []
        self.say(describe(found))
        if found.moved:
            return []
        typical_s = hang.typical_step_s
        self._log(
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

    def _check_timers(self) -> None:
        """End workers that let a timer expire which they had set on themselves."""
        if self._watchdog is None:
            return
        workers = {slot.pid: slot.worker for slot in self._life.running if slot.pid}
        for expired in self._watchdog.expired(time.time()):
            pid = worker_of(expired.pid, workers)
            if pid is None or not expired.signal:
                continue
            worker = workers[pid]
            self._log("hang", worker=worker, timer=expired.scope, pid=expired.pid)
            name = signal_name(expired.signal)
            self.say(f"worker {worker} let its timer {expired.scope!r} expire; it is ended by {name}")
            self._act([Signal(worker, expired.signal)])

    def _on_findings(self, findings: list[Finding], life: Lifecycle) -> list[Action]:
        """Tell what the monitor has found, and let the node leave if something of it is about to fail."""
        actions: list[Action] = []
        for found in findings:
            worker = "" if found.local_rank is None else life.slots[found.local_rank].worker
            self._log(
                "health",
                worker=worker or found.evidence.get("worker"),
                subject=found.subject,
                verdict=found.verdict.name.lower(),
                what=found.what,
                text=found.text,
                evidence=dict(found.evidence),
            )
            who = f"{found.subject} of worker {worker}" if worker else found.subject
            self.say(f"{who}: {found.text}")
            if found.verdict >= Verdict.DRAIN and self._config.detection.health.policy == "drain":
                actions.extend(life.on_sick(f"{found.subject}: {found.text}", time.monotonic()))
        return actions

    # -- act ----------------------------------------------------------------------------------------------------

    def _act(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Start():
                    self._start(action)
                case Signal():
                    self._supervisor.signal(action.worker, action.number)
                case Tell():
                    connection = self._control.connections.get(action.worker)
                    if connection is not None:
                        connection.send(Announce(to_json(action.generation).decode()))
                case Warm():
                    if self._config.start.warm and self._program is not None:
                        env = {**os.environ}
                        if self._config.nproc_per_node > 1:
                            env.setdefault("OMP_NUM_THREADS", "1")
                        self._supervisor.warm(env, self._config.start.preload)
                case Say():
                    self.say(action.text)
                case Exit():
                    self._exit = action

    def _start(self, start: Start) -> None:
        env = worker_env(self._config, start, self._control.path)
        if self._watchdog is not None:
            env[TIMER_FILE] = self._watchdog.path
        env |= self._devices.get(start.local_rank, {})
        try:
            logs, more = self._outputs.prepare(
                start.worker, start.generation.attempt, start.local_rank, int(env["RANK"])
            )
        except ElaunchError as error:
            self.say(str(error))
            self.post(lambda life: life.on_exit(start.worker, 1, None, time.time(), time.monotonic()))
            return
        argv = [fill(arg, start.local_rank) for arg in self._argv]
        program = self._program if start.warm else None
        if program is not None:
            args = [fill(arg, start.local_rank) for arg in program["args"]]
            program = {**program, "args": args}
        self._supervisor.spawn(
            start.worker, argv, {**env, **more}, program, logs.stdout, logs.stderr, self._cpus.get(start.local_rank)
        )

    def say(self, text: str) -> None:
        """Tell the user, in a line; may be called from any thread."""
        with contextlib.suppress(OSError, ValueError):  # whoever read it has gone
            print(f"[elaunch {self._config.node}] {text}", file=sys.stderr, flush=True)

    def _log(self, kind: str, *, t: float | None = None, **fields: Any) -> None:
        generation = self._life.generation
        self._events.write(kind, generation.number if generation else 0, t, **fields)


class _Listener:
    """Turns the participant's news, which come from its thread, into work for the agent's loop."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent

    def joined(self, config: JobConfig) -> None:
        self._agent.token = config.token

    def announced(self, generation: Generation) -> None:
        self._agent.post(lambda life: life.on_generation(generation, time.monotonic()), generation)

    def resized(self, min_nodes: int, max_nodes: int) -> None:
        self._agent.post(lambda life: life.on_resized(min_nodes, max_nodes, time.monotonic()))

    def drains(self, request: DrainRequest) -> None:
        self._agent.post(lambda life: life.drain(request.reason, time.monotonic()))

    def deadlocked(self, found: Deadlock) -> None:
        self._agent.post(lambda _: self._agent.take_out(found))

    def ended(self, result: Result) -> None:
        self._agent.post(lambda life: life.on_result(result, time.monotonic()))

    def waits(self, text: str) -> None:
        self._agent.say(text)

    def outage(self, why: str) -> None:
        self._agent.say(f"the rendezvous store is away, training goes on without it: {why}")

    def back(self, away_s: float) -> None:
        self._agent.say(f"the rendezvous store is back after {away_s:.1f} s")

    def absent(self, text: str) -> None:
        self._agent.say(text)

    def warns(self, text: str) -> None:
        self._agent.say(text)

    def refused(self, error: ElaunchError) -> None:
        self._agent.post(lambda life: life.on_refused(str(error), time.monotonic()))


def _belongs_to(pid: int, worker: int) -> bool:
    """Whether a process is a worker's, by the pid of the one that was started; it may be where one is not known (0)."""
    return not pid or not worker or worker_of(pid, (worker,)) is not None or worker in ancestors(pid)


def _address(text: str) -> str:
    """The address of a worker as it is.

    Raises:
        ProtocolError: nobody could be reached there.
    """
    try:
        usable = len(text) <= MAX_ADDRESS and 0 < split_address(text)[1] < 1 << 16
    except ValueError:
        usable = False
    if not usable:
        raise ProtocolError(f"its address is {reprlib.repr(text)}: expected host:port")
    return text


def _folders(config: AgentConfig) -> list[str]:
    """Where this node's part of the job writes."""
    found = [
        config.output.logs.log_dir,
        config.training.checkpoints.folder if config.training.checkpoints is not None else None,
    ]
    found.append(os.path.dirname(config.output.events) or "." if config.output.events else None)
    return [str(folder) for folder in (*found, tempfile.gettempdir()) if folder]
