"""The agent: one process a node. A loop that observes, lets `lifecycle` decide, and acts."""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from elaunch.agent.config import AgentConfig
from elaunch.agent.control import ControlConnection, ControlServer
from elaunch.agent.decisions.actions import (
    NO_ACCOUNT,
    Action,
    AskEnd,
    Exit,
    Log,
    Record,
    Say,
    Signal,
    Start,
    Tell,
    Warm,
    signal_name,
)
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.node_state import NodeSettings
from elaunch.agent.decisions.outage import Patience
from elaunch.agent.inbox import Inbox
from elaunch.agent.messages import WorkerMessages
from elaunch.agent.notices import Announcement, Notices
from elaunch.agent.output.events import EventLog
from elaunch.agent.output.journal import Journal
from elaunch.agent.output.outputs import Folders, Outputs
from elaunch.agent.output.telemetry import Telemetry
from elaunch.agent.participation import JobListener, make_founding, make_participant, stay_s
from elaunch.agent.starter import WorkerStarter, unlock_clock
from elaunch.agent.supervisor import Supervisor, listen
from elaunch.agent.tcp_store.process import StoreOffer, StoreProcess
from elaunch.agent.watch.hosted import HostedEtcd, ServerPlace
from elaunch.agent.watch.liveness import Asker, LivenessPort
from elaunch.agent.watch.watches import Watches
from elaunch.detect.watchdog import Watchdog
from elaunch.errors import ElaunchError, ProtocolError
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.security.contexts import AgentContexts
from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.store import Store

ALL_LEAVE = signal.SIGUSR2
HAND_OVER_S = 5.0
ANNOUNCEMENTS = (signal.SIGUSR1, ALL_LEAVE)
"""Sent by schedulers some time before they take this node, or all nodes of the job, away."""


