"""From settings to a running agent: the rendezvous that this node may have to host, the fork server, the agent."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING

from elaunch.agent.config import STATIC_SHIFT, AgentConfig, RendezvousSettings
from elaunch.agent.forkserver import end_with_parent
from elaunch.agent.local_jobs import make_folder
from elaunch.agent.supervisor import Supervisor, problem_with
from elaunch.agent.tcp_store.process import StoreProcess, make_store_process
from elaunch.checkpoints import make_folder as make_checkpoint_folder
from elaunch.errors import LaunchError
from elaunch.rendezvous.cluster.opener import StoreOpener
from elaunch.rendezvous.conf import ETCD_PASSWORD, own_address, parse_endpoints
from elaunch.rendezvous.embedded import EmbeddedEtcd, find_etcd, free_address
from elaunch.rendezvous.security.identity import NodeIdentity, TlsFiles, warn_of_store
from elaunch.rendezvous.security.secret import SECRET

AGAIN_S = 0.2
AROUND_FORKS = {"_acquireLock", "_releaseLock", "_after_at_fork_child_reinit_locks", "_after_fork"}
"""What logging, threading and concurrent.futures have called before and after a fork."""

_struck: list[int] = []  # signals that have come before the agent handles them
PROBE_S = 3.5  # a first packet that is lost is sent again after 1 s, and after 3
PROBE_AGAIN_S = 0.1
REQUEST_S = 5.0  # within which the store answers
FIRST_CONTACT_S = 1.0  # who waits for a rendezvous that does not stand yet tries again, and says so now and then
REFUSED_S = 0.2  # for a server that may just have been lost: others are asked between two attempts to reach it
PARENT = "ELAUNCH_PARENT"  # set by elaunch.api: the pid of the program that waits for the job

if TYPE_CHECKING:
    from elaunch.rendezvous.etcd import EtcdStore
    from elaunch.rendezvous.store import Store


def launch(config: AgentConfig) -> int:
    """Starts this node's agent, with a rendezvous of its own where the settings ask for one, and runs it to its end."""
    _follow_caller()
    problem = problem_with(config.program)
    if problem:
        raise LaunchError(problem)
    _check_events(config.output.events, config.node)
    if config.training.checkpoints is not None:
        make_checkpoint_folder(config.training.checkpoints, "--checkpoint-dir")
    for name in (SECRET, ETCD_PASSWORD):  # they are read by now, and workers need not see them
        os.environ.pop(name, None)
    rendezvous = config.rendezvous
    identity = NodeIdentity(
        rendezvous.security, config.job, config.node, rendezvous.encrypts_links, rendezvous.guards_store
    )
    hosted: EmbeddedEtcd | None = None
    directory = ""
    handlers = {number: signal.signal(number, _stop_early) for number in config.stop.signals}
    try:
        several = config.rendezvous.store_nodes(config.max_nodes) > 1
        hosted, directory, host, peer = _host_rendezvous(config.rendezvous, config.local_addr, several, identity)
        identity.note_host(host)
        supervisor = Supervisor()
        store: StoreProcess | None = None
        try:
            store = make_store_process(supervisor.link)
            if directory:
                supervisor.remove_at_the_end(directory)
            if identity.folder:
                supervisor.remove_at_the_end(identity.folder)
            # From here on there are threads: everything that forks has been forked. These imports take as long as an
            # etcd that was started above needs to get ready.
            from elaunch.agent.agent import Agent
            from elaunch.agent.output.telemetry import Telemetry
            from elaunch.agent.watch.hosted import ServerPlace
            from elaunch.rendezvous.etcd import EtcdStore

            if hosted is not None and not _serves(hosted, config.rendezvous, partial(_say, config.node)):
                hosted.stop()
                hosted = None
            if hosted is not None and not rendezvous.security.has_proof:
                warning = warn_of_store(hosted.listens_at, rendezvous.guards_store)
                if warning:
                    _say(config.node, warning)
            endpoint = hosted.endpoint if hosted else config.rendezvous.endpoint
            open_store = StoreOpener(endpoint, partial(_open_store, EtcdStore, config, identity))
            folders = None
            if config.output.logs_specs:
                from elaunch.agent.plugins import plugin_folders

                folders = plugin_folders(config)
            figures = _check_node(config, open_store) if config.detection.node_check else ""
            telemetry = Telemetry(config, partial(_say, config.node))
            place = None
            if several or config.founds:
                port = parse_endpoints(endpoint, config.rendezvous.backend)[0][1]
                is_alone = not several or (hosted is not None and not peer)
                tls = _tls(config.rendezvous, identity)
                place = ServerPlace(host, port, supervisor.remove_at_the_end, peer, is_alone, tls)
            open_store.dress = telemetry.timed
            agent = Agent(
                config, open_store, supervisor, host, folders, hosted, figures, store, telemetry, place, identity
            )
        except BaseException:
            supervisor.close()
            if store is not None:
                store.close()
            raise
        try:
            return agent.run()
        finally:
            telemetry.close()
    finally:
        _strike_no_more()
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # what follows is short, and must not be cut short
        if hosted is not None:
            hosted.stop()
        if directory:
            shutil.rmtree(directory, ignore_errors=True)
        identity.remove()
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _check_node(config: AgentConfig, open_store: Callable[[], Store]) -> str:
    """The figures of this node.

    Raises:
        LaunchError: it failed its check, or is far slower than its peers.
    """
    from elaunch.agent.watch.node_check import check
    from elaunch.rendezvous.membership import job_prefix

    own = check(
        open_store,
        job_prefix(config.job),
        config.node,
        config.nproc_per_node,
        config.max_nodes,
        os.environ,
        config.rendezvous.conf.connect_timeout,
        partial(_say, config.node),
        config.rendezvous.is_hosted,
    )
    _say(config.node, f"node check: {own.text()}")
    return own.to_json()


