"""What a node does about a store that is lost for good: `rules.founding` has the rule, this its eyes and hands."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from elaunch import threads
from elaunch.errors import LaunchError, StoreUnavailable
from elaunch.rendezvous.cluster.standings import SEATS_PER_S, Answers, Rounds, Tls, ask, plain
from elaunch.rendezvous.codec import to_json
from elaunch.rendezvous.membership import Generation
from elaunch.rendezvous.node.mailbox import Mailbox
from elaunch.rendezvous.node.replica import Replica
from elaunch.rendezvous.node.reporter import Reporter
from elaunch.rendezvous.node.session import RETRY_S, Session
from elaunch.rendezvous.rules.founding import (
    Founding,
    FoundStore,
    GoOver,
    Loss,
    Move,
    Standing,
    better_store,
    may_have_paused,
    next_move,
    seen_ended,
)
from elaunch.rendezvous.rules.quorum import has_say

ROUND_S = 0.1  # from one round of asking to the next
SERVER_S = 0.02  # the same while this node's own server starts
SUSPECT_S = 0.2  # in which a death becomes a generation
WORD_S = 0.5

START_S = 10.0
"""How long the server of a store that is founded may take to serve."""


class StoreLeft(StoreUnavailable):
    """This node goes over to another store by itself, though it can reach the one that it used."""


@dataclass(frozen=True, slots=True)
class FoundingSettings:
    """What the agent does for its participant when the store is lost.

    Attributes:
        servers: where the servers of the store are, as this node knows.
        move: has the store opened elsewhere from now on.
        start: starts a server of this node, of a store that has no data yet; returns its address, with which it may
            take a while to serve. Raises `LaunchError`.
        serves: whether this node hosts a server of its store that votes, and runs or is started again.
        leave: ends that server, since this node goes over to another store.
        leave_word: writes where the store is into any that has come up where the job began; the key is given, and one
            that no store has in which no job has begun.
        tls: for the connections to other agents.
        can_found: whether this node may serve the store.
    """

    servers: Callable[[], tuple[str, ...]]
    move: Callable[[str], None]
    start: Callable[[], str]
    serves: Callable[[], bool]
    leave: Callable[[], None]
    leave_word: Callable[[str, str], None]
    tls: Tls = plain
    can_found: bool = True


class Founder:
    """Asks the others, one round at a time, and goes over to another store where that is what the rule says.

    Args:
        session: goes over with its next connection.
        replica: has the newest generation, and what the store says of its founding.
        mail: has this node's newest report.
        settings: what the agent does.
        node: name of this node.
        lease_s: how long the others count it as present without a word.
        reporter: for lines to the user.
        clock: in seconds.

    Attributes:
        standing: how this node stands; other threads read it.
    """

    def __init__(
        self,
        session: Session,
        replica: Replica,
        mail: Mailbox,
        settings: FoundingSettings,
        node: str,
        lease_s: float,
        reporter: Reporter,
        clock: Callable[[], float],
    ) -> None:
        self.standing = Standing(node)
        self._founding: Founding | None = None  # to be written into the store at the next connection
        self._founded_s = 0.0
        self._looker: threading.Thread | None = None
        self._word: threading.Thread | None = None
        self._word_s = float("-inf")
        self._session = session
        self._replica = replica
        self._mail = mail
        self._settings = settings
        self._node = node
        self._lease_s = lease_s
        self._reporter = reporter
        self._clock = clock
        self._ended: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._newest = 0
        self._rounds = Rounds(clock, settings.tls)
        self._told: set[str] = set()
        self._can_found = settings.can_found

    # -- while the store can be used ------------------------------------------------------------------------------

    def begin(self) -> None:
        """Writes into a store that this node has founded how that was done, before anybody else comes to it."""
        if self._founding is not None:
            self._session.create("founding", to_json(self._founding), None)
            self._replica.found(self._founding)
            self._founding = None

    def connected(self) -> None:
        """Notes that this node can reach its store."""
        self._replica.entered = True
        self._rounds.begin()
        self._told.clear()
        self._stand(away=False)

    def look_for_better(self, seats: Mapping[str, str]) -> None:
        """Asks nodes without which this store has too few of the job's, and goes over to theirs where that has enough.

        Those whose agents have ended while they were present are noted. It is the leader who asks.

        Args:
            seats: the nodes, with the liveness addresses of their agents.

        Raises:
            StoreLeft: it goes over.
        """
        generation = self._replica.view.generation
        assert generation is not None
        self._stand(away=False)
        answers = ask(seats, self._session.token, tls=self._settings.tls)
        self._tell_strangers(answers)
        for node, address in seats.items():
            # Read after its end was seen: as long as its lease lasted it can have gone over to no other store.
            if address in answers.ended and self._session.has_node(node, address):
                self._replica.note_ended(address)
        move = better_store(self.standing, generation, list(answers.standings.values()))
        if move is not None:
            self._go_over(move)
            raise StoreLeft(f"this node goes over to {move.store}")

    def leave_word(self) -> None:
        """Tells a store that has come up where the job began, as when a lost machine is started again, where it is now.

        It may have been founded elsewhere, or be served by other nodes than at first. Nobody waits for that: it is done
        in a thread, now and then.
        """
        is_due = self._clock() >= self._word_s + WORD_S and not (self._word is not None and self._word.is_alive())
        view, prefix = self._replica.view, self._replica.prefix
        if view.generation is not None and view.result is None and is_due:
            self._word_s = self._clock()
            tell = partial(self._settings.leave_word, f"{prefix}moved", f"{prefix}generation")
            self._word = threads.start("elaunch-moved", tell, lambda error: None)

    def follow(self, store: str) -> None:
        """Goes over to the store of the job, in which this node has not been."""
        self._go_over(GoOver(store, 0))

    def suspect(self) -> None:
        """Looks in a thread who has ended, where nobody decides on a death: the store may have gone with the dead.

        What is seen while this node's lease lasts counts later.
        """
        if self._looker is None or not self._looker.is_alive():
            self._looker = threads.start("elaunch-suspect", self._look_around, lambda error: None)

    def _look_around(self) -> None:
        former, end_s = self._replica.view.generation, self._clock() + self._lease_s
        while former is not None and self._clock() < end_s:
            time.sleep(SUSPECT_S)
            generation = self._replica.view.generation
            if generation is None or generation.number != former.number or not self._session.is_open:
                return
            seats = self._seats(generation)
            if not self._note_ended(ask(seats, self._session.token, tls=self._settings.tls).ended):
                return
            time.sleep(len(seats) / SEATS_PER_S)

    def _seats(self, generation: Generation) -> dict[str, str]:
        """Returns the liveness addresses of the agents of all other nodes, by node."""
        seats = dict((*generation.former_seats, *generation.seats))
        seats.pop(self._node, None)
        return seats

    def _note_ended(self, ended: set[str]) -> bool:
        """Keeps which agents have ended, if this node's lease is valid by its own clock; returns whether it is."""
        is_held = self._clock() <= self._session.lease.renewed_s + self._lease_s
        if is_held:
            with self._lock:
                self._ended |= ended
        return is_held

    def _tell_strangers(self, answers: Answers) -> None:
        """Tells the user of answers that do not count."""
        for node, address in answers.strangers.items():
            self._tell_once(
                f"what answers at {address}, the address of node {node}'s agent, does not prove that it is of this "
                "job: it is not believed, and the node counts as one that does not answer"
            )

    def _tell_once(self, line: str) -> None:
        """Tells the user, if this line was not told since the node could reach its store last."""
        if line not in self._told:
            self._told.add(line)
            self._reporter.warn(line)

    # -- while it cannot ------------------------------------------------------------------------------------------

    @property
    def turn_s(self) -> float:
        """Returns how many seconds after the beginning of one `seek` the next one is due."""
        return ROUND_S if self._founding is None else SERVER_S

    def seek(self) -> float | None:
        """Does one round of asking; returns in how many seconds to try to connect, here or elsewhere; None: not yet."""
        generation = self._replica.view.generation
        if generation is None or not generation.seats or self._replica.view.result is not None:
            return RETRY_S
        servers = self._settings.servers()
        if self._founding is not None:
            return self._wait_for_server(bool(ask({}, self._session.token, servers).listening))
        seats = self._seats(generation)
        if not self.standing.away:
            self._stand(away=True)  # whoever asks meanwhile need not ask again
        if (answers := self._rounds.ask(seats, self._session.token, servers)) is None:
            return None
        self._tell_strangers(answers)
        is_held = self._note_ended(answers.ended)
        self._stand(away=True)
        there = answers.listening
        silent = [one for one in servers if one not in there]
        dead = seen_ended(silent, answers.ended)
        loss = Loss(len(servers), len(there), dead, not is_held, self._replica.servers.n_learners)
        others = {node: answers.standings.get(node) for node in seats}
        paused = [
            node
            for node, address in seats.items()
            if address in answers.paused and may_have_paused(address, silent, loss.lapsed)
        ]
        move = next_move(self.standing, generation, others, loss, paused, self._replica.entered)
        return self._act(move, bool(there))

    def _wait_for_server(self, is_there: bool) -> float | None:
        """Waits until the server that this node has started serves."""
        if is_there:
            return 0.0
        if self._clock() > self._founded_s + START_S:
            self._reporter.warn(f"the store that this node has founded does not serve within {START_S:g} s")
            self._founding, self._can_found = None, False
            self._settings.leave()
        return None

    def _act(self, move: Move, may_be_there: bool) -> float | None:
        match move:
            case GoOver():
                self._go_over(move)
                return 0.0
            case FoundStore():
                self._found(move.founding)
                return None
        if move.is_news:
            self._tell_once(f"no store is founded in the stead of the one that is lost: {move.why}")
        return RETRY_S if may_be_there else None

    def _go_over(self, move: GoOver) -> None:
        self._reporter.warn(f"this node goes over to the rendezvous store at {move.store}")
        self._newest = max(self._newest, move.epoch)
        self._settings.leave()
        self._move(move.store)

    def _found(self, founding: Founding) -> None:
        try:
            address = self._settings.start()
        except LaunchError as error:
            self._can_found = False
            self._reporter.warn(f"this node cannot serve the store: {error}")
            return
        self._founding, self._founded_s = founding, self._clock()
        self._newest = max(self._newest, founding.epoch)
        self._move(address)

    def _move(self, address: str) -> None:
        self._settings.move(address)
        self._session.move()
        self._replica.begin_store()

    def _stand(self, away: bool) -> None:
        """Makes anew what this node tells whoever asks."""
        replica = self._replica
        generation, founding = replica.view.generation, replica.founding
        epoch = founding.epoch if founding is not None else 0
        told = self._session.told or self._mail.doc  # what happened since has changed nobody's mind
        self._newest = max(self._newest, epoch)
        self.standing = Standing(
            self._node,
            epoch,
            self._newest,
            ",".join(self._settings.servers()),
            founding.node if founding is not None else "",
            generation.number if generation is not None else 0,
            away,
            self._settings.serves(),
            generation is not None and has_say(told, generation),
            self._can_found,
            tuple(sorted(self._ended - replica.absent)),
        )