class Agent:
    """Runs this node's workers until the job is over.

    Args:
        config: the settings.
        open_store: connects to the rendezvous store.
        supervisor: the fork server, forked before this process had threads.
        host: the address at which workers of other nodes reach this node.
        folders: where the streams of workers go; by default as the flags say.
        etcd: the store, where it is one that this agent has started and that ends with it.
        figures: of this node's check, for those that come later.
        store: the process that serves the workers' own store; None: rank 0 makes it.
        telemetry: what monitoring is shown; None: nothing.
        place: where this node may serve the rendezvous store beside others; None: it does not.
        identity: by which it proves that it is of the job; None: by nothing.

    Raises:
        LaunchError: what the settings ask for is not there.
    """

    def __init__(
        self,
        config: AgentConfig,
        open_store: Callable[[], Store],
        supervisor: Supervisor,
        host: str,
        folders: Folders | None = None,
        etcd: EmbeddedEtcd | None = None,
        figures: str = "",
        store: StoreProcess | None = None,
        telemetry: Telemetry | None = None,
        place: ServerPlace | None = None,
        identity: NodeIdentity | None = None,
    ) -> None:
        self._config = config
        self._identity = identity
        self._supervisor = supervisor
        self._exit: Exit | None = None
        self._quiet = False
        self._attempt = 0
        self._selector = selectors.DefaultSelector()
        self._selector.register(supervisor.link, selectors.EVENT_READ, supervisor)
        self._inbox = Inbox(self._selector)
        listeners = telemetry.listeners if telemetry is not None else ()
        events = EventLog(config.output.events, config.node, config.output.events_to_console, listeners)
        self._journal = Journal(config.node, events, self._generation_number)
        say = self._journal.say
        self._hosted = HostedEtcd(etcd, self._selector, say, time.monotonic(), place, config.job)
        self._control = ControlServer(self._selector, self._journal.say)
        supervisor.remove_at_the_end(self._control.directory)
        self._outputs = Outputs(config, folders)
        listener = listen(host)
        address = f"{host}:{listener.getsockname()[1]}"
        tls = AgentContexts(identity).get if identity is not None else lambda address, is_server: None
        self._liveness = LivenessPort(
            self._selector,
            listener,
            address,
            lambda: self._participant.tell(),
            self._journal.say,
            lambda: tls(address, True),
        )
        self._store = StoreOffer(store, config.rendezvous, host, self._journal.say)
        self._life = Lifecycle(
            NodeSettings(
                node=config.node,
                host=host,
                slots=config.nproc_per_node,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                spare_state=config.rendezvous.spare_state,
                max_restarts=config.max_restarts,
                shutdown_s=config.stop.shutdown_timeout,
                left_code=config.stop.left_code,
                role=config.role,
                rank=config.rendezvous.node_rank,
                domain=config.rendezvous.failure_domain,
                warm_start=config.start.warm and config.start.warm_start,
                register_s=config.rendezvous.conf.workers.register_timeout,
            ),
            port=self._store.renew(),
            liveness_address=address,
            store_address=self._hosted.address,
            serves=self._hosted.serves,
        )
        self._watches = Watches(
            config,
            self._life,
            self._selector,
            self._control.directory,
            self._outputs.stacks_path,
            self._journal,
            self._inbox,
        )
        self._starter = WorkerStarter(
            config, supervisor, self._outputs, self._control.path, self._watches.variables, self._store
        )
        saves = config.training.checkpoints is not None
        self._patience = Patience(self._life, config.rendezvous.conf.store_timeout, saves)
        hosts = etcd.endpoint if etcd is not None and self._serves_others() else ""
        job = JobListener(
            self._inbox,
            self._journal.say,
            self._watches.take_out,
            self._patience,
            hosts,
            self._on_servers,
            identity,
        )
        founding = make_founding(config, open_store, self._hosted, self._inbox, lambda address: tls(address, False))
        self._participant = make_participant(config, open_store, self._life.doc(), job, figures, founding)
        self._messages = WorkerMessages(
            self._life, self._control, self._watches, self._participant, job, self._journal, self._act
        )
        if telemetry is not None:
            telemetry.follow(self._messages.node_view)

    def run(self) -> int:
        """Runs the node's part of the job.

        Returns:
            torchrun's exit codes: 0 when the job or this node's part of it ended well, else 1; or what the settings say
            for a node that has left.
        """
        handled = self._config.stop.signals
        self._inbox.take_signals((*handled, *(number for number in ANNOUNCEMENTS if number not in handled)))
        self._participant.start()
        notices = Notices(self._config.stop.notices, self._announced, self._journal.say)
        self._watches.start()
        try:
            while self._exit is None:
                self._turn()
            self._participant.publish(self._life.doc())
            self._hand_over(time.monotonic() + self._config.rendezvous.conf.lease_ttl + HAND_OVER_S)
        finally:
            notices.close()
            last = self._serves_others() and self._life.result is not None
            late_s = stay_s(self._life) if last else 0.0
            if late_s:
                self._journal.say(
                    f"the job is over; this node hosts the rendezvous, and tells late nodes so for {late_s:g} s"
                )
            self._participant.stop(last=last, late_s=late_s, is_hurried=lambda: bool(self._inbox.signals))
            self._hosted.close()
            self._supervisor.close()
            self._store.close()
            self._outputs.close()
            self._control.close()
            self._watches.close()
            self._liveness.close()
            self._journal.close()
            self._inbox.leave_signals()
        if self._exit.text:
            self._journal.say(self._exit.text)
        # Not those of a node whose workers ended only because they were told to.
        failed = self._life.workers.failures
        failures = failed if any(one.own for one in failed) else []
        self._outputs.report(failures, self._exit.code, self._exit.text)
        return self._exit.code

    # -- observe ------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        now_s = time.monotonic()
        due_s = min((one for one in (self._life.due_s(), self._patience.due_s()) if one is not None), default=None)
        wait_s = min(1.0 if due_s is None else max(0.0, due_s - now_s), self._watches.wait_s(now_s))
        for paused in (self._control, self._liveness):
            if paused.due_s is not None:
                wait_s = min(wait_s, max(0.0, paused.due_s - now_s))
        wait_s = min(wait_s, max(0.0, self._hosted.due_s() - now_s))
        self._quiet = True
        for key, mask in self._selector.select(wait_s):
            self._serve(key.data, mask)
        self._hosted.look(time.monotonic())
        line, is_over = self._supervisor.late(time.monotonic())
        if is_over:
            self._exit = Exit(1, line)
        elif line:
            self._journal.say(line)
        self._control.on_time(time.monotonic())
        self._liveness.on_time(time.monotonic())
        if self._identity is not None and (problem := self._identity.look(time.time())):
            self._journal.say(problem)
        self._act(self._watches.check_timers())
        now_s = time.monotonic()
        self._messages.on_time(now_s)
        if self._watches.is_due(now_s):
            self._quiet = not self._look_for_hangs() and self._quiet
        if self._quiet and (due_s is None or now_s < due_s):
            return
        while self._inbox.signals:
            self._act(self._on_signal(self._inbox.signals.popleft()))
        while self._inbox.news:
            decide, generation = self._inbox.news.popleft()
            actions = decide(self._life)
            if generation is not None:
                told: dict[str, Any] = {"cause": generation.cause, "stage": generation.stage.value}
                if generation.standby:
                    told["standby"] = list(generation.standby)
                self._journal.log("generation", workers=list(generation.ids), **told)
            self._act(actions)
        self._act(self._life.on_time(time.monotonic()))
        self._act(self._patience.on_time(time.monotonic()))
        self._publish()

    def _look_for_hangs(self) -> bool:
        """Looks at the workers, as is done a few times a second; returns whether that has changed anything."""
        stalled = self._life.workers.peers.stalled
        actions = self._watches.check_hangs()
        self._act(actions)
        return bool(actions) or self._life.workers.peers.stalled != stalled

    def _publish(self) -> None:
        """Reports this node as it is now; with the report that it is ready for an attempt goes a store for that."""
        if self._life.attempt != self._attempt:
            self._attempt = self._life.attempt
            self._life.port = self._store.renew()
        self._life.store_address, self._life.serves = self._hosted.address, self._hosted.serves
        self._participant.publish(self._life.doc())

    def _serve(self, source: object, mask: int) -> None:
        """Takes what one descriptor brings. Lines for the event log, and questions, change nothing else."""
        if isinstance(source, ControlConnection):
            if self._messages.serve(source, mask):
                self._quiet = False
            return
        if isinstance(source, LivenessPort | Asker):
            source.serve()
            return
        self._quiet = False
        if isinstance(source, Inbox):
            source.receive()
        elif isinstance(source, Supervisor):
            self._serve_supervisor(source)
        elif isinstance(source, ControlServer):
            source.accept()
        elif isinstance(source, Watchdog):
            for line in source.receive():
                self._journal.say(line)

    def _serve_supervisor(self, supervisor: Supervisor) -> None:
        try:
            messages = supervisor.receive()
        except ProtocolError as error:
            text = f"the process that holds this node's workers says what nobody understands: {error}"
            self._exit = Exit(1, text)
            return
        if messages is None:
            self._exit = Exit(1, "the process that holds this node's workers was killed, and the workers with it")
            return
        acts = [self._on_forkserver(message) for message in messages]
        self._publish()  # before all else, because the others wait for it, and at once for all that died together
        for act in acts:
            act()

    def _on_forkserver(self, message: dict[str, Any]) -> Callable[[], None]:
        """Takes one message of the fork server; what is returned logs it and acts on it."""
        if "started" in message:
            self._life.on_started(message["started"], message["pid"])
            return partial(self._log_worker, "worker_started", message["started"], message["pid"])
        if "exited" in message:
            worker, code, number = message["exited"], message["exitcode"], message["signal"]
            ended = {"exitcode": code} if number is None else {"signal": number}
            self._messages.drain(worker)
            slot = self._life.find(worker)
            others = [each.worker for each in self._life.slots if each.worker not in ("", worker)]
            why = self._outputs.account(worker, message["t"], others) if code != 0 else NO_ACCOUNT
            actions = self._life.on_exit(worker, code, number, message["t"], time.monotonic(), why)

            def act() -> None:
                self._outputs.ended(worker)
                self._watches.ended(worker, message["pid"])
                local_rank = slot.local_rank if slot else None
                locked = number is not None and self._config.training.policy.allow_dvfs
                if locked and local_rank is not None and (problem := unlock_clock(local_rank)):
                    self._journal.say(problem)
                self._journal.log(
                    "worker_exited", t=message["t"], worker=worker, pid=message["pid"], local_rank=local_rank, **ended
                )
                self._act(actions)

            return act
        if message.get("warm") is False and message["error"]:
            return partial(self._journal.say, f"workers start from nothing: {message['error']}")
        return lambda: None

    def _on_signal(self, number: int) -> list[Action]:
        """Acts on a signal; those that announce an end are not those that make one, if the user did not say so."""
        if number in self._config.stop.signals:
            return self._life.on_signal(number, time.monotonic())
        if number == ALL_LEAVE:
            self._participant.drain_all(f"{signal_name(number)} to node {self._config.node}")
        return self._life.drain(signal_name(number), time.monotonic())

    def _announced(self, found: Announcement) -> None:
        self._inbox.post(lambda life: life.drain(found.reason, time.monotonic(), found.within_s))

    def _on_servers(self, servers: EtcdServers) -> None:
        self._hosted.on_servers(servers, time.monotonic())

    def _hand_over(self, end_s: float) -> None:
        """Before this node leaves a job that goes on, waits until another one serves the store in its stead."""
        generation = self._life.generation
        is_alone = generation is None or not set(generation.nodes) - {self._config.node}
        if not self._life.ending.draining or self._life.result is not None or is_alone or not self._hosted.address:
            return
        while (self._hosted.serves or self._hosted.is_ending) and time.monotonic() < end_s and not self._inbox.signals:
            time.sleep(0.02)
            while self._inbox.news:
                self._inbox.news.popleft()[0](self._life)
            self._hosted.look(time.monotonic())

    def _serves_others(self) -> bool:
        return self._hosted.serves and self._config.rendezvous.backend != "standalone"

    def _generation_number(self) -> int:
        generation = self._life.generation
        return generation.number if generation is not None else 0

    def _log_worker(self, kind: str, worker: str, pid: int) -> None:
        slot = self._life.find(worker)
        self._journal.log(kind, worker=worker, pid=pid, local_rank=slot.local_rank if slot else None)

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
                        connection.announce(action.generation)
                case Warm():
                    self._starter.warm()
                case Say():
                    self._journal.say(action.text)
                case Log():
                    self._journal.log(action.kind, nodes=list(action.nodes))
                case Record():
                    self._messages.record(action)
                case AskEnd():
                    self._participant.await_end(action.worker)
                case Exit():
                    self._exit = action

    def _start(self, start: Start) -> None:
        try:
            self._starter.start(start)
        except ElaunchError as error:
            self._journal.say(str(error))
            self._inbox.post(lambda life: life.on_exit(start.worker, 1, None, time.time(), time.monotonic()))
