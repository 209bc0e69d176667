"""The command `elaunch ctl`: look at a job that runs and what it has measured, ask for another plan, or for nodes back.

It reads and writes the documents of the job in etcd, as a guest: the leader decides, the agents and workers act.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from elaunch.agent import local_jobs
from elaunch.cli import status
from elaunch.cli.commands import open_store, run_command, seconds
from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.cli.request_plan import change_plan
from elaunch.cli.resize import drain, resize
from elaunch.errors import ElaunchError, RequestRefused, UsageError
from elaunch.ranges import parse_range
from elaunch.rendezvous.conf import ETCD_PORT, parse_conf, parse_endpoint
from elaunch.rendezvous.membership import (
    job_prefix,
    names_text,
)
from elaunch.rendezvous.observer import Documents, Observer, find_jobs
from elaunch.rendezvous.store import Store

if TYPE_CHECKING:
    from elaunch.plan import Plan

TIMEOUT_S = 120.0
FOUNDED_S = 2.0  # until a store that nodes have just founded has what they know of the job
LOOK_S = 0.1
MOST_JOBS = 50  # that are named where one is asked for that is not there


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `elaunch ctl`."""
    p = FlagParser(
        prog="elaunch ctl",
        description="Look at a job that runs, or ask it for something. Without --rdzv-endpoint it is the job of this "
        "user that hosts its rendezvous on this machine.\n\n"
        f"{VERBATIM}elaunch ctl status\n"
        f"{VERBATIM}elaunch ctl status --json --rdzv-endpoint=etcd:2379 --rdzv-id=run-17\n"
        f"{VERBATIM}elaunch ctl drain node-b",
    )
    commands = p.add_subparsers(title="commands", required=True, metavar="COMMAND")
    show = commands.add_parser("status", help="how far the job is, its last recovery, its nodes and workers")
    show.set_defaults(run=_status)
    show.add_argument("--json", action="store_true", help="the same for programs")
    top = commands.add_parser("top", help="the same in the whole terminal, drawn again as it changes")
    top.set_defaults(run=_top)
    top.add_argument("--once", action="store_true", help="draw it once; so without a terminal")
    top.add_argument("--interval", metavar="S", type=seconds, default=1.0, help="between frames if nothing changes")
    plan = commands.add_parser("plan", help="show the plan that was asked for, or ask for another one")
    plan.set_defaults(run=_plan)
    plan.add_argument("--set", metavar="FILE", dest="file", help="the text of the plan to go on by")
    plan.add_argument(
        "--timeout",
        metavar="S",
        type=seconds,
        default=TIMEOUT_S,
        help="seconds to wait until the members go by it",
    )
    profile = commands.add_parser("profile", help="what the job has measured of its layers, workers and links")
    profile.set_defaults(run=_profile)
    profile.add_argument("--json", action="store_true", help="print the file that --profile and `elaunch plan` read")
    drain = commands.add_parser("drain", help="have nodes leave at a step boundary; the others go on")
    drain.set_defaults(run=_drain)
    drain.add_argument("nodes", metavar="NODE", nargs="*", help="their names, as `elaunch ctl status` has them")
    drain.add_argument("--all", action="store_true", help="every node: the job saves its state, if it can, and ends")
    resize = commands.add_parser("resize", help="have fewer nodes, which leave at a step boundary, or more")
    resize.set_defaults(run=_resize)
    resize.add_argument("nodes", metavar="N|MIN:MAX", help="from now on, whatever --nnodes said")
    for command in (drain, resize):
        command.add_argument(
            "--timeout",
            metavar="S",
            type=seconds,
            default=TIMEOUT_S,
            help="seconds to wait until nodes have left",
        )
    for command in (show, top, plan, profile, drain, resize):
        add_job_flags(command)
    return p


def add_job_flags(command: FlagParser) -> None:
    """Adds the flags that say which job is meant."""
    command.flag("--rdzv-endpoint", default="", metavar="HOST:PORT", help="the job's etcd, as its agents were told")
    command.flag("--rdzv-id", default="", metavar="ID", help="name of the job, as its agents were told")
    command.flag(
        "--rdzv-conf",
        default="",
        metavar="KEY=VALUE,…",
        help="connect_timeout, user, password, cacert, cert, key, secret_file, node_ca, node_cert and node_key, as its "
        "agents were told; so ELAUNCH_SECRET",
    )


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0 when it is done, 1 when it was refused or not done in time, 2 for a command line that cannot be used.
    """
    args = parser().parse_args(argv)
    told = "interrupted; `elaunch ctl plan` shows which plan was asked for"
    return run_command("elaunch ctl", args.run, args, told)


# -- which job ----------------------------------------------------------------------------------------------------


def find_job(endpoint: str, job: str) -> tuple[str, str]:
    """Returns the endpoint and the id of the job that is meant: what was given, else the one that runs on this machine.

    Raises:
        UsageError: the endpoint is none, or not exactly one such job runs.
    """
    if endpoint:
        for member in endpoint.split(","):
            parse_endpoint(member, ETCD_PORT)
        return endpoint, job or "none"  # as an agent's --rdzv-id is by default
    found = [local for local in local_jobs.running() if job in ("", local.id)]
    if len(found) == 1:
        return found[0].endpoint, found[0].id
    if found:
        what = "--rdzv-endpoint and --rdzv-id" if job else "--rdzv-id"
        raise UsageError(f"{len(found)} jobs run here: {', '.join(map(str, found))}; give {what} of one of them")
    which = f"no job {job!r}" if job else "no job"
    others = names_text([str(local) for local in local_jobs.running()])
    raise UsageError(
        f"{which} of this user with an etcd of its own runs on this machine{others and f', but {others}'}; "
        "give --rdzv-endpoint=HOST:PORT and --rdzv-id=ID of one that runs elsewhere"
    )


@contextlib.contextmanager
def open_job(args: argparse.Namespace) -> Iterator[tuple[Store, str, str]]:
    """The store of the job that is meant, its endpoint, and the job's id."""
    conf = parse_conf(args.rdzv_conf)
    endpoint, job = find_job(args.rdzv_endpoint, args.rdzv_id)
    store = open_store(endpoint, conf, job)
    try:
        _await_settings(store, job)
        if store.next_key(job_prefix(job), "") is None:
            raise _no_such_job(store, endpoint, job)
        yield store, endpoint, job
    finally:
        store.close()


