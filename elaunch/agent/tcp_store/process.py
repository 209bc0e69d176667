"""The process that serves the workers' store, and the agent's side of it.

    agent ──socket──> store server <──TCP── every worker of the job that uses torch.distributed
                      forked off the agent before it has threads; outlives workers and attempts, ends with the agent

Not in the agent, which is to notice deaths at once whatever thousands of workers ask of the store; not in rank 0, whose
death would take the store with it. It is a fork: it costs no start-up, and idles where a script uses elaunch.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from elaunch.agent.config import RendezvousSettings
from elaunch.agent.forkserver import HANDLED, end_with_parent
from elaunch.agent.supervisor import MOST_WAITING, free_port, listen
from elaunch.agent.tcp_store.server import DONE, EMPTY, SERVE, StoreServer
from elaunch.errors import LaunchError

ANSWER_S = 5.0  # for what takes less than a millisecond
DISABLED = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # as with torchrun: 1: rank 0 makes the store


class StoreProcess:
    """The process; made while this one has one thread.

    Args:
        others: sockets of this process that the other one must not keep open.
    """

    def __init__(self, *others: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        agent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            _become(StoreServer(theirs), agent, ours, *others)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        theirs.close()
        ours.settimeout(ANSWER_S)
        self._link: socket.socket | None = ours

    def serve(self, listener: socket.socket) -> bool:
        """Has an empty store served at this socket, and closes it here; returns False if the process has ended."""
        with listener:
            return self._tell(SERVE, listener.fileno())

    def empty(self) -> bool:
        """Has the store emptied, and its clients dropped; returns False if the process has ended."""
        return self._tell(EMPTY)

    def _tell(self, order: bytes, *descriptors: int) -> bool:
        """Returns once the order is carried out: a worker that starts after this must find the new store."""
        if self._link is None:
            return False
        try:
            socket.send_fds(self._link, [order], list(descriptors))
            if self._link.recv(1) == DONE:
                return True
        except OSError:
            pass
        self.close()  # it may be stopped, and would serve what nobody expects when it goes on
        return False

    def close(self) -> None:
        """Ends the process."""
        if self._link is not None:
            self._link.close()
            self._link = None
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)


def _become(server: StoreServer, agent: int, *others: socket.socket) -> None:
    status = 1
    try:
        for other in others:
            other.close()
        os.setsid()
        for number in HANDLED:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
        end_with_parent(agent)
        server.run()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(status)  # nothing may return into the agent's code


class StoreOffer:
    """What this node offers its job as MASTER_ADDR and MASTER_PORT: for each attempt an empty store.

    Args:
        process: serves it; None: rank 0 makes the store.
        rendezvous: says whether the user has fixed the port.
        host: the address at which workers of other nodes reach this node.
        say: told in a line if the process has ended.

    Attributes:
        served: whether the agent serves the store.
    """

    def __init__(
        self,
        process: StoreProcess | None,
        rendezvous: RendezvousSettings,
        host: str,
        say: Callable[[str], None],
    ) -> None:
        self.served = process is not None
        self._process = process
        self._host = host
        self._say = say
        self._fixed = rendezvous.master
        self._here = rendezvous.node_rank == 0
        self._listens = False

    def renew(self) -> int:
        """Begins an attempt: returns the port of an empty store.

        It is another port for each attempt, as far as the user has not fixed it: a worker of a former attempt that
        another node could not end yet must not meet those of this one.

        Raises:
            LaunchError: somebody else listens at the port that the user has fixed.
        """
        if self._fixed is not None:
            self._renew_fixed(*self._fixed)
            return self._fixed[1]
        if self._process is not None and self.served:
            listener = listen(self._host)
            port: int = listener.getsockname()[1]
            if self._process.serve(listener):
                return port
            self._lost()
        return free_port(self._host)

    def _renew_fixed(self, name: str, port: int) -> None:
        if self._process is None or not self.served or not self._here:
            return
        if self._listens:
            there = self._process.empty()
        else:
            there = self._process.serve(_listen_at(name, port))
            self._listens = True
        if not there:
            self._lost()

    def _lost(self) -> None:
        self.served = False
        self._say("the process that served the store of the workers has ended; from now on rank 0 makes their store")

    def close(self) -> None:
        """Ends the process that serves the store."""
        if self._process is not None:
            self._process.close()


def make_store_process(*others: socket.socket) -> StoreProcess | None:
    """Forks the process that serves the store, unless the user wants none."""
    return None if os.environ.get(DISABLED) == "1" else StoreProcess(*others)


def _listen_at(name: str, port: int) -> socket.socket:
    """Returns a listening socket at the port: of the loopback address if `name` is that, else of all, as torch's.

    Raises:
        LaunchError: somebody else listens there.
    """
    try:
        if name == "localhost" or name.startswith("127."):
            return socket.create_server(("127.0.0.1" if name == "localhost" else name, port), backlog=MOST_WAITING)
        if socket.has_dualstack_ipv6():
            with suppress(OSError):
                return socket.create_server(
                    ("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=MOST_WAITING
                )
        return socket.create_server(("", port), backlog=MOST_WAITING)
    except OSError as error:
        raise LaunchError(
            f"--master-port={port}: the store of the workers cannot listen there: {error.strerror}; end what does, or "
            "give another port to all nodes"
        ) from error
