"""A job in pods, by the manifest of `deploy/kubernetes`: eviction, a spare, a pod that is lost, one that comes back.

A pod is what a kubelet makes of it: namespaces of its own for network, processes, mounts and host name, the command of
the manifest as process 1, SIGTERM to that process, SIGKILL after the grace period.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tests.helpers import ROOT, Spawned, Spawner, is_running, wait_until
from tests.jobs.watch import Node, losses
from tests.netns import Network, network

SCRIPT = ROOT / "tests" / "jobs" / "endless.py"
LIMIT_S = 100.0
NAMES = ("train-0", "train-1", "train-2", "train-3")
LEFT = 143

# What the container runtime does, before it runs the container's command as process 1 of the pod.
SANDBOX = """
mount --bind "$0" /etc/hosts && echo "$HOSTNAME" >/proc/sys/kernel/hostname && exec "$@"
"""


class Pods:
    """The pods of the manifest, of which one is a spare."""

    def __init__(self, spawn: Spawner, folder: Path, net: Network) -> None:
        text = (ROOT / "deploy" / "kubernetes" / "job.yaml").read_text()
        for word, ours in {
            ",train-4.train:29400": "",
            "--nnodes=2:4": "--nnodes=2:3",
            "--nproc-per-node=8": "--nproc-per-node=1",
            "--checkpoint-dir=/shared/train": f"--checkpoint-dir={folder / 'saved'}",
        }.items():
            assert word in text
            text = text.replace(word, ours)
        (job,) = [one for one in yaml.safe_load_all(text) if one["kind"] == "Job"]
        pod = job["spec"]["template"]["spec"]
        (self._container,) = pod["containers"]
        self.grace_s = float(pod["terminationGracePeriodSeconds"])
        self._spawn, self._folder, self._net = spawn, folder, net
        self._spaces = {name: net.add(name) for name in NAMES}
        known = [f"{net.address(name)} {name}.train {name}" for name in NAMES]
        (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *known, ""]))
        self.running: dict[str, Spawned] = {}

    def start(self, name: str) -> Spawned:
        args = self._container["args"]
        assert args[-1] == "train.py"
        words = [*self._container["command"], *args[:-1], str(SCRIPT), str(self._folder / "end"), "0.05"]
        zone = "metadata.labels['topology.kubernetes.io/zone']"
        values = {"status.podIP": self._net.address(name), zone: f"zone-{NAMES.index(name) % 2}"}
        given = {
            one["name"]: one.get("value") or values[one["valueFrom"]["fieldRef"]["fieldPath"]]
            for one in self._container["env"]
        }
        sandbox = ["ip", "netns", "exec", self._spaces[name], "unshare", "--pid", "--mount", "--uts", "--fork"]
        self.running[name] = self._spawn(
            [*sandbox, "--kill-child", "--mount-proc", "sh", "-c", SANDBOX, self._folder / "hosts", *words],
            env={
                "HOSTNAME": name,
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "ELAUNCH_EVENTS": str(self._folder / "%n.jsonl"),
                "ELAUNCH_PRELOAD": "",
                **given,
            },
            name=name,
        )
        return self.running[name]

    def first(self, name: str) -> psutil.Process:
        """Process 1 of a pod, as this host sees it."""
        (process,) = psutil.Process(self.running[name].pid).children()
        return process

    def metrics(self, name: str) -> int:
        """How the readiness probe of a pod is answered."""
        probe = self._container["readinessProbe"]["httpGet"]
        with urllib.request.urlopen(
            f"http://{self._net.address(name)}:{probe['port']}{probe['path']}", timeout=5
        ) as it:
            return int(it.status)

    def logs(self) -> list[Node]:
        return [Node(None, path) for path in self._folder.glob("*.jsonl")]  # type: ignore[arg-type]

    def events(self, kind: str) -> list[dict[str, Any]]:
        return sorted((event for log in self.logs() for event in log.events(kind)), key=lambda event: event["t"])

    def members(self) -> set[str]:
        """The pods that did the newest step."""
        steps, plans = self.events("step"), self.events("generation")
        if not steps:
            return set()
        trains = [one for one in plans if one["stage"] == "train"]
        pods = {worker.partition("/")[0].rpartition("-")[0] for worker in trains[-1]["workers"]}
        return pods if max(steps, key=lambda one: one["step"])["members"] == len(pods) else set()

    def last_step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=-1)

    def told(self) -> str:
        return "\n".join(pod.tail() for pod in self.running.values())

    def wait_for_members(self, pods: set[str] | None, count: int = 3) -> set[str]:
        """Waits until so many pods, or just these, take part, and have done a step."""

        def there() -> set[str] | None:
            time.sleep(0.1)
            found = self.members()
            return found if len(found) == count and pods in (None, found) else None

        found = wait_until(there, LIMIT_S, lambda: f"{count} members, {pods}; {self.members()}\n{self.told()}")
        step = self.last_step()
        wait_until(lambda: self.last_step() > step + 1, LIMIT_S, lambda: f"steps\n{self.told()}")
        return found


@pytest.mark.timeout(300)
def test_pods_are_evicted_lost_and_replaced_while_the_job_goes_on(spawn: Spawner, tmp_path: Path) -> None:
    with network() as net:
        pods = Pods(spawn, tmp_path, net)
        for name in NAMES:
            pods.start(name)
        members = pods.wait_for_members(None)
        (spare,) = set(NAMES) - members
        assert pods.running[spare].wait_for_text("this node is a spare", LIMIT_S)
        for name in NAMES:
            assert pods.first(name).name() == "elaunch"
            assert pods.metrics(name) == 200

        evicted = sorted(members)[1]
        pods.first(evicted).send_signal(signal.SIGTERM)
        assert pods.running[evicted].wait(pods.grace_s) == LEFT, pods.told()
        members = pods.wait_for_members(members - {evicted} | {spare})
        assert not any(event["interrupted"] for event in pods.events("transition")), "it left between two steps"

        # The Job controller makes another pod of that index, which is the spare now.
        again = pods.start(evicted)
        assert again.wait_for_text("this node is a spare", LIMIT_S)

        lost = sorted(members - {"train-0"})[0]
        pods.first(lost).kill()  # as after the grace period, or with its machine: the kernel ends all of the pod
        assert pods.running.pop(lost).wait(LIMIT_S) != 0
        pods.wait_for_members(members - {lost} | {evicted})

        for name, pod in pods.running.items():
            whole = psutil.Process(pod.pid)
            wait_until(lambda: not zombies(whole), LIMIT_S, f"{name} to reap its children")  # noqa: B023 (called at once)
        (tmp_path / "end").touch()
        for name, pod in pods.running.items():
            assert pod.wait(LIMIT_S) == 0, f"{name}\n{pods.told()}"
        assert len(losses(pods.logs())) > 10


def zombies(whole: psutil.Process) -> list[psutil.Process]:
    return [one for one in whole.children(recursive=True) if not is_running(one.pid)]


ORPHANS = """
for number in 1 2 3; do (setsid sleep 0.1 &) ; done
sleep 1
echo "zombies: $(ps -eo stat= | grep -c Z)"
echo "first: $(ps -o comm= 1)"
"""


def test_as_process_1_of_a_container_elaunch_reaps_what_workers_leave_behind(spawn: Spawner, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("namespaces of processes can only be made by root")
    (line,) = [one for one in (ROOT / "deploy" / "Dockerfile").read_text().splitlines() if one.startswith("ENTRYPOINT")]
    entry = json.loads(line.removeprefix("ENTRYPOINT"))
    worker = tmp_path / "worker.sh"
    worker.write_text("#!/bin/sh\n" + ORPHANS)
    worker.chmod(0o755)
    container = spawn(
        ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *entry, "--standalone", "--no-python", worker],
        env={"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "ELAUNCH_PRELOAD": ""},
    )
    assert container.wait(60) == 0, container.tail()
    assert "zombies: 0\n" in container.text()
    assert "first: elaunch\n" in container.text()
