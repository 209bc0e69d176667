"""Native groups between processes: over Gloo, and over NCCL with several ranks on one GPU where there is one."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from elaunch.workers.comm.native import reconfigure
from elaunch.workers.comm.native.nccl import CRASHES_IN_ABORT, refuse_version
from tests import ROOT
from tests.devices import needs_gpu, on_gpu
from tests.helpers import Spawner

RANKS = 3
SCENARIOS = ("freed", "beside", "eager", "ordered", "batch", "options", "order", "pulse", "blocked", "death")


def run(spawn: Spawner, tmp_path: Path, device: str, *scenarios: str) -> None:
    """Has all ranks go through these scenarios; if 'death' is the last one, the last rank is killed in it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    ranks = []
    for rank in range(RANKS):
        place = [f"--rank={rank}", f"--size={RANKS}", f"--port={store.port}", f"--device={device}"]
        env = {
            "NCCL_HOSTID": f"h{rank}",
            "NCCL_SOCKET_IFNAME": "lo",
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%p.log"),
            "PYTHONPATH": str(ROOT),
        }
        command = [sys.executable, "-m", "tests.jobs.bulk_ranks", *place, *scenarios]
        ranks.append(spawn(command, env=env, name=f"rank{rank}"))
    for rank, one in enumerate(ranks):
        is_dead = rank == RANKS - 1 and scenarios[-1] == "death"
        code = one.process.wait(100)
        told = one.log.read_text()
        assert code == (-signal.SIGKILL if is_dead else 0), told
        for name in scenarios[:-1] if is_dead else scenarios:
            assert f"{name}: right" in told, told


def test_native_groups_of_gloo_between_processes(spawn: Spawner, tmp_path: Path) -> None:
    # All in one: what costs is the import of torch.
    run(spawn, tmp_path, "cpu", *SCENARIOS)


@pytest.mark.parametrize("scenario", [on_gpu(name) for name in SCENARIOS])
def test_native_groups_of_nccl_between_processes_on_one_gpu(spawn: Spawner, tmp_path: Path, scenario: str) -> None:
    run(spawn, tmp_path, "cuda:0", scenario)


@pytest.mark.skipif(reconfigure.OPTIONS is None, reason="a torch before 2.14: NCCL's groups are not connected anew")
@needs_gpu
def test_a_group_of_nccl_is_connected_anew_among_the_survivors(spawn: Spawner, tmp_path: Path) -> None:
    run(spawn, tmp_path, "cuda:0", "anew")


@needs_gpu
def test_the_nccl_of_this_machine_can_abort_or_is_refused_by_name() -> None:
    version = torch.cuda.nccl.version()
    first, last = CRASHES_IN_ABORT
    if first <= version[:3] <= last:
        with pytest.raises(RuntimeError, match=".".join(map(str, version[:3]))):
            refuse_version(version)
    else:
        refuse_version(version)
