"""What the leader does when the membership changes again and again and no step commits in between. Pure.

    a link fails, its ends live -> a new generation of the same workers, whose links are made anew (a reset)
    REPLACE_AFTER resets in a row -> the worker to which most links fail is replaced, and again after as many more
    GIVE_UP_AFTER resets in a row, or more urgent generations of any cause than deaths can explain -> the job ends

Every count starts anew when a step commits. A worker's own deaths are bounded by its agent
(`elaunch.agent.decisions.lifecycle`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence

from elaunch.rendezvous.membership import BrokenLink, Generation, NodeDoc, Streak, names_text

REPLACE_AFTER = 3
GIVE_UP_AFTER = 10
DEATHS_OF_A_SLOT = 4
"""More urgent generations than this for each worker do not come from workers that die: their agents give up before."""

LINKS_KEPT = 64


def follow(generation: Generation, nodes: Iterable[NodeDoc], reset: bool, doubted: Iterable[BrokenLink] = ()) -> Streak:
    """Returns the streak of the urgent generation that comes after this one.

    Args:
        generation: the present one.
        nodes: reports of the nodes that are here.
        reset: whether the next one loses nobody.
        doubted: links whose ends each say that the other is dead.
    """
    docs = tuple(nodes)
    streak = generation.streak
    if any(doc.progress.committed >= generation.aborts_step_before for doc in docs):
        streak = Streak()
    if generation.hold:
        return streak  # nobody trains, so nothing could commit
    ids = set(generation.ids)
    reported = [*(link for doc in docs for link in doc.peers.broken), *doubted]
    broken = [link for link in reported if {link.worker, link.peer} <= ids]
    kept = tuple(dict.fromkeys((*streak.broken, *broken)))[-LINKS_KEPT:]
    most = max(streak.members, len(ids))
    return Streak(streak.urgent + 1, streak.resets + int(reset), most, kept, streak.replaced)


def suspect(
    streak: Streak, members: Sequence[str], holders: Collection[str], heard: Collection[str] | None = None
) -> str:
    """Returns the member to replace: the one to which links from most others failed; "" where nobody is to go.

    The only holder of the state does not go. Nor does one go, where somebody else could, who is the only one of whom
    anything was heard lately: the others may be lost with their machines. Of equals one goes that is not known to hold
    the state, such as one whose node has fallen silent; of those the last: a joiner, rather than those it came to.

    Args:
        streak: up to the generation to come.
        members: of the present generation, in their order.
        holders: those of them that hold the state of the job.
        heard: those of the holders whose nodes have said that they have heard of the present links; None: all of them.
    """
    if not streak.resets or streak.resets % REPLACE_AFTER:
        return ""
    ends = defaultdict[str, set[str]](set)
    for link in streak.broken:
        ends[link.worker].add(link.peer)
        ends[link.peer].add(link.worker)
    may_go = [worker for worker in members if ends.get(worker) and (set(holders) or set(members)) - {worker}]
    safe = [worker for worker in may_go if worker not in holders or set(holders if heard is None else heard) - {worker}]
    return max(reversed(safe or may_go), key=lambda worker: (len(ends[worker]), worker not in holders), default="")


def why_given_up(streak: Streak, saved: int | None) -> str:
    """Returns why the job ends, with what was tried; "" while it goes on.

    Args:
        streak: up to the generation to come.
        saved: number of steps in the newest checkpoint; None: there is none.
    """
    if streak.resets <= GIVE_UP_AFTER and streak.urgent <= GIVE_UP_AFTER + DEATHS_OF_A_SLOT * streak.members:
        return ""
    tried = f"links were made anew {streak.resets} times"
    if streak.broken:
        pairs = dict.fromkeys(" and ".join(sorted((link.worker, link.peer))) for link in streak.broken)
        tried += f" (they failed between {names_text(tuple(pairs))})"
    tried += f"; {names_text(streak.replaced)} replaced in vain" if streak.replaced else "; nobody could be replaced"
    if saved is None:
        advice = "start the job again from your last checkpoint"
    else:
        advice = f"there is a checkpoint of {saved} steps: start the job again to go on from it"
    return f"no step has committed in {streak.urgent} changes of the membership in a row; {tried}; {advice}"
