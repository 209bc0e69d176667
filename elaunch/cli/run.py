"""The command `elaunch`: flags and PET_ variables into an AgentConfig, then one agent."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence

from elaunch import __version__, checkpoints
from elaunch.agent import notices
from elaunch.agent.config import (
    HEALTH_INTERVAL_S,
    MASTER_PORT,
    NUMA_MODES,
    PRELOAD,
    AgentConfig,
    DetectionSettings,
    OutputSettings,
    StartSettings,
    StopSettings,
    TrainingSettings,
    WorkerProgram,
    parse_health,
    parse_nproc,
    parse_signals,
)
from elaunch.agent.launch import launch
from elaunch.agent.output.logs import LogSettings, parse_filters, parse_mask, parse_ranks
from elaunch.cli.rendezvous_flags import FOREIGN, count, read_rendezvous
from elaunch.detect import hang
from elaunch.errors import ElaunchError, UsageError
from elaunch.policy import settings as policies
from elaunch.ranges import parse_range

CHECKPOINT_FLAGS = ("--checkpoint-dir", "--checkpoint-every")
NO_ID = "none"  # torchrun's name for a job that was given none


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose flags take their defaults from PET_<NAME>, as torchrun's do."""

    def flag(self, *names: str, in_environment: bool = True, **options: object) -> None:
        """Adds a flag in both spellings, with dashes and with underscores.

        Its default is the value of PET_<NAME> where that is set, unless `in_environment` is False. `options` are
        those of `add_argument`.
        """
        long = next(name for name in names if name.startswith("--"))
        dashed = long.removeprefix("--")
        spellings = dict.fromkeys((*names, long, "--" + dashed.replace("-", "_")))
        dest = dashed.replace("-", "_")
        variable = f"PET_{dest.upper()}"
        value = os.environ.get(variable) if in_environment else None
        if value is not None:
            options["default"] = parse_switch(variable, value) if "action" in options else value
        self.add_argument(*spellings, dest=dest, **options)  # type: ignore[arg-type]


def parse_switch(variable: str, text: str) -> bool:
    """Reads the environment variable of a flag without a value: a number, as for torchrun, or a word.

    Raises:
        UsageError: it is neither.
    """
    word = text.strip().lower()
    if word in ("", "false", "no", "off"):
        return False
    if word in ("true", "yes", "on"):
        return True
    try:
        return int(word) != 0
    except ValueError:
        raise UsageError(f"{variable}={text}: expected 1 or 0, true or false") from None


