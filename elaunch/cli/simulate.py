"""The command `elaunch simulate`: what a job would have done over a trace of nodes, and a cluster over one of jobs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.cli.plan import print_answer
from elaunch.errors import UsageError
from elaunch.policy.profile import Profile
from elaunch.ranges import parse_range
from elaunch.scheduler.settings import QUEUE_ORDERS, SuikaSettings
from elaunch.scheduler.speeds import MoveCost, RestartCost
from elaunch.simulator.arrivals import philly_like, scaled_to
from elaunch.simulator.cluster import simulate_cluster
from elaunch.simulator.cluster_model import ClusterSettings
from elaunch.simulator.faults import exponential, present, stragglers
from elaunch.simulator.job import simulate_job
from elaunch.simulator.jobs import cluster_nodes, scaling_jobs
from elaunch.simulator.model import JobModel, Timings
from elaunch.simulator.plots import plot_cluster, plot_jobs
from elaunch.simulator.policies import POLICIES
from elaunch.simulator.report import change_lines, cluster_table, decided_lines, job_lines, job_table
from elaunch.simulator.strategies import STRATEGIES, make_strategy
from elaunch.simulator.traces import Arrival, NodeChange, merged, read_jobs, read_nodes, read_sizes, sized

HOUR_S = 3600.0
DEFAULTS = Timings()
CLUSTER_TIMES = (
    ("--interval", 0.0, "between two looks of the scheduler; 0: it sees everything at once"),
    ("--start", 0.0, "from when a job is given devices until its first step begins"),
    ("--join", 0.0, "until further devices take part; the job goes on with the others meanwhile"),
    ("--leave", 0.0, "until devices that a job gives back, or leaves by its end, are there for others"),
    ("--change", DEFAULTS.change_s, "in which a job does not train when its devices change, beside moving state"),
    ("--detect", DEFAULTS.detect_s, "until the loss of a node is known"),
)


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `elaunch simulate`."""
    p = FlagParser(
        prog="elaunch simulate",
        description="Play a job, or a cluster of jobs, through on a simulated clock; nothing is run. Plans are chosen "
        "and priced, and devices shared out, by the code that does it for real ones.\n\n"
        f"{VERBATIM}elaunch simulate job --profile=model.json --batch=512 --trace=spot.csv\n"
        f"{VERBATIM}elaunch simulate job --profile=model.json --batch=512 --nodes=32 --mtbf=100 --hours=24 "
        "--strategies=auto,restart\n"
        f"{VERBATIM}elaunch simulate cluster --jobs=jobs.csv --nodes=16x8 --policies=none,suika\n"
        f"{VERBATIM}elaunch simulate cluster --arrivals=2000 --nodes=125x8 --hours=24",
    )
    commands = p.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _job_flags(commands.add_parser("job", help="one job whose nodes fail, come and go"))
    _cluster_flags(commands.add_parser("cluster", help="many jobs that share devices"))
    return p


def _job_flags(p: argparse.ArgumentParser) -> None:
    p.set_defaults(run=_job)
    model = p.add_argument_group("the job")
    model.add_argument("--profile", required=True, metavar="FILE", help="what layers, workers and links cost, as JSON")
    model.add_argument("--batch", required=True, type=int, metavar="N", help="samples of a step")
    model.add_argument("--micro-batch", default=1, type=int, metavar="N", help="samples of a micro-batch")
    model.add_argument("--workers-per-node", default=1, type=int, metavar="N", help="workers of a node")
    model.add_argument("--nnodes", default="1:100000", metavar="MIN:MAX", help="nodes that it needs, and can use")
    model.add_argument("--dp", type=int, metavar="N", help="pipelines of its first plan; the fastest if not given")
    model.add_argument("--pp", type=int, metavar="N", help="stages of its first plan; the fastest if not given")
    model.add_argument("--memory", type=float, metavar="GB", help="1e9 bytes that a worker may use")
    model.add_argument("--copies", default=1, type=int, metavar="N", help="copies of the optimizer's state elsewhere")
    nodes = p.add_argument_group("its nodes", "from a file, or made up")
    nodes.add_argument("--trace", metavar="FILE", help="lines of MILLISECONDS,add|remove,NODE, or of JSON lists")
    nodes.add_argument("--sizes", metavar="FILE", help='JSON list of {"time": minutes, "size": workers}')
    nodes.add_argument("--nodes", default=0, type=int, metavar="N", help="so many nodes from the beginning on")
    nodes.add_argument("--mtbf", type=float, metavar="H", help="hours after which a node fails, in the mean")
    nodes.add_argument("--repair", type=float, metavar="H", help="hours until it is back; never if not given")
    nodes.add_argument("--slow-per-hour", default=0.0, type=float, metavar="N", help="times that a node gets slow")
    nodes.add_argument("--slow-speed", default="0.5:0.9", metavar="MIN:MAX", help="of a slow node; 1 is as usual")
    nodes.add_argument("--slow-for", default=600.0, type=float, metavar="S", help="seconds of it, in the mean")
    nodes.add_argument("--seed", default=0, type=int, metavar="N", help="of what is made up")
    nodes.add_argument("--hours", type=float, metavar="H", help="of the simulation; to the trace's end if not given")
    ways = p.add_argument_group("how it goes on")
    ways.add_argument(
        "--strategies", default="auto,restart", metavar="NAME,…", help=f"to compare: {', '.join(STRATEGIES)}"
    )
    ways.add_argument("--notice", default=0.0, type=float, metavar="S", help="seconds before a node leaves it says so")
    ways.add_argument("--detect", default=DEFAULTS.detect_s, type=float, metavar="S", help="until a loss is known")
    ways.add_argument(
        "--decide",
        default=str(DEFAULTS.decide_s),
        metavar="S",
        help="of choosing a plan; `measured`: as long as it takes here",
    )
    ways.add_argument("--join", default=DEFAULTS.join_s, type=float, metavar="S", help="until a new node can train")
    ways.add_argument("--restart", default=DEFAULTS.restart_s, type=float, metavar="S", help="of processes anew")
    ways.add_argument(
        "--storage", default=DEFAULTS.storage_bytes_per_s / 1e9, type=float, metavar="GB/S", help="reading a checkpoint"
    )
    ways.add_argument(
        "--checkpoint-every", default=DEFAULTS.checkpoint_every_s, type=float, metavar="S", help="between checkpoints"
    )
    _output_flags(p)


