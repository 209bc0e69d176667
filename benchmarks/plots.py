"""Draws what benchmarks have written with --json, as SVG for docs/benchmarks.md.

    python benchmarks/recovery.py --json recovery.json
    python benchmarks/lost_nodes.py --json lost_nodes.json
    python benchmarks/lost_host.py --json lost_host.json
    python benchmarks/plots.py recovery.json lost_nodes.json lost_host.json --out docs/images

Each picture is made of the rows of one kind, wherever they stand in the files; of kinds that are in none there is no
picture. The same rows give the same bytes. Needs matplotlib: pip install 'elaunch[plots]'.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "elaunch",  # ids of parts do not change from run to run
    "svg.fonttype": "none",  # text stays text: small, and readers can search for it
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
COLOURS = ("#3b6ea8", "#d98a3d", "#5b9a68", "#a8557a", "#8a8a8a", "#7763b0")


def recovery(rows: Sequence[Row], axes: Any) -> None:
    """After the death of a worker: the step that is repeated, and what comes on top of it."""
    _stacked(
        axes,
        [row["SIGKILL -> next commit"] for row in rows],
        {
            "the step itself": [row["step_ms"] for row in rows],
            "recovery, median": [row["median_less_step_ms"] for row in rows],
            "worst": [max(0.0, row["worst_less_step_ms"] - row["median_less_step_ms"]) for row in rows],
        },
    )
    axes.set_xscale("symlog", linthresh=200)
    axes.set_xlabel("milliseconds from SIGKILL to the next commit (logarithmic above 200)")


def overhead(rows: Sequence[Row], axes: Any) -> None:
    """Steps without failures: the medians of runs, from the least to the greatest."""
    names = [f"{row['failure-free step']}, {row['compute']} compute" for row in rows]
    medians = [row["median_ms"] for row in rows]
    spans = [
        [middle - row["least_run_median_ms"] for middle, row in zip(medians, rows, strict=True)],
        [row["worst_run_median_ms"] - middle for middle, row in zip(medians, rows, strict=True)],
    ]
    spans = [[max(0.0, one) for one in side] for side in spans]
    axes.barh(names, medians, xerr=spans, color=COLOURS[0], height=0.6, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("milliseconds of a step: median, and the medians of all runs")


def spares(rows: Sequence[Row], axes: Any) -> None:
    """After the loss of a node: until a step has committed, and until one has by as many workers as before."""
    _stacked(
        axes,
        [row["a node is lost"] for row in rows],
        {
            "the step itself": [row["step_ms"] for row in rows],
            "until the next commit": [max(0.0, row["next_commit_median_ms"] - row["step_ms"]) for row in rows],
            "with fewer workers": [max(0.0, row["whole_median_ms"] - row["next_commit_median_ms"]) for row in rows],
        },
    )
    axes.set_xlabel("milliseconds from the loss, medians")


def lost_host(rows: Sequence[Row], axes: Any) -> None:
    """After the loss of the host of the store: the medians, from the least to the greatest."""
    names = [f"{row['loss']}, {row['hosts']} hosts, etcd on {row['servers']}" for row in rows]
    medians = [row["median_s"] for row in rows]
    spans = [
        [row["median_s"] - row["least_s"] for row in rows],
        [row["worst_s"] - row["median_s"] for row in rows],
    ]
    axes.barh(names, medians, xerr=spans, color=COLOURS[0], height=0.6, capsize=3)
    axes.invert_yaxis()
    axes.set_xlabel("seconds from the loss to the next step of the others: median, least and worst")


def lost_nodes(rows: Sequence[Row], axes: Any) -> None:
    """Throughput after nodes are lost, by policy, of the last model of the rows; pale: does not fit into memory."""
    model = rows[-1]["model"]
    mine = [row for row in rows if row["model"] == model]
    before = next((row["samples_per_s"] for row in mine if row["lost"] == 0), None)
    policies = list(dict.fromkeys(row["policy"] for row in mine if row["lost"]))
    counts = sorted({row["lost"] for row in mine if row["lost"]})
    for place, policy in enumerate(policies):
        found = {row["lost"]: row for row in mine if row["policy"] == policy}
        at = [count + (place - (len(policies) - 1) / 2) * 0.8 / len(policies) for count in counts if count in found]
        rates = [found[count]["samples_per_s"] for count in counts if count in found]
        bars = axes.bar(at, rates, width=0.8 / len(policies), label=policy, color=COLOURS[place % len(COLOURS)])
        for bar, count in zip(bars, [count for count in counts if count in found], strict=True):
            if found[count].get("fits") == "no":  # into the memory of the devices
                bar.set(alpha=0.35, hatch="//")
    if before is not None:
        axes.axhline(before, color="#444444", linewidth=1, linestyle="--", label="before")
    axes.set_xticks(counts)
    axes.set_xlabel(f"lost nodes, {model}, computed")
    axes.set_ylabel("samples/s")
    axes.legend(fontsize=8, frameon=False, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))


def _stacked(axes: Any, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> None:
    left = [0.0] * len(names)
    for place, (label, widths) in enumerate(parts.items()):
        axes.barh(names, widths, left=left, height=0.6, label=label, color=COLOURS[place])
        left = [one + width for one, width in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.legend(fontsize=8, frameon=False, ncols=len(parts), loc="lower center", bbox_to_anchor=(0.5, 1.0))


PICTURES: dict[str, tuple[str, Callable[[Sequence[Row], Any], None]]] = {
    "recovery": ("SIGKILL -> next commit", recovery),
    "overhead": ("failure-free step", overhead),
    "spares": ("a node is lost", spares),
    "lost-host": ("went_on", lost_host),
    "lost-nodes": ("lost", lost_nodes),
}
"""By name of the picture: the column that its rows have, and what draws them."""


def draw(rows: Sequence[Row], out: Path) -> list[Path]:
    """Draws each picture for which there are rows into a folder; returns the files.

    Raises:
        SystemExit: matplotlib is not there.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("matplotlib is not installed: pip install 'elaunch[plots]'") from None
    out.mkdir(parents=True, exist_ok=True)
    made: list[Path] = []
    for name, (column, picture) in PICTURES.items():
        mine = [row for row in rows if column in row]
        if not mine:
            continue
        with mpl.rc_context(STYLE):
            figure = Figure(
                figsize=(7.2, 3.2 if picture is lost_nodes else 0.8 + 0.5 * len(mine)), layout="constrained"
            )
            picture(mine, figure.subplots())
            path = out / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
        made.append(path)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, help="what benchmarks have written with --json")
    parser.add_argument("--out", type=Path, default=Path("docs/images"), help="folder for the pictures")
    args = parser.parse_args()
    rows = [row for file in args.files for row in json.loads(file.read_text())["rows"]]
    made = draw(rows, args.out)
    print("\n".join(map(str, made)) or "no row of these files is of a kind that is drawn", file=sys.stderr)
    return 0 if made else 1


if __name__ == "__main__":
    sys.exit(main())
