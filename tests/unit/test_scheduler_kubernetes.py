"""What is said to Kubernetes, by its published schema, and what is made of its objects (in tests/data)."""

from __future__ import annotations

import base64
import copy
import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from elaunch.cli.schedule import main
from elaunch.errors import UsageError
from elaunch.scheduler.clusters import kubernetes
from elaunch.scheduler.clusters.cluster import AgentReport, AgentRequest, ClusterStage, ClusterUnavailable
from elaunch.scheduler.clusters.kubernetes import KubernetesCluster, connect, read_template
from elaunch.scheduler.clusters.kubernetes_objects import (
    KubernetesSettings,
    held,
    job_name,
    label_value,
    manifest,
    parse_agents,
    parse_nodes,
    pod_report,
    requested,
    silent_nodes,
    tolerates,
)
from elaunch.scheduler.model import ClusterNode
from tests.helpers import ROOT, Spawned, Spawner, make_certificates, mute_address, wait_until
from tests.kubernetes_api import Answer, TestKubernetes, check, serving

DATA = ROOT / "tests" / "data"
ROLES = ROOT / "examples" / "kubernetes.yaml"
NODES = list(yaml.safe_load_all((DATA / "kubernetes_nodes.yaml").read_text()))
PODS = list(yaml.safe_load_all((DATA / "kubernetes_pods.yaml").read_text()))
AGENT = {"name": "elaunch", "image": "registry.example/train:1"}
TEMPLATE: dict[str, Any] = {"metadata": {}, "spec": {"containers": [AGENT]}}
SETTINGS = KubernetesSettings("main", Path("/shared"), ("elaunch",), TEMPLATE)
REQUEST = AgentRequest("GPT_2.0.13", "gke-a100-0", 2, ("--rdzv-id=GPT_2.0", "train.py", "$(HOME) it's"), "/home/ann")
LIMIT_S = 30.0

RICH = """
apiVersion: v1
kind: PodTemplate
metadata: {name: train}
template:
  metadata:
    name: left-out
    labels: {team: vision}
    annotations: {sidecar.istio.io/inject: "false"}
  spec:
    serviceAccountName: train
    restartPolicy: Always
    nodeSelector: {pool: train}
    tolerations: [{key: team, operator: Equal, value: vision, effect: NoSchedule}]
    affinity:
      podAntiAffinity:
        requiredDuringSchedulingIgnoredDuringExecution:
        - labelSelector: {matchLabels: {app: noisy}}
          topologyKey: kubernetes.io/hostname
    terminationGracePeriodSeconds: 90
    containers:
    - name: agent
      image: registry.example/train:1
      env: [{name: ELAUNCH_ETCD_USER, valueFrom: {secretKeyRef: {name: etcd, key: user}}}]
      resources: {requests: {memory: 64Gi}, limits: {memory: 64Gi}}
    - {name: logs, image: "registry.example/logs:1"}
"""


def template(folder: Path, text: str = RICH) -> dict[str, Any]:
    file = folder / "pod.yaml"
    file.write_text(text)
    return read_template(str(file))


def test_the_check_by_the_schema_finds_what_is_wrong() -> None:
    job = manifest(REQUEST, SETTINGS)
    wrongs: list[dict[str, Any]] = [
        {"parallelism": "1"},
        {"paralelism": 1},
        {"template": {"spec": {"containers": [{}]}}},
    ]
    for wrong in wrongs:
        with pytest.raises(ValueError, match=r"valid|unknown fields"):
            check(job | {"spec": job["spec"] | wrong})


# -- the Job of an agent ----------------------------------------------------------------------------------------------


