"""The agent's part in the rendezvous: its participant, and what that one's news mean to the agent's loop."""

from __future__ import annotations

import os
import queue
import time
from collections.abc import Callable

from elaunch.agent.config import AgentConfig, settings_for_all
from elaunch.agent.decisions.actions import Action
from elaunch.agent.decisions.lifecycle import Lifecycle
from elaunch.agent.decisions.outage import Patience
from elaunch.agent.inbox import Inbox
from elaunch.agent.watch.hosted import HostedEtcd
from elaunch.errors import ElaunchError, LaunchError
from elaunch.rendezvous.cluster.opener import StoreOpener
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.cluster.standings import Tls
from elaunch.rendezvous.decide import MembershipSettings
from elaunch.rendezvous.embedded import has_etcd
from elaunch.rendezvous.membership import Deadlock, DrainRequest, Generation, JobConfig, NodeDoc, Result
from elaunch.rendezvous.node.founder import FoundingSettings
from elaunch.rendezvous.node.reporter import MembershipListener
from elaunch.rendezvous.node.servers import ServerSettings
from elaunch.rendezvous.participant import Participant
from elaunch.rendezvous.security.identity import NodeIdentity
from elaunch.rendezvous.store import Store

LATE_S = 3.0
START_S = 5.0  # in which the agent's loop comes to start a server
LOST_S = 2.0  # a server of the store whose node has been gone for so long is removed


def stay_s(life: Lifecycle) -> float:
    """Returns for how long the agent that hosts the store of a job that is over tells nodes that come late, in seconds.

    There are such nodes only where the job had room for them; else nobody is kept from the prompt.
    """
    generation = life.generation
    return LATE_S if generation is None or len(generation.nodes) < life.settings.max_nodes else 0.0


class JobListener:
    """Turns the participant's news, which come from its thread, into work for the agent's loop.

    Args:
        inbox: of the loop.
        say: tells the user.
        take_out: told in the loop that all members wait for each other, and which one of this node is to go.
        patience: told in the loop whether the store can be used.
        hosts: where this node hosts the rendezvous for others; empty: it does not. Told until the job has begun.
        on_servers: told in the loop which nodes serve the store.
        identity: by which workers of this node prove to those of others that they are of the job.

    Attributes:
        token: the secret that the workers of the job know each other by; empty before this node has joined.
        identity: see above.
    """

    def __init__(
        self,
        inbox: Inbox,
        say: Callable[[str], None],
        take_out: Callable[[Deadlock], None],
        patience: Patience,
        hosts: str = "",
        on_servers: Callable[[EtcdServers], None] = lambda servers: None,
        identity: NodeIdentity | None = None,
    ) -> None:
        self.token = ""
        self.identity = identity
        self._hosts = hosts
        self._inbox = inbox
        self._say = say
        self._take_out = take_out
        self._patience = patience
        self._on_servers = on_servers

    def joined(self, config: JobConfig) -> None:
        """Takes over the job's token."""
        if self.identity is not None:
            self.identity.make_of_token(config.token, time.time())
        self.token = config.token

    def announced(self, generation: Generation) -> None:
        """Has the lifecycle react to a new generation."""
        self._hosts = ""  # from now on there is a job
        self._inbox.post(lambda life: life.on_generation(generation, time.monotonic()), generation)

    def resized(self, min_nodes: int, max_nodes: int) -> None:
        """Has the lifecycle react to another number of nodes."""
        self._inbox.post(lambda life: life.on_resized(min_nodes, max_nodes, time.monotonic()))

    def spared(self, nodes: tuple[str, ...]) -> None:
        """Has the lifecycle hold workers ready where this node is a spare."""
        self._inbox.post(lambda life: life.on_spares(nodes, time.monotonic()))

    def drains(self, request: DrainRequest) -> None:
        """Has this node leave, as somebody asked for."""
        self._inbox.post(lambda life: life.drain(request.reason, time.monotonic()))

    def deadlocked(self, found: Deadlock) -> None:
        """Has the worker taken out that the leader chose of those that wait for each other."""

        def take_out(life: Lifecycle) -> list[Action]:
            self._take_out(found)
            return []

        self._inbox.post(take_out)

    def served(self, servers: EtcdServers) -> None:
        """Has this node serve the store, or no more, as the job's leader says."""

        def take(life: Lifecycle) -> list[Action]:
            self._on_servers(servers)
            return []

        self._inbox.post(take)

    def ended(self, result: Result) -> None:
        """Has the lifecycle react to the job's result."""
        self._inbox.post(lambda life: life.on_result(result, time.monotonic()))

    def worker_ended(self, worker: str, logged: int) -> None:
        """Has lines on steps written that wait for this."""
        self._inbox.post(lambda life: life.workers.lines.heard_of_end(worker, logged, time.monotonic()))

    def waits(self, text: str) -> None:
        """Tells the user what the job waits for; where it met here before, that shows that it is begun anew."""
        here = f"; this node hosts the rendezvous at {self._hosts}; if a job has met there before, it has ended"
        self._say(f"{text}{here}" if self._hosts else text)

    def outage(self, why: str) -> None:
        """Tells the user that the store is away."""
        self._say(f"the rendezvous store is away, training goes on without it: {why}")
        self.hindered(why)

    def back(self, away_s: float) -> None:
        """Tells the user that the store is back."""
        self._say(f"the rendezvous store is back after {away_s:.1f} s")
        self.hindered("")

    def hindered(self, why: str) -> None:
        """Limits how long this node waits for what only the store can bring, as long as the store is of no use."""
        patience = self._patience
        self._inbox.post(lambda life: patience.begin(why, time.monotonic()) if why else patience.end())

    def absent(self, text: str) -> None:
        """Tells the user that this node was missed."""
        self._say(text)

    def warns(self, text: str) -> None:
        """Tells the user something about the store."""
        self._say(text)

    def refused(self, error: ElaunchError) -> None:
        """Has the lifecycle end: the job does not take this node."""
        self._inbox.post(lambda life: life.on_refused(str(error), time.monotonic()))


