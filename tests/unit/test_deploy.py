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