def test_an_agent_is_a_job_of_one_pod_that_nothing_starts_again() -> None:
    job = manifest(REQUEST, SETTINGS)
    check(job)
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["parallelism"], spec["completions"], spec["backoffLimit"], pod["restartPolicy"]) == (1, 1, 0, "Never")
    assert (spec["suspend"], "activeDeadlineSeconds" in spec, spec["podReplacementPolicy"]) == (False, False, "Failed")
    assert pod["terminationGracePeriodSeconds"] == 45
    (container,) = pod["containers"]
    assert container["command"] == ["elaunch"]
    assert container["args"] == ["--rdzv-id=GPT_2.0", "train.py", "$$(HOME) it's"], "no variable of Kubernetes"
    assert container["workingDir"] == "/home/ann"
    assert container["resources"] == {"requests": {"nvidia.com/gpu": "2"}, "limits": {"nvidia.com/gpu": "2"}}
    ((term,),) = pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"].values()
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["gke-a100-0"]}]}
    for metadata in (job["metadata"], spec["template"]["metadata"]):
        assert metadata["labels"].items() >= {"elaunch/scheduler": "main", "elaunch/agent": "GPT_2.0.13"}.items()
        assert metadata["annotations"] == {"elaunch/scheduler": "main", "elaunch/agent": "GPT_2.0.13"}
    assert manifest(REQUEST, SETTINGS) == job, "the same each time: created twice, it is there once"
    assert "command" not in TEMPLATE["spec"]["containers"][0]


