"""A Slurm of a test's own: munged, slurmctld and some slurmds on this host, on free ports, in a folder of their own."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.helpers import Spawned, Spawner, find_free_port, wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
START_S = 30.0
LIMIT_S = 20.0

# What a command of Slurm needs at least of a cluster whose nodes are processes. Job steps take no cgroups. A job
# that is queued again waits for `cred_expire` seconds.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/m/socket,cred_expire=20
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
KillWait=5
"""

# On nodes, their names are addresses of this host. No process of a job sees another /etc/hosts.
KNOWING_NODES = 'mount --bind "$0" /etc/hosts && exec "$@"'


class TestSlurm:
    """Commands of this Slurm, which SLURM_CONF names."""

    __test__ = False

    def __init__(self, spawn: Spawner, configuration: Path) -> None:
        self.configuration = configuration
        self.servers: dict[str, Spawned] = {}
        self._spawn = spawn
        self._env = {"SLURM_CONF": str(configuration), "PATH": f"{os.environ['PATH']}:/usr/sbin"}

    def start(self, name: str) -> None:
        """Starts slurmctld, or the slurmd of a node."""
        program = ["/usr/sbin/slurmctld", "-D"]
        if name != "slurmctld":
            hosts = str(self.configuration.parent / "hosts")
            program = ["unshare", "--mount", "sh", "-c", KNOWING_NODES, hosts, "/usr/sbin/slurmd", "-D", "-N", name]
        self.servers[name] = self._spawn(program, env=self._env, name=name)

    def lose(self, node: str, agent: int) -> None:
        """Ends a node as the loss of its machine would, with an agent on it, what Slurm runs it by, and its workers."""
        self.servers[node].signal(signal.SIGKILL)
        self.servers[node].wait(LIMIT_S)
        whole = psutil.Process(agent)
        above = whole.parents()
        step = next(at for at, process in enumerate(above) if process.name() == "slurmstepd")
        for process in (above[step], *above[:step], whole, *whole.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):  # workers go with their agent
                process.kill()
        self("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")

    def __call__(self, *command: str) -> str:
        """What a command of Slurm writes."""
        env = os.environ | {"SLURM_CONF": str(self.configuration)}
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, env=env, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def running(self) -> dict[str, str]:
        """The nodes of batch jobs that run, by their names."""
        rows = [line.split("|") for line in self("squeue", "-h", "-t", "R", "-o", "%j|%N").splitlines()]
        return dict(rows)


@contextlib.contextmanager
def slurm(spawn: Spawner, nodes: int, cpus: int) -> Iterator[TestSlurm]:
    """Nodes n1, n2, ..., each with so many processors. At the end, jobs are cancelled and all of it has ended."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=f"{os.environ['PATH']}:/usr/sbin") is None]
    if missing or os.geteuid() != 0:
        why = f"{', '.join(missing)} missing" if missing else "not root"
        pytest.skip(f"a Slurm of one's own needs root and `apt-get install slurm-wlm munge`: {why}")
    # A socket's path has to be short.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    try:
        (folder / "m").mkdir(mode=0o700)
        (folder / "state").mkdir()
        key = folder / "m" / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        host = socket.gethostname().split(".")[0]
        lines = [CONFIGURATION.format(host=host, port=find_free_port(), folder=folder)]
        names = [f"n{index + 1}" for index in range(nodes)]
        lines += [
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={find_free_port()} CPUs={cpus}"
            for name in names
        ]
        lines.append(f"PartitionName=all Nodes={','.join(names)} Default=YES MaxTime=INFINITE State=UP")
        known = [f"127.0.0.{index + 1} {name}" for index, name in enumerate(names)]
        (folder / "hosts").write_text("\n".join([Path("/etc/hosts").read_text(), *known, ""]))
        configuration = folder / "slurm.conf"
        configuration.write_text("\n".join(lines) + "\n")
        yield from _serving(spawn, TestSlurm(spawn, configuration), folder, names)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _serving(spawn: Spawner, commands: TestSlurm, folder: Path, names: list[str]) -> Iterator[TestSlurm]:
    m = folder / "m"
    files = [f"--{what}-file={m / what}" for what in ("key", "pid", "log", "seed")]
    munged = spawn(["/usr/sbin/munged", "--foreground", "--force", f"--socket={m / 'socket'}", *files], name="munged")
    wait_until((m / "socket").exists, START_S, "munged")
    for name in ("slurmctld", *names):
        commands.start(name)

    def idle() -> bool:
        with contextlib.suppress(AssertionError):
            return commands("sinfo", "-h", "-N", "-o", "%T").split() == ["idle"] * len(names)
        return False

    wait_until(idle, START_S, "nodes of Slurm")
    try:
        yield commands
        commands("scancel", "--user=root")
        wait_until(lambda: not commands("squeue", "-h").strip(), START_S, "the end of Slurm's jobs")
    finally:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            commands("scancel", "--user=root")
        for server in (*reversed(commands.servers.values()), munged):
            server.end()
