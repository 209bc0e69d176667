"""The agent's side of the fork server, and the environment that workers are given."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import sys
import time
from string import Template
from typing import TYPE_CHECKING, Any

from elaunch import replica_check
from elaunch.agent import forkserver
from elaunch.checkpoints import EVERY, FOLDER
from elaunch.detect import hang
from elaunch.errors import ProtocolError
from elaunch.policy import collectives
from elaunch.rendezvous.rules.spares import STATE_VARIABLE
from elaunch.waits import Pace
from elaunch.wire import LINK_TIMEOUT

MOST_WAITING = (
    4096  # connections that are not accepted yet: as many as a job may have workers; the kernel has its limit
)

if TYPE_CHECKING:
    from elaunch.agent.config import AgentConfig, WorkerProgram
    from elaunch.agent.decisions.actions import Start


CLOSE_S = 10.0  # so long the fork server may take to end all workers, and then the kernel to end it
START_S = 300.0  # so long it may take to start one process


class Supervisor:
    """Starts workers, passes signals to them and hears of their ends, through the fork server process."""

    def __init__(self) -> None:
        self.link, self.pid = forkserver.start()
        self._rest = b""
        self._groups: set[int] = set()
        self._asked_s: dict[str, float] = {}  # when workers were asked for that it has not started yet
        self._imports = False  # they may wait for modules to be imported
        self._pace = Pace.begin(0.0)

    def spawn(
        self,
        worker: str,
        argv: list[str],
        env: dict[str, str],
        program: dict[str, Any] | None,
        stdout: str | None = None,
        stderr: str | None = None,
        cpus: frozenset[int] | None = None,
    ) -> None:
        """Starts a worker; with a `program`, as a fork of the warm parent where there is one.

        `stdout` and `stderr` are files that its streams are appended to; `cpus` those that it may run on.
        """
        among = sorted(cpus) if cpus else None
        self._asked_s[worker] = time.monotonic()
        self._send(
            op="spawn", worker=worker, argv=argv, env=env, program=program, stdout=stdout, stderr=stderr, cpus=among
        )

    def signal(self, worker: str, number: int) -> None:
        """Sends signal `number` to a worker's process group; does nothing to a worker that has ended."""
        self._send(op="signal", worker=worker, signal=number)

    def warm(self, env: dict[str, str], modules: tuple[str, ...], share: float = 1.0) -> None:
        """Begins to keep a process that has the modules imported, which takes so much of a core until it is needed."""
        self._imports = True
        self._send(op="warm", env=env, modules=list(modules), share=share)

    def remove_at_the_end(self, folder: str) -> None:
        """Has a folder removed when this process ends, even if it is killed."""
        self._send(op="remove at the end", folder=folder)

    def receive(self) -> list[dict[str, Any]] | None:
        """Returns what the fork server says (see `forkserver.start`), or None at its end.

        If it was killed, the kernel ends its workers, but not the children that they have started: they end here.

        Raises:
            ProtocolError: it says what nobody understands, so nobody knows what becomes of the workers.
        """
        try:
            data = self.link.recv(1 << 16)
        except ConnectionResetError:
            data = b""
        if not data:
            self._kill_groups()
            return None
        *lines, self._rest = (self._rest + data).split(b"\n")
        try:
            messages: list[dict[str, Any]] = [json.loads(line) for line in lines]
            for message in messages:
                if "started" in message:
                    self._groups.add(message["pid"])
                    self._asked_s.pop(message["started"], None)
                elif "exited" in message:
                    self._groups.discard(message["pid"])
                    self._asked_s.pop(message["exited"], None)
                elif "warm" in message:
                    self._imports = False
                    self._asked_s = dict.fromkeys(self._asked_s, time.monotonic())
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ProtocolError(f"{data[:80]!r} ({error})") from error
        return messages

    def late(self, now_s: float) -> tuple[str, bool]:
        """Returns a line about a worker that was asked for and does not start, if one is due; and whether to give up.

        Nobody but the fork server can say what becomes of it: it may be stopped, or open a log file on a dead disk. It
        is waited for while modules are imported for all workers: that may take long from a slow disk, and others train.
        """
        worker, asked_s = min(self._asked_s.items(), key=lambda item: item[1], default=("", now_s))
        waited_s = now_s - asked_s
        if waited_s >= START_S and not self._imports:
            return f"the process that holds this node's workers has not started {worker} within {START_S:g} s", True
        if waited_s < self._pace.first_s:
            self._pace.reset(asked_s)
            return "", False
        why = "while modules are imported for it" if self._imports else f"of at most {START_S:g} s"
        line = f"the process of worker {worker} has been starting for {waited_s:.0f} s, {why}"
        return line if self._pace.is_due(now_s) else "", False

    def close(self, limit_s: float = CLOSE_S) -> None:
        """Ends the fork server, and with it whatever still runs; kills it where it has not ended in time."""
        self.link.close()
        if not self._reaped(limit_s):
            os.kill(self.pid, signal.SIGKILL)
            self._kill_groups()
            self._reaped(limit_s)

    def _reaped(self, limit_s: float) -> bool:
        """Waits for the end of the fork server."""
        end_s = time.monotonic() + limit_s
        while os.waitpid(self.pid, os.WNOHANG)[0] == 0:
            if time.monotonic() >= end_s:
                return False
            time.sleep(0.002)
        return True

    def _kill_groups(self) -> None:
        for group in self._groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def _send(self, **message: Any) -> None:
        # If it is gone, `receive` says so.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.sendall(json.dumps(message).encode() + b"\n")


