"""The keys of `--rdzv-conf`, as the help shows them."""

from __future__ import annotations

import textwrap
from dataclasses import fields

from elaunch.rendezvous.conf import KEYS, RendezvousConf, WorkerLimits


def conf_keys(indent: str) -> str:
    """Returns a line for each key of `--rdzv-conf`: its default, in seconds, and what it means."""
    defaults = {one.name: one.default for kind in (RendezvousConf, WorkerLimits) for one in fields(kind)}
    rows = [
        (key, f"{default:g}" if isinstance(default := defaults.get(key), float) and default else "", text)
        for key, text in KEYS.items()
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(2)]
    lines: list[str] = []
    for key, default, text in rows:
        head = f"{indent}{key:<{widths[0]}}  {default:>{widths[1]}}  "
        lines += textwrap.wrap(text, 100, initial_indent=head, subsequent_indent=" " * len(head))
    return "\n".join(lines)
