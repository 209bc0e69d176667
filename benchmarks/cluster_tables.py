"""The tables of Suika and Chameleon about many jobs, failures and decisions, beside what elaunch's own logic gives.

    python benchmarks/cluster_tables.py --only chameleon
    python benchmarks/cluster_tables.py --json cluster_tables.json

Nothing is run but the simulator (docs/simulator.md) and the planner: pure computation on one core. Each row has the
paper's figure and ours; nothing is fitted. docs/benchmarks.md says why they differ.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.chameleon_tables import chameleon
from benchmarks.report import Cell, Report, add_arguments
from benchmarks.suika_tables import figure_16_xl, suika

TABLES = {"suika": suika, "suika-xl": figure_16_xl, "chameleon": chameleon}


class ToldReport(Report):
    """Says each row at once, too: all tables take many minutes."""

    def row(self, cells: Mapping[str, Cell] | None = None, **more: Cell) -> None:
        super().row(cells, **more)
        print(", ".join(f"{name} {value}" for name, value in self.rows[-1].items()), file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument(
        "--only", choices=TABLES, help="the tables of one paper; suika-xl: figure 16 with the largest models"
    )
    args = parser.parse_args()
    report = ToldReport("tables of the papers, simulated")
    for name, make in TABLES.items():
        if args.only in (None, name):
            make(report, args.quick)
    report.print()
    report.write(args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
