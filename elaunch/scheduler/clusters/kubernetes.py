"""Kubernetes as a cluster, through its API: an agent is a Job of one pod on one node.

The API is spoken by Kubernetes' own client, which reads kubeconfigs, runs their credential plugins and renews tokens.
Of its classes for objects nothing is used: answers are read as the JSON that they are.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from elaunch.errors import UsageError
from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.clusters.kubernetes_objects import (
    SCHEDULER,
    AgentJob,
    Json,
    KubernetesSettings,
    agent_of,
    held,
    is_own,
    job_name,
    label_value,
    manifest,
    parse_agents,
    parse_nodes,
    silent_nodes,
)
from elaunch.scheduler.model import ClusterNode

T = TypeVar("T")

LIMIT_S = 8.0  # of a request
LOOK_S = 16.0  # of a look: within the lease of the leading daemon
OTHERS_S = 15.0  # between two looks at the pods of everybody, which may be thousands
PAGE = 500  # objects in an answer
KILL_S = 1  # not 0: a pod would then be gone before its processes are, and its devices free
LOG_BYTES = 16 << 20
IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
ACTIVE = "spec.nodeName!=,status.phase!=Succeeded,status.phase!=Failed"


class _Refused(ClusterUnavailable):
    """Kubernetes has answered, and does not do it; `code` is HTTP's."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(slots=True)
class KubernetesCluster:
    """Kubernetes, asked through its API.

    Attributes:
        settings: how agents are run.
        agents: of this scheduler by their names, as of the last look.
        ran: those of them that have had a pod.
    """

    settings: KubernetesSettings
    agents: dict[str, AgentJob] = field(default_factory=dict)
    ran: set[str] = field(default_factory=set)
    _client: Any = None
    _namespace: str = ""
    _others: list[tuple[str, Decimal]] = field(default_factory=list)
    _others_s: float = float("-inf")
    _until_s: float = float("inf")

    def look(self) -> tuple[list[ClusterNode], list[AgentReport]]:
        """Lists Jobs and pods of this scheduler, nodes and, less often, all other pods."""
        self._connect()
        settings = self.settings
        own = f"{SCHEDULER}={label_value(settings.name)}"
        self._until_s = time.monotonic() + LOOK_S
        try:
            jobs = self._list(self._path("jobs"), whole, labelSelector=own)
            pods = self._list(self._path("pods"), whole, labelSelector=own)
            nodes = self._list("/api/v1/nodes", whole)
            if time.monotonic() > self._others_s + OTHERS_S:
                self._others = self._list("/api/v1/pods", self._held_by_others, fieldSelector=ACTIVE)
                self._others_s = time.monotonic()
        finally:
            self._until_s = float("inf")
        if nodes and len(silent_nodes(nodes)) == len(nodes):
            raise ClusterUnavailable(f"Kubernetes hears nothing from any of its nodes ({len(nodes)})")
        agents = parse_agents(jobs, pods, nodes, self.ran, settings)
        self.agents = {agent.report.name: agent for agent in agents}
        self.ran = {name for name, agent in self.agents.items() if name in self.ran or agent.pods or agent.logged}
        reports = [agent.report for agent in agents]
        living = {report.name for report in reports if report.stage is not ClusterStage.ENDED}
        going = [held(pod, settings.device) for pod in pods if agent_of(pod) not in living]
        return parse_nodes(nodes, [*self._others, *going], settings), reports

    def start(self, request: AgentRequest) -> None:
        """Creates a Job; Kubernetes refuses another one of the same name."""
        self._connect()
        try:
            self._ask("POST", self._path("jobs"), body=manifest(request, self.settings))
        except _Refused as error:
            if error.code != 409:
                raise

    def stop(self, name: str, kill: bool) -> None:
        """Deletes the pod, which gets SIGTERM and has the time of its template, or a second; without one, the Job."""
        self._connect()
        agent = self.agents.get(name)
        if agent is None or not agent.pods:
            self._delete_job(name)
            return
        for pod in agent.pods:
            self._delete(self._path("pods", pod), {"gracePeriodSeconds": KILL_S} if kill else {})

    def forget(self, name: str) -> None:
        """Writes the pod's log into the scheduler's folder, and deletes the Job with its pods."""
        self._connect()
        agent = self.agents.get(name)
        if agent is not None and agent.logged:
            with suppress(ClusterUnavailable, OSError):  # pods that were deleted, or whose node is away, have none
                query = {"container": self.settings.container, "limitBytes": LOG_BYTES}
                log = self._ask("GET", f"{self._path('pods', agent.logged)}/log", query, raw=True)
                part = self.settings.folder / f"{name}.log.part"
                part.write_bytes(log)
                part.replace(part.with_suffix(""))  # who looks for the log finds all of it
        self._delete_job(name)

    def _delete_job(self, name: str) -> None:
        self._delete(self._path("jobs", job_name(self.settings.name, name)), {"propagationPolicy": "Background"})

    def _path(self, kind: str, name: str = "") -> str:
        group = "/apis/batch/v1" if kind == "jobs" else "/api/v1"
        return f"{group}/namespaces/{self._namespace}/{kind}" + (f"/{name}" if name else "")

    # -- requests -------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Makes a client, if there is none."""
        if self._client is None:
            self._client, of_context = connect(self.settings.context)
            self._namespace = self.settings.namespace or of_context

    def _held_by_others(self, pod: Json) -> tuple[str, Decimal]:
        """All that is kept of a pod, of which there may be thousands: where it holds how many devices."""
        own = is_own(pod, self.settings) and pod["metadata"].get("namespace") == self._namespace
        return ("", Decimal(0)) if own else held(pod, self.settings.device)

    def _list(self, path: str, read: Callable[[Json], T], **query: str) -> list[T]:
        """Returns all objects of a kind; a list that has grown too old while it was read is begun once more."""
        try:
            return self._pages(path, read, query)
        except _Refused as error:
            if error.code != 410:
                raise
            return self._pages(path, read, query)

    def _pages(self, path: str, read: Callable[[Json], T], query: Mapping[str, str]) -> list[T]:
        found: list[T] = []
        more: dict[str, str] = {}
        while True:
            answer = self._ask("GET", path, {**query, "limit": PAGE, **more})
            found += map(read, answer.get("items") or ())
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return found
            more = {"continue": token}

    def _delete(self, path: str, query: Mapping[str, object]) -> None:
        try:
            self._ask("DELETE", path, query)
        except _Refused as error:
            if error.code not in (404, 409):  # it is gone, or another one of its name is there
                raise

    def _ask(
        self, method: str, path: str, query: Mapping[str, object] | None = None, body: object = None, raw: bool = False
    ) -> Any:
        """Returns the answer, from JSON or as it is.

        Raises:
            ClusterUnavailable: there is none in time, or it is an error.
        """
        from kubernetes.client.exceptions import OpenApiException
        from kubernetes.config import ConfigException
        from urllib3.exceptions import HTTPError

        self._connect()
        limit_s = min(LIMIT_S, self._until_s - time.monotonic())
        if limit_s <= 0:
            raise ClusterUnavailable(f"Kubernetes has not answered within {LOOK_S:g} s")
        try:
            request = self._client.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={"Accept": "application/json", "Content-Type": "application/json"},
                body=body,
                auth_settings=["BearerToken"],
            )
            answer = self._client.call_api(*request, _request_timeout=(limit_s, limit_s))
            data = answer.read()
            if answer.status >= 300:
                if answer.status == 401:  # credentials are read again
                    self._client = None
                text = _message(data) or str(answer.reason)
                raise _Refused(answer.status, f"Kubernetes refuses {method} {path}: {answer.status} {text}")
            return data if raw else json.loads(data)
        except (HTTPError, OpenApiException, ConfigException, OSError, ValueError) as error:
            text = " ".join(str(error).split())[:300]
            raise ClusterUnavailable(f"Kubernetes does not answer {method} {path}: {text}") from error


