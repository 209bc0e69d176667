"""Simulates many jobs on all cores: `python -m tests.simulation [FIRST] [COUNT]`. Prints transcripts of what fails."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time

from tests.simulation.jobs import simulate_all

BLOCK = 100

KINDS: dict[str, dict[str, bool]] = {"": {}, " in trees": {"tree": True}, " with native groups": {"native": True}}
"""What is simulated of each seed, by how its name ends in what is printed."""


def main(first: int = 0, count: int = 10_000) -> int:
    """Simulates the jobs of `count` seeds, by links alone, in trees, and with native groups; returns the exit code.

    It is 1 where something did not hold.
    """
    seeds = [range(at, min(at + BLOCK, first + count)) for at in range(first, first + count, BLOCK)]
    blocks = [(block, kind) for block in seeds for kind in KINDS]
    begin_s, failed = time.monotonic(), set[str]()
    with multiprocessing.get_context("fork").Pool(os.cpu_count()) as pool:
        for kind, found in pool.imap_unordered(_simulate, blocks):
            for seed, text in found.items():
                name = f"{seed}{kind}"
                print(f"seed {name}: {text}\n", flush=True)
                failed.add(name)
    seconds = time.monotonic() - begin_s
    n_jobs = len(KINDS) * count
    rate = f"{n_jobs / seconds * 60:,.0f} a minute"
    print(f"{n_jobs} jobs in {seconds:.1f} s, {rate}; failed seeds: {', '.join(sorted(failed)) or 'none'}")
    return 1 if failed else 0


def _simulate(block: tuple[range, str]) -> tuple[str, dict[int, str]]:
    seeds, kind = block
    return kind, simulate_all(seeds, **KINDS[kind])


if __name__ == "__main__":
    if "PYTHONHASHSEED" not in os.environ:  # the order of sets decides now and then what comes first
        os.execve(sys.executable, sys.orig_argv, os.environ | {"PYTHONHASHSEED": "0"})
    sys.exit(main(*map(int, sys.argv[1:])))
