"""What a simulated job is, what its changes take, and what has become of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

from elaunch.errors import UsageError
from elaunch.plan import Plan
from elaunch.policy.profile import Profile

SpanKind = Literal["train", "redo", "detect", "decide", "change", "restart", "wait"]
"""What a job does: steps that count; a step that is interrupted and done again; nothing, since the loss is not known
yet; choosing a plan; moving state; starting anew from a checkpoint; waiting for nodes."""


@dataclass(frozen=True)
class JobModel:
    """A job that is trained.

    Attributes:
        profile: of its model; `tensor_parallel` devices for each group of `width` workers.
        batch: samples of a step.
        micro_batch: samples of a micro-batch.
        per_node: workers of a node.
        min_nodes: with fewer it waits.
        max_nodes: further ones wait until they are needed.
        dp: pipelines of its first plan; None: whatever is fastest.
        pp: stages of its first plan; likewise.
        copies: of each worker's part of the optimizer's state, on other nodes (`snapshots` of the real job).
    """

    profile: Profile
    batch: int
    micro_batch: int
    per_node: int = 1
    min_nodes: int = 1
    max_nodes: int = 1 << 30
    dp: int | None = None
    pp: int | None = None
    copies: int = 1

    def __post_init__(self) -> None:
        """Checks that the sizes fit each other.

        Raises:
            UsageError: they do not.
        """
        if self.per_node % self.profile.width:
            raise UsageError(
                f"a node has {self.per_node} workers, which make no whole tensor-parallel groups of "
                f"{self.profile.width}"
            )

    @property
    def devices_of_worker(self) -> float:
        """Returns how many devices a worker stands for."""
        return self.profile.tensor_parallel / self.profile.width

    @cached_property
    def state_bytes(self) -> int:
        """Returns the bytes of parameters and optimizer state, once."""
        return sum(layer.parameter_bytes + layer.optimizer_bytes for layer in self.profile.layers)


@dataclass(frozen=True)
class Timings:
    """What a change takes beside what the plans and their routes say.

    The first five are medians of docs/benchmarks.md. Those of a restart follow from 1.38 and 2.02 minutes for models of
    7 and 13 billion parameters, 14 bytes each, written and read (Suika 2.2, after Universal Checkpointing). That of
    templates is what remains of Chameleon's figure 10 beside the transfer.

    Attributes:
        detect_s: from the loss of a node until the others know: a host that loses its network.
        decide_s: choosing a plan that was not made ahead; None: as long as it takes here.
        change_s: agreement and links, where the profile has not measured them.
        join_s: from a node's being there until its workers are ready; the others train meanwhile.
        slow_steps: until a slow worker is known to be one.
        restart_s: processes anew, without reading the checkpoint.
        storage_bytes_per_s: of reading a checkpoint.
        checkpoint_every_s: from one checkpoint to the next; writing it costs nothing.
        template_s: of making pipelines of other templates, without the transfer of layers.
        notice_s: before it leaves, a node says so; 0: it does not.
    """

    detect_s: float = 3.94
    decide_s: float | None = 0.25
    change_s: float = 0.028
    join_s: float = 2.8
    slow_steps: int = 12
    restart_s: float = 38.0
    storage_bytes_per_s: float = 4.4e9
    checkpoint_every_s: float = 600.0
    template_s: float = 1.9
    notice_s: float = 0.0

    def known_to(self, profile: Profile) -> Profile:
        """Returns the profile with the time of a change, if it has none."""
        return profile if profile.change_s else replace(profile, change_s=self.change_s)

    def restart_of(self, job: JobModel) -> float:
        """Returns the seconds of a restart from a checkpoint."""
        return self.restart_s + self.load_of(job)

    def load_of(self, job: JobModel) -> float:
        """Returns the seconds of reading a checkpoint."""
        return job.state_bytes / self.storage_bytes_per_s


@dataclass(frozen=True)
class RunSpan:
    """A time in which a job does one thing.

    Attributes:
        start_s: since the beginning.
        end_s: likewise.
        kind: what it does.
        members: workers that it has.
        busy: of those, the ones with something to do under its plan.
        steps: that committed in it.
    """

    start_s: float
    end_s: float
    kind: SpanKind
    members: int
    busy: int = 0
    steps: int = 0

    @property
    def length_s(self) -> float:
        """Returns how long it is."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class ChangeRecord:
    """A change of plan.

    Attributes:
        at_s: when it was decided.
        policy: that was chosen.
        members: workers from then on.
        lost: workers that were lost.
        joined: workers that are new.
        stopped_s: without training, from the loss or the step's end on.
        moved_bytes: of state.
        step_s: under the new plan.
        undone: steps that committed, and were lost with the state.
        reason: for people.
        plan: its text.
    """

    at_s: float
    policy: str
    members: int
    lost: int
    joined: int
    stopped_s: float
    moved_bytes: int
    step_s: float
    undone: int
    reason: str
    plan: str


