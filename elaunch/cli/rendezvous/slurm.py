"""What `--rdzv-backend=slurm` takes from the variables of a job step of Slurm, and how Slurm writes lists of nodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice

from elaunch.agent.config import STORE_NODES
from elaunch.errors import UsageError
from elaunch.rendezvous.conf import join_endpoint

BACKEND = "slurm"
STEP = "SLURM_STEP_ID"
"""Set by `srun` for the tasks of a step, and not in the batch script around it."""

PORTS = range(20000, 30000)
"""From which a step gets its port: below those that systems give to outgoing connections."""

_NAMES = r"(?:[A-Za-z0-9._-]|\[[0-9,-]+\])+"
_STEP_STRIDE = 617  # so that steps of one job, and jobs submitted one after the other, seldom share a port


def step_defaults(variables: Mapping[str, str], spares: str = "0") -> dict[str, str]:
    """Returns what the flags are in this step, by the names of their values, where they are not given.

    Args:
        variables: of the environment.
        spares: what --spares says: so many of the nodes are held ready, and the others make up the job.

    Raises:
        UsageError: this is no step of Slurm, or what its variables say cannot be used.
    """
    if STEP not in variables:
        raise UsageError(
            f"--rdzv-backend={BACKEND}: {STEP} is not set, so this is no job step of Slurm; start it as "
            f"`srun --ntasks-per-node=1 elaunch --rdzv-backend={BACKEND} ...`"
        )
    job, step = _number(variables, "SLURM_JOB_ID"), _number(variables, STEP)
    restarts = _number(variables, "SLURM_RESTART_COUNT", "0")
    nodes = _number(variables, "SLURM_STEP_NUM_NODES", variables.get("SLURM_JOB_NUM_NODES", ""))
    tasks = _number(variables, "SLURM_STEP_NUM_TASKS", str(nodes))
    if tasks != nodes:
        raise UsageError(
            f"--rdzv-backend={BACKEND}: srun has started {tasks} tasks on {nodes} nodes; elaunch starts the workers of "
            "its node itself, so give srun --ntasks-per-node=1"
        )
    held = int(spares) if spares.isdecimal() else 0  # what else it says is refused where all flags are read
    port = PORTS[(job + _STEP_STRIDE * step) % len(PORTS)]
    names = read_hosts(variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST", ""))
    return {
        "nnodes": str(nodes - held),
        "rdzv_endpoint": ",".join(join_endpoint(name, port) for name in islice(names, STORE_NODES)),
        "rdzv_id": f"{job}.{step}-{restarts}" if restarts else f"{job}.{step}",
        "node_name": variables.get("SLURMD_NODENAME", ""),
    }


def failure_domain(variables: Mapping[str, str]) -> str:
    """Returns the switch, or the block, below which Slurm has this node; empty where no topology is configured."""
    return variables.get("SLURM_TOPOLOGY_ADDR", "").rpartition(".")[0]


def _number(variables: Mapping[str, str], name: str, default: str = "") -> int:
    text = variables.get(name, default)
    if not text.isdecimal():
        raise UsageError(f"--rdzv-backend={BACKEND}: {name}={text}: expected a number, which srun sets")
    return int(text)


def read_hosts(text: str) -> Iterator[str]:
    """Reads a list of nodes as Slurm writes it, such as `n[1-3,07-10],gpu2` or `rack[1-2]n[01-16]`, one by one.

    Raises:
        UsageError: it is none.
    """
    if re.fullmatch(f"{_NAMES}(,{_NAMES})*", text) is None:
        raise _not_a_list(text)
    for found in re.finditer(_NAMES, text):
        yield from _combine(re.split(r"\[(.*?)\]", found[0]), text)  # names and ranges by turns


def _combine(parts: list[str], text: str) -> Iterator[str]:
    """Yields every name: the last range turns fastest."""
    head, *rest = parts
    if not rest:
        yield head
        return
    for number in _numbers(rest[0], text):
        for tail in _combine(rest[1:], text):
            yield f"{head}{number}{tail}"


def _numbers(ranges: str, text: str) -> Iterator[str]:
    """Yields the numbers of `1-3,07-10`, as wide as the first of each range."""
    for item in ranges.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        low, high = (found[1], found[2] or found[1]) if found is not None else ("1", "0")
        if int(low) > int(high):
            raise _not_a_list(text)
        for number in range(int(low), int(high) + 1):
            yield str(number).zfill(len(low))


def _not_a_list(text: str) -> UsageError:
    form = "expected a list as Slurm writes one, such as n[1-3,07-10],gpu2"
    return UsageError(f"--rdzv-backend={BACKEND}: the list of nodes is {text[:80]!r}; {form}")
