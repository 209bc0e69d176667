"""Whether processes of a job take more and more: memory, descriptors, threads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

MB = 1_000_000
LOOKS = 8
"""How often a process must have been looked at, once after each fault.

With fewer, what is kept of each fault, such as one descriptor, would stay within what is allowed. One worker of each
job and its agent live long enough (`tests.soak.schedule.Round`).
"""
YOUNG = 3
"""What a worker that has been looked at so seldom has is not left over from faults: the plan needs it."""
SETTLES = 2
"""The first looks at a process are not compared: it may still settle."""


@dataclass(frozen=True)
class Look:
    """What a process has: resident bytes, open descriptors, threads."""

    memory: int
    files: int
    threads: int


ALLOWED = {"agent": Look(6 * MB, 4, 8), "worker": Look(24 * MB, 8, 4)}
"""How much more it may have at the end: caches of the allocator, a link that is being made."""


class Growth:
    """What processes had, each time that the job was whole."""

    def __init__(self) -> None:
        self._looks: dict[tuple[str, str, int], list[tuple[float, Look, Counter[str]]]] = {}

    def look(self, kind: str, name: str, pid: int) -> None:
        """Looks at a process, which is an `agent` or a `worker`."""
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                look = Look(process.memory_info().rss, process.num_fds(), process.num_threads())
        except psutil.NoSuchProcess:
            return
        self._looks.setdefault((kind, name, pid), []).append((time.monotonic(), look, held(pid)))

    def told(self) -> str:
        """Returns all looks at all processes, a line each."""
        return "".join(
            f"{kind} {name}: "
            + "; ".join(f"{look.memory // MB} MB {look.files} files {look.threads} threads" for _, look, _ in looks)
            + "\n"
            for (kind, name, _), looks in self._looks.items()
        )

    def judged(self) -> Counter[str]:
        """Returns how many processes were seen often enough to be compared, by kind."""
        return Counter(kind for (kind, _, _), looks in self._looks.items() if len(looks) >= LOOKS)

    def found(self) -> list[str]:
        """Returns a line for each process that has grown."""
        lines = []
        for (kind, name, _), looks in self._looks.items():
            young = self._young(looks[-_third(looks)][0]) if kind == "worker" else []
            if line := grown(f"{kind} {name}", [look for _, look, _ in looks], ALLOWED[kind], young):
                more = looks[-1][2] - looks[SETTLES][2]
                lines.append(f"{line} (more of: {', '.join(f'{what} {count}' for what, count in more.items())})")
        return lines

    def _young(self, since_s: float) -> list[Look]:
        """Returns what workers had, from some time on, that had been looked at seldom by then."""
        workers = [looks for (kind, _, _), looks in self._looks.items() if kind == "worker"]
        return [look for looks in workers for at_s, look, _ in looks[:YOUNG] if at_s >= since_s]


def held(pid: int) -> Counter[str]:
    """Returns what a process has open and which threads it has, each kind with its number."""
    found: Counter[str] = Counter()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                found[f"thread {(task / 'comm').read_text().strip()}"] += 1
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found[f"file {str(file.readlink()).partition('[')[0]}"] += 1
    return found


def grown(who: str, looks: Sequence[Look], allowed: Look, young: Sequence[Look] = ()) -> str:
    """Returns what a process has more than it may, after so many looks at it; empty: nothing, or too few looks.

    Args:
        who: the process.
        looks: at it.
        allowed: how much more it may have at the end.
        young: what new workers of the job had at the end. The native groups of a plan, with their threads and
            descriptors, may be more than those of the plan before; who has no more than a new worker keeps nothing.
    """
    if len(looks) < LOOKS:
        return ""
    settled, third = looks[SETTLES:], _third(looks)
    more = []
    for field in ("memory", "files", "threads"):
        first, last = (median(getattr(look, field) for look in part) for part in (settled[:third], settled[-third:]))
        if field != "memory":
            first = max([first, *(getattr(look, field) for look in young)])
        if last - first > getattr(allowed, field):
            more.append(f"{field} {first:.0f} -> {last:.0f}")
    return f"{who} grows in {len(looks)} looks: {', '.join(more)}" if more else ""


def _third(looks: Sequence[object]) -> int:
    """Returns how many looks are the first ones that are compared with as many last ones."""
    return max(1, (len(looks) - SETTLES) // 3)
