"""What `deploy/` holds is what its readers take: published schemas, files that are there, flags that elaunch has."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubeflow_trainer_api import models

from elaunch.cli.run import parse
from elaunch.errors import UsageError
from tests.helpers import ROOT
from tests.kubernetes_api import check

KUBERNETES = ROOT / "deploy" / "kubernetes"
CUSTOM = {
    "JobSet": models.JobsetV1alpha2JobSet,
    "TrainJob": models.TrainerV1alpha1TrainJob,
    "TrainingRuntime": models.TrainerV1alpha1TrainingRuntime,
}
FOUND: list[tuple[str, dict[str, Any]]] = [
    (path.stem, one) for path in sorted(KUBERNETES.glob("*.yaml")) for one in yaml.safe_load_all(path.read_text())
]
OBJECTS = [pytest.param(one, id=f"{file}-{one['kind']}") for file, one in FOUND]


def validate(thing: dict[str, Any]) -> None:
    """Checks an object by its published schema; `ValueError` for a wrong type, a missing value, an unknown field."""
    model = CUSTOM.get(thing["kind"])
    if model is None:
        check(thing)
    elif json.loads(model.from_dict(thing).to_json()) != thing:
        raise ValueError("unknown fields")


def containers(thing: object) -> list[dict[str, Any]]:
    """All containers in an object, and the trainer of a TrainJob, which stands for one."""
    if isinstance(thing, list):
        return [found for one in thing for found in containers(one)]
    if not isinstance(thing, dict):
        return []
    here = [*thing.get("containers", []), *([thing["trainer"]] if "trainer" in thing else [])]
    return here + [found for one in thing.values() for found in containers(one)]


def test_there_are_manifests() -> None:
    assert {one["kind"] for _, one in FOUND} >= {"Job", "Service", "JobSet", "TrainJob", "TrainingRuntime"}


@pytest.mark.parametrize("thing", OBJECTS)
def test_a_manifest_is_as_its_schema_has_it(thing: dict[str, Any]) -> None:
    validate(thing)


@pytest.mark.parametrize("thing", OBJECTS)
def test_a_misspelt_field_would_be_found(thing: dict[str, Any]) -> None:
    wrong = copy.deepcopy(thing)
    wrong["spec"]["sepc"] = 1
    with pytest.raises(ValueError, match="unknown fields"):
        validate(wrong)


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.stem)
def test_pods_name_each_other_by_names_that_they_have_and_have_time_to_leave(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "ELAUNCH_")):
            monkeypatch.delenv(name)
    text = path.read_text()
    (args,) = [one["args"] for one in containers(list(yaml.safe_load_all(text))) if "args" in one]
    config = parse([word.replace("--nproc-per-node=8", "--nproc-per-node=1") for word in args])
    (grace_s,) = map(int, re.findall(r"terminationGracePeriodSeconds: (\d+)", text))
    assert config.stop.shutdown_timeout + 10 <= grace_s
    assert {str(config.stop.left_code)} == set(re.findall(r"operator: In, values: \[(\d+)\]", text))
    things = {one["kind"]: one for one in yaml.safe_load_all(text)}
    if "Job" in things:
        pods, domain = things["Job"]["spec"]["completions"], things["Service"]["metadata"]["name"]
        prefix = things["Job"]["metadata"]["name"]
        assert things["Job"]["spec"]["template"]["spec"]["subdomain"] == domain
    elif "JobSet" in things:
        (group,) = things["JobSet"]["spec"]["replicatedJobs"]
        pods, domain = group["template"]["spec"]["completions"], things["JobSet"]["spec"]["network"]["subdomain"]
        prefix = f"{things['JobSet']['metadata']['name']}-{group['name']}-0"
    else:
        pods, domain = things["TrainJob"]["spec"]["trainer"]["numNodes"], things["TrainJob"]["metadata"]["name"]
        prefix = f"{domain}-node-0"
    assert config.rendezvous.endpoint == ",".join(f"{prefix}-{index}.{domain}:29400" for index in range(pods))
    assert (config.max_nodes, config.rendezvous.spares) == (pods - 1, 1)


def job_specs(thing: object) -> list[dict[str, Any]]:
    """All specifications of Jobs in an object: what says how many of its pods may fail."""
    if not isinstance(thing, dict | list):
        return []
    inner = thing.values() if isinstance(thing, dict) else thing
    here = [thing] if isinstance(thing, dict) and "backoffLimit" in thing else []
    return here + [found for one in inner for found in job_specs(one)]


def traits(path: Path) -> dict[str, Any]:
    """What does not depend on how the pods are made: all of them but names, how many there are, and selectors."""
    things = {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}
    (job,) = job_specs(list(things.values()))
    pod, rules = job["template"]["spec"], copy.deepcopy(job["podFailurePolicy"]["rules"])
    for rule in rules:
        rule.get("onExitCodes", {}).pop("containerName", None)
    (container,) = pod["containers"]
    # Trainer puts these of a TrainJob into the container of its runtime.
    given = things["TrainJob"]["spec"]["trainer"] if "TrainJob" in things else container
    return {
        "backoffLimit": job["backoffLimit"],
        "rules": rules,
        "pod": {
            name: value
            for name, value in pod.items()
            if name not in ("containers", "subdomain", "topologySpreadConstraints")
        },
        "spread": [
            {name: one[name] for name in ("maxSkew", "topologyKey", "whenUnsatisfiable")}
            for one in pod["topologySpreadConstraints"]
        ],
        "container": {name: container[name] for name in ("env", "readinessProbe", "volumeMounts", "image")},
        "resources": given.get("resources") or given["resourcesPerNode"],
        "flags": [flag for flag in given["args"] if "train" not in flag and "gpt" not in flag],
        "budget": things["PodDisruptionBudget"]["spec"]["minAvailable"],
    }


def pod_labels(things: dict[str, Any]) -> dict[str, str]:
    """The labels of a manifest's pods: those that it gives, and that of JobSet, whose name is that of the TrainJob."""
    (job,) = job_specs(list(things.values()))
    owner = things.get("JobSet") or things.get("TrainJob")
    own = {"jobset.sigs.k8s.io/jobset-name": owner["metadata"]["name"]} if owner else {}
    return {**job["template"]["metadata"]["labels"], **own}