def _await_settings(store: Store, job: str) -> None:
    """Waits a moment for a job without settings: nodes may just have founded this store in the stead of a lost one."""
    end_s = time.monotonic() + FOUNDED_S
    while store.get(f"{job_prefix(job)}config") is None and time.monotonic() < end_s:
        time.sleep(LOOK_S)


def _no_such_job(store: Store, endpoint: str, job: str) -> RequestRefused:
    """Names the jobs that there are, for there is none of this name."""
    what = f"there is no job {job!r} at {endpoint}"
    try:
        found = find_jobs(store, MOST_JOBS)
    except ElaunchError:  # this user may read one job only
        return RequestRefused(f"{what}: check --rdzv-endpoint and --rdzv-id")
    jobs = sorted(set(found) - {job})  # strangers may have left something under its name
    if not jobs:
        return RequestRefused(f"{what}, nor any other: check --rdzv-endpoint")
    more = " and others" if len(found) == MOST_JOBS else ""
    return RequestRefused(f"{what}; the jobs there are {', '.join(jobs)}{more}: give --rdzv-id")


# -- status ---------------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace) -> None:
    with _observed(args) as (observer, endpoint, job):
        documents = observer.documents
    if args.json:
        print(json.dumps(status.as_values(documents, job, endpoint, time.time()), indent=2))
        return
    print(f"job {job} at {endpoint}: {status.describe(documents, time.time())}")
    for name, why in documents.unreadable:
        then = "nothing changes until it is mended" if (name, why) in documents.damaged else "it is ignored"
        print(f"{job_prefix(job)}{name} is no document of this job, {then}: {why}")


def _top(args: argparse.Namespace) -> None:
    from elaunch.cli.top import console, show

    console()  # whether there is one is told before the job is asked
    with _observed(args) as (observer, endpoint, job):
        show(observer, job, endpoint, args.interval, args.once)


@contextlib.contextmanager
def _observed(args: argparse.Namespace) -> Iterator[tuple[Observer, str, str]]:
    """The job that is meant, its endpoint and its id; refused where there is none."""
    with open_job(args) as (store, endpoint, job), contextlib.closing(Observer(store, job)) as observer:
        documents = observer.documents
        if replace(documents, unreadable=documents.damaged) == Documents():
            raise _no_such_job(store, endpoint, job)
        yield observer, endpoint, job


# -- plan -----------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> None:
    plan = read_plan(args.file) if args.file is not None else None
    with open_job(args) as (store, endpoint, job):
        if plan is not None:
            print(change_plan(store, job, plan, args.timeout))
            return
        with contextlib.closing(Observer(store, job)) as observer:
            generation = observer.documents.generation
        if generation is not None and generation.plan_request:
            print(generation.plan)
        else:
            print(f"no plan was asked for in job {job} at {endpoint}", file=sys.stderr)


# -- profile --------------------------------------------------------------------------------------------------------


def _profile(args: argparse.Namespace) -> None:
    from elaunch.cli.profile_table import table
    from elaunch.policy.profile import Profile

    with _observed(args) as (observer, endpoint, job):
        text = observer.documents.profile
    if not text:
        raise RequestRefused(
            f"job {job!r} at {endpoint} has measured nothing yet: scripts that call elaunch.hybrid() or elaunch.init() "
            "measure their first steps"
        )
    print(text if args.json else table(Profile.from_json(text)))


# -- nodes ----------------------------------------------------------------------------------------------------------


def _drain(args: argparse.Namespace) -> None:
    if args.all == bool(args.nodes):
        raise UsageError("elaunch ctl drain: name the nodes that are to leave, or give --all")
    with open_job(args) as (store, _, job):
        print(drain(store, job, args.nodes, args.all, "elaunch ctl drain", args.timeout))


def _resize(args: argparse.Namespace) -> None:
    parse_range(args.nodes, "elaunch ctl resize")
    with open_job(args) as (store, _, job):
        print(resize(store, job, args.nodes, args.timeout))


def read_plan(path: str) -> Plan:
    """Returns the plan that a file holds.

    Raises:
        RequestRefused: the file cannot be read, or is no valid plan.
    """
    from elaunch.plan import Plan, PlanError

    try:
        with open(path, encoding="utf-8") as file:
            plan = Plan.parse(file.read())
        plan.validate()
    except OSError as error:
        raise RequestRefused(f"--set {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RequestRefused(f"--set {path}: expected the text of a plan, found bytes that are no UTF-8") from error
    except PlanError as error:
        raise RequestRefused(f"--set {path}: {_first_line(error)}; mend the file and ask again") from error
    return plan


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
