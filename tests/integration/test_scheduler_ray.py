"""`elaunch schedule` on a real Ray: a job grows, gives nodes back to a better one, and loses no step."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.scheduler.service.documents import AgentStage, JobStage
from elaunch.scheduler.service.show import held
from elaunch.scheduler.service.stored import read_all
from tests.helpers import ROOT, Spawned, Spawner, find_free_port, wait_until
from tests.jobs.watch import Node as Agent
from tests.jobs.watch import digests, losses

LIMIT_S = 120.0
HERE = f"env PYTHONPATH={ROOT} ELAUNCH_PRELOAD= OMP_NUM_THREADS=1 {sys.executable} -m elaunch"
CLUSTER = """
import signal, sys
from ray.cluster_utils import Cluster
dashboard = {"num_cpus": 0, "include_dashboard": True, "dashboard_port": int(sys.argv[1])}
cluster = Cluster(initialize_head=True, head_node_args=dashboard)
for _ in range(3):
    cluster.add_node(num_cpus=1)
print("three nodes", flush=True)
signal.sigwait([signal.SIGTERM])
cluster.shutdown()
"""

pytestmark = [
    pytest.mark.soak,  # Ray is 110 MB to install, and takes two minutes of processor time here
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `pip install 'ray[default]'`"),
]


def test_a_job_on_ray_grows_and_gives_back(spawn: Spawner, tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    port = find_free_port()
    ray = spawn.python("-c", CLUSTER, str(port), name="ray")
    ray.wait_for_text("three nodes", LIMIT_S)
    env = {"PET_RDZV_ENDPOINT": etcd.endpoint}
    store = EtcdStore(etcd.endpoint, timeout_s=5.0)

    def schedule(*words: object) -> Spawned:
        return spawn.elaunch("schedule", *words, env=env, name=f"schedule-{words[0]}")

    def submit(name: str, *flags: str, rates: str = "") -> None:
        file = tmp_path / f"{name}.toml"
        file.write_text(f'name = "{name}"\n{rates}')
        script = (ROOT / "tests" / "jobs" / "endless.py", tmp_path / f"{name}.end", "0.05")
        submitted = schedule("submit", *flags, file, "--", "--events", tmp_path / f"{name}-%n.jsonl", *script)
        assert submitted.wait(LIMIT_S) == 0, submitted.tail()

    def settled(sizes: dict[str, int]) -> Callable[[], bool]:
        def there() -> bool:
            progress = read_all(store, "main").progress
            stages = {agent.stage for job in sizes if job in progress for agent in progress[job].agents}
            found = {job: sum(held(one).values()) for job, one in progress.items() if one.agents}
            return stages == {AgentStage.JOINED} and found == sizes

        return there

    submit("a", "--basic=1", "--most=3", rates="[rates]\n1 = 10\n3 = 29\n")
    address = f"--ray-address=http://127.0.0.1:{port}"
    daemon = schedule(
        "run", "--cluster=ray", address, f"--folder={tmp_path}", "--devices=cpu", "--interval=1", f"--elaunch={HERE}"
    )
    wait_until(settled({"a": 3}), LIMIT_S, daemon.tail)
    submit("b", "--basic=2", "--priority=5")
    wait_until(settled({"a": 1, "b": 2}), LIMIT_S, daemon.tail)
    for job in "ab":
        (tmp_path / f"{job}.end").touch()
    wait_until(
        lambda: {one.stage for one in read_all(store, "main").progress.values()} == {JobStage.DONE},
        LIMIT_S,
        daemon.tail,
    )
    agents = {job: [Agent(None, path) for path in sorted(tmp_path.glob(f"{job}-*.jsonl"))] for job in "ab"}  # type: ignore[arg-type]
    done = {job: digests(agents[job]) for job in "ab"}
    shared = min(map(len, done.values()))
    assert shared > 0
    assert done["a"][:shared] == done["b"][:shared]
    for job in "ab":
        losses(agents[job])
        assert read_all(store, "main").progress[job].attempt == 0
    store.close()
    daemon.signal(signal.SIGTERM)
    assert daemon.wait(LIMIT_S) == 0, daemon.tail()
    ray.signal(signal.SIGTERM)
    ray.wait(LIMIT_S)
