"""A Kubernetes of a test's own, in this process: an API server for the calls that elaunch makes, and what acts on it.

As in a real one: lists come in pages whose tokens expire, names exist once, objects are checked against the published
schema, deletion is graceful and goes on to what an object owns, and a service account may do what its roles say. A Job
controller, a scheduler and kubelets act on the objects; a pod is a real process.
"""

from __future__ import annotations

import base64
import contextlib
import json
import re
import secrets
import signal
import ssl
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml
from kubernetes import client

from tests.helpers import Spawned

Object = dict[str, Any]

TOKEN = "token-of-the-service-account"
NAMESPACE = "train"
ACCOUNT = "elaunch-schedule"
TRACKED = "batch.kubernetes.io/job-tracking"
PATH = re.compile(
    r"/(?:api|apis/(?P<group>batch))/v1(?:/namespaces/(?P<space>[^/]+))?/(?P<kind>nodes|pods|jobs)"
    r"(?:/(?P<name>[^/]+))?(?P<log>/log)?"
)
DNS_1123 = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?")
REASONS = {401: "Unauthorized", 403: "Forbidden", 404: "NotFound", 409: "AlreadyExists", 410: "Expired", 422: "Invalid"}


class Answer(Exception):
    """An answer that is an error."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


def check(thing: Mapping[str, Any]) -> None:
    """Checks an object by the published schema of Kubernetes, from which the models of its client are made.

    Raises:
        ValueError: a value is missing or of a wrong type, or the schema does not know a field: it does not come back.
    """
    model = getattr(client, f"V1{thing['kind']}").from_dict(thing)
    back = json.dumps(client.ApiClient().sanitize_for_serialization(model)).replace("+00:00", "Z")
    given = json.loads(json.dumps(thing), object_hook=lambda one: {k: v for k, v in one.items() if v is not None})
    if json.loads(back) != given:
        raise ValueError(f"unknown fields: {thing} comes back as {back}")


class TestKubernetes:
    """The objects, and what acts on them.

    Args:
        folder: of its kubeconfig.
        manifests: with the roles of the account whose token the kubeconfig has.
        run: starts the process of a container: its command, environment, folder and a name.

    Attributes:
        requests: methods and addresses of all that came.
        refuse: answers to those that contain a text.
        expire: so many continuations of lists are too old.
        token: that counts.
    """

    __test__ = False

    def __init__(
        self,
        folder: Path,
        manifests: Path,
        run: Callable[[list[str], Mapping[str, str], Path, str], Spawned] | None = None,
    ) -> None:
        self.lock = threading.RLock()
        self.objects: dict[str, dict[str, Object]] = {"nodes": {}, "pods": {}, "jobs": {}}
        self.requests: list[str] = []
        self.refuse: dict[str, Answer] = {}
        self.expire = 0
        self.token = TOKEN
        self.kubeconfig = folder / "kubeconfig"
        self.roles = [one for one in yaml.safe_load_all(manifests.read_text()) if one["kind"].endswith("Role")]
        self._run = run
        self._processes: dict[str, Spawned] = {}
        self._kill_s: dict[str, float] = {}
        self._revision = 100

    # -- what tests do --------------------------------------------------------------------------------------------

    def add_node(self, name: str, cpus: str = "1", labels: Mapping[str, str] | None = None, **spec: Any) -> None:
        """Adds a node that is ready. Of its processors, allocatable is what it has."""
        amounts = {"cpu": cpus, "memory": "64Gi", "pods": "110"}
        self._put(
            "nodes",
            {
                "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
                "spec": spec,
                "status": {"capacity": amounts, "allocatable": amounts, "conditions": []},
            },
        )
        self.hear(name)

    def hear(self, node: str, status: str = "True") -> None:
        """Sets whether a node is ready: "True", "False", or "Unknown" for one that does not report any more."""
        reasons = {"True": "KubeletReady", "False": "KubeletNotReady", "Unknown": "NodeStatusUnknown"}
        with self.lock:
            _set_condition(self.objects["nodes"][node], "Ready", status, reasons[status], "")

    def cordon(self, node: str, cordoned: bool = True) -> None:
        """As `kubectl cordon`, and `uncordon`."""
        with self.lock:
            spec = self.objects["nodes"][node]["spec"]
            spec.pop("unschedulable", None)
            spec.pop("taints", None)
            if cordoned:
                spec["unschedulable"] = True
                spec["taints"] = [{"key": "node.kubernetes.io/unschedulable", "effect": "NoSchedule"}]

    def suspend(self, agent: str, suspended: bool) -> None:
        """Does what Kueue does with a Job that it admits, or stops for another one."""
        with self.lock:
            (job,) = [
                job for job in self.objects["jobs"].values() if job["metadata"]["annotations"]["elaunch/agent"] == agent
            ]
            job["spec"]["suspend"] = suspended

    def lose(self, node: str) -> None:
        """Ends a node as the loss of its machine would: nobody says how its pods end, or that they do."""
        with self.lock:
            for key, pod in self.objects["pods"].items():
                if pod["spec"].get("nodeName") == node and key in self._processes:
                    self._processes.pop(key).signal(signal.SIGKILL)
            self.hear(node, "Unknown")

    def pods(self) -> dict[str, Object]:
        """Returns the pods that have not ended, by their agents."""
        with self.lock:
            return {
                pod["metadata"]["annotations"]["elaunch/agent"]: pod
                for pod in self.objects["pods"].values()
                if pod["status"]["phase"] in ("Pending", "Running")
            }

    def pid(self, agent: str) -> int:
        """Returns the process of an agent's pod."""
        with self.lock:
            return self._processes[_key(self.pods()[agent])].pid

    def _put(self, kind: str, thing: Object) -> Object:
        with self.lock:
            now = _now()
            thing["metadata"] = {"uid": str(uuid.uuid4()), "creationTimestamp": now} | thing["metadata"]
            self.touch(thing)
            self.objects[kind][_key(thing)] = thing
            return thing

    def touch(self, thing: Object) -> None:
        """Counts a change of an object."""
        self._revision += 1
        thing["metadata"]["resourceVersion"] = str(self._revision)

    # -- the API server -------------------------------------------------------------------------------------------

    def answer(self, method: str, url: str, token: str, body: bytes) -> tuple[int, bytes]:
        """Returns code and body of the answer to a request."""
        parts = urlsplit(url)
        query = {name: values[-1] for name, values in parse_qs(parts.query, keep_blank_values=True).items()}
        with self.lock:
            self.requests.append(f"{method} {url}")
            try:
                for text, refusal in self.refuse.items():
                    if text in f"{method} {url}":
                        raise refusal
                found = self._answer(method, parts.path, query, token, body)
                return found if isinstance(found, tuple) else (200, json.dumps(found).encode())
            except Answer as error:
                status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": error.code}
                status |= {"message": error.message, "reason": REASONS.get(error.code, "")}
                return error.code, json.dumps(status).encode()

    def _answer(
        self, method: str, path: str, query: Mapping[str, str], token: str, body: bytes
    ) -> Object | tuple[int, bytes]:
        match = PATH.fullmatch(path)
        if match is None or (match["kind"] == "jobs") != (match["group"] == "batch"):
            raise Answer(404, "the server could not find the requested resource")
        kind, space, name = match["kind"], match["space"] or "", match["name"] or ""
        verb = {"GET": "get" if name else "list", "POST": "create", "DELETE": "delete"}.get(method, method.lower())
        if token != f"Bearer {self.token}":
            raise Answer(401, "Unauthorized")
        resource = f"{kind}/log" if match["log"] else kind
        if not self._may(verb, match["group"] or "", resource, space):
            where = f'in the namespace "{space}"' if space else "at the cluster scope"
            who = f'User "system:serviceaccount:{NAMESPACE}:{ACCOUNT}"'
            group = f'in API group "{match["group"] or ""}"'
            raise Answer(403, f'{kind} is forbidden: {who} cannot {verb} resource "{resource}" {group} {where}')
        if verb == "list":
            return self._list(kind, space, query)
        if verb == "create":
            return 201, json.dumps(self._create(space, json.loads(body))).encode()
        thing = self.objects[kind].get(f"{space}/{name}")
        if thing is None:
            group = ".batch" if kind == "jobs" else ""
            raise Answer(404, f'{kind}{group} "{name}" not found')
        if match["log"]:
            process = self._processes.get(_key(thing))
            if process is None:
                raise Answer(404, f'unable to retrieve container logs of pod "{name}"')
            return 200, process.log.read_bytes()[: int(query["limitBytes"])]
        if verb == "delete" and kind == "jobs":
            self._delete_job(thing, query.get("propagationPolicy", "Background"))
            return {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success"}
        if verb == "delete" and kind == "pods":
            grace = query.get("gracePeriodSeconds")
            self._delete_pod(thing, None if grace is None else int(grace))
            return thing
        raise Answer(405, "the server does not allow this method on the requested resource")

    def _may(self, verb: str, group: str, resource: str, space: str) -> bool:
        return any(
            verb in rule["verbs"] and group in rule["apiGroups"] and resource in rule["resources"]
            for role in self.roles
            if role["kind"] == "ClusterRole" or role["metadata"]["namespace"] == space
            for rule in role["rules"]
        )

    def _list(self, kind: str, space: str, query: Mapping[str, str]) -> Object:
        chosen = [
            (key, thing)
            for key, thing in sorted(self.objects[kind].items())
            if (not space or key.startswith(f"{space}/"))
            and _has_labels(thing, query.get("labelSelector", ""))
            and _has_fields(thing, query.get("fieldSelector", ""))
        ]
        metadata: Object = {"resourceVersion": str(self._revision)}
        if query.get("continue"):
            if self.expire:
                self.expire -= 1
                raise Answer(410, "The provided continue parameter is too old to display a consistent list result.")
            start = json.loads(base64.b64decode(query["continue"]))["start"]
            chosen = [row for row in chosen if row[0] > start]
        limit = int(query.get("limit") or 0)
        if limit and len(chosen) > limit:
            metadata["remainingItemCount"] = len(chosen) - limit
            chosen = chosen[:limit]
            token = {"v": "meta.k8s.io/v1", "rv": self._revision, "start": chosen[-1][0]}
            metadata["continue"] = base64.b64encode(json.dumps(token).encode()).decode()
        group = "batch/v1" if kind == "jobs" else "v1"
        name = f"{kind[:-1].capitalize()}List"
        return {"kind": name, "apiVersion": group, "metadata": metadata, "items": [thing for _, thing in chosen]}

    def _create(self, space: str, job: Object) -> Object:
        try:
            check(job)
        except ValueError as error:
            raise Answer(422, f"Job.batch is invalid: {error}") from error
        metadata, pod = job["metadata"], job["spec"]["template"]
        for container in pod["spec"]["containers"]:
            resources = container.get("resources") or {}
            for device, amount in (resources.get("requests") or {}).items():
                if "/" in device and (resources.get("limits") or {}).get(device) != amount:
                    raise Answer(422, "Limit must be set for non overcommitable resources")
        values = [*metadata["labels"].values(), *pod["metadata"]["labels"].values()]
        if not DNS_1123.fullmatch(metadata["name"]) or not all(map(LABEL_VALUE.fullmatch, values)):
            raise Answer(422, f'Job.batch "{metadata["name"]}" is invalid: metadata')
        if f"{space}/{metadata['name']}" in self.objects["jobs"]:
            raise Answer(409, f'jobs.batch "{metadata["name"]}" already exists')
        return self._put("jobs", job | {"metadata": metadata | {"namespace": space}, "status": {}})

    def _delete_job(self, job: Object, policy: str) -> None:
        assert policy in ("Background", "Orphan"), policy
        del self.objects["jobs"][_key(job)]
        if policy == "Background":
            for pod in self._pods_of(job):
                self._delete_pod(pod, None)

    def _delete_pod(self, pod: Object, grace: int | None) -> None:
        """Marks it; its kubelet removes it when its process has ended. A later deletion may only shorten the grace."""
        metadata, spec = pod["metadata"], pod["spec"]
        seconds = spec.get("terminationGracePeriodSeconds", 30) if grace is None else grace
        if not spec.get("nodeName") or pod["status"]["phase"] in ("Succeeded", "Failed"):
            seconds = 0
        if "deletionTimestamp" in metadata and seconds >= metadata["deletionGracePeriodSeconds"]:
            return
        metadata["deletionTimestamp"], metadata["deletionGracePeriodSeconds"] = _now(seconds), seconds
        self.touch(pod)
        self._kill_s[_key(pod)] = time.monotonic() + seconds
        if _key(pod) in self._processes:
            self._processes[_key(pod)].signal(signal.SIGTERM)

    # -- controllers ----------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Does one round of what the Job controller, the scheduler, the kubelets and the garbage collector do."""
        with self.lock:
            for job in list(self.objects["jobs"].values()):
                self._control(job)
            for key, pod in list(self.objects["pods"].items()):
                phase = pod["status"]["phase"]
                if phase == "Pending" and not pod["spec"].get("nodeName"):
                    self._schedule(pod)
                elif phase in ("Pending", "Running"):
                    self._serve(key, pod)
                is_over = pod["status"]["phase"] in ("Succeeded", "Failed") or not pod["spec"].get("nodeName")
                owned = any(job["metadata"]["uid"] == _owner(pod) for job in self.objects["jobs"].values())
                tracked = owned and TRACKED in pod["metadata"].get("finalizers", ())
                if "deletionTimestamp" in pod["metadata"] and is_over and not tracked:
                    del self.objects["pods"][key]

    def _pods_of(self, job: Object) -> list[Object]:
        return [pod for pod in self.objects["pods"].values() if _owner(pod) == job["metadata"]["uid"]]

    def _control(self, job: Object) -> None:
        """The Job controller, for Jobs of one pod with a backoff limit of 0 and `podReplacementPolicy: Failed`."""
        spec, status, pods = job["spec"], job["status"], self._pods_of(job)
        for pod in pods:
            if pod["status"]["phase"] in ("Succeeded", "Failed") and TRACKED in pod["metadata"]["finalizers"]:
                pod["metadata"]["finalizers"].remove(TRACKED)
                if spec.get("suspend"):  # pods that end because of that do not count
                    continue
                succeeded = pod["status"]["phase"] == "Succeeded"
                status["succeeded" if succeeded else "failed"] = 1
                limit = ("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
                kind, reason, text = ("Complete", "CompletionsReached", "") if succeeded else limit
                _set_condition(job, "SuccessCriteriaMet" if succeeded else "FailureTarget", "True", reason, text)
                _set_condition(job, kind, "True", reason, text)
                self.touch(job)
        if any(one["type"] in ("Complete", "Failed") for one in status.get("conditions", ())):
            return
        if spec.get("suspend"):
            _set_condition(job, "Suspended", "True", "JobSuspended", "Job suspended")
            for pod in pods:
                self._delete_pod(pod, None)
        elif not pods:
            template, name = spec["template"], job["metadata"]["name"]
            labels = {
                "batch.kubernetes.io/job-name": name,
                "batch.kubernetes.io/controller-uid": job["metadata"]["uid"],
            }
            owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
            metadata = {
                "name": f"{name}-{secrets.token_hex(3)[:5]}",
                "namespace": job["metadata"]["namespace"],
                "labels": {**template["metadata"]["labels"], **labels},
                "annotations": template["metadata"]["annotations"],
                "ownerReferences": [owner | {"controller": True, "blockOwnerDeletion": True}],
                "finalizers": [TRACKED],
            }
            pod_spec = json.loads(json.dumps(template["spec"]))
            self._put(
                "pods", {"metadata": metadata, "spec": pod_spec, "status": {"phase": "Pending", "conditions": []}}
            )

    def _schedule(self, pod: Object) -> None:
        """The scheduler: a pod goes to the node that its affinity names, if that one takes it and has room."""
        if "deletionTimestamp" in pod["metadata"]:
            return
        affinity = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        ((field,),) = [term["matchFields"] for term in affinity["nodeSelectorTerms"]]
        assert (field["key"], field["operator"]) == ("metadata.name", "In")
        (name,) = field["values"]
        node = self.objects["nodes"].get(name)
        why = "node(s) didn't match Pod's node affinity/selector"
        if node is not None:
            others = [one for one in self.objects["pods"].values() if one["spec"].get("nodeName") == name]
            used = sum(_cpus(one) for one in others if one["status"]["phase"] in ("Pending", "Running"))
            ready = next(one for one in node["status"]["conditions"] if one["type"] == "Ready")["status"]
            why = ""
            if node["spec"].get("unschedulable") or ready != "True":
                why = "node(s) were unschedulable"
            elif used + _cpus(pod) > float(node["status"]["allocatable"]["cpu"]):
                why = "Insufficient cpu"
        if why:
            text = f"0/{len(self.objects['nodes'])} nodes are available: 1 {why}."
            _set_condition(pod, "PodScheduled", "False", "Unschedulable", text)
        else:
            pod["spec"]["nodeName"] = name
            _set_condition(pod, "PodScheduled", "True", "", "")
        self.touch(pod)

    def _serve(self, key: str, pod: Object) -> None:
        """The kubelet of a pod's node."""
        node = self.objects["nodes"][pod["spec"]["nodeName"]]
        if next(one for one in node["status"]["conditions"] if one["type"] == "Ready")["status"] == "Unknown":
            return
        container = pod["spec"]["containers"][0]
        process = self._processes.get(key)
        if process is None:
            if pod["status"]["phase"] == "Running" or "deletionTimestamp" in pod["metadata"]:
                # Its machine was lost and is back, or it was deleted before it began.
                self._end(pod, container, 137)
            elif "missing" in container["image"]:
                text = f'Back-off pulling image "{container["image"]}"'
                self._state(pod, container, {"waiting": {"reason": "ImagePullBackOff", "message": text}})
            elif self._run is not None:
                command = [_expanded(word) for word in [*container["command"], *container.get("args", [])]]
                env = {one["name"]: one["value"] for one in container.get("env", ())}
                folder = Path(container["workingDir"])
                self._processes[key] = self._run(command, env, folder, pod["metadata"]["name"])
                pod["status"]["phase"] = "Running"
                self._state(pod, container, {"running": {"startedAt": _now()}})
            return
        if (code := process.process.poll()) is not None:
            self._end(pod, container, code if code >= 0 else 128 - code)
        elif time.monotonic() > self._kill_s.get(key, float("inf")):
            process.signal(signal.SIGKILL)

    def _end(self, pod: Object, container: Object, code: int) -> None:
        pod["status"]["phase"] = "Failed" if code else "Succeeded"
        state = {"exitCode": code, "reason": "Error" if code else "Completed", "finishedAt": _now()}
        self._state(pod, container, {"terminated": state})

    def _state(self, pod: Object, container: Object, state: Object) -> None:
        pod["status"]["containerStatuses"] = [{"name": container["name"], "state": state, "image": container["image"]}]
        self.touch(pod)


def _key(thing: Object) -> str:
    return f"{thing['metadata'].get('namespace', '')}/{thing['metadata']['name']}".removeprefix("/")


def _owner(pod: Object) -> str:
    return str(next((one["uid"] for one in pod["metadata"].get("ownerReferences", ())), ""))


def _now(later_s: float = 0.0) -> str:
    return datetime.fromtimestamp(time.time() + later_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cpus(pod: Object) -> float:
    return sum(float(one["resources"]["requests"]["cpu"]) for one in pod["spec"]["containers"])


def _expanded(word: str) -> str:
    """What Kubernetes makes of `$$`; no test has a variable."""
    return word.replace("$$", "$")


def _set_condition(thing: Object, kind: str, status: str, reason: str, message: str) -> None:
    conditions = thing["status"].setdefault("conditions", [])
    others = [one for one in conditions if one["type"] != kind]
    now = {"lastTransitionTime": _now()}
    thing["status"]["conditions"] = [
        *others,
        {"type": kind, "status": status, "reason": reason, "message": message, **now},
    ]


def _has_labels(thing: Object, selector: str) -> bool:
    labels = thing["metadata"].get("labels", {})
    return all(labels.get(name) == value for name, _, value in (one.partition("=") for one in _parts(selector)))


def _has_fields(thing: Object, selector: str) -> bool:
    for one in _parts(selector):
        name, unequal, value = re.fullmatch(r"([\w.]+)(!?)=(.*)", one).groups()  # type: ignore[union-attr]
        if name not in ("metadata.name", "spec.nodeName", "status.phase"):
            raise Answer(400, f'field label "{name}" not supported')
        group, key = name.split(".")
        if (str(thing[group].get(key, "")) == value) == bool(unequal):
            return False
    return True


def _parts(selector: str) -> list[str]:
    return [one for one in selector.split(",") if one]


@contextlib.contextmanager
def serving(kubernetes: TestKubernetes, certificates: Path | None = None) -> Iterator[TestKubernetes]:
    """Serves the API, and lets the controllers act, ten rounds a second.

    Args:
        kubernetes: what is served.
        certificates: the folder of those by which server and client show who they are (`make_certificates`).
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open, as to a real server

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            code, data = kubernetes.answer(self.command, self.path, self.headers.get("Authorization", ""), body)
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_POST = do_DELETE = do_PATCH = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stopping = threading.Event()
    address = f"127.0.0.1:{server.server_port}"
    cluster, user = {"server": f"http://{address}"}, {"token": TOKEN}
    if certificates is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.pem")
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        server.socket = context.wrap_socket(server.socket, server_side=True)
        encoded = {
            name: base64.b64encode((certificates / name).read_bytes()).decode()
            for name in ("ca.pem", "client.pem", "client.key")
        }
        cluster = {"server": f"https://{address}", "certificate-authority-data": encoded["ca.pem"]}
        user |= {"client-certificate-data": encoded["client.pem"], "client-key-data": encoded["client.key"]}

    def control() -> None:
        while not stopping.wait(0.1):
            kubernetes.act()

    threads = [threading.Thread(target=server.serve_forever), threading.Thread(target=control)]
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": cluster}],
        "users": [{"name": "test", "user": user}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test", "namespace": NAMESPACE}}],
    }
    kubernetes.kubeconfig.write_text(json.dumps(config))
    for thread in threads:
        thread.start()
    try:
        yield kubernetes
    finally:
        stopping.set()
        server.shutdown()
        for thread in threads:
            thread.join()
        server.server_close()