def command(program: WorkerProgram) -> tuple[list[str], dict[str, Any] | None]:
    """Returns what a worker executes: its argv, and the program for a warm fork where the script is Python's."""
    if program.no_python:
        return [program.script, *program.args], None
    python = os.environ.get("PYTHON_EXEC") or sys.executable
    if program.run_path:  # as with torchrun, the interpreter is the launcher's
        return [sys.executable, "-u", "-m", "elaunch.run_path", program.script, *program.args], None
    argv = [python, "-u", *(["-m"] if program.module else []), program.script, *program.args]
    if os.environ.get("PYTHON_EXEC"):
        return argv, None
    return argv, {"module": program.module, "target": program.script, "args": list(program.args)}


def problem_with(program: WorkerProgram) -> str:
    """Says why the script cannot be run, as far as that shows before anything is started; empty if it can."""
    script = program.script
    if program.no_python:
        return "" if shutil.which(script) else f"{script}: no such program"
    if program.module or os.path.isfile(script):
        return ""
    return f"{script}: no such file" if not os.path.exists(script) else f"{script}: not a file"


def torchrun_variables(config: AgentConfig, start: Start, agent_store: bool) -> dict[str, str]:
    """Returns the variables that torchrun sets for a worker.

    A worker that joins a running job gets the rank it would have now; `elaunch.init()` tells it the true one.

    Args:
        config: the settings.
        start: of the worker.
        agent_store: whether agents serve the store at MASTER_ADDR and MASTER_PORT; else rank 0 makes it.
    """
    generation = start.generation
    nodes = list(generation.nodes)
    if config.node not in nodes:
        nodes.append(config.node)
    roles = dict(generation.roles)
    places = [(worker.node, worker.local_rank) for worker in generation.workers]
    place = (config.node, start.local_rank)
    if place not in places:
        places.append(place)
    peers = [each for each in places if each == place or roles.get(each[0], config.role) == config.role]
    rank, size = places.index(place), max(len(places), config.nproc_per_node)
    address, port = config.rendezvous.master or (generation.master.addr, generation.master.port)
    variables: dict[str, object] = {
        "RANK": rank,
        "LOCAL_RANK": start.local_rank,
        "GROUP_RANK": nodes.index(config.node),
        "ROLE_RANK": peers.index(place),
        "ROLE_NAME": config.role,
        "WORLD_SIZE": size,
        "LOCAL_WORLD_SIZE": config.nproc_per_node,
        "GROUP_WORLD_SIZE": len(nodes),
        "ROLE_WORLD_SIZE": max(len(peers), config.nproc_per_node),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
        "TORCHELASTIC_RESTART_COUNT": generation.restarts.count,
        "TORCHELASTIC_MAX_RESTARTS": config.max_restarts or 0,
        "TORCHELASTIC_RUN_ID": config.job,
        "TORCHELASTIC_USE_AGENT_STORE": agent_store,
        "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(signal.Signals(number).name for number in config.stop.signals),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
    }
    threads = os.environ.get("OMP_NUM_THREADS", "1" if config.nproc_per_node > 1 else None)
    if threads is not None:
        variables["OMP_NUM_THREADS"] = threads
    return {name: str(value) for name, value in variables.items()}