def _say(node: str, line: str) -> None:
    print(f"[elaunch {node}] {line}", file=sys.stderr, flush=True)


def _follow_caller() -> None:
    """Where a program has started this agent (elaunch.api), its death is a SIGTERM."""
    parent = os.environ.pop(PARENT, "")
    if parent:
        end_with_parent(int(parent), signal.SIGTERM)


def _stop_early(number: int, frame: FrameType | None) -> None:
    """Handles signals until the agent does.

    What is raised in a callback of the interpreter, as after a fork, is lost; so the signal comes once more.
    """
    _struck.append(number)
    signal.signal(signal.SIGALRM, _strike_again)
    signal.setitimer(signal.ITIMER_REAL, AGAIN_S)
    if frame is not None and frame.f_code.co_name in AROUND_FORKS:
        return  # there it would only be printed
    raise LaunchError(f"stopped by {signal.Signals(number).name}")


def _strike_again(number: int, frame: FrameType | None) -> None:
    signal.raise_signal(_struck[-1])


def _strike_no_more() -> None:
    """Has no signal come again. Before the interpreter ends it must be called: there SIGALRM ends the process."""
    if signal.getsignal(signal.SIGALRM) is _strike_again:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def _serves(hosted: EmbeddedEtcd, rendezvous: RendezvousSettings, say: Callable[[str], None]) -> bool:
    """Waits for the rendezvous of this node; False when another node of this machine was quicker to host it."""
    try:
        hosted.wait_ready(rendezvous.conf.connect_timeout, say)
    except LaunchError:
        if rendezvous.backend != "c10d" or is_free_here(*parse_endpoints(rendezvous.endpoint, "c10d")[0]):
            raise
        return False
    return True


def _check_events(events: str | None, node: str) -> None:
    if events:
        path = events.replace("%n", node)
        folder = os.path.dirname(path) or "."
        if not os.access(folder, os.W_OK):
            raise LaunchError(f"--events {events}: the folder {folder} does not exist or cannot be written to")
        if os.path.exists(path) and (os.path.isdir(path) or not os.access(path, os.W_OK)):
            raise LaunchError(f"--events {events}: {path} cannot be written to")


