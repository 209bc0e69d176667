"""Ray as a cluster, through the HTTP interface of its dashboard: an agent is a job that was submitted (Ray Jobs).

Ray keeps submitted jobs, whoever submitted them, and takes a submission id once only. It has no step between SIGTERM
and SIGKILL that others could set: an agent that is stopped has three seconds.
"""

from __future__ import annotations

import json
import shlex
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.model import ClusterNode

PREFIX = "elaunch"
LIMIT_S = 8.0  # of a request: two of them are within the lease of the leading daemon
NODE_ID = "ray.io/node-id"
KIND = "ray.io/accelerator-type"
STAGES = {"PENDING": ClusterStage.QUEUED, "RUNNING": ClusterStage.RUNNING}


@dataclass(frozen=True, slots=True)
class RaySettings:
    """How jobs are submitted.

    Attributes:
        name: of the scheduler: agents of another one are not its own.
        address: of the dashboard, such as `http://head:8265`.
        elaunch: the command of the launcher.
        gpus: devices are GPUs; else they are CPUs.
    """

    name: str
    address: str
    elaunch: tuple[str, ...]
    gpus: bool = True


@dataclass(slots=True)
class RayCluster:
    """Ray, asked by HTTP.

    Attributes:
        settings: how jobs are submitted.
        ids: of nodes by their names, as of the last look.
    """

    settings: RaySettings
    ids: dict[str, str] = field(default_factory=dict)

    def look(self) -> tuple[list[ClusterNode], list[AgentReport]]:
        """Asks for nodes and submitted jobs."""
        nodes, self.ids = parse_nodes(self._ask("GET", "/nodes?view=summary"), self.settings.gpus)
        return nodes, parse_jobs(self._ask("GET", "/api/jobs/"), self.settings.name)

    def start(self, request: AgentRequest) -> None:
        """Submits a job; Ray refuses another one with the same id."""
        node = self.ids.get(request.node)
        if node is None:
            raise ClusterUnavailable(f"Ray has no node {request.node}")
        body = submission(request, self.settings, node)
        if self._ask("GET", f"/api/jobs/{body['submission_id']}", missing=True) is None:
            self._ask("POST", "/api/jobs/", body)

    def stop(self, name: str, kill: bool) -> None:
        """Has Ray send SIGTERM, and SIGKILL after three seconds."""
        self._ask("POST", f"/api/jobs/{self._id(name)}/stop", missing=True)

    def forget(self, name: str) -> None:
        """Deletes the job with its log."""
        self._ask("DELETE", f"/api/jobs/{self._id(name)}", missing=True)

    def _id(self, name: str) -> str:
        return f"{PREFIX}:{self.settings.name}:{name}"

    def _ask(self, method: str, path: str, body: object = None, missing: bool = False) -> Any:
        """Returns the answer; None for what is not there, where `missing` allows that."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.settings.address + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            if error.code == 404 and missing:
                return None
            lines = error.read().decode(errors="replace").strip().splitlines() or [str(error)]
            raise ClusterUnavailable(f"Ray refuses {method} {path}: {lines[-1][:300]}") from error
        except (OSError, ValueError) as error:
            raise ClusterUnavailable(f"Ray's dashboard at {self.settings.address} does not answer: {error}") from error


def submission(request: AgentRequest, settings: RaySettings, node: str) -> dict[str, Any]:
    """Returns what is posted to submit an agent."""
    command = shlex.join([*settings.elaunch, *request.arguments])
    return {
        "submission_id": f"{PREFIX}:{settings.name}:{request.name}",
        "entrypoint": f"cd {shlex.quote(request.folder)} && exec {command}",
        f"entrypoint_num_{'gpus' if settings.gpus else 'cpus'}": request.devices,
        "entrypoint_label_selector": {NODE_ID: node},
    }


def parse_jobs(answer: Iterable[Mapping[str, Any]], scheduler: str) -> list[AgentReport]:
    """Returns the reports of this scheduler's jobs."""
    prefix = f"{PREFIX}:{scheduler}:"
    found = []
    for job in answer:
        name = str(job.get("submission_id") or "")
        if name.startswith(prefix):
            status, message = str(job.get("status")), " ".join(str(job.get("message") or "").split())
            why = f"{status} ({message[:200]})" if message else status
            stage = STAGES.get(status, ClusterStage.ENDED)
            found.append(AgentReport(name.removeprefix(prefix), stage, why, status == "SUCCEEDED"))
    return found


def parse_nodes(answer: Mapping[str, Any], gpus: bool) -> tuple[list[ClusterNode], dict[str, str]]:
    """Returns the nodes that have devices, and their ids by name.

    What others use of them is not seen: Ray shows it seconds late. A node is called as in Ray; if several are called
    so, by the beginning of its id.
    """
    data = answer["data"]
    raylets = [entry["raylet"] for entry in data["summary"] if entry.get("raylet", {}).get("state") == "ALIVE"]
    names = Counter(str(raylet.get("nodeName")) for raylet in raylets)
    nodes, ids = [], {}
    for raylet in raylets:
        number, given = str(raylet["nodeId"]), str(raylet.get("nodeName"))
        name = given if names[given] == 1 else number[:12]
        devices = int((raylet.get("resourcesTotal") or {}).get("GPU" if gpus else "CPU", 0))
        labels = raylet.get("labels") or {}
        usable = (raylet.get("stateSnapshot") or {}).get("state") != "DRAINING"
        if devices:
            nodes.append(ClusterNode(name, devices, labels.get(KIND, ""), labels.get("rack", ""), usable))
            ids[name] = number
    return nodes, ids