def worker_env(config: AgentConfig, start: Start, control: str, agent_store: bool) -> dict[str, str]:
    """Returns the environment of a worker: the launcher's, torchrun's variables, and what `elaunch.init()` reads."""
    variables: dict[str, object] = {"ELAUNCH_CONTROL": control, "ELAUNCH_WORKER": start.worker}
    variables |= config.training.policy.variables()
    variables[hang.VARIABLE] = config.detection.hang
    variables[collectives.NAME] = config.training.collectives
    variables[replica_check.NAME] = config.training.replica_check
    variables[STATE_VARIABLE] = int(config.rendezvous.spare_state)
    variables[LINK_TIMEOUT] = config.rendezvous.conf.link_timeout
    if (checkpoints := config.training.checkpoints) is not None:
        variables |= {FOLDER: checkpoints.folder, EVERY: checkpoints.every}
    own = {name: str(value) for name, value in variables.items()}
    return {**os.environ, **torchrun_variables(config, start, agent_store), **own}


def fill(argument: str, local_rank: int) -> str:
    """Puts the local rank in for ${local_rank}, by the rules of `string.Template` as torchrun does."""
    return Template(argument).safe_substitute(local_rank=local_rank)


def worker_devices(config: AgentConfig) -> dict[int, dict[str, str]]:
    """Returns what --virtual-local-rank changes in the environment of each local rank.

    Raises:
        LaunchError: CUDA_VISIBLE_DEVICES names fewer devices than there are workers.
    """
    if not config.start.virtual_local_rank:
        return {}
    from elaunch.agent.placement import virtual_local_rank

    return {local_rank: virtual_local_rank(os.environ, local_rank) for local_rank in range(config.nproc_per_node)}


def worker_cpus(config: AgentConfig) -> dict[int, frozenset[int]]:
    """Returns the CPUs that each local rank is bound to; empty without --numa-binding.

    Raises:
        LaunchError: there is no GPU to bind to, or none of its CPUs may be used.
    """
    if not config.start.numa_binding:
        return {}
    from elaunch.agent.placement import cpus_for, read_topology

    topology = read_topology(os.environ)
    allowed = os.sched_getaffinity(0)
    return {
        local_rank: cpus_for(config.start.numa_binding, local_rank, topology, allowed)
        for local_rank in range(config.nproc_per_node)
    }


def free_port(host: str) -> int:
    """Returns a TCP port that nobody listens on just now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind(("", 0))
        port: int = probe.getsockname()[1]
        return port


def listen(host: str) -> socket.socket:
    """Returns a listening TCP socket at a free port of this address, or of all where it is not this machine's own."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, 0), family=family, backlog=MOST_WAITING)
    except OSError:
        listener = socket.create_server(("", 0), family=family, backlog=MOST_WAITING)
    listener.setblocking(False)
    return listener
