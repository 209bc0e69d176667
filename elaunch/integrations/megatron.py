"""Megatron-core in elastic functions: its globals are reset, and its state is found by its own description of shards.

@elaunch.elastic
def train(state):
    megatron.reset()
    dist.init_process_group("nccl")
    tensor, pipeline = megatron.layout(state, (2, 2), (2, 1), (1, 1))
    parallel_state.initialize_model_parallel(tensor, pipeline)
    ...
    state.bind(training=megatron.TrainingState(state, chunks, optimizer, scheduler))
    for batch in state.steps(loader, global_batch_size=64, replica=megatron.replica()):
        ...
        state.commit()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.num_microbatches_calculator import unset_num_microbatches_calculator
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.rerun_state_machine import destroy_rerun_state_machine
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from elaunch.errors import StateError, UsageError
from elaunch.workers.reentry.state import ElasticState
from elaunch.workers.reentry.tensor_shard import Form, TensorShard, empty_shard, fill, form_of


def reset() -> None:
    """Forgets what Megatron keeps of the entry before: groups, buffers, random states, the number of micro-batches.

    Call it first in the function.
    """
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_global_memory_buffer()
    unset_num_microbatches_calculator()
    destroy_rerun_state_machine()
    get_cuda_rng_tracker().reset()


def layout(state: ElasticState, *sizes: tuple[int, int]) -> tuple[int, int]:
    """Returns the first (tensor, pipeline) sizes whose product divides the number of members.

    Where none does, it waits for other members: the function is then left and entered again.

    Raises:
        UsageError: no sizes are given, or one is below 1.
        StepInterrupted: the members have changed.
    """
    if not sizes or any(size < 1 for pair in sizes for size in pair):
        raise UsageError(f"megatron.layout{sizes}: expected pairs of numbers from 1 on")
    for tensor, pipeline in sizes:
        if state.size % (tensor * pipeline) == 0:
            return tensor, pipeline
    return state.wait_for_members(f"{state.size} members fit none of the (tensor, pipeline) sizes {sizes}")


def replica() -> tuple[int, int]:
    """Returns which of how many replicas of the model this worker belongs to, for `state.steps`."""
    return parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()


class TrainingState:
    """The state of a model and its optimizer, which `state.bind` takes. All members make one, before `bind`.

    Which part of each tensor lies here, Megatron's `sharded_state_dict` tells; of the distributed optimizer it is a
    range of this worker's part of the parameter. So the state fits another number of replicas and other pipeline
    stages, and, but for the distributed optimizer, other tensor-parallel sizes.

    Args:
        state: of the elastic function.
        chunks: the model, as a list of its chunks on this worker, wrapped in Megatron's DistributedDataParallel or not.
        optimizer: what `get_megatron_optimizer` returns.
        scheduler: an `OptimizerParamScheduler`, or whatever has `state_dict` and `load_state_dict`.

    Raises:
        UsageError: the optimizer is not Adam.
    """

    def __init__(
        self, state: ElasticState, chunks: Sequence[torch.nn.Module], optimizer: Any = None, scheduler: Any = None
    ) -> None:
        self._chunks, self._scheduler = list(chunks), scheduler
        self._optimizers: list[Any] = []
        if optimizer is not None:
            self._optimizers = optimizer.chained_optimizers if isinstance(optimizer, ChainedOptimizer) else [optimizer]
        for one in self._optimizers:
            _make_moments(one)
        forms: dict[str, Form] = {}
        for note in state.all_gather({name: form_of(shard) for name, shard in self._shards().items()}):
            for name, (dtype, shape) in note.items():
                if forms.setdefault(name, (dtype, tuple(shape))) != (dtype, tuple(shape)):
                    raise StateError(f"{name} is {forms[name]} on one member and {(dtype, tuple(shape))} on another")
        self._forms = dict(sorted(forms.items()))
        self._device = next(self._chunks[0].parameters()).device if self._chunks else state.device

    def state_dict(self) -> dict[str, Any]:
        """Returns all tensors of the job, with the parts that lie here, and what else is the same on all members."""
        own = self._shards()
        shards = {name: own.get(name) or empty_shard(form, self._device) for name, form in self._forms.items()}
        return {"shards": shards, "optimizers": [_options(one) for one in self._optimizers], **self._schedule()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes the state, with the parts that belong here.

        Raises:
            StateError: it has not what belongs here.
        """
        try:
            fill(self._shards(), state["shards"])
        except KeyError as error:
            raise StateError(
                f"the state has no {error}: with Megatron's distributed optimizer the tensor-parallel size "
                "cannot change"
            ) from error
        for one, options in zip(self._optimizers, state["optimizers"], strict=True):
            _take_options(one, options)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def _schedule(self) -> dict[str, Any]:
        return {} if self._scheduler is None else {"scheduler": self._scheduler.state_dict()}

    def _shards(self) -> dict[str, TensorShard]:
        found = model_shards(self._chunks)
        for one in self._optimizers:
            described = _described(self._chunks)
            if isinstance(one, DistributedOptimizer):
                found |= _ranges(one, described)
            else:
                found |= _flat(one.sharded_state_dict(described))
        return found


