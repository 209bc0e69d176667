"""Record how long the same work takes in each step, in several processes at once: series for the tests of detection.

    python benchmarks/step_times.py --workers 2 --steps 600 > tests/data/step_times.jsonl    # as many as cores

Each process trains the GPT of `examples/train_gpt_hybrid.py` by itself, real compute, and measures its layers in every
step as a job does (`elaunch.workers.layers.timing`). Nobody is slow, so whatever differs is the noise of the machine.
The first line says how the file was made; each further one has a worker and its seconds, step by step.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

BATCH, MICRO_BATCH = 8, 2
WARM_UP = 3


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--worker", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker >= 0:
        print(json.dumps({"worker": f"n0/{given.worker}#0", "seconds": _record(given.steps)}))
        return 0
    command = [sys.executable, __file__, "--steps", str(given.steps), "--worker"]
    crew = [
        subprocess.Popen([*command, str(number)], stdout=subprocess.PIPE, text=True) for number in range(given.workers)
    ]
    lines = [one.communicate()[0] for one in crew]
    how = f"python benchmarks/step_times.py --workers {given.workers} --steps {given.steps}"
    print(json.dumps({"made_by": how, "note": "seconds of forward and backward of all layers on a micro-batch"}))
    print("".join(lines), end="")
    return max(one.returncode for one in crew)


def _record(steps: int) -> list[float]:
    import torch

    from benchmarks.profiling import gpt_engine
    from elaunch.workers.layers.timing import Stopwatch

    torch.set_num_threads(1)
    engine = gpt_engine(2, 32, BATCH, MICRO_BATCH)
    seconds = []
    for _ in range(WARM_UP + steps):
        watch = Stopwatch(torch.device("cpu"))
        engine.train_step(watch=watch)
        seconds.append(round(sum(turn.forward_s + turn.backward_s - turn.waited_s for turn in watch.turns()), 6))
    engine.close()
    return seconds[WARM_UP:]


if __name__ == "__main__":
    raise SystemExit(main())
