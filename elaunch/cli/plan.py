"""The command `elaunch plan`: what a job would do if workers were lost, joined or became slow. Nothing is run."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from elaunch.cli.flags.parser import VERBATIM, FlagParser
from elaunch.errors import ElaunchError, UsageError
from elaunch.plan.tiling import Plan, PlanError
from elaunch.policy.candidates.reparallelize import Degrees
from elaunch.policy.candidates.structure import NotPossible
from elaunch.policy.estimate import StepEstimate, estimate_step
from elaunch.policy.profile import Profile, WorkerProfile
from elaunch.policy.select import Choice, SelectorSettings, choose
from elaunch.policy.settings import CONSISTENCIES, POLICIES
from elaunch.ranges import parse_numbers, parse_range
from elaunch.rendezvous.membership import names_text, node_of, slot_of

NEXT_S = SelectorSettings().next_s


@dataclass(frozen=True)
class Situation:
    """What is asked about: the plan before, and who is there afterwards."""

    plan: Plan
    members: tuple[str, ...]
    profile: Profile


def parser() -> argparse.ArgumentParser:
    """Returns the command line of `elaunch plan`."""
    p = FlagParser(
        prog="elaunch plan",
        description="Show what a job would do if workers were lost, joined or became slow; nothing is run.\n\n"
        f"{VERBATIM}elaunch plan --profile=model.json --plan=now.plan --lose=a/0 --svg=after.svg",
    )
    p.add_argument("--profile", required=True, metavar="FILE", help="what layers, workers and links cost, as JSON")
    p.add_argument("--plan", required=True, metavar="FILE", help="the text of the plan by which the job runs")
    p.add_argument("--lose", default="", metavar="WORKER,…", help="workers, slots (node/local_rank) or whole nodes")
    p.add_argument("--join", default="0", metavar="N", help="new nodes of one worker, or NxM: N nodes of M workers")
    p.add_argument("--slow", default="", metavar="WORKER=SPEED,…", help="speeds of workers; 1 is that of the profile")
    p.add_argument("--policy", default="auto", choices=POLICIES, help="the only policy that may be chosen")
    p.add_argument("--consistency", default="fast", choices=CONSISTENCIES, help="bitwise: micro-batches are not cut")
    p.add_argument("--dp", default="", metavar="MIN:MAX", help="pipelines that reparallelize may make")
    p.add_argument("--pp", default="", metavar="MIN:MAX", help="stages of a pipeline that reparallelize makes")
    p.add_argument(
        "--tp",
        default="",
        metavar="N,…",
        help="numbers of workers that a tensor-parallel group may get besides its own",
    )
    p.add_argument(
        "--memory", type=float, metavar="GB", help="1e9 bytes that a worker may use, whatever the profile says"
    )
    p.add_argument("--next", type=float, default=NEXT_S, metavar="S", dest="next_s", help="seconds to the next change")
    p.add_argument("--write", metavar="FILE", help="write the chosen plan, as `elaunch ctl plan --set` reads it")
    p.add_argument("--svg", metavar="FILE", help="draw the plan before and those of all candidates")
    p.add_argument("--json", action="store_true", help="print the decision as it is in the event log")
    return p


def main(argv: Sequence[str]) -> int:
    """Runs the command.

    Returns:
        0; 1 where there is no plan; 2 for values or files that cannot be used.
    """
    return print_answer("elaunch plan", run, parser().parse_args(argv))


def print_answer(name: str, run: Callable[[argparse.Namespace], str], args: argparse.Namespace) -> int:
    """Prints what a command that only computes answers, or why it cannot; returns the exit code, as `main` does."""
    try:
        print(run(args))
    except NotPossible as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except (ElaunchError, PlanError, OSError) as error:
        print(f"{name}: error: {error}", file=sys.stderr)
        return 2
    return 0


def run(args: argparse.Namespace) -> str:
    """Returns what the command prints.

    Raises:
        UsageError: a value cannot be used; names it.
        ProtocolError: the profile cannot be read.
        PlanError: the plan cannot be read, is none, or is of another model than the profile; or there is no plan.
        OSError: a file cannot be read or written.
    """
    here = situation(args)
    settings = _settings(args)
    choice = choose(here.plan, here.plan, here.members, here.profile, settings)
    if args.write:
        Path(args.write).write_text(f"{choice.plan}\n")
    if args.svg:
        Path(args.svg).write_text(pictures(here.plan, choice))
    if args.json:
        return json.dumps(choice.event())
    return table(here, choice)


def situation(args: argparse.Namespace) -> Situation:
    """Returns what is asked about, of the files and flags."""
    plan = Plan.parse(Path(args.plan).read_text())
    plan.validate()
    profile = Profile.load(Path(args.profile))
    profile.check(plan)
    lost = {worker for name in _names(args.lose) for worker in _workers(plan, name, "--lose")}
    speeds = dict(profile.workers)
    for item in _names(args.slow):
        name, _, text = item.partition("=")
        speed = _number(text)
        if not 0 < speed < float("inf"):
            raise UsageError(f"--slow {item}: expected WORKER=SPEED with a number above 0")
        for worker in _workers(plan, name, "--slow"):
            speeds[slot_of(worker)] = replace(speeds.get(slot_of(worker), WorkerProfile()), speed=speed)
    if args.memory is not None:
        if not args.memory > 0:
            raise UsageError(f"--memory={args.memory:g}: expected a number of 1e9 bytes above 0")
        speeds = {slot: replace(worker, memory_bytes=None) for slot, worker in speeds.items()}
        profile = replace(profile, memory_bytes=int(1e9 * args.memory))
    members = tuple(worker for worker in plan.workers if worker not in lost)
    members += _newcomers(args.join, set(map(node_of, plan.workers)))
    if not members:
        raise UsageError(f"--lose={args.lose}: nobody is left")
    return Situation(plan, members, replace(profile, workers=speeds))


def table(here: Situation, choice: Choice) -> str:
    """Returns the candidates for people: the best first, the chosen one marked."""
    batch = here.plan.global_batch_size
    head = ("", "policy", "step s", "samples/s", "bubble %", "moved GB", "stall s", "peak GB", "score")
    rows = [head, _row("", "(before)", batch, estimate_step(here.plan, here.profile))]
    for one in choice.candidates:
        if one.step is not None and one.transition is not None:
            way = _f(one.transition.moved_bytes / 1e9), _f(one.transition.total_s)
            score = "-" if one.rejected else _f(one.score)
            rows.append(_row("*" if one is choice.chosen else "", one.policy, batch, one.step, way, score))
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    lines = [
        "  ".join(cell.ljust(width) if column < 2 else cell.rjust(width)
                  for column, (cell, width) in enumerate(zip(row, widths))).rstrip()
        for row in rows
    ]  # fmt: skip
    refused = [f"{one.policy} is not possible: {one.rejected}" for one in choice.candidates if one.rejected]
    doubts = [f"the profile contradicts itself: {text}" for text in here.profile.contradictions]
    paragraphs = [[choice.reason], lines, refused, doubts]
    return "\n\n".join("\n".join(some) for some in paragraphs if some)


def _row(
    mark: str, name: str, batch: int, step: StepEstimate, way: tuple[str, str] = ("", ""), score: str = ""
) -> tuple[str, ...]:
    times = _f(step.step_s), _f(batch / step.step_s), f"{100 * step.bubble:.1f}"
    return (mark, name, *times, *way, _f(max(step.peak_bytes.values()) / 1e9), score)


def pictures(before: Plan, choice: Choice) -> str:
    """Returns one SVG with the plan before and those of all candidates, one below the other."""
    drawn = [("before", before.to_svg())]
    drawn += [
        (f"{one.policy}{', chosen' if one is choice.chosen else ''}", one.plan.to_svg())
        for one in choice.candidates
        if one.plan is not None
    ]
    body, top = [], 0.0
    for title, svg in drawn:
        body.append(f'<text x="10" y="{top + 18:.0f}" font-weight="bold">{title}</text>')
        body.append(f'<g transform="translate(0 {top + 24:.0f})">{svg}</g>')
        top += 40 + float(svg.partition('height="')[2].partition('"')[0])
    width = drawn[0][1].partition('width="')[2].partition('"')[0]
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top:.0f}" font-family="sans-serif">'
    return "\n".join([head, *body, "</svg>", ""])


def _settings(args: argparse.Namespace) -> SelectorSettings:
    if not args.next_s > 0:
        raise UsageError(f"--next={args.next_s:g}: expected a number of seconds above 0")
    given = {name: parse_range(text, f"--{name}") for name in ("dp", "pp") if (text := getattr(args, name))}
    widths = parse_numbers(args.tp, "--tp", "workers")
    return SelectorSettings(args.policy, args.consistency, Degrees(**given), widths, next_s=args.next_s)


def _names(text: str) -> list[str]:
    return [name for name in (part.strip() for part in text.split(",")) if name]


def _workers(plan: Plan, name: str, flag: str) -> list[str]:
    """The workers that a name stands for: a worker, a slot or a node."""
    for kind in (str, slot_of, node_of):
        if found := [worker for worker in plan.workers if kind(worker) == name]:
            return found
    raise UsageError(f"{flag}: no worker, slot or node {name!r} in the plan, which has {names_text(plan.workers)}")


def _newcomers(text: str, nodes: set[str]) -> tuple[str, ...]:
    first, _, second = text.partition("x")
    if not first.isdecimal() or not (second or "1").isdecimal() or int(second or 1) < 1:
        raise UsageError(f"--join={text}: expected N, or NxM for N nodes of M workers")
    free = (f"new{number}" for number in range(int(first) + len(nodes)) if f"new{number}" not in nodes)
    names = [next(free) for _ in range(int(first))]
    return tuple(f"{node}/{local_rank}#0" for node in names for local_rank in range(int(second or 1)))


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def _f(value: float) -> str:
    return f"{value:.4g}"
