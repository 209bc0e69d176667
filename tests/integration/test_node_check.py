"""`--node-check` of whole jobs: a node shows what it can do before it joins."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent.watch.node_check import Figures
from elaunch.rendezvous.embedded import EmbeddedEtcd
from elaunch.rendezvous.etcd import EtcdStore
from tests.helpers import ROOT, Spawner, wait_until
from tests.jobs.watch import START_S

KEY = "/elaunch/job/checks/{}"
SCRIPT = "import os, sys, time\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)\n"


@pytest.fixture
def store(etcd: EmbeddedEtcd) -> Iterator[EtcdStore]:
    store = EtcdStore(etcd.endpoint, timeout_s=20)
    yield store
    store.close()


def test_a_node_shows_what_it_can_do_and_leaves_it_for_its_peers(
    etcd: EmbeddedEtcd, store: EtcdStore, spawn: Spawner, tmp_path: Path
) -> None:
    script, gate = tmp_path / "waits.py", tmp_path / "gate"
    script.write_text(SCRIPT)
    flags = ("--nnodes=1:1", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-backend=etcd", "--rdzv-id=job")
    agent = spawn.elaunch(*flags, "--node-name=a", "--node-check", script, gate)
    agent.wait_for_text("[elaunch a] node check: matmul ", START_S)
    entry = wait_until(lambda: store.get(KEY.format("a")), START_S, "the figures in the store")
    figures = Figures.from_json(entry.value)
    assert figures.problems == ()
    assert {name.split()[0] for name in figures.rates} == {"matmul", "all-reduce"}
    gate.touch()
    assert agent.wait(START_S) == 0, agent.tail()
    assert store.get(KEY.format("a")) is None


def test_a_node_that_is_far_slower_than_its_peers_does_not_join(
    etcd: EmbeddedEtcd, store: EtcdStore, spawn: Spawner, tmp_path: Path
) -> None:
    fast = Figures({"matmul cpu float32": 1e6, "all-reduce loopback": 1e-6})
    for name in ("x", "y", "z"):
        store.put(KEY.format(name), fast.to_json().encode())
    script = tmp_path / "script.py"
    script.write_text("print('started')\n")
    flags = ("--nnodes=1:4", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", "--node-name=d", "--node-check")
    agent = spawn.elaunch(*flags, script, env={"CUDA_VISIBLE_DEVICES": ""})
    assert agent.wait(2 * START_S) == 1
    assert "elaunch: error: --node-check: node d does not join: matmul cpu float32: " in agent.text()
    assert "TFLOP/s, where the median of 3 peers is 1e+06" in agent.text()
    assert "started" not in agent.text()
    assert store.get(KEY.format("d")) is None
    assert store.range("/elaunch/job/nodes/")[0] == []


def test_a_node_whose_devices_cannot_compute_does_not_join(spawn: Spawner, tmp_path: Path) -> None:
    broken, script = tmp_path / "torch", tmp_path / "script.py"
    broken.mkdir()
    (broken / "__init__.py").write_text("raise RuntimeError('CUDA driver initialization failed')\n")
    script.write_text("print('started')\n")
    environment = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    agent = spawn.elaunch("--standalone", "--node-check", script, env=environment)
    assert agent.wait(START_S) == 1
    assert "node node0 does not join: matmul: RuntimeError: CUDA driver initialization failed" in agent.text()
    assert "started" not in agent.text()
