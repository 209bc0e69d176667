"""The etcd that this agent has started for its job: started again where it ends early, or one server of several."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import BinaryIO

from elaunch.agent.decisions.actions import signal_name
from elaunch.agent.local_jobs import LocalJob, make_folder, register
from elaunch.errors import LaunchError
from elaunch.rendezvous.cluster.servers import EtcdServers
from elaunch.rendezvous.embedded import EmbeddedEtcd, free_address
from elaunch.rendezvous.security.identity import TlsFiles

SERVING_S = 0.5  # a server that has run for so long has served: it takes some 0.2 s to be ready
LASTING_S = 10.0  # one that ends by itself after so long has not failed at its start

REMOVAL_S = 10.0  # within which a server that was removed ends by itself
MOST_FAILURES = 3
MOST_NEEDED = 2  # with as many servers, all are needed

MOST_QUICK_ENDS = 30
LONGEST_PAUSE_S = 2.0


@dataclass(slots=True)
class QuickEnds:
    """Paces the starts of a server that may end again and again. Pure.

    Attributes:
        count: how often in a row it has ended soon after its start.
    """

    count: int = 0

    def pause_s(self, lived_s: float, was_killed: bool) -> float | None:
        """Returns the seconds until the next start; None: there is none any more.

        Args:
            lived_s: how long the server lived that has ended.
            was_killed: whether somebody else ended it. Then it is enough that it has served; else it failed.
        """
        if lived_s >= (SERVING_S if was_killed else LASTING_S):
            self.count = 0
            return 0.0
        self.count += 1
        if self.count >= MOST_QUICK_ENDS:
            return None
        return min(LONGEST_PAUSE_S, 0.05 * 2.0 ** min(self.count, 20))


class ServerPlace:
    """Where this node's server of the store would be.

    Args:
        host: the address at which other nodes reach this one.
        port: for agents; another one, if it is taken.
        remove_at_the_end: has a folder removed when this agent ends.
        address: where it listens for other servers; empty: at a free port, or nowhere if `host` is no address of this
            machine, as behind a router.
        is_alone: whether it serves the store alone, and there is no other server.
        tls: the files by which it knows agents and other servers; None: it takes whoever comes.
    """

    def __init__(
        self,
        host: str,
        port: int,
        remove_at_the_end: Callable[[str], None],
        address: str = "",
        is_alone: bool = False,
        tls: TlsFiles | None = None,
    ) -> None:
        self.tls = tls
        self.host = host
        self.port = port
        self.remove_at_the_end = remove_at_the_end
        self.address = address
        self._is_alone = is_alone
        if not address:
            self.renew()

    def renew(self) -> str:
        """Returns an address for another server: etcd takes one of a new address for a new one, without data."""
        with suppress(LaunchError):
            self.address = "" if self._is_alone else free_address(self.host)
        return self.address

    def make_server(self, at_any_port: bool = False) -> EmbeddedEtcd:
        """Returns a server without data, which is not started yet."""
        folder = make_folder()
        self.remove_at_the_end(folder)
        return EmbeddedEtcd(folder, self.host, 0 if at_any_port else self.port, peer=self.address, tls=self.tls)


class HostedEtcd:
    """Keeps this node's etcd running, in the loop of the agent.

    It is the job's only one, and then it is started again whenever it ends, or one of the servers of a cluster. Of
    three servers one that ends is replaced by another without data, on this node or elsewhere, as the job's leader
    decides; of two it is needed, so it comes back with its data.

    Args:
        etcd: the server, which runs; None: this node has none yet.
        selector: of the loop, which is woken at the server's end.
        say: tells the user.
        now_s: the time.
        place: where a server of this node would be that joins others or is started in the stead of a store that is
            lost; None: it neither joins nor is started.
        job: name of the job, for whoever looks for it on this machine.

    Attributes:
        address: where the server, or one that is still to come, listens for others; empty: it serves no cluster.
    """

    def __init__(
        self,
        etcd: EmbeddedEtcd | None,
        selector: selectors.BaseSelector,
        say: Callable[[str], None],
        now_s: float,
        place: ServerPlace | None = None,
        job: str = "",
    ) -> None:
        self.address = place.address if place is not None else ""
        self._etcd = etcd
        self._selector = selector
        self._say = say
        self._place = place
        self._servers = EtcdServers()
        self._ends = QuickEnds()
        self._failures = 0  # of servers in a row that have not come to serve with others
        self._began_s = now_s
        self._start_s: float | None = None
        self._gave_up = False
        self._pid_fd: int | None = None
        self._removed: list[tuple[EmbeddedEtcd, float]] = []
        self._job = job
        self._listing: BinaryIO | None = None
        self._listed_at = ""
        self._watch()
        if etcd is not None and job:
            self._list(etcd.folder, etcd.endpoint)

    @property
    def serves(self) -> bool:
        """Returns whether this node serves the store."""
        return self._etcd is not None

    @property
    def will_serve(self) -> bool:
        """Returns whether this node's server runs or is started again, and counts for the quorum."""
        own = self._servers.find(self.address)
        return self._etcd is not None and not self._gave_up and (own is None or own.votes)

    @property
    def is_ending(self) -> bool:
        """Returns whether a server of this node runs whose removal is under way."""
        return bool(self._removed)

    def due_s(self) -> float:
        """Returns when there is something to do at the latest; infinite while the server runs or is given up."""
        ends_s = min((end_s for _, end_s in self._removed), default=inf)
        return ends_s if self._start_s is None or self._gave_up else min(self._start_s, ends_s)

    def on_servers(self, servers: EtcdServers, now_s: float) -> None:
        """Has this node serve the store, or no more, as the job's leader says."""
        before, self._servers = self._servers, servers
        if self._listing is not None and servers.clients:
            self._list(os.path.dirname(self._listing.name), ",".join(servers.clients))
        if self._place is None or self._gave_up:
            return
        if servers.find(self.address) is None:
            if (own := before.find(self.address)) is not None:
                self._give_way(now_s, failed=not own.votes)
        elif self._etcd is None:
            self._join(self._place, now_s)

    def found(self, now_s: float) -> str:
        """Starts a server of a store that has no data yet, in the stead of one that is lost; returns its address.

        Raises:
            LaunchError: it cannot be started.
        """
        place = self._place
        if place is None or self._gave_up:
            raise LaunchError("this node does not serve the store of its job")
        self.leave(now_s)
        for former, _ in self._removed:
            former.stop(0.0)  # nodes that come look for the job at its port
        self._removed.clear()
        etcd = place.make_server()
        try:
            etcd.start(has_threads=True)
        except LaunchError:
            etcd = place.make_server(at_any_port=True)
            etcd.start(has_threads=True)
        self._etcd, self._began_s, self._start_s, self._ends = etcd, now_s, None, QuickEnds()
        self._watch()
        self._list(etcd.folder, etcd.endpoint)
        self._say(
            f"the rendezvous store is lost with those that served it; this node serves another one at {etcd.endpoint}: "
            "other nodes that come from now on, and `elaunch ctl`, find the job there"
        )
        return etcd.endpoint

    def leave(self, now_s: float) -> None:
        """Ends the server of a store that this node leaves for another one."""
        self._servers = EtcdServers()
        if self._etcd is not None:
            self._give_way(now_s, failed=False)
            self._removed = [(etcd, now_s) for etcd, _ in self._removed]
        if self._listing is not None:
            self._listing.close()
            self._listing, self._listed_at = None, ""

    def look(self, now_s: float) -> None:
        """Starts the server again if it has ended, as often as that makes sense. It costs next to nothing else."""
        for etcd, end_s in list(self._removed):
            if etcd.pid is None or now_s >= end_s:
                etcd.stop(0.0)
                self._removed.remove((etcd, end_s))
        if self._gave_up or self._etcd is None or self._etcd.pid is not None:
            return
        if self._start_s is None:
            code = self._etcd.exitcode or 0
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            if self._is_dispensable():
                self._say(
                    f"the etcd of this node at {self._etcd.endpoint}, one of those that serve the store, {how}; the "
                    "others go on, and another one is started in its stead"
                )
                self._give_way(now_s, failed=now_s < self._began_s + LASTING_S)
                return
            self._ended(how, -code in (signal.SIGKILL, signal.SIGTERM), now_s)
        while self._start_s is not None and now_s >= self._start_s and not self._gave_up:
            self._start_s, self._began_s = None, now_s
            try:
                self._etcd.start_again()
                self._watch()
            except LaunchError as error:
                self._ended(f"could not be started ({error})", False, now_s)

    def close(self) -> None:
        """Starts the server no more. Whoever has started it first ends it; one that has joined others ends here."""
        self._gave_up = True
        self._forget()
        if self._listing is not None:
            self._listing.close()
        for etcd in [*(etcd for etcd, _ in self._removed), self._etcd]:
            if etcd is not None and self._place is not None:
                # The others may be gone already, and nobody needs its data: it would look for them first.
                etcd.stop(0.0 if len(self._servers.servers) > 1 else 1.0)

    def _is_dispensable(self) -> bool:
        """Returns whether the others have a quorum without the server, or do not count it."""
        own = self._servers.find(self.address)
        return own is not None and (not own.votes or sum(one.votes for one in self._servers.servers) > MOST_NEEDED)

    def _join(self, place: ServerPlace, now_s: float) -> None:
        etcd = place.make_server()
        try:
            etcd.join(one.peer for one in self._servers.servers)
        except LaunchError as error:
            self._say(f"this node cannot serve the store: {error}")
            self._give_way(now_s, failed=True)
            return
        self._etcd, self._began_s, self._start_s, self._ends = etcd, now_s, None, QuickEnds()
        self._watch()
        self._say(f"this node serves the rendezvous store, too, at {etcd.endpoint}")

    def _give_way(self, now_s: float, failed: bool) -> None:
        """Leaves the server to its end, which comes when its removal is agreed on, and offers another one.

        After several failures in a row, as where there is no etcd program or a port cannot be reached, it offers none.
        """
        self._failures = self._failures + 1 if failed else 0
        self._forget()
        if self._etcd is not None:
            self._removed.append((self._etcd, now_s + REMOVAL_S))
        self._etcd, self._start_s = None, None
        if self._place is not None:
            self.address = self._place.renew() if self._failures < MOST_FAILURES else ""

    def _ended(self, how: str, was_killed: bool, now_s: float) -> None:
        self._forget()
        pause_s = self._ends.pause_s(now_s - self._began_s, was_killed)
        assert self._etcd is not None
        what = f"the etcd of this job, which this agent has started at {self._etcd.endpoint}, {how}"
        if pause_s is None:
            self._gave_up = True
            self._say(
                f"{what}, soon after its start, for the {self._ends.count}th time in a row: it is not started again. "
                f"Training goes on without it until a member is lost or joins. Its log ends: {self._etcd.last_line()}"
            )
            return
        if self._ends.count <= 1:
            self._say(f"{what}; it is started again with its data, and training goes on meanwhile")
        self._start_s = now_s + pause_s

    def _list(self, folder: str, endpoint: str) -> None:
        """Has whoever looks for jobs on this machine find this one."""
        if endpoint != self._listed_at:
            former, self._listing = self._listing, register(folder, LocalJob(self._job, endpoint, os.getpid()))
            self._listed_at = endpoint
            if former is not None:
                former.close()

    def _watch(self) -> None:
        """Has the server's end wake the loop. Where the kernel cannot tell, the next turn of the loop finds out."""
        pid = self._etcd.pid if self._etcd is not None else None
        if pid is None:
            return
        try:
            self._pid_fd = os.pidfd_open(pid)
        except OSError:
            return
        self._selector.register(self._pid_fd, selectors.EVENT_READ, self)

    def _forget(self) -> None:
        if self._pid_fd is not None:
            self._selector.unregister(self._pid_fd)
            os.close(self._pid_fd)
            self._pid_fd = None
