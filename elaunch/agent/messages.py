"""What workers send to their agent, and what each message means to the lifecycle of the node."""

from __future__ import annotations

import reprlib
import selectors
import time
from collections.abc import Callable

from elaunch.agent.control import ControlConnection, ControlServer
from elaunch.agent.decisions.actions import Action, Record
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.output.journal import Journal
from elaunch.agent.output.status import StatusBoard
from elaunch.agent.participation import JobListener
from elaunch.agent.watch.watches import Watches
from elaunch.detect.host import ancestors
from elaunch.detect.watchdog import worker_of
from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import split_address
from elaunch.rendezvous.participant import Participant
from elaunch.telemetry.node_view import NodeView, view_of
from elaunch.threads import describe, tell
from elaunch.wire import (
    MOST,
    Abandoned,
    Attach,
    Evict,
    Finished,
    Joined,
    Leaving,
    Logged,
    Message,
    Profiled,
    Progress,
    Ready,
    Report,
    Saved,
    Unreachable,
    Welcome,
)

MAX_ADDRESS = 300  # characters of a worker's address; a host's name has at most 253
MAX_ABANDONED = 2000  # characters of why the job cannot go on
MAX_WHY = 300  # characters of a worker's reason in a line


def step_of(message: Message) -> Logged | None:
    """Returns what to tell a worker whose report of a step stands in the event log; None: it is no such report."""
    if not isinstance(message, Report) or message.kind != "step":
        return None
    generation, step = message.fields.get("generation"), message.fields.get("step")
    if type(generation) is not int or type(step) is not int:
        return None
    return Logged(generation, step) if 0 <= generation < MOST and 0 <= step < MOST else None