def _cluster_flags(p: argparse.ArgumentParser) -> None:
    p.set_defaults(run=_cluster)
    jobs = p.add_argument_group("the jobs", "from a file, or made up")
    jobs.add_argument("--jobs", metavar="FILE", help="CSV with submit_s, duration_s, num_gpus and others")
    jobs.add_argument("--arrivals", default=0, type=int, metavar="N", help="so many jobs, as in Microsoft's Philly")
    jobs.add_argument("--hours", default=24.0, type=float, metavar="H", help="in which those that are made up come")
    jobs.add_argument(
        "--load",
        type=float,
        metavar="PART",
        help="makes all jobs longer or shorter to ask for this part of the devices",
    )
    jobs.add_argument("--most", default=8, type=int, metavar="N", help="a job can use N times what it asks for")
    jobs.add_argument(
        "--scaling", default=0.9, type=float, metavar="PART", help="of twice the speed, on twice the devices"
    )
    jobs.add_argument("--state", default=100.0, type=float, metavar="GB", help="parameters and optimizer of a job")
    nodes = p.add_argument_group("the cluster")
    nodes.add_argument("--nodes", required=True, metavar="NxD", help="N nodes of D devices")
    nodes.add_argument("--rack", default=16, type=int, metavar="N", help="nodes of a rack")
    nodes.add_argument("--link", default=25.0, type=float, metavar="GB/S", help="of a device, to other nodes")
    nodes.add_argument(
        "--trace", metavar="FILE", help="lines of MILLISECONDS,add|remove|drain,NODE; nodes are n1, n2, …"
    )
    nodes.add_argument("--mtbf", type=float, metavar="H", help="hours after which a node fails, in the mean")
    nodes.add_argument("--repair", default=1.0, type=float, metavar="H", help="hours until it is back")
    nodes.add_argument("--seed", default=0, type=int, metavar="N", help="of what is made up")
    ways = p.add_argument_group("how it is shared out")
    ways.add_argument("--policies", default="none,suika", metavar="NAME,…", help=f"to compare: {', '.join(POLICIES)}")
    ways.add_argument("--aggressiveness", default=1.0, type=float, metavar="N", help="lambda of Suika's threshold")
    ways.add_argument("--queue", default="fifo", choices=QUEUE_ORDERS, help="which waiting job starts first")
    for flag, default, text in CLUSTER_TIMES:
        ways.add_argument(flag, default=default, type=float, metavar="S", help=text)
    ways.add_argument("--restart", default=DEFAULTS.restart_s, type=float, metavar="S", help="of processes anew")
    ways.add_argument(
        "--storage", default=DEFAULTS.storage_bytes_per_s / 1e9, type=float, metavar="GB/S", help="of checkpoints"
    )
    _output_flags(p)