def model_shards(chunks: Sequence[torch.nn.Module]) -> dict[str, TensorShard]:
    """Returns the parts of a model's tensors that lie here, which are those of the model itself, by Megatron's keys."""
    return dict(_flat(_described(chunks)))


def _described(chunks: Sequence[Any]) -> dict[str, Any]:
    """Returns Megatron's description of the model; of each layer by a name that does not depend on the stage."""
    metadata = {
        "singleton_local_shards": True,  # two halves of SwiGLU are two tensors, and each layer is one of its own
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    found: dict[str, Any] = {}
    for number, chunk in enumerate(chunks):
        described = (chunk.module if hasattr(chunk, "ddp_config") else chunk).sharded_state_dict(metadata=metadata)
        found |= {f"model{number}.{name}": value for name, value in described.items()}
    return found


def _flat(value: Any) -> Iterator[tuple[str, TensorShard]]:
    """Yields the tensors in a description, by their keys; what Megatron cuts into several (SwiGLU), cut."""
    if isinstance(value, ShardedTensorFactory):
        value = value.build()
    if isinstance(value, ShardedTensor):
        yield _key(value), _shard(value)
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _flat(item)


def _key(tensor: ShardedTensor) -> str:
    """Returns the key of a tensor, with its place along axes that are only in the whole, such as experts."""
    places: tuple[int, ...] = tensor.global_offset[: tensor.prepend_axis_num]
    return ".".join([tensor.key, *map(str, places)])


def _shard(tensor: ShardedTensor) -> TensorShard:
    offsets = tensor.global_offset[tensor.prepend_axis_num :]
    box = tuple((start, start + size) for start, size in zip(offsets, tensor.local_shape, strict=True))
    return TensorShard(tensor.data.detach(), box, tuple(tensor.global_shape[tensor.prepend_axis_num :]))


def _ranges(optimizer: Any, model: dict[str, Any]) -> dict[str, TensorShard]:
    """Returns this worker's ranges of what the distributed optimizer keeps of each parameter, as that lies here."""
    keys = {}
    for value in model.values():
        if isinstance(value, ShardedTensor):
            keys[id(value.data)] = _key(value)
        elif isinstance(value, ShardedTensorFactory):
            keys[id(value.data)] = value.key
    found = {}
    place, size = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_world_size(),
    )
    for parameter in optimizer.model_param_group_index_map:
        where = optimizer._get_model_param_range_map(parameter)["param"]
        part = f".tensor{place}of{size}" if getattr(parameter, "tensor_model_parallel", False) and size > 1 else ""
        for name, tensor in optimizer._get_main_param_and_optimizer_states(parameter).items():
            own = (
                tensor.untyped_storage().data_ptr() != parameter.untyped_storage().data_ptr()
            )  # not a view of the model
            if name != "step" and own:
                key = f"distributed.{name}.{keys[id(parameter)]}{part}"
                found[key] = TensorShard(tensor.detach(), ((where.start, where.end),), (parameter.numel(),))
    return found


def _make_moments(optimizer: Any) -> None:
    """Has an optimizer keep from the start what it keeps after its first step."""
    inner = optimizer.optimizer
    if inner is None:
        return
    if getattr(optimizer, "init_state_fn", None) is None:
        raise UsageError(f"megatron.TrainingState takes Megatron's Adam, got {type(inner).__name__}")
    optimizer.init_state_fn(inner, optimizer.config)
    if type(inner).__module__.startswith("torch."):
        for kept in inner.state.values():
            kept.setdefault("step", torch.tensor(0.0))


def _options(optimizer: Any) -> dict[str, Any]:
    """Returns what an optimizer keeps besides tensors of the parameters' sizes."""
    inner = optimizer.optimizer
    if inner is None:
        return {"step": None, "groups": []}
    steps = [float(kept["step"]) for kept in inner.state.values() if "step" in kept]
    groups = [{key: value for key, value in group.items() if key != "params"} for group in inner.param_groups]
    options: dict[str, Any] = {"step": max(steps) if steps else None, "groups": groups}
    if getattr(optimizer, "grad_scaler", None) is not None:
        options["scaler"] = optimizer.grad_scaler.state_dict()
    return options


def _take_options(optimizer: Any, options: Mapping[str, Any]) -> None:
    inner = optimizer.optimizer
    if inner is None:
        return
    for kept in inner.state.values():
        if "step" in kept and options["step"] is not None:
            kept["step"] = torch.tensor(options["step"])
    known = {_identity(group): group for group in options["groups"]}
    for group in inner.param_groups:
        group.update(known.get(_identity(group), {}))
    if "scaler" in options and optimizer.grad_scaler is not None:
        optimizer.grad_scaler.load_state_dict(options["scaler"])


def _identity(group: Mapping[str, Any]) -> tuple[Any, ...]:
    """Returns what tells a group of parameters from others, whose learning rates and decays differ."""
    return tuple(group.get(key) for key in ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr"))