def parser() -> argparse.ArgumentParser:
    """Returns the command line of elaunch, whose defaults are those of the environment.

    Raises:
        UsageError: a variable of a flag without a value is neither true nor false.
    """
    p = FlagParser(
        prog="elaunch",
        description="Launch a training job whose surviving workers go on when its membership changes.",
        epilog="`elaunch ctl --help`: look at a job that runs, or ask for another plan; `elaunch plan --help`: what a "
        "job would do if workers were lost or joined; scripts of these names are ./ctl and ./plan",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    p.add_argument("--version", action="version", version=f"elaunch {__version__}")
    p.flag("--nnodes", default="1:1", help="number of nodes, or MIN:MAX")
    p.flag("--nproc-per-node", default="1", help="workers on this node: a number, cpu, gpu, npu, xpu or auto")

    p.flag(
        "--rdzv-backend",
        default="",
        help="static: nodes meet at --master-addr and --master-port, each has its --node-rank; c10d: the first node "
        "hosts the rendezvous at --rdzv-endpoint; etcd: the server there. Not given: etcd if there is an endpoint and "
        "no --node-rank, else static",
    )
    p.flag("--rdzv-endpoint", default="", help="HOST:PORT of the rendezvous")
    p.flag(
        "--rdzv-id",
        default=NO_ID,
        help="name of the job; nodes of one job give the same; a job of one node without a name is given one",
    )
    p.flag("--rdzv-conf", default="", help="further settings: key=value,…")
    p.flag("--standalone", action="store_true", default=False, help="one node, with a rendezvous of its own")
    p.flag("--node-rank", default=None, type=int, help="static: rank of this node, 0 to N-1")
    p.flag("--master-addr", default="127.0.0.1", help="static: address of node 0")
    p.flag("--master-port", default=None, type=int, help=f"static: port on node 0; if not given, {MASTER_PORT}")
    p.flag("--local-addr", default="", help="address of this node; default: the one on the route to the endpoint")
    p.flag("--node-name", default="", help="name of this node in identities and logs, unique in the job")

    p.flag(
        "--max-restarts",
        default=None,
        type=int,
        help="replacements of workers on a node, and restarts of the whole job after a failure that memory cannot "
        "mend; not given: workers are replaced as long as steps commit between failures, and there is no restart",
    )
    p.flag("--monitor-interval", default=0.1, type=float, help="no effect: ends of workers are reported by the kernel")
    p.flag(
        "--start-method",
        default="spawn",
        choices=("spawn", "fork", "forkserver"),
        help="no effect",
    )
    p.flag("--role", default="default", help="role of the workers of this node")
    p.flag("--module", "-m", action="store_true", default=False, help="run the script as python -m does")
    p.flag("--no-python", action="store_true", default=False, help="the script is a program, not a Python file")
    p.flag("--run-path", action="store_true", default=False, help="run the script by runpy.run_path")
    p.flag(
        "--virtual-local-rank",
        action="store_true",
        default=False,
        help="each worker sees its own device only, and LOCAL_RANK 0",
    )
    p.flag(
        "--numa-binding",
        default=None,
        choices=NUMA_MODES,
        in_environment=False,
        help="bind each worker to the CPUs near its GPU",
    )
    p.flag("--signals-to-handle", default="SIGTERM,SIGINT,SIGHUP,SIGQUIT", help="signals that end this node's workers")
    p.flag("--shutdown-timeout", default=None, type=float, help="seconds between the signal and SIGKILL for workers")

    p.flag("--log-dir", default=None, help="folder for log files; default: a fresh temporary one")
    p.flag(
        "--redirects",
        "-r",
        default="0",
        help="streams that go into files: 0, 1 (stdout), 2 (stderr), 3, or rank:mask,…",
    )
    p.flag("--tee", "-t", default="0", help="the same, and to the console too")
    p.flag("--local-ranks-filter", default="", help="local ranks whose streams the console shows")
    p.flag("--duplicate-stdout-filters", default="", help="lines of tee'd stdout to duplicate: with one of these")
    p.flag("--duplicate-stderr-filters", default="", help="the same for stderr; ,, is a comma")
    p.flag("--logs-specs", default="", in_environment=False, help="name of a torchrun.logs_specs entry point")
    p.flag("--event-log-handler", default="null", help="null, or console: events are printed to standard error")

    p.add_argument(
        "--events", default=os.environ.get("ELAUNCH_EVENTS"), help="append events to this file; %%n: the node"
    )
    p.add_argument(
        "--checkpoint-dir",
        default=os.environ.get(checkpoints.FOLDER),
        help="folder for checkpoints of a script that uses elaunch, the same for all nodes; the job resumes from there",
    )
    p.add_argument(
        "--checkpoint-every",
        default=os.environ.get(checkpoints.EVERY),
        help=f"steps from one checkpoint to the next; if not given, {checkpoints.DEFAULT_EVERY}",
    )
    p.add_argument(
        "--notice",
        metavar="NAME[:ARG],…",
        default=os.environ.get("ELAUNCH_NOTICE", ""),
        help="who announces that this machine is taken away, so that the node drains before: file:PATH, aws, gcp, "
        "azure, or what a package adds",
    )
    p.add_argument(
        "--policy",
        default=os.environ.get(policies.POLICY, ""),
        help="how a script that uses elaunch goes on after a change: auto, reroute, resize or reparallelize",
    )
    p.add_argument(
        "--consistency",
        default=os.environ.get(policies.CONSISTENCY, ""),
        help="bitwise: no plan changes a bit of the result; fast: gradients are summed in any order",
    )
    p.add_argument(
        "--allow-dvfs",
        action="store_true",
        default=parse_switch(policies.ALLOW_DVFS, os.environ.get(policies.ALLOW_DVFS, "")),
        help="the clocks of devices may be locked, to a higher frequency where one holds up the others",
    )
    for name, variable, what in (("dp", policies.DP, "pipelines"), ("pp", policies.PP, "stages of a pipeline")):
        p.add_argument(
            f"--{name}",
            metavar="MIN:MAX",
            default=os.environ.get(variable, ""),
            help=f"{what} that reparallelize may make",
        )
    p.add_argument(
        "--tp",
        metavar="N,...",
        default=os.environ.get(policies.TP, ""),
        help="numbers of workers that a tensor-parallel group may get besides its own",
    )
    p.add_argument(
        "--profile",
        default=os.environ.get(policies.PROFILE, ""),
        help="file with what the model's layers cost: read at the start, if it is there, and kept up to date",
    )
    p.add_argument(
        "--node-check",
        action="store_true",
        default=parse_switch("ELAUNCH_NODE_CHECK", os.environ.get("ELAUNCH_NODE_CHECK", "")),
        help="before it joins, this node multiplies matrices on each device and reduces over its loopback; one that "
        "fails, or is far slower than its peers, does not join",
    )
    p.add_argument(
        "--health-policy",
        default=os.environ.get("ELAUNCH_HEALTH_POLICY", ""),
        help="when a device of this node is about to fail: drain (its workers leave the job; the default), report (a "
        "line and an event), off (nobody looks)",
    )
    p.add_argument(
        "--health-interval",
        default=os.environ.get("ELAUNCH_HEALTH_INTERVAL", ""),
        help=f"seconds between two looks at the memory of this node; if not given, {HEALTH_INTERVAL_S:g}. GPUs are "
        "looked at every fifth time, disks every tenth",
    )
    p.add_argument(
        hang.FLAG,
        default=os.environ.get(hang.VARIABLE, ""),
        metavar="SECONDS",
        help="of a script that uses elaunch: end a worker that does not go on, nor wait for others, for so long; auto "
        "(default): a limit learnt from the job's steps; off: never",
    )
    p.add_argument(
        "--slow-policy",
        default=os.environ.get(policies.SLOW_POLICY, ""),
        help="what is done about a slow worker of a script that uses elaunch: rebalance, replace, exclude or report",
    )
    p.add_argument(
        "--preload",
        default=os.environ.get("ELAUNCH_PRELOAD", ",".join(PRELOAD)),
        help="modules that the warm parent of replacements imports, separated by commas; empty: no warm parent",
    )
    p.add_argument(
        "--warm-start",
        action="store_true",
        default=parse_switch("ELAUNCH_WARM_START", os.environ.get("ELAUNCH_WARM_START", "")),
        help="the first workers of a node, too, are forks of the warm parent: its modules are imported once",
    )
    p.add_argument("script", help="the training script, module or program")
    p.add_argument("script_args", nargs=argparse.REMAINDER, help="its arguments")
    return p


def parse(argv: Sequence[str] | None = None) -> AgentConfig:
    """Reads the command line and the environment.

    Raises:
        UsageError: a value cannot be used.
        SystemExit: 2, from argparse, with the usage.
    """
    args = parser().parse_args(argv)
    low, high = parse_range(args.nnodes, "--nnodes")
    nproc = parse_nproc(str(args.nproc_per_node))
    rendezvous = read_rendezvous(args, low, high)
    if not args.rdzv_id.isprintable() or not args.rdzv_id:
        raise UsageError(f"--rdzv-id={args.rdzv_id!r}: expected a name of printable characters")
    if args.node_name and not re.fullmatch(r"[A-Za-z0-9._-]+", args.node_name):
        raise UsageError(f"--node-name={args.node_name!r}: expected letters, digits, '.', '_' and '-'")
    if args.module and args.no_python and not args.run_path:
        raise UsageError("--module and --no-python exclude each other")
    _seconds("--monitor-interval", args.monitor_interval)
    timeout = args.shutdown_timeout
    if timeout is None:
        timeout = os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or "30"
    preload = tuple(name for name in args.preload.split(",") if name)
    nameless = args.rdzv_id == NO_ID and rendezvous.backend == "standalone" and rendezvous.master is None
    job = _fresh_id() if nameless else args.rdzv_id
    return AgentConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=nproc,
        job=job,
        rendezvous=rendezvous,
        program=WorkerProgram(
            script=args.script,
            args=tuple(args.script_args),
            module=args.module and not args.run_path,
            no_python=args.no_python and not args.run_path,
            run_path=args.run_path,
        ),
        max_restarts=None if args.max_restarts is None else count("--max-restarts", args.max_restarts),
        node=args.node_name or _node_name(standalone=rendezvous.backend == "standalone"),
        role=args.role,
        local_addr=args.local_addr,
        start=StartSettings(
            numa_binding=args.numa_binding or "",
            virtual_local_rank=args.virtual_local_rank,
            warm=bool(preload),
            warm_start=args.warm_start,
            preload=preload,
        ),
        stop=StopSettings(
            signals=parse_signals(args.signals_to_handle),
            notices=notices.parse(args.notice),
            shutdown_timeout=_seconds("--shutdown-timeout", timeout),
        ),
        output=OutputSettings(
            logs=_logs(args, job),
            logs_specs=args.logs_specs,
            events=args.events,
            events_to_console=args.event_log_handler == "console",
        ),
        detection=DetectionSettings(
            health=parse_health(args.health_policy, args.health_interval),
            hang=hang.parse(args.hang_timeout),
            node_check=args.node_check,
        ),
        training=TrainingSettings(
            checkpoints=checkpoints.parse(args.checkpoint_dir, args.checkpoint_every, CHECKPOINT_FLAGS),
            policy=policies.parse(
                args.policy,
                args.consistency,
                args.allow_dvfs,
                args.profile,
                args.slow_policy,
                args.dp,
                args.pp,
                args.tp,
            ),
        ),
    )