def make_participant(
    config: AgentConfig,
    open_store: Callable[[], Store],
    doc: NodeDoc,
    listener: MembershipListener,
    figures: str,
    founding: FoundingSettings | None = None,
) -> Participant:
    """Returns this node's participant, not started yet.

    Args:
        config: the settings.
        open_store: connects to the rendezvous store.
        doc: the node's first report.
        listener: told what happens in the job.
        figures: of this node's check, for those that come later.
        founding: what the agent does where another store is founded; None: none is.
    """
    conf, checkpoints = config.rendezvous.conf, config.training.checkpoints
    return Participant(
        open_store,
        config.job,
        JobConfig(
            config.min_nodes,
            config.max_nodes,
            config.max_restarts,
            training=settings_for_all(config, os.environ),
            spares=config.rendezvous.spares,
        ),
        MembershipSettings(
            min_nodes=config.min_nodes,
            max_nodes=config.max_nodes,
            spares=config.rendezvous.spares,
            spare_state=config.rendezvous.spare_state,
            max_restarts=config.max_restarts,
            last_call_s=conf.last_call_timeout,
            join_s=conf.join_timeout,
            attach_s=conf.attach_timeout,
            ready_s=conf.ready_timeout,
            lease_s=conf.lease_ttl,
            saves=checkpoints is not None,
            founds=founding is not None,
        ),
        doc,
        listener,
        connect_s=conf.connect_timeout,
        figures=figures,
        hosted=config.rendezvous.is_hosted,
        cluster=_cluster(config, open_store),
        founding=founding,
    )


def make_founding(
    config: AgentConfig, open_store: Callable[[], Store], hosted: HostedEtcd, inbox: Inbox, tls: Tls
) -> FoundingSettings | None:
    """Returns what the agent does where another store is founded; None where none is.

    Args:
        config: the settings.
        open_store: connects to the rendezvous store.
        hosted: this node's server of it, which belongs to the agent's loop.
        inbox: of the loop.
        tls: for the connections to other agents.
    """
    if not config.founds:
        return None
    assert isinstance(open_store, StoreOpener)

    def start() -> str:
        answer = queue.SimpleQueue[str | LaunchError]()

        def found(life: Lifecycle) -> list[Action]:
            try:
                answer.put(hosted.found(time.monotonic()))
            except LaunchError as error:
                answer.put(error)
            return []

        inbox.post(found)
        try:
            address = answer.get(timeout=START_S)
        except queue.Empty:
            raise LaunchError(f"the agent has not started it within {START_S:g} s") from None
        if isinstance(address, LaunchError):
            raise address
        return address

    def leave(life: Lifecycle) -> list[Action]:
        hosted.leave(time.monotonic())
        return []

    return FoundingSettings(
        servers=lambda: open_store.addresses,
        move=open_store.move,
        start=start,
        serves=lambda: hosted.will_serve,
        leave=lambda: inbox.post(leave),
        leave_word=open_store.leave_word,
        tls=tls,
        can_found=has_etcd(),
    )


def _cluster(config: AgentConfig, open_store: Callable[[], Store]) -> ServerSettings | None:
    most = config.rendezvous.store_nodes(config.max_nodes)
    if most == 1:
        return None
    from elaunch.rendezvous.cluster.members import ClusterMembers  # with the etcd client, which is loaded by now

    assert isinstance(open_store, StoreOpener)
    return ServerSettings(
        most=most,
        patience_s=min(config.rendezvous.conf.lease_ttl, LOST_S),
        members=lambda: ClusterMembers(open_store.store),
        use=open_store.use,
    )
