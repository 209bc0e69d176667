"""`elaunch schedule` on the API of Kubernetes: a job grows, a node is cordoned, the daemon and a node are lost."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from elaunch.scheduler.service.documents import AgentStage, JobStage
from elaunch.scheduler.service.stored import read_all
from tests.helpers import ROOT, Spawned, Spawner, wait_until
from tests.jobs.watch import PRELOADS, WARM, losses
from tests.jobs.watch import Node as Agent
from tests.kubernetes_api import TestKubernetes, serving

LIMIT_S = 90.0
JOB = """
name = "a"
basic = 1
most = 3
[rates]
1 = 10.0
2 = 19.5
3 = 28.0
"""


@pytest.mark.timeout(300)
def test_an_elastic_job_on_kubernetes(spawn: Spawner, tmp_path: Path, etcd: EmbeddedEtcd) -> None:
    def run(command: list[str], env: Mapping[str, str], folder: Path, name: str) -> Spawned:
        assert command[0] == "elaunch"
        return spawn.fork(WARM, *command, env=env, cwd=folder, name=name)

    warm = {"ELAUNCH_WARM_START": "1", "ELAUNCH_PRELOAD": PRELOADS["train.py"]}
    container = {
        "name": "elaunch",
        "image": "registry.example/train:1",
        "env": [{"name": name, "value": value} for name, value in warm.items()],
    }
    template = tmp_path / "pod.json"
    template.write_text(json.dumps({"spec": {"containers": [container]}}))
    (tmp_path / "a.toml").write_text(JOB)
    assert spawn.fork(WARM, "elaunch", "--version", name="warm").wait(LIMIT_S) == 0  # pods then start at once
    store = EtcdStore(etcd.endpoint, timeout_s=5.0)
    with (
        contextlib.closing(store),
        serving(TestKubernetes(tmp_path, ROOT / "examples" / "kubernetes.yaml", run)) as kubernetes,
    ):
        env = {"PET_RDZV_ENDPOINT": etcd.endpoint, "KUBECONFIG": str(kubernetes.kubeconfig)}
        for node in ("n1", "n2", "n3"):
            kubernetes.add_node(node)

        def schedule(*words: object) -> Spawned:
            return spawn.elaunch("schedule", *words, env=env, name=f"schedule-{words[0]}")

        def start() -> Spawned:
            flags = (f"--pod-template={template}", f"--folder={tmp_path / 'agents'}", "--devices=cpu", "--interval=0.5")
            return schedule("run", "--cluster=kubernetes", *flags)

        def agents() -> list[Agent]:
            return [Agent(None, path) for path in sorted(tmp_path.glob("a-*.jsonl"))]  # type: ignore[arg-type]

        def members() -> int:
            steps = [event for agent in agents() for event in agent.events("step")]
            return max(steps, key=lambda event: event["step"])["members"] if steps else 0

        def settled(count: int, without: str = "") -> dict[str, str]:
            """Waits until the job has so many nodes; returns them by their agents."""

            def there() -> dict[str, str] | None:
                found = read_all(store, "main").progress.get("a")
                if found is None or {agent.stage for agent in found.agents} != {AgentStage.JOINED}:
                    return None
                held = {f"a.0.{agent.number}": agent.node for agent in found.agents}
                pods = {name: pod["spec"].get("nodeName") for name, pod in kubernetes.pods().items()}
                same = members() == len(held) == count and without not in held.values()
                return held if same and held.items() <= pods.items() else None

            return wait_until(there, LIMIT_S, lambda: f"{count} nodes; there is {kubernetes.pods()}\n{daemon.tail()}")

        script = (ROOT / "tests" / "jobs" / "endless.py", tmp_path / "a.end", "0.05")
        submitted = schedule("submit", tmp_path / "a.toml", "--", "--events", tmp_path / "a-%n.jsonl", *script)
        assert submitted.wait(LIMIT_S) == 0, submitted.tail()
        daemon = start()
        held = settled(3)

        name, cordoned = max(held.items())
        kubernetes.cordon(cordoned)
        held = settled(2, without=cordoned)
        log = tmp_path / "agents" / "main" / f"{name}.log"
        wait_until(lambda: log.exists() and name not in kubernetes.pods(), LIMIT_S, "the end of the agent that left")
        assert "leave at the next step boundary" in log.read_text()
        interrupted = [event for agent in agents() for event in agent.events("transition") if event["interrupted"]]
        assert interrupted == [], "nodes come and leave between two steps"

        daemon.signal(signal.SIGKILL)
        assert daemon.wait(LIMIT_S) == -signal.SIGKILL
        _, lost = max(held.items())
        kubernetes.lose(lost)
        wait_until(lambda: members() == 1, LIMIT_S, "steps without the lost node, and without a daemon")
        kubernetes.cordon(cordoned, cordoned=False)
        daemon = start()
        held = settled(2, without=lost)
        assert cordoned in held.values()
        assert f"lost its agent on {lost}, which ended with node {lost} does not answer to Kubernetes" in daemon.text()

        (tmp_path / "a.end").touch()
        wait_until(lambda: read_all(store, "main").progress["a"].stage is JobStage.DONE, LIMIT_S, daemon.tail)
        kubernetes.hear(lost)
        wait_until(lambda: not (kubernetes.objects["jobs"] or kubernetes.objects["pods"]), LIMIT_S, "the end of all")
        daemon.signal(signal.SIGTERM)
        assert daemon.wait(LIMIT_S) == 0, daemon.tail()
        assert read_all(store, "main").progress["a"].attempt == 0
        assert len(losses(agents())) > 20, "each step committed once, see there"
