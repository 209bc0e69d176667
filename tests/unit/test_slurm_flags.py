"""What `--rdzv-backend=slurm` takes from a job step of Slurm, and how lists of nodes are read."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elaunch.cli.rendezvous.slurm import PORTS, read_hosts, step_defaults
from elaunch.cli.run import parse
from elaunch.errors import UsageError

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NUM_NODES": "5",
    "SLURM_JOB_NODELIST": "n[08-11],gpu2",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[08-11]",
    "SLURMD_NODENAME": "n09",
}
PORT = PORTS[4711]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a task of this step."""
    for name in list(os.environ):
        if name.startswith(("PET_", "SLURM")):
            monkeypatch.delenv(name)
    for name, value in STEP.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


@pytest.mark.usefixtures("step")
def test_a_step_says_how_many_nodes_meet_where_and_under_which_names() -> None:
    config = parse(["--rdzv-backend=slurm", "train.py"])
    assert (config.min_nodes, config.max_nodes, config.job, config.node) == (4, 4, "4711.0", "n09")
    assert config.rendezvous.backend == "c10d"
    assert config.rendezvous.endpoint == f"n08:{PORT},n09:{PORT},n10:{PORT}"


@pytest.mark.usefixtures("step")
def test_of_the_nodes_of_a_step_some_may_be_spares() -> None:
    config = parse(["--rdzv-backend=slurm", "--spares=1", "train.py"])
    assert (config.min_nodes, config.max_nodes, config.rendezvous.spares) == (3, 3, 1)
    config = parse(["--rdzv-backend=slurm", "--spares=4", "--nnodes=2:4", "train.py"])
    assert (config.min_nodes, config.max_nodes, config.rendezvous.spares) == (2, 4, 4)
    with pytest.raises(UsageError, match="--nnodes=0: expected"):
        parse(["--rdzv-backend=slurm", "--spares=4", "train.py"])


def test_the_failure_domain_of_a_node_is_its_switch(step: pytest.MonkeyPatch) -> None:
    def domain(*flags: str) -> str:
        return parse(["--rdzv-backend=slurm", *flags, "train.py"]).rendezvous.failure_domain

    assert domain() == ""
    step.setenv("SLURM_TOPOLOGY_ADDR", "n09")
    assert domain() == "", "no topology is configured"
    step.setenv("SLURM_TOPOLOGY_ADDR", "spine.leaf2.n09")
    assert domain() == "spine.leaf2"
    assert domain("--failure-domain=rack7") == "rack7"
    step.setenv("ELAUNCH_FAILURE_DOMAIN", "rack8")
    assert domain() == "rack8"


def test_flags_and_variables_go_before_slurm(step: pytest.MonkeyPatch) -> None:
    step.setenv("PET_RDZV_BACKEND", "slurm")
    step.setenv("PET_RDZV_ID", "mine")
    config = parse(["--nnodes=2:4", "--node-name=a", "--rdzv-endpoint=n1:29400", "train.py"])
    assert (config.min_nodes, config.max_nodes, config.job, config.node) == (2, 4, "mine", "a")
    assert config.rendezvous.endpoint == "n1:29400"


def test_a_requeued_job_and_each_step_have_an_id_of_their_own(step: pytest.MonkeyPatch) -> None:
    step.setenv("SLURM_RESTART_COUNT", "2")
    first = parse(["--rdzv-backend=slurm", "train.py"])
    step.setenv("SLURM_STEP_ID", "1")
    second = parse(["--rdzv-backend=slurm", "train.py"])
    assert (first.job, second.job) == ("4711.0-2", "4711.1-2")
    assert first.rendezvous.endpoint != second.rendezvous.endpoint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"SLURM_STEP_ID": None},
            "SLURM_STEP_ID is not set, so this is no job step of Slurm; start it as `srun --ntasks",
        ),
        ({"SLURM_STEP_NUM_TASKS": "8"}, "srun has started 8 tasks on 4 nodes; elaunch starts the workers of its node"),
        (
            {"SLURM_STEP_NODELIST": "n[8-"},
            "the list of nodes is 'n[8-'; expected a list as Slurm writes one, such as n[1-3",
        ),
        ({"SLURM_JOB_ID": "x"}, "SLURM_JOB_ID=x: expected a number, which srun sets"),
    ],
)
def test_what_is_no_step_is_refused_in_one_line(
    step: pytest.MonkeyPatch, changes: dict[str, str | None], message: str
) -> None:
    for name, value in changes.items():
        step.setenv(name, value) if value is not None else step.delenv(name)
    with pytest.raises(UsageError, match=re.escape(f"--rdzv-backend=slurm: {message}")) as refused:
        parse(["--rdzv-backend=slurm", "train.py"])
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[1-3,07-10],gpu2", ["n1", "n2", "n3", "n07", "n08", "n09", "n10", "gpu2"]),
        ("rack[1-2]n[098-100]", [f"rack{rack}n{node}" for rack in (1, 2) for node in ("098", "099", "100")]),
        ("a-b,c[3],d.e", ["a-b", "c3", "d.e"]),
    ],
)
def test_lists_of_nodes_are_read_as_slurm_writes_them(text: str, names: list[str]) -> None:
    assert list(read_hosts(text)) == names


@pytest.mark.parametrize(
    "text", ["", ",", "a,", "n[", "n]", "n[]", "n[1-]", "n[3-1]", "n[a]", "n[[1]]", "n 1", "n[1,]"]
)
def test_what_is_no_list_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected a list as Slurm writes one"):
        list(read_hosts(text))


@given(st.lists(st.from_regex(r"[a-z]{1,3}[0-9]{0,3}", fullmatch=True), min_size=1))
def test_names_without_ranges_are_a_list_of_themselves(names: list[str]) -> None:
    assert list(read_hosts(",".join(names))) == names


def test_a_long_range_is_read_only_as_far_as_it_is_needed() -> None:
    found = step_defaults(STEP | {"SLURM_STEP_NODELIST": "n[1-999999999999]"})
    assert found["rdzv_endpoint"] == f"n1:{PORT},n2:{PORT},n3:{PORT}"


@given(st.text(max_size=30))
def test_any_text_is_a_list_or_is_refused(text: str) -> None:
    try:
        first = next(read_hosts(text))
    except UsageError:
        return
    assert first
    assert "," not in first