@dataclass(frozen=True)
class JobRun:
    """What has become of a job.

    Attributes:
        strategy: by which it went on.
        until_s: the end of the simulation.
        batch: samples of a step.
        per_worker: devices that a worker stands for.
        spans: without gaps, from 0 to the end.
        changes: of its plan, in their order.
        undone: steps that committed and were lost with the state, all together.
        note: why it came to no plan at the end; empty if it did.
    """

    strategy: str
    until_s: float
    batch: int
    per_worker: float
    spans: tuple[RunSpan, ...]
    changes: tuple[ChangeRecord, ...]
    undone: int
    note: str = ""

    @property
    def steps(self) -> int:
        """Returns the steps that stand at the end."""
        return sum(span.steps for span in self.spans) - self.undone

    @property
    def samples(self) -> int:
        """Returns the samples of those steps."""
        return self.steps * self.batch

    @property
    def rate(self) -> float:
        """Returns samples per second over the whole time."""
        return self.samples / self.until_s if self.until_s else 0.0

    def seconds(self, kind: SpanKind) -> float:
        """Returns how long the job did one thing."""
        return sum(span.length_s for span in self.spans if span.kind == kind)

    def device_s(self, kind: SpanKind | None = None) -> float:
        """Returns the device-seconds that the job had; those of one kind, if one is given."""
        return self.per_worker * sum(
            span.members * span.length_s for span in self.spans if kind is None or span.kind == kind
        )

    @property
    def trained(self) -> float:
        """Returns the part of its device-seconds in which devices did steps that count, 0..1.

        Idle devices, and steps that were lost with the state, do not count.
        """
        had = self.device_s()
        useful = self.per_worker * sum(span.busy * span.length_s for span in self.spans if span.kind == "train")
        done = sum(span.steps for span in self.spans)
        return useful / had * (self.steps / done if done else 0.0) if had else 0.0

    def document(self) -> dict[str, Any]:
        """Returns all of it in JSON values."""
        kinds: tuple[SpanKind, ...] = ("train", "redo", "detect", "decide", "change", "restart", "wait")
        return {
            "strategy": self.strategy,
            "until_s": self.until_s,
            "steps": self.steps,
            "samples": self.samples,
            "samples_per_s": self.rate,
            "trained": self.trained,
            "undone_steps": self.undone,
            "seconds": {kind: self.seconds(kind) for kind in kinds},
            "device_s": self.device_s(),
            "note": self.note,
            "changes": [vars(change) for change in self.changes],
            "spans": [
                [span.start_s, span.end_s, span.kind, span.members, span.busy, span.steps] for span in self.spans
            ],
        }

    def rates(self) -> list[tuple[float, float]]:
        """Returns (seconds, samples per second from then on) for a plot."""
        found: list[tuple[float, float]] = []
        for span in self.spans:
            rate = span.steps * self.batch / span.length_s if span.kind == "train" and span.length_s else 0.0
            found.append((span.start_s, rate))
        return found


@dataclass(frozen=True)
class JobSituation:
    """What a strategy is asked about.

    Attributes:
        job: that is trained.
        now: the plan under which the state is distributed.
        preferred_plan: with every place filled.
        members: who there is.
        profile: of the model, with the speeds that are known.
        next_s: expected seconds to the next change.
        lost: workers of the plan that are gone.
    """

    job: JobModel
    now: Plan
    preferred_plan: Plan
    members: tuple[str, ...]
    profile: Profile
    next_s: float = 3600.0
    lost: tuple[str, ...] = field(default=())

    @property
    def joined(self) -> Sequence[str]:
        """Returns the members that have no place in the plan yet."""
        known = set(self.now.workers)
        return [member for member in self.members if member not in known]


@dataclass(frozen=True)
class Way:
    """How a job goes on.

    Attributes:
        plan: for the members.
        preferred_plan: to which it returns.
        policy: by which.
        stall_s: in which no step is done, after the decision.
        moved_bytes: of state.
        restarts: it starts anew: `stall_s` is that of a restart.
        loses: steps since the last checkpoint are lost, even if the state is not.
        reason: for people.
        decide_s: that choosing it took here; None: nobody has measured.
    """

    plan: Plan
    preferred_plan: Plan
    policy: str
    stall_s: float
    moved_bytes: int
    restarts: bool = False
    loses: bool = False
    reason: str = ""
    decide_s: float | None = None
