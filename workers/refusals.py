"""What a job cannot work with, said at the call that brings it, with the cure."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from elaunch.errors import StateError
from elaunch.rendezvous.rules.spares import STATE_FLAG, STATE_VARIABLE
from elaunch.workers.comm.process_group import ElasticProcessGroup

_FSDP = "torch.distributed.fsdp"
OWN_GROUP = (
    "this script calls torch.distributed.init_process_group(), where a worker that replaces a dead one would wait for "
    "peers that never come: leave that call out. elaunch.init() connects the workers, job.wrap(model) replaces "
    "DistributedDataParallel, and job.process_group is for collectives of your own (docs/running.md)"
)


def has_own_group() -> bool:
    """Returns whether the script has made a default process group of its own."""
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        return False
    return not isinstance(distributed.group.WORLD, ElasticProcessGroup)


def warn_of_own_group() -> None:
    """Says, on standard error, that a script that has its own process group cannot survive a death."""
    if has_own_group():
        print(f"[elaunch] warning: {OWN_GROUP}", file=sys.stderr, flush=True)


def refuse_own_group() -> None:
    """Refuses to train beside a process group that no replacement can enter.

    Raises:
        StateError: the script has made one.
    """
    if has_own_group():
        raise StateError(OWN_GROUP)


WRAP_INSTEAD = (
    "use job.wrap(model) in its place, or elaunch.hybrid() for a model that must be cut over workers (docs/plans.md)"
)


def refuse_wrappers(things: Iterable[Any], whose: str = "the model", cure: str = WRAP_INSTEAD) -> None:
    """Refuses models whose gradients or parameters somebody else distributes.

    Args:
        things: some of them modules.
        whose: how the message names what is refused.
        cure: what to do instead.

    Raises:
        StateError: one of them is in DistributedDataParallel or FSDP.
    """
    for model in (thing for thing in things if isinstance(thing, nn.Module)):
        for module in model.modules():
            kind = _distributor(module)
            if kind:
                raise StateError(f"{whose} is in {kind}, which does not survive a change of members: {cure}")


def _distributor(module: nn.Module) -> str:
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return "DistributedDataParallel"
    sharded = any(kind.__module__.startswith(_FSDP) for kind in type(module).__mro__)
    return "FSDP" if sharded else ""


def refuse_spare_state(what: str) -> None:
    """Refuses a kind of job whose workers cannot be members without samples of their own.

    Args:
        what: how the message names the kind.

    Raises:
        StateError: the spares of the job are to hold the state.
    """
    if os.environ.get(STATE_VARIABLE) == "1":
        raise StateError(
            f"{STATE_FLAG} works with elaunch.init() only, and this script uses {what}: start the job with --spares "
            f"alone; a spare then receives the state when it takes a place"
        )


def refuse_sparse(model: nn.Module, whose: str = "the model") -> None:
    """Refuses embeddings with sparse gradients, before the first of these is made.

    Args:
        model: with modules in it.
        whose: how the message names it.

    Raises:
        StateError: there is one.
    """
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise StateError(
                f"{name or whose} is {type(module).__name__} with sparse=True, whose gradients cannot be summed "
                "over the members: give it sparse=False"
            )


def refuse_unregistered(trained: Collection[int], registered: Callable[[torch.optim.Optimizer], bool]) -> Any:
    """Has optimizers that train the job's parameters without being registered raise at their first step.

    Args:
        trained: the ids of the parameters.
        registered: returns whether the job knows an optimizer.

    Returns:
        The handle of torch's hook.
    """

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if registered(optimizer):
            return
        if any(id(parameter) in trained for group in optimizer.param_groups for parameter in group["params"]):
            raise StateError(
                f"this {type(optimizer).__name__} trains the job's model and is not registered, so it would act in "
                "steps that do not commit: name it in job.register(..., optimizer=optimizer)"
            )

    return register_optimizer_step_pre_hook(check)