def _host_rendezvous(
    rendezvous: RendezvousSettings, local_addr: str, several: bool, identity: NodeIdentity
) -> tuple[EmbeddedEtcd | None, str, str, str]:
    """Starts an etcd where this node is to host it; `several`: other nodes may come to serve the store with it.

    Returns:
        it, its folder, the address of this node, and where it listens for other servers.
    """
    peer = ""
    if rendezvous.backend == "standalone":
        host, name, port = local_addr or "127.0.0.1", "127.0.0.1", 0
        identity.make(time.time(), (host,))
    else:
        name, port = parse_endpoints(rendezvous.endpoint, rendezvous.backend)[0]
        host = local_addr or own_address(name, port)
        identity.make(time.time(), (host,))
        if not _is_host(rendezvous, name, port):
            return None, "", host, ""
    find_etcd()
    directory = make_folder()
    if several:
        with suppress(LaunchError):  # where the address is that of a router, it stays the only server
            peer = free_address(host)
    try:
        cores = 1 if rendezvous.backend == "standalone" else None
        hosted = EmbeddedEtcd(directory, name, port, cores, peer, _tls(rendezvous, identity))
        hosted.start()
    except BaseException as error:
        shutil.rmtree(directory, ignore_errors=True)
        if isinstance(error, LaunchError) and rendezvous.backend == "c10d" and not is_free_here(name, port):
            return None, "", host, ""  # another node of this machine was quicker
        if isinstance(error, LaunchError) and rendezvous.backend == "static":
            raise LaunchError(
                f"{error} (the nodes meet at a port {STATIC_SHIFT} beside --master-port: give all of them another one)"
            ) from error
        raise
    return hosted, directory, host, peer


def _is_host(rendezvous: RendezvousSettings, name: str, port: int) -> bool:
    if rendezvous.backend == "static":
        return rendezvous.node_rank == 0
    if rendezvous.backend != "c10d":
        return False
    if rendezvous.conf.is_host is not None:
        return rendezvous.conf.is_host
    if not is_free_here(name, port):
        return False
    others = parse_endpoints(rendezvous.endpoint, "c10d")[1:]
    if not others:
        return True
    with ThreadPoolExecutor(len(others), "elaunch-probe") as pool:
        return not any(list(pool.map(_is_served, others)))


def _is_served(address: tuple[str, int]) -> bool:
    """Returns whether somebody listens there: then the job goes on without its first node, which comes back now.

    A machine that refuses the connection has answered. One that does not may not be reached yet: the network of a
    machine that has just come back may take seconds to carry anything.
    """
    end_s = time.monotonic() + PROBE_S
    while (left_s := end_s - time.monotonic()) > 0:
        try:
            socket.create_connection(address, left_s).close()
        except ConnectionRefusedError:
            return False
        except OSError:
            time.sleep(PROBE_AGAIN_S)
        else:
            return True
    return False


def is_free_here(name: str, port: int) -> bool:
    """Returns whether the endpoint is an address of this machine where nobody listens: then this node is the first."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            # Neither connections of a former job that linger, nor another agent that looks just now, is a listener.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
        return True
    except OSError:
        return False


def _tls(rendezvous: RendezvousSettings, identity: NodeIdentity) -> TlsFiles | None:
    return identity.files if rendezvous.guards_store else None


def _open_store(
    kind: type[EtcdStore], config: AgentConfig, identity: NodeIdentity, endpoint: str, patience: int
) -> EtcdStore:
    rendezvous, conf = config.rendezvous, config.rendezvous.conf
    # By then others may have found another one; an election among servers takes a second or two.
    longest_s = min(REQUEST_S, 1.5 * conf.lease_ttl) if config.founds else REQUEST_S * patience
    limit_s = min(longest_s, conf.connect_timeout)
    if rendezvous.guards_store:
        store = kind(endpoint, limit_s, patience=patience, pem=identity.store_pem, newest=lambda: identity.store_pem)
    else:
        store = kind(endpoint, limit_s, patience=patience, **conf.etcd.arguments())
    store.first_contact_s = FIRST_CONTACT_S
    if config.founds:
        store.first_contact_s = store.refused_s = REFUSED_S
    return store
