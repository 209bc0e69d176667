"""Objects of Kubernetes, as its API has them in JSON: the Job that runs an agent, and what nodes, Jobs and pods say.

Pure. Reading is lenient: what an object lacks has the value that Kubernetes gives it.
"""

from __future__ import annotations

import copy
import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.model import ClusterNode

Json = Mapping[str, Any]

SCHEDULER = "elaunch/scheduler"
AGENT = "elaunch/agent"
QUEUE = "kueue.x-k8s.io/queue-name"
RACK = "topology.kubernetes.io/zone"
KIND = "nvidia.com/gpu.product"
GPU = "nvidia.com/gpu"
LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")

NEVER = {
    *("ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"),
    *("CreateContainerConfigError", "CreateContainerError"),
}
"""Reasons for which a container waits that no time heals."""


@dataclass(frozen=True, slots=True)
class KubernetesSettings:
    """How agents are run.

    Attributes:
        name: of the scheduler: agents of another one are not its own.
        folder: of the agents' logs.
        elaunch: the command of the launcher in the image.
        template: a pod's metadata and spec; its first container runs the agent.
        device: the resource that is a device.
        queue: of Kueue, which then decides when a Job starts; empty: at once.
        context: of the kubeconfig; empty: its current one, or the service account of the pod that this runs in.
        namespace: of the Jobs; empty: that of the context or the pod.
        rack, kind: labels of nodes that name their rack and the kind of their devices.
        grace_s: that a pod may take to end when somebody deletes it, if its template says nothing else.
    """

    name: str
    folder: Path
    elaunch: tuple[str, ...]
    template: Json
    device: str = GPU
    queue: str = ""
    context: str = ""
    namespace: str = ""
    rack: str = RACK
    kind: str = KIND
    grace_s: float = 45.0

    @property
    def container(self) -> str:
        """Returns the name of the container that runs the agent."""
        return str(self.template["spec"]["containers"][0]["name"])

    @property
    def tolerations(self) -> list[Json]:
        """Returns those of the template, and that of nodes which are kept for pods that ask for devices."""
        extended = [{"key": self.device, "operator": "Exists"}] if "/" in self.device else []
        return [*(self.template["spec"].get("tolerations") or ()), *extended]


# -- what goes to Kubernetes ------------------------------------------------------------------------------------------


def label_value(text: str) -> str:
    """Returns a text as the value of a label; one that is no such value is shortened, with a digest of the whole."""
    if LABEL.fullmatch(text):
        return text
    readable = re.sub(r"[^A-Za-z0-9_.-]", "-", text)[:40].strip("-_.")
    return f"{readable}-{_digest(text)}".lstrip("-")


def job_name(scheduler: str, name: str) -> str:
    """Returns the name of an agent's Job: the same one each time; pods and labels, which add to it, take no more."""
    readable = re.sub(r"[^a-z0-9]+", "-", name.lower())[-36:].strip("-")
    return f"elaunch-{readable}-{_digest(f'{scheduler}/{name}')}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def manifest(request: AgentRequest, settings: KubernetesSettings) -> dict[str, Any]:
    """Returns the Job of one agent. Whatever ends its pod, no second one is made."""
    template = copy.deepcopy(dict(settings.template))
    metadata = template.get("metadata") or {}
    labels = {SCHEDULER: label_value(settings.name), AGENT: label_value(request.name)}
    names = {SCHEDULER: settings.name, AGENT: request.name}
    template["metadata"] = metadata | {
        "labels": (metadata.get("labels") or {}) | labels,
        "annotations": (metadata.get("annotations") or {}) | names,
    }
    spec = template["spec"]
    spec["restartPolicy"] = "Never"
    spec["tolerations"] = settings.tolerations
    spec.setdefault("terminationGracePeriodSeconds", math.ceil(settings.grace_s))
    # By the name of the node, which its label `kubernetes.io/hostname` need not be. Kubernetes' own scheduler still
    # decides: a pod that is put on a node past it ignores cordons, and fails where it finds no room.
    here = {"key": "metadata.name", "operator": "In", "values": [request.node]}
    spec["affinity"] = (spec.get("affinity") or {}) | {
        "nodeAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [here]}]}
        }
    }
    container = spec["containers"][0]
    container["command"] = [_verbatim(word) for word in settings.elaunch]
    container["args"] = [_verbatim(word) for word in request.arguments]
    container["workingDir"] = request.folder
    resources = container.setdefault("resources", {})
    devices = {settings.device: str(request.devices)}
    resources["requests"] = (resources.get("requests") or {}) | devices
    limits = resources.get("limits") or {}
    if "/" in settings.device or settings.device in limits:
        resources["limits"] = limits | devices
    queue = {QUEUE: settings.queue} if settings.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": job_name(settings.name, request.name),
            "labels": labels | {"app.kubernetes.io/managed-by": "elaunch"} | queue,
            "annotations": names,
        },
        "spec": {
            "parallelism": 1,
            "completions": 1,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",  # a pod that is asked to leave and exits with 0 has succeeded
            "suspend": bool(queue),
            "template": template,
        },
    }


