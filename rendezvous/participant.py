"""One node's part in the rendezvous: join, renew, watch, and lead when it is this node's turn.

A single thread talks to the store; the agent only leaves its newest report (`publish`) and gets call-backs. When the
store is away, the thread keeps trying: the agent, and so training, goes on with the membership it has.
Traffic is O(nodes) for each change: every node watches the generation, only the leader watches the nodes and what is
asked of the job.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable

from elaunch.errors import ElaunchError, LaunchError, StoreUnavailable
from elaunch.rendezvous.etcd_trouble import gave_up, with_cause
from elaunch.rendezvous.intake import read_text
from elaunch.rendezvous.membership import DrainRequest, GenerationStage, JobConfig, NodeDoc
from elaunch.rendezvous.node.ends import WorkerEnds
from elaunch.rendezvous.node.founder import Founder, FoundingSettings, StoreLeft
from elaunch.rendezvous.node.leader import Leader
from elaunch.rendezvous.node.mailbox import Mailbox, is_news
from elaunch.rendezvous.node.replica import Replica
from elaunch.rendezvous.node.reporter import MembershipListener, Reporter
from elaunch.rendezvous.node.requests import Requests
from elaunch.rendezvous.node.servers import ServerKeeper, ServerSettings
from elaunch.rendezvous.node.session import EDIT, RETRY_S, Entrant, Session, StoreMoved
from elaunch.rendezvous.node.setbacks import Setbacks
from elaunch.rendezvous.rules.founding import Standing
from elaunch.rendezvous.store import Store
from elaunch.rendezvous.view import MembershipSettings
from elaunch.waits import Pace

HURRY_S = 0.1
"""How often a node that leaves asks whether it is in a hurry."""


class Participant:
    """Keeps this node's report in the store and tells the agent what the job has agreed on.

    Args:
        open_store: connects to the store; called again after each loss of the connection.
        job: name of the job.
        config: what this node was told; a running job with other settings refuses it.
        settings: limits for the times at which this node leads.
        doc: the first report.
        listener: gets the news.
        connect_s: how long to try before the store is called unreachable at the start, in seconds.
        clock: in seconds.
        figures: of this node's check, by which nodes that come later are judged; they stand as long as this node does.
        hosted: whether the store is one that a node of the job hosts, which comes and ends with that node.
        cluster: how several nodes are to serve the store; None: one does, or others than the job's.
        founding: what the agent does where another store is founded in the stead of one that is lost; None: none is.
    """

    def __init__(
        self,
        open_store: Callable[[], Store],
        job: str,
        config: JobConfig,
        settings: MembershipSettings,
        doc: NodeDoc,
        listener: MembershipListener,
        connect_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
        figures: str = "",
        hosted: bool = False,
        cluster: ServerSettings | None = None,
        founding: FoundingSettings | None = None,
    ) -> None:
        self._listener = listener
        self._lease_s = settings.lease_s
        self._connect_s = connect_s
        self._hosted = hosted
        self._clock = clock
        self._mail = Mailbox(doc)
        self._thread = threading.Thread(target=self._run, name="elaunch-participant", daemon=True)
        # What follows belongs to the thread alone.
        entrant = Entrant(job, doc.node, config, figures.encode(), settings.lease_s, hosted, founding is not None)
        self._setbacks = Setbacks(settings.lease_s / 3)
        self._reporter = reporter = Reporter(listener, self._setbacks)
        self._replica = Replica(job, doc.node, reporter, clock)
        followed = (
            *(EDIT, "config", "result", "leader", "size"),
            *(f"requests/{what}/{doc.node}" for what in ("drain", "deadlock")),
            *(("servers",) if cluster is not None else ()),
            *(("spares",) if settings.spares else ()),
            *(("founding", "absent", "moved", "left/") if founding is not None else ()),
        )
        self._session = Session(open_store, entrant, self._mail, self._replica, reporter, clock, followed)
        self._ends = WorkerEnds(self._session, listener, clock)
        self._requests = Requests(self._session, self._replica)
        self._founder = (
            Founder(self._session, self._replica, self._mail, founding, doc.node, settings.lease_s, reporter, clock)
            if founding is not None
            else None
        )
        look = self._founder.look_for_better if self._founder is not None else lambda seats: None
        self._leader = Leader(self._session, self._replica, self._requests, settings, doc.node, reporter, clock, look)
        self._servers = (
            ServerKeeper(self._session, self._replica, cluster, reporter, clock) if cluster is not None else None
        )
        self._started_s = clock()
        self._away_since_s: float | None = None
        self._pace = Pace.begin(self._started_s)
        self._hindrance = ""

    def tell(self) -> tuple[Standing, str]:
        """Returns how this node stands to the store, which others ask when they have lost it, and the job's token.

        By that they know each other; it is empty before this node has joined.
        """
        standing = self._founder.standing if self._founder is not None else Standing(self._mail.doc.node)
        return standing, self._session.token

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def publish(self, doc: NodeDoc) -> None:
        """Leaves the node's newest report; the thread writes it at once, or when the store is back."""
        self._mail.publish(doc)

    def show(self, name: str, document: str) -> None:
        """Leaves the profile or the status of the job for whoever looks at it; it stands as long as this node does."""
        self._mail.show(name, document.encode())

    def drain_all(self, reason: str) -> None:
        """Has all nodes that are here now leave the job at a step boundary, this one too."""
        self._mail.drain_all(DrainRequest(reason, time.time()))

    def await_end(self, worker: str) -> None:
        """Looks for the end of this worker, which is told to the listener, and of no other; empty: of none."""
        self._mail.await_end(worker)

    def suspect_leader(self) -> None:
        """Tells that a peer was found dead: if the leader died with it, this node leads before that lease ends."""
        self._mail.suspect_leader()
        if self._founder is not None:
            self._founder.suspect()

    def stop(
        self,
        timeout_s: float = 2.0,
        *,
        last: bool = False,
        late_s: float = 0.0,
        is_hurried: Callable[[], bool] = lambda: False,
    ) -> None:
        """Leaves the job: the report and the lease go.

        Args:
            timeout_s: how long to try, in seconds.
            last: the store goes when this returns, so wait until the other nodes have left, or their leases run out.
            late_s: with `last`, for how long in any case nodes that come now shall find the result, in seconds.
            is_hurried: asked meanwhile; once it returns true, that time is over.
        """
        self._mail.stop(wait_for_others=last, late_s=late_s)
        end_s = time.monotonic() + timeout_s + (max(2 * self._lease_s, late_s) if last else 0.0)
        while self._thread.is_alive() and (left_s := end_s - time.monotonic()) > 0:
            self._thread.join(min(left_s, HURRY_S))
            if is_hurried():
                self._mail.hurry()

    # -- the thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._mail.is_stopping:
            try:
                if not self._session.is_open:
                    self._connect()
                self._turn()
            except StoreUnavailable as error:
                self._lost_store(error)
            except Exception as error:  # the store refuses something, or it is a defect
                if not self._replica.in_job:
                    self._refuse(error)
                    break
                self._set_back(error)
        self._session.leave()

    def _connect(self) -> None:
        found = self._session.connect()
        if found is None:
            return  # the job is over
        entries, revision = found
        if self._away_since_s is not None:
            self._replica.doubt_absences()
            self._listener.back(self._clock() - self._away_since_s)
            self._away_since_s, self._hindrance = None, ""
        if self._founder is not None:
            self._founder.begin()
        self._leader.follow(entries, revision)
        if self._servers is not None:
            self._servers.follow()
        self._session.plan_renewal()
        self._replica.in_job = True
        if self._founder is not None:
            self._founder.connected()
            self._look_elsewhere()

    def _turn(self) -> None:
        """Waits for something to do, and does it."""
        mail = self._mail.collect(self._session.written, self._wait_s)
        if self._mail.is_stopping:
            return
        begin_s = self._clock()
        for item in mail.news:
            if isinstance(item, StoreUnavailable):
                raise item
            self._leader.take(item)
        self._look_elsewhere()
        is_due = self._clock() >= self._session.lease.due_s
        if is_news(mail.doc, self._session.written) or (is_due and mail.doc != self._session.written):
            self._session.write(mail.doc)
        for name, document in mail.shown.items():
            self._session.write_shown(name, document)
        if mail.awaited is not None:
            self._ends.await_end(mail.awaited)
        if mail.drain_all is not None:
            self._requests.drain_all(mail.drain_all)
            self._mail.drained_all(mail.drain_all)
        if is_due and self._session.renew():
            self._look_again()
        if self._mail.take_suspicion():
            self._leader.replace_dead_leader()
        self._ends.turn()
        self._leader.turn(has_news=bool(mail.news))
        if self._servers is not None:
            self._servers.follow()
            if self._leader.leads:
                self._servers.turn()
        if self._founder is not None and self._leader.leads:
            self._founder.leave_word()
        self._tell_waiting()
        if (lasted_s := self._setbacks.end(self._clock())) is not None:
            self._replica.doubt_absences()
            self._reporter.warn(f"the rendezvous of this node works again after {lasted_s:.1f} s")
        if self._clock() > begin_s + self._lease_s / 3:
            self._replica.doubt_absences()
        damaged = self._replica.intake.damaged
        if damaged or not self._setbacks.under_way:
            self._tell_hindrance(f"damaged in the store: {', '.join(damaged)}" if damaged else "")

    def _look_elsewhere(self) -> None:
        """Leaves a store in which no job has begun for that in which this one runs."""
        if self._replica.moved and self._replica.view.generation is None:
            self._session.joined = self._replica.in_job = False
            raise StoreMoved(self._replica.moved)

    def _wait_s(self) -> float:
        """Returns how long there is nothing to do if nothing comes; a second at most where this node leads."""
        now_s = self._clock()
        due_s = min(self._session.lease.due_s, self._leader.due_s, self._ends.due_s)
        if self._servers is not None and self._leader.leads:
            due_s = min(due_s, self._servers.due_s)
        if self._is_waiting:
            due_s = min(due_s, self._pace.due_s)
        if self._leader.leads or self._setbacks.under_way:
            due_s = min(due_s, now_s + 1.0)
        return max(0.0, due_s - now_s)

    def _look_again(self) -> None:
        """Notices what no watch of this node tells: that its own report is another's, and that damage has ended."""
        if self._replica.view.result is None and self._replica.in_job:
            self._session.check_report()
            self._leader.check_damaged()

    @property
    def _is_waiting(self) -> bool:
        """Whether the job waits for nodes."""
        generation = self._replica.view.generation
        return generation is None or generation.stage is GenerationStage.ASSEMBLE or bool(generation.hold)

    def _tell_waiting(self) -> None:
        """Says, while the job waits for nodes, who is there, who is missing and how long still, ever more rarely.

        The leader knows, and leaves it in the store; so this costs each node one read now and then.
        """
        if not self._is_waiting:
            self._pace.reset(self._clock())
        elif self._leader.leads:
            self._leader.tell_waiting(self._pace.has_told, lambda: self._pace.is_due(self._clock()))
        elif self._pace.is_due(self._clock()):
            entry = self._session.get("waiting")
            if entry is not None and (text := read_text(entry.value)):
                self._listener.waits(text)

    def _tell_hindrance(self, why: str) -> None:
        """Lets the agent know whether members can change, once for each reason."""
        if why != self._hindrance:
            self._hindrance = why
            self._listener.hindered(why)

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def _refuse(self, error: Exception) -> None:
        if not isinstance(error, ElaunchError):  # a defect; without this thread the agent would wait for ever
            traceback.print_exception(error)
            error = LaunchError(f"the rendezvous of this node failed: {error!r}")
        self._listener.refused(error)

    def _set_back(self, error: Exception) -> None:
        """Goes on without the store for a while: this node may hold healthy state, whatever the store refuses."""
        pause_s = self._setbacks.meet(self._clock())
        self._reporter.tell_setback(error, "training goes on with the present members, and this is tried again")
        self._tell_hindrance(str(error) or repr(error))
        self._session.close()
        self._mail.discard_news()
        self._mail.pause(self._clock() + pause_s, self._clock)

    def _lost_store(self, error: StoreUnavailable) -> None:
        if self._founder is not None and isinstance(error, StoreMoved):
            self._session.close()
            self._founder.follow(str(error))
            self._started_s = self._clock()
            return
        if not self._session.joined and self._clock() > self._started_s + self._connect_s:
            self._listener.refused(StoreUnavailable(gave_up(error, self._connect_s, self._hosted)))
            self._mail.stop()
            return
        if not self._session.joined and self._pace.is_due(self._clock()):
            left_s = self._started_s + self._connect_s - self._clock()
            told = with_cause(error, self._hosted)
            self._listener.waits(f"waiting for the rendezvous, {max(0.0, left_s):.0f} s left: {told}")
        if self._away_since_s is None and self._session.joined and not self._replica.end_told:
            self._away_since_s = self._clock()
            if not isinstance(error, StoreLeft):
                self._listener.outage(str(error))
        self._session.close()
        self._mail.discard_news()
        if self._founder is None or not self._session.joined:
            self._mail.wait_once(RETRY_S)
            return
        pause_s: float | None = None
        while not self._mail.is_stopping:
            begin_s = self._clock()  # a round that waited for a silent machine is not followed by another wait
            if (pause_s := self._founder.seek()) is not None:
                break
            self._mail.pause(begin_s + self._founder.turn_s, self._clock)
        if pause_s:
            self._mail.wait_once(pause_s)
