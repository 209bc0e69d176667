"""The command `elaunch schedule`: many elastic jobs on one cluster. Submits and shows jobs, and runs the daemon."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
import os
import shlex
import signal
import socket
import sys
import time
import tomllib
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from elaunch.cli.commands import open_store, run_command, seconds
from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.errors import ElaunchError, StoreUnavailable, UsageError
from elaunch.rendezvous.conf import ETCD_PORT, parse_conf, parse_endpoint
from elaunch.rendezvous.store import Store

if TYPE_CHECKING:
    from elaunch.scheduler.clusters.cluster import Cluster
    from elaunch.scheduler.model import SchedulingPolicy
    from elaunch.scheduler.service.daemon import Daemon

NAME = "main"
LATER_S = 2.0  # before etcd is tried again


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `elaunch schedule`."""
    p = FlagParser(
        prog="elaunch schedule",
        description="Many elastic jobs on one cluster: each gets its basic demand, and grows where it pays.\n\n"
        f"{VERBATIM}elaunch schedule run --rdzv-endpoint=etcd:2379 --folder=/shared/schedule\n"
        f"{VERBATIM}elaunch schedule submit --name=gpt --basic=2 --most=8 -- train.py --steps 1000\n"
        f"{VERBATIM}elaunch schedule status\n"
        f"{VERBATIM}elaunch schedule cancel gpt",
    )
    commands = p.add_subparsers(title="commands", required=True, metavar="COMMAND")
    daemon = commands.add_parser("run", help="run the daemon; of several with one name, one leads")
    daemon.set_defaults(run=_run)
    daemon.add_argument("--folder", required=True, help="for logs and exit codes of agents, shared by all nodes")
    clusters = ["slurm", "ray", "kubernetes"]
    daemon.add_argument("--cluster", choices=clusters, default="slurm", help="whose nodes these are")
    daemon.add_argument("--devices", choices=["gpu", "cpu"], default="gpu", help="what a device is")
    daemon.add_argument("--elaunch", default="", metavar="COMMAND", help="the launcher on the nodes")
    daemon.add_argument("--policy", choices=["suika", "fifo"], default="suika", help="fifo: no job grows")
    daemon.add_argument("--settings", metavar="FILE", help="TOML with the settings of the policy")
    for name, default, text in (
        ("--interval", 2.0, "seconds between two looks"),
        ("--queue-timeout", 60.0, "seconds for the cluster to start an agent"),
        ("--kill-timeout", 45.0, "seconds for an agent to end after SIGTERM"),
    ):
        daemon.add_argument(name, metavar="S", type=seconds, default=default, help=text)
    daemon.add_argument("--events", metavar="FILE", help="append events to this file, a line of JSON each")
    daemon.add_argument("--metrics", metavar="FILE", help="keep figures in this file, in Prometheus's text format")
    _add_cluster_flags(daemon)
    submit = commands.add_parser("submit", help="hand in a job: a file, flags, or both, and behind -- its command")
    submit.set_defaults(run=_submit)
    submit.add_argument("file", nargs="?", metavar="JOB.toml", help="values of the job; flags go before them")
    for name, kind, text in (
        ("name", str, "unique"),
        ("basic", int, "devices that it needs to run at all"),
        ("most", int, "devices that it can use (default: basic)"),
        ("unit", int, "it grows by so many (default: 1)"),
        ("priority", int, "higher goes first (default: 0)"),
        ("user", str, "whose quota counts (default: you)"),
        ("profile", str, "file that `elaunch ctl profile --json` has written"),
        ("folder", str, "in which it runs (default: this one)"),
    ):
        submit.add_argument(f"--{name}", type=kind, help=text)
    show = commands.add_parser("status", help="jobs, what they have, and why")
    show.set_defaults(run=_status)
    show.add_argument("--json", action="store_true", help="the same for programs")
    end = commands.add_parser("cancel", help="end jobs: their state goes to --checkpoint-dir, if they have one")
    end.set_defaults(run=_cancel)
    end.add_argument("jobs", nargs="+", metavar="JOB")
    for command in (daemon, submit, show, end):
        command.flag("--rdzv-endpoint", default="", metavar="HOST:PORT", help="etcd, the scheduler's and the jobs'")
        command.flag("--rdzv-conf", default="", metavar="KEY=VALUE,…", help="how etcd is reached, as for `elaunch`")
        command.add_argument("--scheduler", default=NAME, metavar="NAME", help="which one (default: %(default)s)")
    return p