def _verbatim(word: str) -> str:
    """Kubernetes replaces `$(NAME)` in commands by variables, and `$$` by `$`."""
    return word.replace("$", "$$")


# -- nodes ------------------------------------------------------------------------------------------------------------


def silent_nodes(nodes: Iterable[Json]) -> set[str]:
    """Returns the names of nodes from which Kubernetes has not heard for about a minute."""
    return {node["metadata"]["name"] for node in nodes if (_condition(node, "Ready") or {}).get("status") == "Unknown"}


def held(pod: Json, device: str) -> tuple[str, Decimal]:
    """Returns the node that a pod is on, and what it holds there; with no node, or when it is over, nothing."""
    over = (pod.get("status") or {}).get("phase") in ("Succeeded", "Failed")
    name = node_of(pod)
    return name, requested(pod, device) if name and not over else Decimal(0)


def parse_nodes(
    nodes: Iterable[Json], taken: Iterable[tuple[str, Decimal]], settings: KubernetesSettings
) -> list[ClusterNode]:
    """Returns the nodes that have devices and are among those that the template's `nodeSelector` chooses.

    Args:
        nodes: of the cluster.
        taken: what is held by others on which node.
        settings: what a device is, which labels count, what pods tolerate.
    """
    sums = defaultdict[str, Decimal](Decimal)
    for name, amount in taken:
        sums[name] += amount
    chosen = settings.template["spec"].get("nodeSelector") or {}
    found = []
    for node in nodes:
        name, labels = str(node["metadata"]["name"]), node["metadata"].get("labels") or {}
        total = _amount((node.get("status") or {}).get("allocatable") or {}, settings.device)
        if total >= 1 and chosen.items() <= labels.items():
            devices = max(0, math.floor(total - sums[name]))
            usable = _is_usable(node, settings.tolerations)
            found.append(
                ClusterNode(name, devices, labels.get(settings.kind, ""), labels.get(settings.rack, ""), usable)
            )
    return found


def _is_usable(node: Json, tolerations: Collection[Json]) -> bool:
    spec = node.get("spec") or {}
    if spec.get("unschedulable") or (_condition(node, "Ready") or {}).get("status") != "True":
        return False
    kept_free = [taint for taint in spec.get("taints") or () if taint.get("effect") in ("NoSchedule", "NoExecute")]
    return all(any(tolerates(one, taint) for one in tolerations) for taint in kept_free)


def tolerates(toleration: Json, taint: Json) -> bool:
    """Returns whether a pod with this toleration may be on a node with this taint."""
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key, operator = toleration.get("key") or "", toleration.get("operator") or "Equal"
    if operator == "Exists":
        return key in ("", taint.get("key"))
    same = (toleration.get("value") or "") == (taint.get("value") or "")
    return operator == "Equal" and key == taint.get("key") and same


