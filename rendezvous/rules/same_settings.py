"""Whether a node was started with the settings of its job. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from elaunch.checkpoints import FOLDER_FLAG
from elaunch.rendezvous.membership import JobConfig


@dataclass(frozen=True, slots=True)
class Differences:
    """The settings of a job that a node was given other values of: their names, the job's values, and the node's."""

    found: tuple[tuple[str, str, str], ...] = ()

    @property
    def are_refused(self) -> bool:
        """Returns whether the node cannot take part. The same folder may have another name on another machine."""
        return any(name != FOLDER_FLAG for name, _, _ in self.found)

    def theirs(self) -> str:
        """Returns the settings of the job, as they would be given."""
        return " and ".join(f"{name}={value}" if value else f"no {name}" for name, value, _ in self.found)

    def ours(self) -> str:
        """Returns those of the node."""
        return " and ".join(f"{name}={value}" if value else f"no {name}" for name, _, value in self.found)


def differences(job: JobConfig, node: JobConfig) -> Differences:
    """Returns what differs between the settings of a job and those of a node."""
    theirs, ours = _by_name(job), _by_name(node)
    names = dict.fromkeys((*theirs, *ours))
    both = ((name, theirs.get(name, ""), ours.get(name, "")) for name in names)
    return Differences(tuple((name, one, other) for name, one, other in both if one != other))


def _by_name(config: JobConfig) -> dict[str, str]:
    restarts = "" if config.max_restarts is None else str(config.max_restarts)
    return {
        "--nnodes": f"{config.min_nodes}:{config.max_nodes}",
        "--max-restarts": restarts,
        "--spares": str(config.spares) if config.spares else "",
        **dict(config.training),
    }
