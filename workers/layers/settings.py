"""What a script says of how its model in layers is trained."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from elaunch.errors import StateError
from elaunch.workers.data.batches import Collate
from elaunch.workers.data.source import DataSource, Loading
from elaunch.workers.layers.shards import MakeScheduler

Consistency = Literal["bitwise", "fast"]


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The keyword arguments of `job.engine(...)`; the same on all workers.

    Attributes:
        dataset: map-style; items are pairs (input, target). Or a DataLoader of one: what is not given here is then as
            it has it, but the size of a micro-batch is the plan's.
        seed: of initial values, order of samples and all random numbers.
        scheduler: of the learning rate, called with the optimizer; steps once a step.
        clip_norm: the gradient's greatest norm.
        dtype: of the parameters; with bfloat16, master weights and optimizer states are float32.
        recompute: layers whose activations are computed again in backward instead of being kept; True: all.
        consistency: "bitwise": gradients are summed along a tree over the logical micro-batches, so that a result does
            not depend on who computed them; it takes a few more gradients' memory. "fast": each worker keeps one sum.
        shuffle: whether each pass over the data has an order of its own; default: True.
        collate_fn: makes a batch of a list of items; default: torch's.
        loading: `num_workers` and what else DataLoader takes for loading ahead, with the same meanings.
        device: of this worker's layers.
        snapshots: how many other workers keep a copy of each worker's optimizer state in host memory.
        max_extra_bytes: bound of the memory that a change of plan takes beside the state (see
            `elaunch.workers.state.reshard`).
        blocking: whether a change of plan waits until all state is where it belongs, even where it could move during
            the next step.

    Raises:
        StateError: `consistency` is neither.
    """

    dataset: Any
    seed: int = 0
    scheduler: MakeScheduler | None = None
    clip_norm: float | None = None
    dtype: torch.dtype | None = None
    recompute: Collection[int] | bool = ()
    consistency: Consistency = "bitwise"
    shuffle: bool | None = None
    collate_fn: Collate | None = None
    loading: Loading = field(default_factory=Loading)
    device: torch.device | str = "cpu"
    snapshots: int = 1
    max_extra_bytes: int | None = None
    blocking: bool = False

    def __post_init__(self) -> None:
        if self.consistency not in ("bitwise", "fast"):
            raise StateError(f"consistency must be 'bitwise' or 'fast', got {self.consistency!r}")

    @classmethod
    def of(cls, **given: Any) -> EngineSettings:
        """Returns the settings for keyword arguments, of which those of `Loading` may stand among the others.

        Raises:
            StateError: a GradScaler is among them, or as the constructor.
        """
        if "scaler" in given:
            raise StateError(
                "a model in layers takes no GradScaler: use dtype=torch.bfloat16, whose gradients need no scaling; "
                "master weights and optimizer states are float32 then"
            )
        loading = {name: given.pop(name) for name in Loading.__annotations__ if name in given}
        return cls(**given, loading=Loading(**loading))  # type: ignore[typeddict-item]

    def source(self) -> DataSource:
        """Returns where the samples come from.

        Raises:
            TypeError: the data set is not map-style.
            ValueError: a sampler's samples cannot be dealt out, or an argument of loading is out of range.
        """
        return DataSource.of(
            self.dataset, seed=self.seed, shuffle=self.shuffle, collate_fn=self.collate_fn, loading=self.loading
        )

    def recomputed(self, n_layers: int) -> frozenset[int]:
        """Returns the layers, of so many, whose activations are computed again."""
        return frozenset(range(n_layers) if self.recompute is True else self.recompute or ())
