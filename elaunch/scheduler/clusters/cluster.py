"""What the scheduler needs of a cluster: its nodes, and agents of elaunch that start and end on them.

Each agent is one job of the cluster's own (of Slurm, say) on one node, so that the loss of a node takes nothing else
with it. Its name is unique for all time and encodes the job, the attempt and a number: whoever comes after a daemon
that was killed finds by these names what was started. All calls may be repeated.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from elaunch.errors import ElaunchError
from elaunch.scheduler.model import ClusterNode


class ClusterUnavailable(ElaunchError):
    """The cluster does not answer, or refuses: it is asked again."""


class ClusterStage(enum.StrEnum):
    """How far an agent is, as the cluster says."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """An agent that is to run.

    Attributes:
        name: `job.attempt.number`.
        node: where.
        devices: that it gets.
        arguments: of `elaunch`.
        folder: in which it runs.
        options: of the cluster's own command, as the job gives them.
    """

    name: str
    node: str
    devices: int
    arguments: tuple[str, ...]
    folder: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AgentReport:
    """What the cluster says of an agent.

    Attributes:
        name: as it was asked for.
        stage: how far it is.
        why: it is still queued, or how it has ended, in the cluster's words.
        succeeded: it has ended, and its exit code was 0.
    """

    name: str
    stage: ClusterStage
    why: str = ""
    succeeded: bool = False


class Cluster(Protocol):
    """A cluster. Every call returns or raises `ClusterUnavailable` in bounded time."""

    def look(self) -> tuple[list[ClusterNode], list[AgentReport]]:
        """Returns all nodes, and what the cluster knows of the agents of this scheduler.

        Of the nodes' devices those that others use do not count. Agents that have ended are there until `forget`; one
        that is neither there nor was forgotten is lost: it has ended, and nobody knows how.
        """

    def start(self, request: AgentRequest) -> None:
        """Asks for an agent; of two with one name, only one ever runs."""

    def stop(self, name: str, kill: bool) -> None:
        """Asks an agent that is queued or runs to leave at once, or ends it; no error if there is none."""

    def forget(self, name: str) -> None:
        """Removes what is kept of an agent that has ended; its log stays."""