def test_what_a_template_has_stays(tmp_path: Path) -> None:
    settings = replace(SETTINGS, template=template(tmp_path), device="cpu", queue="train", grace_s=7.2)
    job = manifest(REQUEST, settings)
    check(job)
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "train"
    assert job["spec"]["suspend"], "until Kueue admits it"
    whole = job["spec"]["template"]
    assert "name" not in whole["metadata"]
    assert whole["metadata"]["labels"].items() >= {"team": "vision", "elaunch/scheduler": "main"}.items()
    assert whole["metadata"]["annotations"].items() >= {"sidecar.istio.io/inject": "false"}.items()
    pod = whole["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 90)
    assert (pod["serviceAccountName"], pod["nodeSelector"]) == ("train", {"pool": "train"})
    assert pod["affinity"].keys() == {"podAntiAffinity", "nodeAffinity"}
    agent, logs = pod["containers"]
    assert (agent["name"], logs) == ("agent", {"name": "logs", "image": "registry.example/logs:1"})
    assert agent["env"][0]["name"] == "ELAUNCH_ETCD_USER"
    assert agent["resources"] == {"requests": {"memory": "64Gi", "cpu": "2"}, "limits": {"memory": "64Gi"}}


def test_names_are_those_that_kubernetes_takes() -> None:
    names = ["a.0.0", "A.0.0", "a_b.0.0", "a-b.0.0", f"{'x_' * 30}.10.123456", f"{'x_' * 30}.10.123457", "-.0.1"]
    found = [job_name("main", name) for name in names] + [job_name("other", "a.0.0")]
    assert len(set(found)) == len(found)
    for name in found:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", name), name
        assert len(name) <= 57, "its pod's name has six characters more, and a name of a host at most 63"
    assert label_value("GPT_2.0.13") == "GPT_2.0.13"
    labels = [label_value(name) for name in (*names, "", "_", "x" * 63, "x" * 64, "team/vision")]
    assert len(set(labels)) == len(labels)
    for label in labels:
        assert re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", label), label


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "while parsing a flow"),
        ("just text", "expected a pod whose spec has containers"),
        ("spec: {containers: []}", "expected a pod whose spec has containers"),
        ("kind: Pod", "expected a pod whose spec has containers"),
        ("spec: {containers: [{name: a}]}", "the first container, which runs the agent, has no image"),
        ("spec: {nodeName: n1, containers: [{image: a}]}", "leave out nodeName: the scheduler gives them"),
        ("spec: {affinity: {nodeAffinity: {}}, containers: [{image: a}]}", "leave out nodeAffinity"),
        ("spec: {containers: [{image: a, args: [b]}]}", "leave out command and args of the first container"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(UsageError, match=rf"^--pod-template {tmp_path}/pod.yaml: .*{complaint}"):
        template(tmp_path, text)


def test_a_template_is_named_and_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ["run", "--cluster=kubernetes", f"--folder={tmp_path}", "--rdzv-endpoint=127.0.0.1:9"]
    assert main(run) == 2
    assert main([*run, f"--pod-template={tmp_path}/none"]) == 2
    text = capsys.readouterr().err
    assert "--cluster=kubernetes needs --pod-template=FILE: a pod with the image of the jobs" in text
    assert f"--pod-template {tmp_path}/none: No such file or directory" in text


def test_the_manifests_of_the_example_are_valid() -> None:
    documents = list(yaml.safe_load_all(ROLES.read_text()))
    for document in documents:
        check(document)
    (pod,) = [one["data"]["pod.yaml"] for one in documents if one["kind"] == "ConfigMap"]
    check(manifest(REQUEST, replace(SETTINGS, template=yaml.safe_load(pod))))


# -- nodes ------------------------------------------------------------------------------------------------------------


def pod_with(node: str, gpus: int, **values: Any) -> dict[str, Any]:
    containers = [{"name": "a", "resources": {"requests": {"nvidia.com/gpu": str(gpus)}}}]
    return {"metadata": {"name": "a"}, "spec": {"nodeName": node, "containers": containers}, "status": values}


def test_nodes_have_the_devices_that_others_leave() -> None:
    for node in NODES:
        check(node)
    pods = [
        pod_with("gke-a100-0", 1, phase="Running"),
        pod_with("gke-a100-0", 1, phase="Succeeded"),
        pod_with("gke-a100-1", 2, phase="Pending"),
        pod_with("gke-a100-1", 1, phase="Running"),
        pod_with("", 4, phase="Pending"),
    ]
    taken = [held(pod, "nvidia.com/gpu") for pod in pods]
    settings = replace(
        SETTINGS, template={"metadata": {}, "spec": {**TEMPLATE["spec"], "nodeSelector": {"pool": "train"}}}
    )
    assert parse_nodes(NODES, taken, settings) == [
        ClusterNode("gke-a100-0", 3, "NVIDIA-A100-SXM4-40GB", "europe-west4-a"),
        ClusterNode("gke-a100-1", 1, "NVIDIA-A100-SXM4-40GB", "europe-west4-b", usable=False),
        ClusterNode("gke-a100-2", 4, usable=False),
        ClusterNode("gke-a100-3", 4, usable=False),
        ClusterNode("gke-a100-4", 4, usable=False),
    ]
    assert silent_nodes(NODES) == {"gke-a100-3"}
    others = replace(settings, template=copy.deepcopy(settings.template), rack="pool", kind="none")
    others.template["spec"]["tolerations"] = [{"key": "team", "operator": "Exists"}]
    assert parse_nodes(NODES, [], others)[4] == ClusterNode("gke-a100-4", 4, "", "train")
    cpus = {node.name: node for node in parse_nodes(NODES, [], replace(SETTINGS, device="cpu"))}
    assert cpus["gke-cpu-0"] == ClusterNode("gke-cpu-0", 3)
    assert cpus["gke-a100-0"].devices == 46
    assert not cpus["gke-a100-0"].usable, "it is kept for pods that ask for GPUs"


def test_a_pod_holds_what_its_containers_need_at_one_time() -> None:
    def container(cpus: str, **values: str) -> dict[str, Any]:
        return {"name": "a", "resources": {"requests": {"cpu": cpus}}, **values}

    def cpus(**spec: Any) -> float:
        return float(requested({"metadata": {}, "spec": spec}, "cpu"))

    assert cpus(containers=[container("500m"), container("1"), {"name": "b"}]) == 1.5
    assert cpus(containers=[container("1")], initContainers=[container("4"), container("2")]) == 4
    sidecar = container("1", restartPolicy="Always")
    assert cpus(containers=[container("1")], initContainers=[container("1500m"), sidecar]) == 2
    assert cpus(containers=[container("1")], initContainers=[sidecar, container("3")]) == 4
    assert cpus(containers=[container("1")], overhead={"cpu": "250m"}) == 1.25
    assert cpus(containers=[container("1")], resources={"requests": {"cpu": "6"}}) == 6
    with pytest.raises(ClusterUnavailable, match="a quantity of cpu that cannot be read"):
        cpus(containers=[container("a few")])


@pytest.mark.parametrize(
    ("toleration", "does"),
    [
        ({"operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists"}, True),
        ({"key": "team", "operator": "Exists", "effect": "NoExecute"}, False),
        ({"key": "team", "value": "vision"}, True),
        ({"key": "team", "value": "vision", "effect": "NoSchedule"}, True),
        ({"key": "team", "value": "speech"}, False),
        ({"key": "team"}, False),
        ({"key": "other", "operator": "Exists"}, False),
    ],
)
def test_tolerations_are_those_of_kubernetes(toleration: dict[str, str], does: bool) -> None:
    assert tolerates(toleration, {"key": "team", "value": "vision", "effect": "NoSchedule"}) == does


# -- agents -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pod", PODS, ids=lambda pod: pod["metadata"]["name"].removeprefix("elaunch-a-0-0-"))
def test_what_a_pod_says_of_its_agent(pod: dict[str, Any]) -> None:
    check(pod)
    stage, succeeded, why = pod["metadata"]["annotations"]["expected"].split(" ", 2)
    assert pod_report("a.0.0", pod, "elaunch") == AgentReport("a.0.0", ClusterStage(stage), why, succeeded == "yes")


def job_of(name: str, scheduler: str = "main", suspend: bool = False, **status: Any) -> dict[str, Any]:
    annotations = {"elaunch/scheduler": scheduler, "elaunch/agent": name}
    metadata = {"name": job_name(scheduler, name), "uid": f"uid-{scheduler}-{name}", "annotations": annotations}
    return {"metadata": metadata, "spec": {"suspend": suspend}, "status": status}


def pod_of(job: dict[str, Any], like: str, node: str = "gke-a100-0") -> dict[str, Any]:
    pod: dict[str, Any] = copy.deepcopy(next(one for one in PODS if one["metadata"]["name"].endswith(f"-{like}")))
    pod["metadata"]["name"] = f"{job['metadata']['name']}-{like}"
    pod["metadata"]["annotations"] = job["metadata"]["annotations"]
    pod["metadata"]["ownerReferences"] = [{"kind": "Job", "uid": job["metadata"]["uid"]}]
    if "nodeName" in pod["spec"]:
        pod["spec"]["nodeName"] = node
    return pod


def test_agents_are_known_by_their_jobs_and_pods() -> None:
    limit = {
        "type": "Failed",
        "status": "True",
        "reason": "BackoffLimitExceeded",
        "message": "Job has reached the specified backoff limit",
    }
    jobs = {
        name: job_of(name, **values)  # type: ignore[arg-type]
        for name, values in {
            "new.0.0": {},
            "kueue.0.0": {"suspend": True},
            "kueue.0.1": {"suspend": True},
            "done.0.0": {"conditions": [{"type": "Complete", "status": "True"}]},
            "gone.0.0": {"conditions": [limit]},
            "ends.0.0": {"conditions": [limit]},
            "runs.0.0": {},
            "left.0.0": {},
            "silent.0.0": {},
            "away.0.0": {},
        }.items()
    }
    jobs["kueue.0.0"]["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "train"}
    pods = [
        pod_of(jobs["ends.0.0"], "leaving"),  # older versions end the Job before its pod
        pod_of(jobs["runs.0.0"], "running"),
        pod_of(jobs["left.0.0"], "done"),
        pod_of(jobs["silent.0.0"], "leaving", "gke-a100-3"),
        pod_of(jobs["away.0.0"], "running", "gke-a100-9"),
        pod_of(job_of("runs.0.0", "other"), "failed"),
    ]
    found = parse_agents([*jobs.values(), job_of("new.0.0", "other")], pods, NODES, {"kueue.0.1"}, SETTINGS)
    ended, queued, running = ClusterStage.ENDED, ClusterStage.QUEUED, ClusterStage.RUNNING
    assert [agent.report for agent in found] == [
        AgentReport("new.0.0", queued, "its Job has no pod yet"),
        AgentReport("kueue.0.0", queued, "waits in the queue train of Kueue"),
        AgentReport("kueue.0.1", ended, "its Job was suspended"),
        AgentReport("done.0.0", ended, "Complete", True),
        AgentReport("gone.0.0", ended, "Failed (BackoffLimitExceeded: Job has reached the specified backoff limit)"),
        AgentReport("ends.0.0", running, "Terminating"),
        AgentReport("runs.0.0", running, "Running"),
        AgentReport("left.0.0", ended, "exit code 0", True),
        AgentReport("silent.0.0", ended, "node gke-a100-3 does not answer to Kubernetes"),
        AgentReport("away.0.0", ended, "node gke-a100-9 is gone"),
    ]
    by_name = {agent.report.name: agent for agent in found}
    assert by_name["runs.0.0"].pods == (pods[1]["metadata"]["name"],)
    assert (by_name["left.0.0"].pods, by_name["left.0.0"].logged) == ((), pods[2]["metadata"]["name"])
    assert by_name["silent.0.0"].logged == ""


# -- the API ----------------------------------------------------------------------------------------------------------

WORKS = """
spec:
  containers: [{name: elaunch, image: "registry.example/train:1", env: [{name: WORD, value: hello}]}]
"""


@pytest.fixture
def api(tmp_path: Path, spawn: Spawner, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestKubernetes]:
    def run(command: list[str], env: Mapping[str, str], folder: Path, name: str) -> Spawned:
        return spawn(command, env=env, cwd=folder, name=name)

    with serving(TestKubernetes(tmp_path, ROLES, run)) as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        for index in range(3):
            kubernetes.add_node(f"n{index}", labels={"topology.kubernetes.io/zone": "a"})
        yield kubernetes


def cluster(folder: Path, script: str = "exit 0") -> KubernetesCluster:
    settings = KubernetesSettings("main", folder, ("sh", "-c", script), template(folder, WORKS), device="cpu")
    return KubernetesCluster(settings)


def request(number: int, node: str, folder: Path, *arguments: str) -> AgentRequest:
    return AgentRequest(f"a.0.{number}", node, 1, arguments, str(folder))


def reports(kubernetes: KubernetesCluster) -> dict[str, tuple[ClusterStage, str, bool]]:
    return {one.name: (one.stage, one.why, one.succeeded) for one in kubernetes.look()[1]}


def stages(kubernetes: KubernetesCluster) -> set[ClusterStage]:
    return {stage for stage, _, _ in reports(kubernetes).values()}


SCRIPT = """
[ "$1" = ends ] && { echo $WORD; exit 3; }
[ "$1" = stays ] && trap : TERM || trap 'exit 0' TERM
: >"ready-$1"
while :; do sleep 0.05; done
"""


def test_agents_start_once_leave_are_killed_and_are_forgotten(api: TestKubernetes, tmp_path: Path) -> None:
    here = cluster(tmp_path, SCRIPT)
    assert here.look() == ([ClusterNode(f"n{index}", 1, rack="a") for index in range(3)], [])
    words = ["sh", "leaves"], ["sh", "stays"], ["sh", "ends"]
    for number, arguments in enumerate(words):
        for _ in range(2):
            here.start(request(number, f"n{number}", tmp_path, *arguments))
    wait_until(lambda: reports(here).get("a.0.2", ("",))[0] is ClusterStage.ENDED, LIMIT_S, "the end of an agent")
    for name in ("leaves", "stays"):
        wait_until((tmp_path / f"ready-{name}").exists, LIMIT_S, "the start of the others")
    assert reports(here)["a.0.1"][:2] == (ClusterStage.RUNNING, "Running")
    assert reports(here)["a.0.2"] == (ClusterStage.ENDED, "exit code 3", False)
    assert [node.devices for node in here.look()[0]] == [1, 1, 1], "what is the scheduler's own is not taken"
    assert [node.devices for node in cluster(tmp_path).look()[0]] == [1, 1, 1], "nor for a daemon that begins anew"
    other = KubernetesCluster(replace(here.settings, name="other"))
    assert [node.devices for node in other.look()[0]] == [0, 0, 1], "for another scheduler it is"
    here.forget("a.0.2")
    assert (tmp_path / "a.0.2.log").read_text() == "hello\n"

    api.cordon("n0")
    assert [node.usable for node in here.look()[0]] == [False, True, True]
    here.stop("a.0.0", kill=False)
    wait_until(lambda: reports(here)["a.0.0"][2], LIMIT_S, "an agent that leaves with exit code 0")
    here.stop("a.0.1", kill=False)
    assert reports(here)["a.0.1"] == (ClusterStage.RUNNING, "Terminating", False)
    here.stop("a.0.1", kill=True)
    wait_until(lambda: stages(here) == {ClusterStage.ENDED}, LIMIT_S, "the end of an agent that was killed")
    for number in (0, 1, 1):
        here.forget(f"a.0.{number}")
    here.stop("a.0.1", kill=True)
    wait_until(lambda: not (api.objects["jobs"] or api.objects["pods"]), LIMIT_S, "the end of all objects")
    assert reports(here) == {}

    # What the account may do is what was done, and nothing beside it.
    verbs = {
        (re.sub(r"(?<=[a-z])/elaunch-[a-z0-9-]+", "/NAME", line.partition("?")[0])).rstrip("/") for line in api.requests
    }
    assert verbs == {
        "GET /api/v1/nodes",
        "GET /api/v1/pods",
        "GET /api/v1/namespaces/train/pods",
        "DELETE /api/v1/namespaces/train/pods/NAME",
        "GET /api/v1/namespaces/train/pods/NAME/log",
        "GET /apis/batch/v1/namespaces/train/jobs",
        "POST /apis/batch/v1/namespaces/train/jobs",
        "DELETE /apis/batch/v1/namespaces/train/jobs/NAME",
    }
    rules = [rule for role in api.roles for rule in role["rules"]]
    granted = {(resource, verb) for rule in rules for resource in rule["resources"] for verb in rule["verbs"]}
    assert granted == {
        *(("nodes", "list"), ("pods", "list"), ("pods", "delete"), ("pods/log", "get")),
        *(("jobs", "list"), ("jobs", "create"), ("jobs", "delete")),
    }


def test_agents_that_wait_are_withdrawn(api: TestKubernetes, tmp_path: Path) -> None:
    here = cluster(tmp_path, SCRIPT)
    here.settings.template["spec"]["containers"][0]["image"] = "registry.example/missing:1"
    here.look()
    api.cordon("n0")
    here.start(request(0, "n0", tmp_path))
    here.start(request(1, "n1", tmp_path))
    kueue = KubernetesCluster(replace(here.settings, queue="train"))
    kueue.look()
    kueue.start(request(2, "n2", tmp_path))
    wait_until(lambda: "Unschedulable" in reports(here)["a.0.0"][1], LIMIT_S, "a pod without a node")
    wait_until(lambda: reports(here)["a.0.1"][0] is ClusterStage.ENDED, LIMIT_S, "a pod without an image")
    found = reports(here)
    why = "Pending (Unschedulable: 0/3 nodes are available: 1 node(s) were unschedulable.)"
    assert found["a.0.0"] == (ClusterStage.QUEUED, why, False)
    why = 'Pending (ImagePullBackOff: Back-off pulling image "registry.example/missing:1")'
    assert found["a.0.1"] == (ClusterStage.ENDED, why, False)
    assert found["a.0.2"] == (ClusterStage.QUEUED, "waits in the queue train of Kueue", False)
    assert [node.devices for node in here.look()[0]] == [1, 0, 1], "the pod without an image still holds its device"
    here.stop("a.0.0", kill=True)
    wait_until(lambda: reports(here)["a.0.0"][0] is ClusterStage.ENDED, LIMIT_S, "the end of a pod without a node")
    here.stop("a.0.2", kill=True)
    assert "a.0.2" not in reports(here)
    for number in (0, 1):
        here.forget(f"a.0.{number}")
    api.refuse["POST"] = Answer(403, 'pods "x" is forbidden: exceeded quota: gpus')
    with pytest.raises(
        ClusterUnavailable, match=r"^Kubernetes refuses POST /apis/.*/jobs: 403 .*exceeded quota: gpus$"
    ):
        here.start(request(3, "n2", tmp_path))
    wait_until(lambda: not (api.objects["jobs"] or api.objects["pods"]), LIMIT_S, "the end of all objects")


def test_an_agent_that_kueue_suspends_leaves_and_has_ended(api: TestKubernetes, tmp_path: Path) -> None:
    here = cluster(tmp_path, SCRIPT)
    here = KubernetesCluster(replace(here.settings, queue="train"))
    here.look()
    here.start(request(0, "n0", tmp_path))
    assert reports(here) == {"a.0.0": (ClusterStage.QUEUED, "waits in the queue train of Kueue", False)}
    api.suspend("a.0.0", False)
    wait_until(lambda: reports(here)["a.0.0"][1] == "Running", LIMIT_S, "its start")
    api.suspend("a.0.0", True)
    ended = (ClusterStage.ENDED, "its Job was suspended", False)
    wait_until(lambda: reports(here)["a.0.0"] == ended, LIMIT_S, "its end")
    here.forget("a.0.0")
    assert reports(here) == {}


def test_long_lists_come_in_pages(api: TestKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "PAGE", 2)
    for index in range(3, 8):
        api.add_node(f"n{index}")
    here = cluster(tmp_path)
    assert [node.name for node in here.look()[0]] == [f"n{index}" for index in range(8)]
    assert sum("continue=" in line for line in api.requests) == 3

    api.expire = 1
    assert len(here.look()[0]) == 8, "a list that has expired is read once more"
    api.expire = 2
    with pytest.raises(ClusterUnavailable, match="410 The provided continue parameter is too old"):
        here.look()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (403, 'nodes is forbidden: User "x" cannot list resource "nodes"'),
        (429, "Too many requests, please try again later."),
        (500, "etcdserver: leader changed"),
        (503, "apiserver not ready"),
    ],
)
def test_refusals_are_told_in_one_line(api: TestKubernetes, tmp_path: Path, code: int, message: str) -> None:
    here = cluster(tmp_path)
    api.refuse["nodes"] = Answer(code, f"{message}\nwith more")
    with pytest.raises(ClusterUnavailable) as refused:
        here.look()
    assert str(refused.value) == f"Kubernetes refuses GET /api/v1/nodes: {code} {message}"
    api.refuse.clear()
    assert len(here.look()[0]) == 3


