"""Whoever sums in the process groups of a function leaves them when they are freed, in whatever order that happens."""

from __future__ import annotations

import random
import subprocess
import sys
import time

import pytest
import torch.distributed as dist

from tests.helpers import ROOT, child_environment, scaled

MEMBERS = 3
ROUNDS = scaled(12, 120)


@pytest.mark.timeout(scaled(120, 400))
def test_all_members_leave_sums_that_are_freed_in_any_order() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = child_environment({"OMP_NUM_THREADS": "1"})
    members = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.jobs.freed_groups", *map(str, (rank, MEMBERS, store.port, ROUNDS))],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )
        for rank in range(MEMBERS)
    ]
    choose = random.Random(0)

    def expect(word: str) -> None:
        for member in members:
            assert member.stdout is not None
            assert member.stdout.readline() == f"{word}\n"

    def tell(member: subprocess.Popen[str]) -> None:
        assert member.stdin is not None
        member.stdin.write("\n")

    try:
        for _ in range(ROUNDS):
            expect("begun")
            time.sleep(choose.uniform(0, 0.02))
            for member in choose.sample(members, MEMBERS):
                tell(member)
                time.sleep(choose.choice((0, 0.001, 0.01)))
            expect("left")
            for member in members:
                tell(member)
        assert [member.wait(20) for member in members] == [0] * MEMBERS
    finally:
        for member in members:
            member.kill()
            member.communicate()
