"""Simulates many jobs on all cores: `python -m tests.simulation [FIRST] [COUNT]`. Prints transcripts of what fails."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from tests.simulation.jobs import simulate_all

BLOCK = 100


def main(first: int = 0, count: int = 10_000) -> int:
    """Simulates the jobs of `count` seeds; returns the exit code: 1 where something did not hold."""
    blocks = [range(at, min(at + BLOCK, first + count)) for at in range(first, first + count, BLOCK)]
    begin_s, failed = time.monotonic(), dict[int, str]()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for found in pool.imap_unordered(simulate_all, blocks):
            for seed, text in found.items():
                print(f"seed {seed}: {text}\n", flush=True)
            failed |= found
    seconds = time.monotonic() - begin_s
    rate = f"{count / seconds * 60:,.0f} a minute"
    print(f"{count} jobs in {seconds:.1f} s, {rate}; failed seeds: {sorted(failed) or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