def requested(pod: Json, device: str) -> Decimal:
    """Returns how much of a resource Kubernetes keeps on a node for a pod."""
    spec = pod.get("spec") or {}
    sidecars = most = Decimal(0)
    for container in spec.get("initContainers") or ():
        needs = _requests(container, device)
        if container.get("restartPolicy") == "Always":
            sidecars += needs
        most = max(most, sidecars if container.get("restartPolicy") == "Always" else sidecars + needs)
    total = sidecars + sum((_requests(one, device) for one in spec.get("containers") or ()), Decimal(0))
    whole = (spec.get("resources") or {}).get("requests") or {}
    needs = _amount(whole, device) if device in whole else max(total, most)
    return needs + _amount(spec.get("overhead") or {}, device)


def _requests(container: Json, device: str) -> Decimal:
    return _amount((container.get("resources") or {}).get("requests") or {}, device)


def _amount(resources: Json, device: str) -> Decimal:
    from kubernetes.utils.quantity import parse_quantity

    try:
        amount: Decimal = parse_quantity(resources.get(device, 0))
    except ValueError as error:
        raise ClusterUnavailable(f"Kubernetes has a quantity of {device} that cannot be read: {error}") from error
    return amount


# -- agents -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AgentJob:
    """What the Job of an agent and its pods say.

    Attributes:
        report: for the scheduler.
        pods: that have not ended, by their names.
        logged: a pod that has ended, whose log there may be; empty: none.
    """

    report: AgentReport
    pods: tuple[str, ...] = ()
    logged: str = ""


def is_own(thing: Json, settings: KubernetesSettings) -> bool:
    """Returns whether a Job or pod is of this scheduler."""
    annotations = thing["metadata"].get("annotations") or {}
    return annotations.get(SCHEDULER) == settings.name and AGENT in annotations


def agent_of(thing: Json) -> str:
    """Returns the name of the agent that a Job or pod is of."""
    return str((thing["metadata"].get("annotations") or {}).get(AGENT, ""))


def parse_agents(
    jobs: Iterable[Json],
    pods: Iterable[Json],
    nodes: Collection[Json],
    ran: Collection[str],
    settings: KubernetesSettings,
) -> list[AgentJob]:
    """Returns what is known of the agents of this scheduler.

    Args:
        jobs: of the namespace.
        pods: of the namespace, listed after the Jobs.
        nodes: of the cluster, listed after the pods: an agent on one that is silent or gone is lost.
        ran: agents that had a pod on a node before: Kueue has suspended those that have none any more.
        settings: whose agents these are.
    """
    of_job = defaultdict[str, list[Json]](list)
    for pod in pods:
        for owner in pod["metadata"].get("ownerReferences") or ():
            of_job[owner.get("uid", "")].append(pod)
    silent = silent_nodes(nodes)
    lost = {name: f"node {name} does not answer to Kubernetes" for name in silent}
    there = {node["metadata"]["name"] for node in nodes}
    found = []
    for job in jobs:
        if is_own(job, settings):
            own = of_job[job["metadata"].get("uid", "")]
            lost |= {name: f"node {name} is gone" for name in map(node_of, own) if name and name not in there}
            found.append(_agent(job, own, lost, agent_of(job) in ran, settings.container))
    return found


def node_of(pod: Json) -> str:
    """Returns the name of the node that a pod is on; empty: none yet."""
    return str((pod.get("spec") or {}).get("nodeName") or "")


def _agent(job: Json, pods: Iterable[Json], lost: Mapping[str, str], ran: bool, container: str) -> AgentJob:
    name = agent_of(job)
    rows = [(pod["metadata"]["name"], pod, pod_report(name, pod, container)) for pod in pods]
    alive = [row for row in rows if row[2].stage is not ClusterStage.ENDED]
    ended = [row for row in rows if row[2].stage is ClusterStage.ENDED]
    names = tuple(row[0] for row in alive)
    if alive:
        _, pod, report = max(alive, key=lambda row: row[2].stage is ClusterStage.RUNNING)
        if node_of(pod) in lost:
            report = AgentReport(name, ClusterStage.ENDED, lost[node_of(pod)])
        return AgentJob(report, names)
    if ended:
        return AgentJob(ended[-1][2], names, ended[-1][0])
    return AgentJob(_without_pod(name, job, ran))