@pytest.mark.parametrize("plugin", [False, True])
def test_credentials_are_read_again_when_they_have_expired(api: TestKubernetes, tmp_path: Path, plugin: bool) -> None:
    file = api.kubeconfig
    if plugin:  # such as those of clouds: a command that prints a token
        file = tmp_path / "credential.json"
        version = "client.authentication.k8s.io/v1"
        credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": api.token}}
        file.write_text(json.dumps(credential))
        config = yaml.safe_load(api.kubeconfig.read_text())
        command = {"apiVersion": version, "command": "cat", "args": [str(file)], "interactiveMode": "Never"}
        config["users"][0]["user"] = {"exec": command}
        api.kubeconfig.write_text(json.dumps(config))
    here = cluster(tmp_path)
    here.look()
    before, api.token = api.token, "another one"
    with pytest.raises(ClusterUnavailable, match="401 Unauthorized"):
        here.look()
    file.write_text(file.read_text().replace(before, api.token))
    assert len(here.look()[0]) == 3


def test_the_server_and_the_client_show_certificates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    openssl = shutil.which("openssl")
    assert openssl is not None, "apt-get install openssl"
    make_certificates(openssl, tmp_path)
    with serving(TestKubernetes(tmp_path, ROLES), tmp_path) as kubernetes:
        monkeypatch.setenv("KUBECONFIG", str(kubernetes.kubeconfig))
        kubernetes.add_node("n0")
        assert len(cluster(tmp_path).look()[0]) == 1
        config = yaml.safe_load(kubernetes.kubeconfig.read_text())
        config["clusters"][0]["cluster"] |= {
            "certificate-authority-data": base64.b64encode((tmp_path / "other.pem").read_bytes()).decode()
        }
        kubernetes.kubeconfig.write_text(json.dumps(config))
        with pytest.raises(ClusterUnavailable, match=r"^Kubernetes does not answer GET .*certificate verify failed"):
            cluster(tmp_path).look()