def _add_cluster_flags(daemon: argparse.ArgumentParser) -> None:
    """Adds the flags that only one kind of cluster has."""
    slurm = daemon.add_argument_group("Slurm")
    slurm.add_argument("--sbatch", default="", metavar="OPTIONS", help="of sbatch, such as --sbatch='-p train'")
    ray = daemon.add_argument_group("Ray")
    ray.add_argument("--ray-address", default="http://127.0.0.1:8265", metavar="URL", help="of the dashboard")
    kubernetes = daemon.add_argument_group("Kubernetes")
    for name, metavar, text in (
        ("--pod-template", "FILE", "a pod in YAML or JSON; its first container runs the agent"),
        ("--kube-context", "NAME", "of the kubeconfig (default: its current one; in a pod, the service account)"),
        ("--kube-namespace", "NAME", "in which agents run (default: that of the context or pod)"),
        ("--kueue-queue", "NAME", "the LocalQueue of Kueue that agents wait in"),
    ):
        kubernetes.add_argument(name, metavar=metavar, default="", help=text)
    for name, default, text in (
        ("--gpu-resource", "nvidia.com/gpu", "of which a device is one"),
        ("--rack-label", "topology.kubernetes.io/zone", "of nodes, that names their rack"),
        ("--kind-label", "nvidia.com/gpu.product", "of nodes, that names the kind of their devices"),
    ):
        kubernetes.add_argument(name, metavar="NAME", default=default, help=text)


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0 when it is done, 1 when it was refused, 2 for a command line that cannot be used.
    """
    words, command = list(argv), []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    args = parser().parse_args(words)
    args.command = command
    return run_command("elaunch schedule", args.run, args)


def _open(args: argparse.Namespace) -> Store:
    if not args.rdzv_endpoint:
        raise UsageError("give --rdzv-endpoint=HOST:PORT of the scheduler's etcd, or set PET_RDZV_ENDPOINT")
    for member in args.rdzv_endpoint.split(","):
        parse_endpoint(member, ETCD_PORT)
    return open_store(args.rdzv_endpoint, parse_conf(args.rdzv_conf))


@contextlib.contextmanager
def _store(args: argparse.Namespace) -> Iterator[Store]:
    store = _open(args)
    try:
        yield store
    finally:
        store.close()


# -- jobs -------------------------------------------------------------------------------------------------------------


def _submit(args: argparse.Namespace) -> None:
    from elaunch.scheduler.service.submit import job_spec, read_job, submit

    values: dict[str, Any] = {"user": getpass.getuser()} | (read_job(args.file) if args.file else {})
    for name in ("name", "basic", "most", "unit", "priority", "user", "profile", "folder", "command"):
        given = getattr(args, name)
        if given not in (None, []):
            values[name] = given
    spec = job_spec(values, time.time())
    with _store(args) as store:
        submit(store, args.scheduler, spec)
    print(f"job {spec.name} is submitted; `elaunch schedule status` shows it")


def _cancel(args: argparse.Namespace) -> None:
    from elaunch.scheduler.service.submit import cancel

    with _store(args) as store:
        cancel(store, args.scheduler, args.jobs, getpass.getuser())
    print("the daemon ends them; `elaunch schedule status` shows how far it is")


def _status(args: argparse.Namespace) -> None:
    from elaunch.scheduler.service.show import as_values, describe
    from elaunch.scheduler.service.stored import read_all

    with _store(args) as store:
        stored = read_all(store, args.scheduler)
    print(json.dumps(as_values(stored), indent=2) if args.json else describe(stored))


# -- the daemon -------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace) -> None:
    from elaunch.agent.output.events import EventLog
    from elaunch.scheduler.service.show import metrics

    identity = f"{socket.gethostname().split('.')[0]}-{os.getpid()}"
    policy = read_policy(args.policy, args.settings)
    folder = Path(args.folder, args.scheduler).resolve()  # exit codes of another one are not its own
    folder.mkdir(parents=True, exist_ok=True)
    cluster = _cluster(args, folder)
    log = EventLog(args.events, identity)

    def tell(kind: str, job: str, text: str) -> None:
        print(f"[elaunch schedule] {f'{job} ' if job else ''}{text}", flush=True)
        log.write(kind, 0, None, job=job, text=text)

    stopping = _Stopping()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stopping.note)
    try:
        while not stopping.asked:
            store = None
            try:
                store = _open(args)
                for daemon in _turns(args, store, identity, policy, cluster, tell, stopping):
                    if args.metrics:
                        _replace_file(args.metrics, metrics(daemon.jobs, daemon.nodes))
            except StoreUnavailable as error:
                tell("store_away", "", f"etcd is away, jobs go on without the scheduler: {error}")
                stopping.wait(LATER_S)
            finally:
                if store is not None:
                    store.close()
    finally:
        log.close()


def _turns(
    args: argparse.Namespace,
    store: Store,
    identity: str,
    policy: SchedulingPolicy,
    cluster: Cluster,
    tell: Callable[[str, str, str], None],
    stopping: _Stopping,
) -> Iterator[Daemon]:
    """Makes a daemon, and yields it after each turn, until the process is to stop or etcd is away."""
    from elaunch.scheduler.clusters.cluster import ClusterUnavailable
    from elaunch.scheduler.service.advance import WaitLimits
    from elaunch.scheduler.service.daemon import Daemon, DaemonSettings, LeadLost
    from elaunch.scheduler.service.known import KnownSpeeds
    from elaunch.scheduler.service.reports import StoredReports

    limits = WaitLimits(queue_s=args.queue_timeout, stop_s=args.kill_timeout)
    settings = DaemonSettings(args.scheduler, identity, args.rdzv_endpoint, limits)
    reports = StoredReports(store)
    daemon = Daemon(settings, store, cluster, reports, policy, KnownSpeeds(), tell)
    told = ""

    def tell_once(kind: str, text: str) -> None:
        nonlocal told
        if text != told:
            told = text
            tell(kind, "", f"{text}; tried again every {args.interval:g} s")

    try:
        while not stopping.asked:
            try:
                if daemon.lead():
                    daemon.turn()
                    told = ""
                    yield daemon
            except LeadLost as error:
                tell("follows", "", str(error))
            except ClusterUnavailable as error:
                tell_once("cluster_away", str(error))
            except ElaunchError:
                raise
            except Exception as error:  # jobs go on, and the next turn may see something else
                place = traceback.extract_tb(error.__traceback__)[-1]
                tell_once("defect", f"a defect of the scheduler at {place.filename}:{place.lineno}: {error!r}")
            stopping.wait(args.interval)
        daemon.resign()
    finally:
        reports.close()


def _cluster(args: argparse.Namespace, folder: Path) -> Cluster:
    """Returns the cluster that the flags name; no other one is imported."""
    elaunch = tuple(shlex.split(args.elaunch)) or (sys.executable, "-m", "elaunch")
    gpus = args.devices == "gpu"
    if args.cluster == "ray":
        from elaunch.scheduler.clusters.ray import RayCluster, RaySettings

        return RayCluster(RaySettings(args.scheduler, args.ray_address, elaunch, gpus))
    if args.cluster == "kubernetes":
        from elaunch.scheduler.clusters.kubernetes import KubernetesCluster, read_template
        from elaunch.scheduler.clusters.kubernetes_objects import KubernetesSettings

        if not args.pod_template:
            raise UsageError("--cluster=kubernetes needs --pod-template=FILE: a pod with the image of the jobs")
        return KubernetesCluster(
            KubernetesSettings(
                args.scheduler,
                folder,
                tuple(shlex.split(args.elaunch)) or ("elaunch",),  # that of the image
                read_template(args.pod_template),
                device=args.gpu_resource if gpus else "cpu",
                queue=args.kueue_queue,
                context=args.kube_context,
                namespace=args.kube_namespace,
                rack=args.rack_label,
                kind=args.kind_label,
                grace_s=args.kill_timeout,
            )
        )
    from elaunch.scheduler.clusters.slurm import SlurmCluster, SlurmSettings

    return SlurmCluster(SlurmSettings(args.scheduler, folder, elaunch, tuple(shlex.split(args.sbatch)), gpus))


class _Stopping:
    """Whether the process was asked to stop."""

    def __init__(self) -> None:
        self.asked = False

    def note(self, number: int, frame: FrameType | None) -> None:
        self.asked = True

    def wait(self, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while not self.asked and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(0.2, left_s))


def read_policy(name: str, path: str | None) -> SchedulingPolicy:
    """Returns the policy of a name with the settings of a file.

    Raises:
        UsageError: the file cannot be read, or has a setting that there is not.
    """
    from elaunch.scheduler.baselines import Fifo
    from elaunch.scheduler.settings import SuikaSettings
    from elaunch.scheduler.suika import Suika

    kind: type[Suika] | type[Fifo] = Fifo if name == "fifo" else Suika
    if path is None:
        return kind()
    try:
        with open(path, "rb") as file:
            return kind(SuikaSettings(**tomllib.load(file)))
    except (OSError, tomllib.TOMLDecodeError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"--settings {path}: {reason}") from error


def _replace_file(path: str, lines: Iterable[str]) -> None:
    """Writes a file so that whoever reads it sees it whole."""
    new = f"{path}.new"
    with contextlib.suppress(OSError):  # figures are not worth the jobs
        Path(new).write_text("".join(f"{line}\n" for line in lines))
        os.replace(new, path)