def _without_pod(name: str, job: Json, ran: bool) -> AgentReport:
    failed = _condition(job, "Failed") or _condition(job, "FailureTarget")
    if _is_true(_condition(job, "Complete")):
        return AgentReport(name, ClusterStage.ENDED, "Complete", True)
    if failed is not None and _is_true(failed):
        return AgentReport(name, ClusterStage.ENDED, _reason("Failed", failed))
    if (job.get("spec") or {}).get("suspend"):
        queue = (job["metadata"].get("labels") or {}).get(QUEUE)
        if ran:
            return AgentReport(name, ClusterStage.ENDED, "its Job was suspended")
        return AgentReport(name, ClusterStage.QUEUED, f"waits in the queue {queue} of Kueue" if queue else "suspended")
    return AgentReport(name, ClusterStage.QUEUED, "its Job has no pod yet")


def pod_report(name: str, pod: Json, container: str) -> AgentReport:
    """Returns what a pod says of its agent, which runs in this container."""
    status, spec = pod.get("status") or {}, pod.get("spec") or {}
    phase = status.get("phase") or "Pending"
    states = {one.get("name"): one.get("state") or {} for one in status.get("containerStatuses") or ()}
    over = states.get(container, {}).get("terminated")
    if over or phase in ("Succeeded", "Failed"):
        succeeded = over.get("exitCode") == 0 if over else phase == "Succeeded"
        return AgentReport(name, ClusterStage.ENDED, _ending(status, over or {}), succeeded)
    leaving = bool(pod["metadata"].get("deletionTimestamp"))
    if not spec.get("nodeName"):
        if leaving:  # it never gets a node
            return AgentReport(name, ClusterStage.ENDED, "its pod was deleted before it had a node")
        return AgentReport(name, ClusterStage.QUEUED, _reason("Pending", _condition(pod, "PodScheduled") or {}))
    if phase == "Pending":
        begun = (status.get("initContainerStatuses") or []) + (status.get("containerStatuses") or [])
        waits = [waiting for one in begun if (waiting := (one.get("state") or {}).get("waiting"))]
        for waiting in waits:
            if waiting.get("reason") in NEVER:
                return AgentReport(name, ClusterStage.ENDED, _reason("Pending", waiting))
        # It has its devices, and its image may be large: this counts as the agent's own start.
        return AgentReport(name, ClusterStage.RUNNING, _reason("Pending", waits[0] if waits else {}))
    return AgentReport(name, ClusterStage.RUNNING, "Terminating" if leaving else phase)


def _ending(status: Json, over: Json) -> str:
    """How a pod has ended: by the cluster's hand, or with an exit code."""
    disruption = _condition({"status": status}, "DisruptionTarget") or {}
    if status.get("reason"):
        return _reason(status["reason"], {"message": status.get("message")})
    if _is_true(disruption):
        return _reason("disrupted", disruption)
    if "exitCode" not in over:
        return _reason(status.get("phase", "ended"), over)
    reason = over.get("reason")
    text = f"exit code {over['exitCode']}"
    return text if reason in (None, "", "Completed", "Error") else _reason(text, over)


def _condition(thing: Json, kind: str) -> Json | None:
    conditions = (thing.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind), None)


def _is_true(condition: Json | None) -> bool:
    return condition is not None and condition.get("status") == "True"


def _reason(what: str, why: Json) -> str:
    """A state with the reason and the message that Kubernetes gives for it, in one line."""
    message = " ".join(str(why.get("message") or "").split())[:200]
    parts = [part for part in (why.get("reason"), message) if part and part != what]
    return f"{what} ({': '.join(parts)})" if parts else what