class WorkerMessages:
    """Takes the messages of this node's workers, in the agent's loop.

    Args:
        life: of the node.
        control: knows which connection is whose.
        watches: told of workers that attach, and of peers that are silent.
        participant: given what is for the whole job.
        job: knows the token of the job.
        journal: written to.
        act: carries out actions.
    """

    def __init__(
        self,
        life: Lifecycle,
        control: ControlServer,
        watches: Watches,
        participant: Participant,
        job: JobListener,
        journal: Journal,
        act: Callable[[list[Action]], None],
    ) -> None:
        self._life = life
        self._control = control
        self._watches = watches
        self._participant = participant
        self._job = job
        self._journal = journal
        self._act = act
        self._status = StatusBoard()
        self._profile = ""
        self._logged: dict[str, Logged] = {}  # to be told to a worker once all that it has sent is taken
        self._is_serving = False

    def node_view(self) -> NodeView:
        """Returns what metrics show of the state of this node; for any thread."""
        return view_of(self._life.doc(), self._life.generation, self._profile, self._life.standby.spares)

    def serve(self, connection: ControlConnection, mask: int) -> bool:
        """Takes what a worker sends. Whatever is wrong with that ends its connection, and nothing else.

        Returns:
            Whether more has come than lines for the event log, which come with every step and change nothing else.
        """
        has_news, self._is_serving = False, True
        try:
            if mask & selectors.EVENT_WRITE:
                connection.flush()
            if mask & selectors.EVENT_READ:
                for message in connection.receive():
                    if not connection.closed:
                        has_news = has_news or not isinstance(message, Report)
                        self._act(self._take(connection, message))
        except ProtocolError as error:
            self._journal.say(f"{connection}: {error}; its connection is closed")
            connection.close()
        except Exception as error:  # a defect of ours, or what nobody has thought of
            tell(f"{connection}: what it sent cannot be taken, its connection is closed: {describe(error)}", error)
            connection.close()
        self._is_serving = False
        self._tell_logged()
        return has_news

    def drain(self, worker: str) -> None:
        """Takes what a worker whose process has ended had sent before: its last step may be in it.

        Its lines that wait are written: what this node reports of its log with that end has to count them.
        """
        connection = self._control.connections.get(worker)
        while connection is not None and not connection.closed and connection.has_input:
            self.serve(connection, selectors.EVENT_READ)
        self._act(self._life.workers.lines.end_of(worker, time.monotonic()))

    def on_time(self, now_s: float) -> None:
        """Writes lines that have waited long enough, and shows how far the training is, if that is due.

        Args:
            now_s: time of the monotonic clock.
        """
        self._act(self._life.workers.lines.on_time(now_s))
        status = self._status.due(now_s)
        if status is not None:
            self._participant.show("status", to_json(status).decode())

    def record(self, line: Record) -> None:
        """Writes a line on a step, unless a log has it, and tells the worker that has reported it."""
        if not self._life.workers.lines.has(line):
            self._journal.forward(line.report)
        self._life.workers.lines.note(line.report)
        if (logged := step_of(line.report)) is not None:
            self._logged[line.worker] = logged
        if not self._is_serving:
            self._tell_logged()

    def _tell_logged(self) -> None:
        for worker, logged in self._logged.items():
            connection = self._control.connections.get(worker)
            if connection is not None and not connection.closed:
                connection.send(logged)
        self._logged.clear()

    def _take(self, connection: ControlConnection, message: Message) -> list[Action]:
        """Takes one message.

        Raises:
            ProtocolError: no worker sends this, or not now.
        """
        worker = connection.worker
        if isinstance(message, Attach) == bool(worker):
            raise ProtocolError(f"{type(message).__name__}, but the first message, and no other, is Attach")
        match message:
            case Report():
                self._status.take(message, time.time())
                if message.kind == "step":
                    message.fields.setdefault("t", time.time())  # the line may wait
                    return self._life.workers.lines.take(worker, message, time.monotonic())
                self._journal.forward(message)
            case Attach():
                return self._attach(connection, message.worker)
            case Profiled():
                self._profile = message.profile
                self._participant.show("profile", message.profile)
            case Unreachable():
                self._on_unreachable(worker, message)
            case _:
                return react(self._life, worker, message)
        return []

    def _on_unreachable(self, worker: str, found: Unreachable) -> None:
        if note_lost_link(self._life, worker, found, time.monotonic()):
            self._watches.ask_others(found)
        if found.refused:
            self._participant.publish(self._life.doc())
            self._participant.suspect_leader()

    def _attach(self, connection: ControlConnection, worker: str) -> list[Action]:
        """Takes a process that says that it is a worker of this node.

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
            self._journal.say(f"worker {worker} takes the place of process {former.pid}, which had its name")
        self._control.attach(connection, worker)
        self._watches.attached(worker, connection.pid or slot.pid, connection.take_fds())
        settings = self._life.settings
        identity = self._job.identity
        tls = identity.folder if identity is not None and identity.encrypts else ""
        always = identity is not None and identity.settings.links == "on"
        connection.send(
            Welcome(self._job.token, settings.host, settings.node, slot.local_rank, settings.min_nodes, tls, always)
        )
        return self._life.on_attach(worker)


def react(life: Lifecycle, worker: str, message: Message) -> list[Action]:
    """Lets the lifecycle react to what a worker says of itself; what is for others changes nothing.

    Raises:
        ProtocolError: no worker sends this, or not now.
    """
    match message:
        case Ready():
            life.on_ready(worker, _checked_address(message.address), message.takes_plans)
        case Joined():
            newest = life.generation.number if life.generation is not None else 0
            if message.generation > newest:
                raise ProtocolError(f"it is a member of generation {message.generation}, but the newest is {newest}")
            life.on_joined(worker, message.generation)
        case Progress():
            life.on_progress(worker, message.generation)
        case Saved():
            life.on_saved(message.step)
        case Finished():
            life.on_finished(worker)
        case Evict():
            return life.evict(worker, message.replace, " ".join(message.why.split())[:MAX_WHY])
        case Leaving():
            life.on_leaving(worker)
        case Abandoned():
            life.workers.abandon(worker, " ".join(message.why.split())[:MAX_ABANDONED])
    return []


def note_lost_link(life: Lifecycle, worker: str, found: Unreachable, now_s: float) -> bool:
    """Has the lifecycle note what `worker` found out about a lost peer.

    A peer on a silent machine that is no member of the newest generation counts as dead: it was to leave, and the
    others go on without it in any case; only members find out which of them cannot be reached. A worker that is to
    leave is none either, so no decision on its node ends the step that the others wait for it in: all make their links
    anew.

    Returns:
        Whether the other nodes are to be asked whether they can be reached.
    """
    leaving, members = ((), {}) if life.generation is None else (life.generation.leaving, life.generation.ranks)
    dead = found.refused or (found.silent and found.peer not in members)
    if not dead:
        life.on_broken(found.generation, worker, found.peer)
    asks = found.silent and not dead
    if asks:
        life.workers.peers.asked_in = max(life.workers.peers.asked_in, found.generation)
    if not asks or worker in leaving:
        life.on_unreachable(found.generation, found.peer, dead, now_s)
    return asks


def _belongs_to(pid: int, worker: int) -> bool:
    """Whether a process is a worker's, by the pid of the one that was started; it may be where one is not known (0)."""
    return not pid or not worker or worker_of(pid, (worker,)) is not None or worker in ancestors(pid)


def _checked_address(text: str) -> str:
    """Returns the address of a worker as it is.

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