def test_when_no_node_is_heard_of_the_fault_is_elsewhere(api: TestKubernetes, tmp_path: Path) -> None:
    here = cluster(tmp_path)
    for node in ("n0", "n1", "n2"):
        api.hear(node, "Unknown")
    with pytest.raises(ClusterUnavailable, match=r"^Kubernetes hears nothing from any of its nodes \(3\)$"):
        here.look()
    api.hear("n2", "False")
    assert [node.usable for node in here.look()[0]] == [False, False, False]


def test_a_server_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kubernetes, "LIMIT_S", 0.3)
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(file))
    monkeypatch.setattr(kubernetes, "IN_POD", tmp_path / "no-pod")
    with pytest.raises(ClusterUnavailable, match="cannot be reached without a configuration"):
        cluster(tmp_path).look()
    with mute_address() as mute:
        for address in (mute, "127.0.0.1:9"):
            file.write_text(
                yaml.safe_dump(
                    {
                        "current-context": "a",
                        "clusters": [{"name": "a", "cluster": {"server": f"http://{address}"}}],
                        "users": [{"name": "a", "user": {"token": "t"}}],
                        "contexts": [
                            {"name": "a", "context": {"cluster": "a", "user": "a"}},
                            {"name": "b", "context": {"cluster": "a", "user": "a", "namespace": "vision"}},
                        ],
                    }
                )
            )
            assert (connect("")[1], connect("b")[1]) == ("default", "vision")
            with pytest.raises(ClusterUnavailable) as away:
                cluster(tmp_path).look()
            start = "Kubernetes does not answer GET /apis/batch/v1/namespaces/default/jobs: "
            assert str(away.value).startswith(start)
            assert "\n" not in str(away.value)
        with pytest.raises(ClusterUnavailable, match="cannot be reached without a configuration"):
            connect("none")


@pytest.mark.parametrize("package", ["kubernetes", "yaml"])
def test_without_the_client_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=r"needs its client: pip install 'elaunch\[kubernetes\]'"):
        connect("") if package == "kubernetes" else read_template("pod.yaml")


def test_in_a_pod_the_service_account_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kubernetes.config import incluster_config

    for name, text in {"token": "t", "namespace": "train\n", "ca.crt": "certificate"}.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(kubernetes, "IN_POD", tmp_path)
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(tmp_path / "token"))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "192.0.2.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    client, namespace = connect("")
    assert (client.configuration.host, namespace) == ("https://192.0.2.1:443", "train")