def _output_flags(p: argparse.ArgumentParser) -> None:
    output = p.add_argument_group("what comes out")
    output.add_argument(
        "--changes", action="store_true", help="a line for each change, and for each job of a cluster, too"
    )
    output.add_argument("--json", metavar="FILE", help="write all of it; '-': print it and nothing else")
    output.add_argument("--plot", metavar="FILE", help="draw it (.png, .svg, .pdf); needs matplotlib")


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0; 1 where a job cannot be trained at all; 2 for values or files that cannot be used.
    """
    args = parser().parse_args(argv)
    return print_answer("elaunch simulate", args.run, args)


def _job(args: argparse.Namespace) -> str:
    job = _model(args)
    changes, end_s = _nodes(args)
    timings = Timings(
        detect_s=_at_least("--detect", args.detect),
        decide_s=_decide_s(args.decide),
        join_s=_at_least("--join", args.join),
        restart_s=_at_least("--restart", args.restart),
        storage_bytes_per_s=1e9 * _above("--storage", args.storage),
        checkpoint_every_s=_above("--checkpoint-every", args.checkpoint_every),
        notice_s=_at_least("--notice", args.notice),
    )
    runs = [
        simulate_job(job, make_strategy(name, timings), changes, end_s, timings)
        for name in names_of(args.strategies, STRATEGIES, "--strategies")
    ]
    if args.plot:
        plot_jobs(runs, Path(args.plot))
    if args.json:
        text = json.dumps({"model": job.profile.name, "runs": [run.document() for run in runs]})
        if args.json == "-":
            return text
        Path(args.json).write_text(f"{text}\n")
    lines = [job_table(runs)]
    if args.changes:
        lines += [change_lines(run) for run in runs]
    return "\n\n".join(lines)


def _cluster(args: argparse.Namespace) -> str:
    count, _, per_node = args.nodes.partition("x")
    if not (count.isdecimal() and per_node.isdecimal() and int(count) and int(per_node)):
        raise UsageError(f"--nodes={args.nodes}: expected NxD, for N nodes of D devices")
    nodes = cluster_nodes(int(count), int(per_node), max(1, args.rack))
    arrivals = _arrivals(args, int(count) * int(per_node))
    moving = MoveCost(
        _at_least("--change", args.change), 1e9 * _at_least("--state", args.state), 1e9 * _above("--link", args.link)
    )
    restart = RestartCost(
        _at_least("--restart", args.restart), 1e9 * args.state, 1e9 * _above("--storage", args.storage)
    )
    settings = SuikaSettings(queue=args.queue, aggressiveness=_at_least("--aggressiveness", args.aggressiveness))
    names = [node.name for node in nodes]
    changes = read_nodes(Path(args.trace), names) if args.trace else []
    if args.mtbf is not None:
        span_s = 4 * max(one.at_s + one.duration_s for one in arrivals)
        mtbf_s, repair_s = HOUR_S * _above("--mtbf", args.mtbf), HOUR_S * _above("--repair", args.repair)
        changes += exponential(names, mtbf_s, span_s, args.seed, repair_s)
    runs = []
    for name in names_of(args.policies, list(POLICIES), "--policies"):
        way = POLICIES[name]
        cost = moving if way.moves else restart
        jobs = [way.job(one) for one in scaling_jobs(arrivals, int(per_node), args.most, args.scaling, cost)]
        run_settings = ClusterSettings(
            interval_s=max(way.interval_s, _at_least("--interval", args.interval)),
            start_s=_at_least("--start", args.start),
            join_s=_at_least("--join", args.join),
            leave_s=_at_least("--leave", args.leave),
            detect_s=_at_least("--detect", args.detect),
            checkpoint_every_s=0.0 if way.moves else DEFAULTS.checkpoint_every_s,
        )
        runs.append(simulate_cluster(jobs, nodes, way.make(settings), name, merged(changes), settings=run_settings))
    if args.plot:
        plot_cluster(runs, Path(args.plot))
    if args.json:
        text = json.dumps({"runs": [run.document() for run in runs]})
        if args.json == "-":
            return text
        Path(args.json).write_text(f"{text}\n")
    lines = [cluster_table(runs)]
    if args.changes:
        lines += [text for run in runs for text in (job_lines(run), decided_lines(run))]
    return "\n\n".join(lines)


def _arrivals(args: argparse.Namespace, devices: int) -> list[Arrival]:
    if bool(args.jobs) == bool(args.arrivals):
        raise UsageError("expected one of --jobs and --arrivals")
    for flag, value, least in (("--arrivals", args.arrivals, 0), ("--most", args.most, 1)):
        if value < least:
            raise UsageError(f"{flag}={value}: expected a whole number of {least} or more")
    if not 0.5 <= args.scaling <= 1:
        raise UsageError(f"--scaling={args.scaling:g}: expected a number from 0.5 (no faster) to 1 (twice as fast)")
    if args.jobs:
        found = read_jobs(Path(args.jobs))
        within_s = max(one.at_s for one in found) or max(one.duration_s for one in found)
    else:
        within_s = HOUR_S * _above("--hours", args.hours)
        found = philly_like(args.arrivals, within_s, args.seed)
    if args.load is not None:
        found = scaled_to(found, _above("--load", args.load) * devices * within_s)
    return found


def _model(args: argparse.Namespace) -> JobModel:
    profile = Profile.load(Path(args.profile))
    if args.memory is not None:
        profile = replace(profile, memory_bytes=int(1e9 * _above("--memory", args.memory)))
    for flag, value in (
        ("--batch", args.batch),
        ("--micro-batch", args.micro_batch),
        ("--workers-per-node", args.workers_per_node),
        ("--copies", args.copies),
        ("--dp", 1 if args.dp is None else args.dp),
        ("--pp", 1 if args.pp is None else args.pp),
    ):
        if value < 1:
            raise UsageError(f"{flag}={value}: expected a whole number of 1 or more")
    if args.micro_batch > args.batch:
        raise UsageError(f"--micro-batch={args.micro_batch} is more than --batch={args.batch}")
    low, high = parse_range(args.nnodes, "--nnodes")
    return JobModel(
        profile, args.batch, args.micro_batch, args.workers_per_node, low, high, args.dp, args.pp, args.copies
    )


def _nodes(args: argparse.Namespace) -> tuple[list[NodeChange], float]:
    """Returns what happens to the nodes, and the end of the simulation in seconds."""
    given = [
        flag for flag, value in (("--trace", args.trace), ("--sizes", args.sizes), ("--nodes", args.nodes)) if value
    ]
    if len(given) != 1:
        raise UsageError(f"expected one of --trace, --sizes and --nodes, found {' and '.join(given) or 'none of them'}")
    end_s = None if args.hours is None else HOUR_S * _above("--hours", args.hours)
    if args.trace:
        changes = read_nodes(Path(args.trace))
        names = list(dict.fromkeys(node for change in changes for node in change.joined))
        end_s = changes[-1].at_s if end_s is None else end_s
    elif args.sizes:
        sizes = read_sizes(Path(args.sizes))
        changes, names = sized(sizes, args.workers_per_node), []
        end_s = sum(length_s for length_s, _ in sizes) if end_s is None else end_s
    else:
        names = [f"node{number}" for number in range(args.nodes)]
        changes, end_s = present(names), 24 * HOUR_S if end_s is None else end_s
    if end_s <= 0:
        raise UsageError("the trace has no length: give --hours")
    if args.mtbf is not None:
        if not args.nodes:
            raise UsageError("--mtbf is for nodes that are made up: give --nodes")
        repair_s = None if args.repair is None else HOUR_S * _above("--repair", args.repair)
        changes += exponential(names, HOUR_S * _above("--mtbf", args.mtbf), end_s, args.seed, repair_s)
    if args.slow_per_hour:
        low, high = _speeds(args.slow_speed)
        per_hour, lasting_s = _at_least("--slow-per-hour", args.slow_per_hour), _above("--slow-for", args.slow_for)
        changes += stragglers(names, per_hour, (low, high), lasting_s, end_s, args.seed)
    return merged(changes), end_s


def names_of(text: str, known: Sequence[str], flag: str) -> list[str]:
    """Reads a list of known names.

    Raises:
        UsageError: one is not known, or there is none.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise UsageError(f"{flag}={name}: expected some of {', '.join(known)}")
    if not names:
        raise UsageError(f"{flag}={text}: expected some of {', '.join(known)}")
    return list(dict.fromkeys(names))


def _speeds(text: str) -> tuple[float, float]:
    low, _, high = text.partition(":")
    try:
        found = float(low), float(high or low)
    except ValueError:
        found = 0.0, 0.0
    if not 0 < found[0] <= found[1] < float("inf"):
        raise UsageError(f"--slow-speed={text}: expected MIN:MAX with 0 < MIN <= MAX")
    return found


def _decide_s(text: str) -> float | None:
    if text == "measured":
        return None
    try:
        found = float(text)
    except ValueError:
        raise UsageError(f"--decide={text}: expected a number of 0 or more, or `measured`") from None
    return _at_least("--decide", found)


def _at_least(flag: str, value: float) -> float:
    if not 0 <= value < float("inf"):
        raise UsageError(f"{flag}={value:g}: expected a number of 0 or more")
    return value


def _above(flag: str, value: float) -> float:
    if not 0 < value < float("inf"):
        raise UsageError(f"{flag}={value:g}: expected a number above 0")
    return value
