"""Where the figures that were measured of a job contradict each other, in sentences for its user. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from elaunch.policy.profile import LinkProfile
from elaunch.policy.sample import Point, Sample

APART = 0.1
"""A step that takes so much more or less than its parts contradicts them; so do rows, kept bytes and links."""

ALIKE = 0.2
"""Workers of which none is slow differ by less than this on the same layer."""

LEAST_S = 1e-4
"""Differences of less than this are not told: as much passes between two looks at a clock on a busy machine."""

Kind = Literal["step", "layer", "rows", "kept", "link"]


class Contradiction(NamedTuple):
    """Figures that cannot all be right; `text` names them, what estimates use, and what to do."""

    kind: Kind
    text: str


def contradictions(
    samples: Mapping[str, Sample],
    speeds: Mapping[str, float],
    links: Mapping[tuple[str, str], LinkProfile],
    carried: Mapping[tuple[str, str], float],
    step: tuple[float, float] | None = None,
) -> list[Contradiction]:
    """Returns the worst contradiction of each kind, with how many more there are.

    Args:
        samples: what the workers have told, by slot.
        speeds: of those that are slow or fast, by slot.
        links: as the kernel sees them, by the slots of sender and receiver.
        carried: bytes per second that messages were seen to have over links.
        step: seconds that a step takes, and that its parts come to; None: not known, or not stable.
    """
    found = [
        [] if step is None else _of_step(*step),
        _of_workers(samples, speeds),
        _of_rows(samples),
        _of_kept_bytes(samples),
        _of_links(links, carried),
    ]
    return [_worst(some) for some in found if some]


_Found = list[tuple[float, Contradiction]]
"""With how bad they are."""


def _worst(some: _Found) -> Contradiction:
    kind, text = max(some, key=lambda one: one[0])[1]
    more = len(some) - 1
    return Contradiction(kind, text if not more else f"{text} ({more} more like this)")


def _of_step(step_s: float, parts_s: float) -> _Found:
    apart_s = step_s - parts_s
    if abs(apart_s) <= max(APART * step_s, LEAST_S):
        return []
    if apart_s < 0:
        text = (
            f"step: it takes {_text(step_s)}, and its parts as they were measured {_text(parts_s)}, so other plans are "
            "estimated too slow as well. Parts were measured while the machine was busier, or come from an older run: "
            "wait until nothing is 'not stable yet', or begin without the file of --profile"
        )
    else:
        text = (
            f"step: it takes {_text(step_s)}, and its parts as they were measured {_text(parts_s)}; estimates add the "
            f"other {_text(apart_s)} to each step, or to each message between stages, whatever the plan. Look for what "
            "was not measured: workers that share cores, slow loading, work between two steps"
        )
    return [(abs(apart_s) / step_s, Contradiction("step", text))]


def _of_workers(samples: Mapping[str, Sample], speeds: Mapping[str, float]) -> _Found:
    by_point: dict[Point, list[tuple[float, str]]] = defaultdict(list)
    for slot, sample in samples.items():
        if slot not in speeds:
            for point, (forward_s, backward_s, waited_s) in sample.turns.items():
                by_point[point].append((forward_s + backward_s - waited_s, slot))
    found = []
    for (layer, rows, _), own in by_point.items():
        (least_s, fast), (most_s, slow) = min(own), max(own)
        if most_s > (1 + ALIKE) * least_s and most_s - least_s > LEAST_S:
            text = (
                f"layers[{layer}]: forward and backward, {_rows(rows)} {_text(least_s)} on {fast} and "
                f"{_text(most_s)} on {slow}, and neither is known as slow; estimates use the median for both. Give "
                "workers the same cores and devices, or wait: who stays slow has a speed of its own after some steps"
            )
            found.append((most_s / least_s, Contradiction("layer", text)))
    return found


def _of_rows(samples: Mapping[str, Sample]) -> _Found:
    found = []
    for slot, sample in samples.items():
        by_layer: dict[tuple[int, int], list[tuple[int, float]]] = defaultdict(list)
        for (layer, rows, width), (forward_s, backward_s, waited_s) in sample.turns.items():
            by_layer[layer, width].append((rows, forward_s + backward_s - waited_s))
        for (layer, _), points in by_layer.items():
            for (few, few_s), (many, many_s) in pairwise(sorted(points)):
                fall = few_s / many_s - 1
                rise = many_s / many * few / few_s - 1
                if fall > APART and few_s - many_s > LEAST_S:
                    what = "more take less; estimates use the mean time of a row"
                elif rise > APART and many_s - many * few_s / few > LEAST_S:
                    what = "each row takes longer among more; estimates use one time for a row, whatever their number"
                else:
                    continue
                text = (
                    f"layers[{layer}]: {_rows(few)} {_text(few_s)} on {slot} and {many} {_text(many_s)}: "
                    f"{what}. Do not rely on estimates of plans that cut micro-batches, or let the job run on if these "
                    "are 'not stable yet'"
                )
                found.append((max(fall, rise), Contradiction("rows", text)))
    return found


def _of_kept_bytes(samples: Mapping[str, Sample]) -> _Found:
    by_layer: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for slot, sample in samples.items():
        for layer, n_bytes in sample.kept_bytes.items():
            by_layer[layer].append((n_bytes, slot))
    found = []
    for layer, kept in by_layer.items():
        (least, one), (most, other) = min(kept), max(kept)
        if most > (1 + APART) * least:
            text = (
                f"layers[{layer}]: {least:,.0f} bytes of a row are kept for backward on {one} and {most:,.0f} on "
                f"{other}; estimates of memory use the larger figure. Do the workers have the same versions and "
                "settings of torch?"
            )
            found.append((most / max(1.0, least), Contradiction("kept", text)))
    return found


def _of_links(links: Mapping[tuple[str, str], LinkProfile], carried: Mapping[tuple[str, str], float]) -> _Found:
    found = []
    for ends, rate in carried.items():
        link = links.get(ends)
        if link is not None and rate > (1 + APART) * link.bandwidth_bytes_per_s:
            text = (
                f"link {ends[0]} to {ends[1]}: messages were seen to have {rate / 1e9:.3g} GB/s, and estimates use the "
                f"kernel's {link.bandwidth_bytes_per_s / 1e9:.3g} GB/s, so what moves over it is estimated too slow. "
                "Something else used the link when the kernel looked: wait for the next look"
            )
            found.append((rate / link.bandwidth_bytes_per_s, Contradiction("link", text)))
    return found


def _rows(n: int) -> str:
    return "1 row takes" if n == 1 else f"{n} rows take"


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"


def changed(before: Iterable[Contradiction], now: Iterable[Contradiction]) -> bool:
    """Returns whether there are contradictions of other kinds than before."""
    return {one.kind for one in before} != {one.kind for one in now}


class Doubts:
    """What there is to say of the contradictions of a profile, one after the other."""

    def __init__(self) -> None:
        self._found: list[Contradiction] = []
        self._untold: list[dict[str, Any]] = []

    def hear(self, found: list[Contradiction]) -> None:
        """Takes in those that there are now."""
        if changed(self._found, found):
            self._untold.append({"contradictions": [one.text for one in found]})
        self._found = found

    def take(self) -> list[dict[str, Any]]:
        """Returns, for each time since the last call that they had become others, the fields of the event."""
        untold, self._untold = self._untold, []
        return untold
