"""The command `elaunch`: flags and PET_ variables into an AgentConfig, then one agent."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import re
import secrets
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from elaunch import checkpoints, replica_check
from elaunch.agent import notices
from elaunch.agent.config import (
    ALL_INTERFACES,
    LOOPBACK,
    AgentConfig,
    DetectionSettings,
    OutputSettings,
    StartSettings,
    StopSettings,
    TrainingSettings,
    WorkerProgram,
    parse_address,
    parse_health,
    parse_nproc,
    parse_signals,
)
from elaunch.agent.launch import launch
from elaunch.agent.output.logs import LogSettings, parse_filters, parse_mask, parse_ranks
from elaunch.cli.flags.launcher import NO_ID, parser
from elaunch.cli.flags.parser import where_to_read
from elaunch.cli.rendezvous import slurm
from elaunch.cli.rendezvous.flags import FOREIGN, count, read_rendezvous
from elaunch.detect import hang
from elaunch.errors import ElaunchError, UsageError
from elaunch.policy import collectives
from elaunch.policy import settings as policies
from elaunch.ranges import parse_range
from elaunch.rendezvous.security import users
from elaunch.rendezvous.security.secret import read_security

MAX_EXIT_CODE = 255

COMMANDS = ("ctl", "plan", "schedule", "simulate", "trace", "ui")
"""Modules beside this one: the first word of a command line that is not that of a job."""


def parse(argv: Sequence[str] | None = None) -> AgentConfig:
    """Reads the command line and the environment.

    Raises:
        UsageError: a value cannot be used.
        SystemExit: 2, from argparse, with the usage.
    """
    flags = parser()
    own, script_args = flags.split_at_script(sys.argv[1:] if argv is None else argv)
    args = flags.parse_args(own)
    if args.rdzv_backend == slurm.BACKEND:
        flags.use_defaults(slurm.step_defaults(os.environ, args.spares))
        args = flags.parse_args(own)
        args.rdzv_backend = "c10d"
        args.failure_domain = args.failure_domain or slurm.failure_domain(os.environ)
    low, high = parse_range(args.nnodes, "--nnodes")
    nproc = parse_nproc(str(args.nproc_per_node))
    rendezvous = read_rendezvous(args, low, high)
    of_user = partial(users.find, os.environ, _say) if rendezvous.is_hosted and not rendezvous.is_within else bytes
    security = read_security(rendezvous.conf.etcd.node, os.environ, args.link_encryption, of_user)
    rendezvous = replace(rendezvous, security=security)
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
            args=tuple(script_args),
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
            left_code=_left_code(args.left_exit_code),
        ),
        output=OutputSettings(
            logs=_logs(args, job),
            logs_specs=args.logs_specs,
            events=args.events,
            events_to_console=args.event_log_handler == "console",
            metrics=parse_address(args.metrics_port, "--metrics-port", ALL_INTERFACES),
            ui=parse_address(args.ui_port, "--ui-port", LOOPBACK),
        ),
        detection=DetectionSettings(
            health=parse_health(args.health_policy, args.health_interval),
            hang=hang.parse(args.hang_timeout),
            node_check=args.node_check,
        ),
        training=TrainingSettings(
            checkpoints=checkpoints.parse(args.checkpoint_dir, args.checkpoint_every, checkpoints.FLAGS),
            replica_check=replica_check.parse(args.check_replicas, "--check-replicas"),
            collectives=collectives.parse(args.collectives, "--collectives"),
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


def _say(line: str) -> None:
    print(f"[elaunch] {line}", file=sys.stderr, flush=True)


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


def _left_code(text: str) -> int:
    code = count("--left-exit-code", text)
    if code > MAX_EXIT_CODE:
        raise UsageError(f"--left-exit-code={text}: expected a number of at most {MAX_EXIT_CODE}")
    return code


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
    if "_ARGCOMPLETE" in os.environ and argv is None:
        from elaunch.cli import completion

        completion.answer()
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] and arguments[0] in COMMANDS:
        code: int = importlib.import_module(f"elaunch.cli.{arguments[0]}").main(arguments[1:])
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
    if isinstance(error, UsageError):
        print(where_to_read("elaunch"), file=sys.stderr)
    return 1
