"""Every parser, with as many hostile inputs as one wants.

    python -m tests.fuzz                          # a million each, about an hour
    python -m tests.fuzz --inputs 10000 --only rdzv-conf
    python -m tests.fuzz --keep                   # also writes what behaved in a new way to tests/data/corpus

An input is a valid one, or one of the corpus, mutated (`tests/hostile.py`). What a parser makes of it is told apart by
its value's type or its error's text without numbers; an input that behaves in a new way is mutated further. Fails where
a parser raises what it does not document, takes more than a second of the processor, or leaves memory or descriptors
behind.
"""

from __future__ import annotations

import argparse
import base64
import gc
import random
import re
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType

import psutil

from tests.hostile import KINDS, PIECES, mutated
from tests.parsers import CORPUS, PARSERS, Parser, corpus, slug

KEPT = 40
"""So many inputs of a parser are kept at most, and none of more than KEPT_BYTES."""

KEPT_BYTES = 1500
SEEDS = 400
HANG_S = 20
SLOW_S = 1.0
GROWTH_BYTES = 24 << 20


class Hang(Exception):
    """An input took HANG_S seconds."""


@dataclass
class Found:
    """What became of the inputs of one parser."""

    parser: Parser
    inputs: int = 0
    values: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    growth_bytes: int = 0
    descriptors: int = 0
    seen: dict[str, bytes] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    @property
    def is_well(self) -> bool:
        small = self.growth_bytes < GROWTH_BYTES and self.descriptors <= 0
        return not self.wrong and small and self.slowest_s < SLOW_S

    def line(self) -> str:
        return (
            f"{self.parser.name:28} {self.inputs:>9} {self.seconds:>7.0f} s {self.values:>9} values "
            f"{len(self.seen):>5} ways {1e3 * self.slowest_s:>7.1f} ms slowest {self.growth_bytes >> 10:>7} KiB more "
            f"{self.descriptors:>3} descriptors more{'' if self.is_well else '   WRONG'}"
        )


def way_of(outcome: object) -> str:
    """What tells outcomes apart: the type of a value, or the text of an error without what stood in the input."""
    if not isinstance(outcome, BaseException):
        return type(outcome).__name__
    text = re.sub(r"'[^']*'|\"[^\"]*\"|[\d.]+|\\\\x..", "", str(outcome))
    return f"{type(outcome).__name__} {' '.join(text.split()[:12])[:100]}"


def tried(parser: Parser, data: bytes, found: Found) -> None:
    """Gives the parser one input."""
    outcome: object
    begin_s = time.process_time()
    try:
        outcome = parser.read(data)
        found.values += 1
    except Hang:
        raise
    except parser.raises as error:
        outcome = error.with_traceback(None)
    except Exception as error:
        found.wrong.append(f"{type(error).__name__}: {str(error)[:200]} for {data[:300]!r}")
        return
    finally:
        found.slowest_s = max(found.slowest_s, time.process_time() - begin_s)
    found.inputs += 1
    if len(found.seen) < SEEDS and len(data) <= KEPT_BYTES:
        found.seen.setdefault(way_of(outcome), data)


def fuzz(parser: Parser, inputs: int, seed: int) -> Found:
    """Tries one parser."""
    found, chance = Found(parser), random.Random(f"{seed} {parser.name}")
    starts = [*parser.valid, *corpus(parser)]
    for data in starts:
        tried(parser, data, found)
    seeds: Sequence[bytes] = starts
    process, before, n_open = psutil.Process(), 0, 0
    begin_s = time.monotonic()
    try:
        for number in range(inputs):
            if number % 1000 == 0:
                signal.alarm(HANG_S)
                seeds = [*starts, *found.seen.values()]
                if number == min(20_000, inputs // 5) // 1000 * 1000:
                    gc.collect()
                    before, n_open = process.memory_info().rss, process.num_fds()
            pieces = [
                (chance.choice(KINDS), chance.random(), chance.choice(PIECES))
                for _ in range(chance.choice((1, 1, 2, 3)))
            ]
            tried(parser, mutated(chance.choice(seeds), pieces), found)
            if len(found.wrong) >= 5:
                break
    except Hang:
        found.wrong.append(f"an input took {HANG_S} s, or a thousand did")
    finally:
        signal.alarm(0)
    gc.collect()
    found.growth_bytes = process.memory_info().rss - before
    found.descriptors = process.num_fds() - n_open
    found.seconds = time.monotonic() - begin_s
    return found


def keep(found: Found) -> None:
    """Writes the shortest inputs that behave in different ways."""
    kept = sorted({*found.seen.values()}, key=lambda data: (len(data), data))[:KEPT]
    CORPUS.mkdir(exist_ok=True)
    lines = (base64.b64encode(data).decode() or "=" for data in kept if data)
    (CORPUS / f"{slug(found.parser)}.txt").write_text("".join(f"{line}\n" for line in lines))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=1_000_000, help="for each parser")
    parser.add_argument("--only", default="", metavar="WORD,…", help="parsers with one of these in their names")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true", help="write what behaved in a new way to the corpus")
    args = parser.parse_args()

    def hangs(number: int, frame: FrameType | None) -> None:
        raise Hang

    signal.signal(signal.SIGALRM, hangs)
    well = True
    for one in PARSERS:
        if not any(word in one.name for word in args.only.split(",")):
            continue
        found = fuzz(one, args.inputs, args.seed)
        print(found.line(), flush=True)
        for wrong in found.wrong:
            print(f"    {wrong}", flush=True)
        if args.keep:
            keep(found)
        well = well and found.is_well
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
