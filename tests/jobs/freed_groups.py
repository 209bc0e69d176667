"""One of several members whose process groups are freed in the middle of sums, round after round, as members change.

    freed_groups.py RANK SIZE STORE_PORT ROUNDS

Writes a line when a round has begun and when it has left it, and goes on by lines of its standard input.
"""

from __future__ import annotations

import os
import sys
import threading

import torch
import torch.distributed as dist

from elaunch.workers.reentry.groups import FunctionGroups

SIZES = (1000, 1_000_000)
"""Elements of a sum: one that sockets take at once, and one that they do not."""


def rounds(rank: int, size: int, n_rounds: int) -> None:
    groups = FunctionGroups()

    def free(freed: threading.Event) -> None:
        sys.stdin.readline()
        groups.free()
        freed.set()

    for number in range(n_rounds):
        freed = threading.Event()
        try:
            with groups.watching(f"round {number}"):
                dist.init_process_group("gloo")
                pairs = [dist.new_group([one, (one + 1) % size]) for one in range(size)]
                own = [dist.group.WORLD, *(pairs[one] for one in ((rank - 1) % size, rank))]
                own.sort(key=lambda group: sorted(dist.get_process_group_ranks(group)))
                dist.barrier()
                threading.Thread(target=free, args=[freed], daemon=True).start()
                print("begun", flush=True)
                tensor = torch.ones(SIZES[number % len(SIZES)])
                while True:
                    for group in own:
                        dist.all_reduce(tensor, group=group)
        except RuntimeError:
            freed.wait()
        print("left", flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    own_rank, members, port, count = map(int, sys.argv[1:])
    os.environ |= {
        "RANK": str(own_rank),
        "WORLD_SIZE": str(members),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    torch.set_num_threads(1)
    rounds(own_rank, members, count)