@pytest.mark.parametrize("name", ["jobset", "trainjob"])
def test_all_manifests_start_the_same_pods(name: str) -> None:
    assert traits(KUBERNETES / f"{name}.yaml") == traits(KUBERNETES / "job.yaml")


@pytest.mark.parametrize("path", sorted(KUBERNETES.glob("*.yaml")), ids=lambda path: path.stem)
def test_budgets_and_spreads_are_of_the_pods_of_the_job_which_are_ready_where_they_serve_metrics(path: Path) -> None:
    things = {one["kind"]: one for one in yaml.safe_load_all(path.read_text())}
    labels = pod_labels(things).items()
    assert things["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"].items() <= labels
    (job,) = job_specs(list(things.values()))
    pod = job["template"]["spec"]
    for spread in pod["topologySpreadConstraints"]:
        assert spread["labelSelector"]["matchLabels"].items() <= labels
        assert set(spread.get("matchLabelKeys", [])) <= dict(labels).keys()
    (container,) = pod["containers"]
    served = {one["name"]: one.get("value") for one in container["env"]}["ELAUNCH_METRICS_PORT"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/metrics", "port": int(served or 0)}
    assert pod["securityContext"]["runAsNonRoot"]


@pytest.mark.parametrize("text", ["-1", "256", "x"])
def test_an_exit_code_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=f"--left-exit-code={text}: expected a number of at"):
        parse([f"--left-exit-code={text}", "train.py"])


def test_the_container_file_copies_what_is_there_and_does_not_run_as_root() -> None:
    text = (ROOT / "deploy" / "Dockerfile").read_text()
    extras = re.findall(r"ARG EXTRAS=(\S+)", text)[0].split(",")
    declared = re.findall(r"^(\w+) =$", (ROOT / "setup.cfg").read_text().partition("[options.extras_require]")[2], re.M)
    assert set(extras) <= set(declared)
    assert re.findall(r"^USER (\d+)$", text, re.M) == ["1000"]
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", text, re.M)[0]) == ["elaunch"]
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ".venv" in ignored
    assert not {"elaunch", "rendezvous", "workers", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"} & set(
        ignored
    )
