"""The hook protocol, for frameworks that bring their own engine (docs/hooks.md).

    Hooks                        what a training runtime offers, so that it can be recovered, re-planned and moved
    Savable                      the same, of a framework whose state `--checkpoint-dir` saves
    Vote, Verdict                what a worker brings into an agreement, and what follows from the votes
    Generation, Group            the agreed workers, and the collectives over the links between them
    attach, Member               this worker as a member of its job
    Layout, TensorSpace, Moved   which member holds which part of each tensor, how they move, and what it has cost
    LayoutUnion, FlatBuffer      tensors on several meshes, as pipeline stages are; ranges of ZeRO-1 optimizers
    tensors_of                   from a model and its optimizer to tensors by name,
    load_model, load_optimizer   and back
    FullySharded                 the hooks of a loop with FSDP2

The import is light: torch is loaded with the first of these names that is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elaunch.rendezvous.membership import Generation
    from elaunch.workers.comm.group import Group
    from elaunch.workers.frameworks.attach import Savable, attach
    from elaunch.workers.frameworks.fsdp import FullySharded
    from elaunch.workers.hooks import Hooks, Verdict, Vote
    from elaunch.workers.runtime import Member
    from elaunch.workers.state.modules import load_model, load_optimizer, tensors_of
    from elaunch.workers.state.placement.layouts import FlatBuffer, Layout, LayoutUnion
    from elaunch.workers.state.reshard import Moved
    from elaunch.workers.state.tensors import TensorSpace

__all__ = [
    "FlatBuffer",
    "FullySharded",
    "Generation",
    "Group",
    "Hooks",
    "Layout",
    "LayoutUnion",
    "Member",
    "Moved",
    "Savable",
    "TensorSpace",
    "Verdict",
    "Vote",
    "attach",
    "load_model",
    "load_optimizer",
    "tensors_of",
]

_HOMES = {
    "elaunch.rendezvous.membership": ("Generation",),
    "elaunch.workers.comm.group": ("Group",),
    "elaunch.workers.frameworks.fsdp": ("FullySharded",),
    "elaunch.workers.hooks": ("Hooks", "Verdict", "Vote"),
    "elaunch.workers.frameworks.attach": ("Savable", "attach"),
    "elaunch.workers.runtime": ("Member",),
    "elaunch.workers.state.modules": ("load_model", "load_optimizer", "tensors_of"),
    "elaunch.workers.state.reshard": ("Moved",),
    "elaunch.workers.state.placement.layouts": ("FlatBuffer", "Layout", "LayoutUnion"),
    "elaunch.workers.state.tensors": ("TensorSpace",),
}


def __getattr__(name: str) -> Any:
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module 'elaunch.hooks' has no attribute {name!r}")