def _logs(args: argparse.Namespace, job: str) -> LogSettings:
    return LogSettings(
        log_dir=args.log_dir or None,
        redirects=parse_mask("--redirects", args.redirects),
        tee=parse_mask("--tee", args.tee),
        local_ranks_filter=parse_ranks("--local-ranks-filter", args.local_ranks_filter),
        duplicate_stdout_filters=parse_filters(args.duplicate_stdout_filters),
        duplicate_stderr_filters=parse_filters(args.duplicate_stderr_filters),
        role=args.role,
        run_id=job,
        prefix_template=os.environ.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"),
        color="NO_COLOR" not in os.environ,
    )


def _fresh_id() -> str:
    """A random UUID, as torchrun names a job that needs no name; the module uuid takes longer to import."""
    digits = secrets.token_hex(16)
    return f"{digits[:8]}-{digits[8:12]}-4{digits[13:16]}-a{digits[17:20]}-{digits[20:]}"


def _seconds(flag: str, text: str | float) -> float:
    number = -1.0
    with contextlib.suppress(ValueError):
        number = float(text)
    if not 0 <= number < float("inf"):
        raise UsageError(f"{flag}={text}: expected a number of seconds")
    return number


def _node_name(standalone: bool) -> str:
    """The host's name, with a suffix that tells agents of one host name apart, also over time."""
    host = re.sub(r"[^A-Za-z0-9.-]", "-", socket.gethostname().split(".")[0]) or "node"
    return "node0" if standalone else f"{host}-{secrets.token_hex(4)}"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command.

    Returns:
        0 when the job ended well; 1 when it or the launcher failed, also for a value that cannot be used. A command
        line that cannot be read exits with 2 and the usage.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["plan"]:
        from elaunch.cli import plan

        return plan.main(arguments[1:])
    if arguments[:1] == ["ctl"]:
        from elaunch.cli import ctl

        code = ctl.main(arguments[1:])
        if argv is None:
            # Threads of gRPC whose calls were ended this instant can keep an interpreter from ending.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        return code
    try:
        config = parse(arguments)
    except UsageError as error:
        return _refuse(error)
    if config.rendezvous.backend == FOREIGN:
        from elaunch.agent.plugins import run_torchs_agent

        run_torchs_agent(arguments)
    try:
        return launch(config)
    except (ElaunchError, OSError) as error:
        return _refuse(error)


def _refuse(error: Exception) -> int:
    from elaunch.failures import record_own_error  # not needed, so not imported, by a job that starts

    record_own_error(error)
    print(f"elaunch: error: {error}", file=sys.stderr)
    return 1