def whole(thing: Json) -> Json:
    """Returns an object as it is."""
    return thing


def _message(body: bytes) -> str:
    """The message of an object of kind Status, or the first line of what a proxy on the way has said."""
    text = body.decode(errors="replace")
    with suppress(ValueError, AttributeError):
        text = str(json.loads(text).get("message") or "")
    return " ".join((text.strip().splitlines() or [""])[0].split())[:300]


def connect(context: str) -> tuple[Any, str]:
    """Returns a client and its namespace: for a context of the kubeconfig, or, in a pod, for its service account.

    As with kubectl, a kubeconfig goes before the service account.

    Raises:
        ClusterUnavailable: there is neither, or it cannot be read.
        UsageError: the client is not installed.
    """
    try:
        from kubernetes import config
        from kubernetes.client import ApiClient, Configuration
    except ImportError as error:
        raise UsageError("--cluster=kubernetes needs its client: pip install 'elaunch[kubernetes]'") from error
    configuration = Configuration()
    configuration.retries = False  # the daemon asks again by itself
    files = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    in_pod = not context and not any(map(os.path.exists, files.split(os.pathsep))) and (IN_POD / "token").exists()
    namespace = "default"
    try:
        if in_pod:
            config.load_incluster_config(client_configuration=configuration)
            namespace = (IN_POD / "namespace").read_text().strip() or namespace
        else:
            config.load_kube_config(files, context or None, client_configuration=configuration)
            contexts, active = config.list_kube_config_contexts(files)
            chosen = next((one for one in contexts if one["name"] == context), active)
            namespace = chosen["context"].get("namespace") or namespace
    except (config.ConfigException, OSError, ValueError) as error:
        raise ClusterUnavailable(f"Kubernetes cannot be reached without a configuration: {error}") from error
    return ApiClient(configuration), namespace


def read_template(path: str) -> dict[str, Any]:
    """Returns metadata and spec of a pod from a file in YAML or JSON: a Pod, a PodTemplate, or only the two.

    Raises:
        UsageError: there is no such file, or it has something that the scheduler gives.
    """
    try:
        import yaml
    except ImportError as error:
        raise UsageError("--cluster=kubernetes needs its client: pip install 'elaunch[kubernetes]'") from error
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else " ".join(str(error).split())
        raise UsageError(f"--pod-template {path}: {reason}") from error
    try:
        template = document.get("template", document)
        metadata, spec = template.get("metadata") or {}, template["spec"]
        first = spec["containers"][0]
        given = {
            "nodeName": "nodeName" in spec,
            "nodeAffinity": "nodeAffinity" in (spec.get("affinity") or {}),
            "command and args of the first container": "command" in first or "args" in first,
        }
        first.setdefault("name", "elaunch")
        kept = {name: metadata[name] for name in ("labels", "annotations") if metadata.get(name)}
    except (AttributeError, KeyError, IndexError, TypeError) as error:
        raise UsageError(f"--pod-template {path}: expected a pod whose spec has containers") from error
    if not first.get("image"):
        raise UsageError(f"--pod-template {path}: the first container, which runs the agent, has no image")
    for what, there in given.items():
        if there:
            raise UsageError(f"--pod-template {path}: leave out {what}: the scheduler gives them")
    return {"metadata": kept, "spec": spec}
