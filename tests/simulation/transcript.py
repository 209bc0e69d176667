"""What happened in a simulated job, as events, and as text that a person reads from top to bottom.

Events are kept as they are and become text only where somebody reads them: in a committed transcript
(`tests/data/transcripts`), or when a simulated job fails. Lines that say the same of several workers become one line,
and commits become one line for each run of steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from elaunch.rendezvous.membership import Generation, GenerationStage, NodeDoc, PeerFaults, WorkerState

TOGETHER_S = 0.05
"""What several workers do within this time may stand in one line."""

UNTIL_S = 0.05
"""A line of commits that took longer says when the last one came."""


@dataclass(frozen=True, slots=True)
class Said:
    """Somebody, `who`, does what `text` says; its first word is a verb in the third person."""

    t_s: float
    who: str
    text: str
    of_worker: bool = False

    def __str__(self) -> str:
        return f"{self.who} {self.text}".strip()


@dataclass(frozen=True, slots=True)
class Reported:
    """A node wrote its report; `before` is the one that it had in the store."""

    t_s: float
    before: NodeDoc | None
    after: NodeDoc

    def __str__(self) -> str:
        text = report_text(self.before, self.after)
        return f"{self.after.node} reports: {text}" if text else ""


@dataclass(frozen=True, slots=True)
class Announced:
    """The leader wrote a generation."""

    t_s: float
    leader: str
    before: Generation | None
    after: Generation

    def __str__(self) -> str:
        return f"{self.leader} writes {generation_text(self.before, self.after)}"


@dataclass(frozen=True, slots=True)
class Committed:
    """A worker commits a step as a member of a generation."""

    t_s: float
    worker: str
    step: int
    generation: Generation

    def __str__(self) -> str:
        return f"{self.worker} commits step {self.step}"


Event = Said | Reported | Announced | Committed


def render(events: Sequence[Event]) -> list[str]:
    """Returns the lines of a transcript, each with its time in seconds."""
    lines = list[_Line]()
    for event in _with_whole_commits(events):
        _append(lines, event)
    return [str(line) for line in lines]


def report_text(before: NodeDoc | None, after: NodeDoc) -> str:
    """Returns what a report says that the one before did not; "" where that changes nothing for anybody."""
    if before is None or before.progress.attempt > after.progress.attempt:
        before = NodeDoc(after.node, after.host, after.slots)
    parts = list[str]()
    if after.progress.attempt != before.progress.attempt:
        parts.append(f"no worker of the attempt before {after.progress.attempt} is left")
    states = dict[WorkerState, list[str]]()
    former = {worker.id: worker.state for worker in before.workers}
    for worker in after.workers:
        if former.pop(worker.id, None) is not worker.state:
            states.setdefault(worker.state, []).append(worker.id)
    parts += [f"{', '.join(ids)} {state.value}" for state, ids in states.items()]
    if former and after.progress.attempt == before.progress.attempt:
        parts.append(f"{', '.join(former)} no more")
    if after.cause != before.cause and after.cause:
        parts.append(f'cause "{after.cause}"')
    parts += _trouble(before.peers, after.peers)
    former_departure, departure = before.departure, after.departure
    parts += [f"{worker} is to leave" for worker in departure.evicted if worker not in former_departure.evicted]
    if departure.joined > former_departure.joined:
        parts.append(f"all its members have entered generation {departure.joined}")
    if after.progress.committed > before.progress.committed:
        parts.append(f"a step has committed in generation {after.progress.committed}")
    if after.progress.plan_request not in ("", before.progress.plan_request):
        parts.append(f"all its members go by plan {after.progress.plan_request}")
    if departure.sick and not former_departure.sick:
        parts.append(f"sick ({departure.sick})")
    if after.draining and not before.draining:
        parts.append("draining")
    for word in ("finished", "failed"):
        if getattr(after.summary, word) and not getattr(before.summary, word):
            parts.append(word)
    return "; ".join(parts)


def _trouble(before: PeerFaults, after: PeerFaults) -> list[str]:
    parts = [f"{worker} is dead" for worker in after.unreachable if worker not in before.unreachable]
    parts += [f"the link of {link.worker} to {link.peer} failed" for link in after.broken if link not in before.broken]
    if after.reset_generation > before.reset_generation:
        parts.append(f"links of generation {after.reset_generation} have to be made anew")
    if after.cut != before.cut:
        cut = ", ".join(one.node for one in after.cut)
        parts.append(f"nothing passes between it and {cut}" if cut else "it reaches all nodes again")
    return parts


def generation_text(before: Generation | None, after: Generation) -> str:
    """Returns a generation in two lines: what it is, and what led to it."""
    kind = [after.stage.value]
    if after.stage is GenerationStage.TRAIN:
        kind.append("urgent" if after.aborts_step_before == after.number else "planned")
    if after.hold:
        kind.append("hold")
    if after.attempt:
        kind.append(f"attempt {after.attempt}")
    if after.restarts.count:
        kind.append(f"restarts {after.restarts.count}")
    changes = list[str]()
    if before is not None and before.stage is after.stage is GenerationStage.TRAIN:
        lost = [one for one in before.ids if one not in (*after.ids, *after.leaving)]
        joiners = [one for one in after.ids if one not in before.ids]
        changes += [f"{what} {', '.join(ids)}" for what, ids in (("without", lost), ("joiners", joiners)) if ids]
    if after.standby:
        changes.append(f"standby {', '.join(after.standby)}")
    if after.leaving:
        changes.append(f"leaving {', '.join(after.leaving)}")
    if after.streak.resets and after.aborts_step_before == after.number:
        changes.append(f"resets in a row {after.streak.resets}")
    if after.plan_request:
        changes.append(f"plan {after.plan_request}")
    if after.cause != "start":
        changes.append(f'cause "{after.cause}"')
    members = f": {' '.join(after.ids)}" if after.ids else ""
    return "\n".join(
        [f"generation {after.number} ({', '.join(kind)}){members}", *(["; ".join(changes)] if changes else [])]
    )


@dataclass(slots=True)
class _Line:
    t_s: float
    who: list[str]
    text: str
    of_worker: bool = False
    run: tuple[Generation, int, int] | None = None  # of commits on all members: generation, first and last step
    end_s: float = 0.0

    def __str__(self) -> str:
        if self.run is not None:
            generation, first, last = self.run
            steps = f"step {first} commits" if first == last else f"steps {first}..{last} commit"
            members = {1: "the only member", 2: "both members"}.get(
                len(generation.ids), f"all {len(generation.ids)} members"
            )
            end = f", the last at {self.end_s:.3f}" if self.end_s - self.t_s > UNTIL_S else ""
            text = f"{steps} on {members}{end}"
        else:
            text = " ".join([*([names(self.who)] if self.who else []), plural(self.text, len(self.who))])
        return f"{self.t_s:8.3f}  " + text.replace("\n", f"\n{'':14}")


def _with_whole_commits(events: Iterable[Event]) -> list[Event | list[Committed]]:
    """Put the commits of a step in a generation where the first of them stands; where some are missing, the last."""
    steps = dict[tuple[int, int], list[Committed]]()
    for event in events:
        if isinstance(event, Committed):
            steps.setdefault((event.generation.number, event.step), []).append(event)
    whole = list[Event | list[Committed]]()
    for event in events:
        if not isinstance(event, Committed):
            whole.append(event)
        else:
            commits = steps[event.generation.number, event.step]
            if event is commits[0 if len(commits) == len(event.generation.ids) else -1]:
                whole.append(commits)
    return whole


def _append(lines: list[_Line], event: Event | list[Committed]) -> None:
    if isinstance(event, list):
        one, end_s = event[0], event[-1].t_s
        if len(event) < len(one.generation.ids):
            who = names([each.worker for each in event])
            lines.append(_Line(end_s, [], f"step {one.step} commits on {who} only"))
            return
        before = lines[-1].run if lines else None
        if before is not None and before[0].number == one.generation.number and before[2] + 1 == one.step:
            lines[-1].run, lines[-1].end_s = (before[0], before[1], one.step), end_s
        else:
            lines.append(_Line(one.t_s, [], "", run=(one.generation, one.step, one.step), end_s=end_s))
    elif isinstance(event, Said):
        if event.text.startswith("says:") and event.text.endswith(("workers go on", "worker goes on")):
            return  # what the generation says as its cause
        last = lines[-1] if lines else None
        if last and last.who == [event.who] and last.text.startswith("starts ") and event.text.startswith("starts "):
            last.text += f", {event.text.removeprefix('starts ')}"
            return
        if not _merge(lines, event):
            lines.append(_Line(event.t_s, [event.who] if event.who else [], event.text, event.of_worker))
    elif text := str(event):
        lines.append(_Line(event.t_s, [], text))


def _merge(lines: list[_Line], event: Said) -> bool:
    """Add a worker or an agent to a line that says the same.

    What workers do may be told out of order among different workers, but never for one of them, and nothing is moved
    across what an agent or the leader writes.
    """
    for line in reversed(lines):
        if event.t_s - line.t_s > TOGETHER_S or not event.who:
            return False
        if (line.text, line.of_worker) == (event.text, event.of_worker) and line.who and event.who not in line.who:
            line.who.append(event.who)
            return True
        if not (event.of_worker and line.of_worker) or event.who in line.who:
            return False
    return False


def names(who: Sequence[str]) -> str:
    return " and ".join([", ".join(who[:-1]), who[-1]]) if len(who) > 1 else who[0]


def plural(text: str, count: int) -> str:
    """Returns a sentence without its subject, in the plural where it has more than one."""
    if count < 2:
        return text
    verb, space, rest = text.partition(" ")
    mark = ":" if verb.endswith(":") else ""
    verb = verb.removesuffix(":")
    for one, many in (("is", "are"), ("has", "have")):
        if verb == one:
            return f"{many}{mark}{space}{rest}"
    if verb.endswith("ies"):
        verb = f"{verb.removesuffix('ies')}y"
    else:
        verb = verb.removesuffix("es" if verb.endswith(("shes", "oes")) else "s")
    return f"{verb}{mark}{space}{rest}"
