"""Gloo's groups among other members: a new one, or the left one connected anew, which torch can do from 2.14 on.

    python benchmarks/regroup.py --quick

In each turn another rank is missing, and the others open both kinds in turn, each time from a moment for which all have
waited. Included is that each member knows the sockets of its group, by which it can be freed. Timed is until the last
rank has its group, and until the last has the result of a first sum; then all leave it, by the shutdown of its sockets.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks.crew import Rank, crew
from benchmarks.report import Report, add_arguments
from elaunch.workers.comm.native import reconfigure, sockets
from elaunch.workers.comm.native.gloo import THREADS, GlooBulk
from elaunch.workers.comm.native.gloo_work import NO_TIMEOUT
from elaunch.workers.comm.native.groups import FIRST_LOOK_S

HOST = "127.0.0.1"
SIZES, TURNS = (4, 8, 16), 20


class Again(GlooBulk):
    """Brings a group that was left before, if there is one."""

    def __init__(self, left: reconfigure.LeftGroups, ports: list[int]) -> None:
        super().__init__(HOST)
        self._left, self._ports, self._where = left, ports, ""

    def open(self, store: dist.Store, rank: int, size: int, messages: bool = False) -> None:
        """Connects to all other members."""
        older = sockets.inodes()

        def make(root: dist.Store) -> Any:
            options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=HOST)]
            options._timeout, options._threads, options.enable_reconfigure = NO_TIMEOUT, THREADS, True
            self._ports[:] = [port for inode, port in sockets.listening() if inode not in older]
            return dist.ProcessGroupGloo(root, rank, size, options)

        self._where = reconfigure.place_of(store)
        self._group, _ = reconfigure.connect(store, rank, size, self._left, make, lambda: False)
        sockets.tell(store, rank, self._ports)
        self._connections = sockets.of_group(store, rank, size, self._ports, older)

    def close(self) -> None:
        """Leaves the group for the next turn."""
        self._left.leave(self._where, self._group)
        super().close()


class Member(Rank):
    """A rank that opens groups."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.store, self.left, self.ports = arguments[2], reconfigure.LeftGroups(), list[int]()

    def turn(self, kind: str, number: int, members: list[int]) -> tuple[float, float] | None:
        """Returns the seconds until the group is open here and until the first sum is there; None: it is missing."""
        if self.place not in members:
            return None
        bulk = GlooBulk(HOST) if kind == "new" else Again(self.left, self.ports)
        rank, store = members.index(self.place), dist.PrefixStore(f"{kind}/{number}", self.store)
        if store.add("here", 1) == len(members):
            store.set("all", "1")
        while not store.check(["all"]):
            time.sleep(FIRST_LOOK_S)
        begin_s = time.monotonic()
        bulk.open(store, rank, len(members))
        open_s = time.monotonic() - begin_s
        total = torch.ones(10)
        bulk.all_reduce(total).wait()
        first_s = time.monotonic() - begin_s
        assert total.tolist() == [len(members)] * 10
        # Whoever is through first must not end the sum of the others.
        if store.add("done", 1) == len(members):
            store.set("through", "1")
        store.wait(["through"])
        bulk.poison()
        bulk.close()
        return open_s, first_s


def measure(size: int, turns: int) -> dict[str, list[tuple[float, float]]]:
    """Returns, for each kind, by turn what the last rank took."""
    found: dict[str, list[tuple[float, float]]] = {"new": [], "anew": []}
    with crew([f"a/{place}#0" for place in range(size + 1)], Member) as members:
        for number in range(turns + size + 1):  # until each has a group to bring
            present = [place for place in range(size + 1) if place != number % (size + 1)]
            for kind, figures in found.items():
                took = [one for one in members("turn", kind, number, present) if one is not None]
                figures.append((max(open_s for open_s, _ in took), max(first_s for _, first_s in took)))
    return {kind: figures[-turns:] for kind, figures in found.items()}


def main() -> int:
    """Prints the table; without such a torch, says so."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    args = parser.parse_args()
    if reconfigure.OPTIONS is None:
        print(f"not measured: torch {torch.__version__} connects no group anew, torch 2.14 and later do")
        return 0
    report = Report("Gloo's groups among other members")
    for size in SIZES[:1] if args.quick else SIZES:
        for kind, figures in measure(size, 5 if args.quick else TURNS).items():
            opened, first = zip(*figures, strict=True)
            report.row(
                members=size,
                group={"new": "a new one", "anew": "connected anew"}[kind],
                turns=len(figures),
                open_ms=round(1e3 * statistics.median(opened), 2),
                open_worst_ms=round(1e3 * max(opened), 2),
                first_sum_ms=round(1e3 * statistics.median(first), 2),
                first_sum_worst_ms=round(1e3 * max(first), 2),
            )
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
