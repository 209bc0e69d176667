"""The variables that Kubeflow's TrainJob gives to the pods of its torch runtime are all that elaunch needs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers import ROOT, Spawner
from tests.jobs.watch import elaunch


@pytest.mark.timeout(120)
def test_the_pods_of_a_train_job_find_each_other_and_survive_a_worker(
    spawn: Spawner, tmp_path: Path, free_port: int
) -> None:
    script = (ROOT / "tests" / "jobs" / "elastic.py", "--epochs", "1", "--die", "1:7:step", "--sleep", "0.02")
    pods = [
        elaunch(
            spawn,
            tmp_path,
            script=script,
            name=f"pod{rank}",
            environment={
                "PET_NNODES": "2",
                "PET_NPROC_PER_NODE": "2",
                "PET_NODE_RANK": str(rank),
                "PET_MASTER_ADDR": "localhost",
                "PET_MASTER_PORT": str(free_port),
            },
        )
        for rank in range(2)
    ]
    for pod in pods:
        assert pod.agent.wait(80) == 0, pod.agent.tail()
    assert sorted(event["step"] for pod in pods for event in pod.events("step")) == list(range(25))
    assert any("entry 2:" in pod.agent.text() and ", step 7\n" in pod.agent.text() for pod in pods)
