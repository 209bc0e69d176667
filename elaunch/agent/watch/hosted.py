"""The etcd that this agent has started for its job: where it ends before the job, it is started again."""

from __future__ import annotations

import os
import selectors
import signal
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from elaunch.agent.decisions.actions import signal_name
from elaunch.errors import LaunchError
from elaunch.rendezvous.embedded import EmbeddedEtcd

SERVING_S = 0.5  # a server that has run for so long has served: it takes some 0.2 s to be ready
LASTING_S = 10.0  # one that ends by itself after so long has not failed at its start

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


class HostedEtcd:
    """Keeps the job's etcd running, in the loop of the agent that has started it.

    Args:
        etcd: the server, which runs.
        selector: of the loop, which is woken at the server's end.
        say: tells the user.
        now_s: the time.
    """

    def __init__(
        self, etcd: EmbeddedEtcd, selector: selectors.BaseSelector, say: Callable[[str], None], now_s: float
    ) -> None:
        self._etcd = etcd
        self._selector = selector
        self._say = say
        self._ends = QuickEnds()
        self._began_s = now_s
        self._start_s: float | None = None
        self._gave_up = False
        self._pid_fd: int | None = None
        self._watch()

    def due_s(self) -> float:
        """Returns when the server is to be started next; infinite while it runs or is given up."""
        return inf if self._start_s is None or self._gave_up else self._start_s

    def look(self, now_s: float) -> None:
        """Starts the server again if it has ended, as often as that makes sense. It costs next to nothing else."""
        if self._gave_up or self._etcd.pid is not None:
            return
        if self._start_s is None:
            code = self._etcd.exitcode or 0
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"exited with code {code}"
            self._ended(how, -code in (signal.SIGKILL, signal.SIGTERM), now_s)
        while self._start_s is not None and now_s >= self._start_s and not self._gave_up:
            self._start_s, self._began_s = None, now_s
            try:
                self._etcd.start_again()
                self._watch()
            except LaunchError as error:
                self._ended(f"could not be started ({error})", False, now_s)

    def close(self) -> None:
        """Starts the server no more. Whoever has started it first ends it."""
        self._gave_up = True
        self._forget()

    def _ended(self, how: str, was_killed: bool, now_s: float) -> None:
        self._forget()
        pause_s = self._ends.pause_s(now_s - self._began_s, was_killed)
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

    def _watch(self) -> None:
        """Has the server's end wake the loop. Where the kernel cannot tell, the next turn of the loop finds out."""
        pid = self._etcd.pid
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
