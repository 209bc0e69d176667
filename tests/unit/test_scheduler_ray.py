"""What is said to Ray's dashboard, and what is made of its answers, which are those of Ray 2.60 in what is read."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.clusters.ray import RayCluster, RaySettings
from elaunch.scheduler.model import ClusterNode

HEAD, FIRST, SECOND = (f"{letter}{'0123456789ab' * 4}" for letter in "abc")
REFUSAL = "Job supervisor actor could not be scheduled: The actor is not schedulable: The node\ndoesn't exist any more"
REQUEST = AgentRequest("a.0.1", FIRST[:12], 2, ("--rdzv-id=a.0", "it's.py"), "/home/ann")


def raylet(number: str, cpus: float, **values: Any) -> dict[str, Any]:
    total = {"memory": 24271429632.0, "CPU": cpus} if cpus else {"memory": 24271429632.0}
    found = {
        "nodeId": number,
        "nodeName": "192.0.2.2",
        "state": "ALIVE",
        "resourcesTotal": total,
        "labels": {"ray.io/node-id": number},
        "stateSnapshot": {"state": "ACTIVE", "idleDurationMs": "0", "nodeActivity": []},
    }
    return {"hostname": "vm", "raylet": found | values}


class Dashboard(BaseHTTPRequestHandler):
    """Answers as Ray's dashboard does, with what a test has put there."""

    address: str
    nodes: list[dict[str, Any]]
    jobs: list[dict[str, Any]]
    asked: list[tuple[str, str, Any]]

    def do_GET(self) -> None:
        if self.path == "/nodes?view=summary":
            self._answer(200, {"result": True, "msg": "", "data": {"summary": self.nodes}})
        elif self.path == "/api/jobs/":
            self._answer(200, self.jobs)
        else:
            found = [job for job in self.jobs if self.path.endswith(job["submission_id"])]
            self._answer(200 if found else 404, found[0] if found else {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.asked.append((self.command, self.path, json.loads(body) if body else None))
        if "broken" in str(body):
            self.send_response(500)
            self.end_headers()
            self.wfile.write(b"Traceback (most recent call last):\nRuntimeError: no such thing\n")
        else:
            self._answer(200 if "gone" not in self.path else 404, {"stopped": True})

    do_DELETE = do_POST

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _answer(self, code: int, body: Any) -> None:
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())


@pytest.fixture
def dashboard() -> Iterator[type[Dashboard]]:
    class Own(Dashboard):
        pass

    Own.nodes = [raylet(HEAD, 0), raylet(FIRST, 2), raylet(SECOND, 4), {"hostname": "old", "raylet": {}}]
    Own.jobs, Own.asked = [], []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Own)
    Own.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield Own
    server.shutdown()
    thread.join()
    server.server_close()


def cluster(dashboard: type[Dashboard], gpus: bool = False) -> RayCluster:
    return RayCluster(RaySettings("main", dashboard.address, ("elaunch",), gpus))


def test_nodes_have_devices_kinds_and_names_of_their_own(dashboard: type[Dashboard]) -> None:
    ray = cluster(dashboard)
    assert ray.look()[0] == [ClusterNode(FIRST[:12], 2), ClusterNode(SECOND[:12], 4)]
    labels = {"ray.io/accelerator-type": "H100", "rack": "r1"}
    snapshot = {"state": "DRAINING"}
    dashboard.nodes = [
        raylet(FIRST, 8, nodeName="n1", labels=labels, resourcesTotal={"CPU": 64, "GPU": 8.0}),
        raylet(SECOND, 8, nodeName="n2", stateSnapshot=snapshot, resourcesTotal={"CPU": 64, "GPU": 4.0}),
        raylet(HEAD, 8, nodeName="n3", state="DEAD", resourcesTotal={"GPU": 4.0}),
    ]
    assert cluster(dashboard, gpus=True).look()[0] == [
        ClusterNode("n1", 8, "H100", "r1"),
        ClusterNode("n2", 4, usable=False),
    ]


def test_jobs_of_this_scheduler_are_read_and_others_left_out(dashboard: type[Dashboard]) -> None:
    states = ["PENDING", "RUNNING", "SUCCEEDED", "FAILED", "STOPPED"]
    dashboard.jobs = [
        {
            "submission_id": f"elaunch:main:a.0.{number}",
            "status": state,
            "message": REFUSAL if state == "FAILED" else "",
        }
        for number, state in enumerate(states)
    ]
    dashboard.jobs += [{"submission_id": "elaunch:other:a.0.0"}, {"submission_id": None, "status": "RUNNING"}]
    assert cluster(dashboard).look()[1] == [
        AgentReport("a.0.0", ClusterStage.QUEUED, "PENDING"),
        AgentReport("a.0.1", ClusterStage.RUNNING, "RUNNING"),
        AgentReport("a.0.2", ClusterStage.ENDED, "SUCCEEDED", True),
        AgentReport("a.0.3", ClusterStage.ENDED, f"FAILED ({' '.join(REFUSAL.split())})"),
        AgentReport("a.0.4", ClusterStage.ENDED, "STOPPED"),
    ]


def test_an_agent_is_submitted_once_for_its_node(dashboard: type[Dashboard]) -> None:
    ray = cluster(dashboard)
    ray.look()
    ray.start(REQUEST)
    assert dashboard.asked == [
        (
            "POST",
            "/api/jobs/",
            {
                "submission_id": "elaunch:main:a.0.1",
                "entrypoint": "cd /home/ann && exec elaunch --rdzv-id=a.0 'it'\"'\"'s.py'",
                "entrypoint_num_cpus": 2,
                "entrypoint_label_selector": {"ray.io/node-id": FIRST},
            },
        )
    ]
    dashboard.jobs = [{"submission_id": "elaunch:main:a.0.1", "status": "PENDING"}]
    ray.start(REQUEST)
    assert len(dashboard.asked) == 1
    ray.stop("a.0.1", kill=False)
    ray.stop("gone", kill=True)
    ray.forget("gone")
    assert [(method, path) for method, path, _ in dashboard.asked[1:]] == [
        ("POST", "/api/jobs/elaunch:main:a.0.1/stop"),
        ("POST", "/api/jobs/elaunch:main:gone/stop"),
        ("DELETE", "/api/jobs/elaunch:main:gone"),
    ]


def test_refusals_are_told_in_one_line(dashboard: type[Dashboard]) -> None:
    ray = cluster(dashboard)
    with pytest.raises(ClusterUnavailable, match=r"^Ray has no node"):
        ray.start(REQUEST)
    ray.look()
    broken = AgentRequest("broken.0.0", FIRST[:12], 1, (), "/")
    with pytest.raises(ClusterUnavailable, match=r"^Ray refuses POST /api/jobs/: RuntimeError: no such thing$"):
        ray.start(broken)
    nobody = RayCluster(RaySettings("main", "http://127.0.0.1:9", ("elaunch",)))
    with pytest.raises(ClusterUnavailable, match="does not answer"):
        nobody.look()
