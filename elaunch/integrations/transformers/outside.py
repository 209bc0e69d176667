"""Before `train()`: every worker is alone, and no process group is formed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from accelerate.state import PartialState
from transformers import TrainingArguments
from transformers.training_args import ParallelMode

from elaunch.integrations.transformers.sharded import fsdp_version

GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class Outside:
    """Has accelerate form no process group before `train()`: every worker is alone, but knows its rank.

    Attributes:
        alone: whether that is so now.
    """

    alone = False
    _form: Callable[..., None]
    _set_up: Callable[..., Any]

    @classmethod
    def begin(cls) -> None:
        """Takes the place of accelerate's forming of a group."""
        cls.alone = True
        cls._form = PartialState.__init__
        PartialState.__init__ = lambda state, *args, **kwargs: cls._start(state, *args, **kwargs)
        devices = TrainingArguments.__dict__["_setup_devices"]
        cls._set_up = devices.func
        devices.func = cls._one_device
        # A model that will be sharded: a Trainer asks for a group, and must not put the whole of it on a device.
        cls._tell_of_sharding("parallel_mode", ParallelMode.DISTRIBUTED)
        cls._tell_of_sharding("place_model_on_device", False)

    @classmethod
    def _tell_of_sharding(cls, name: str, told: Any) -> None:
        own: Any = getattr(TrainingArguments, name).fget
        answer = property(lambda args: told if cls.alone and fsdp_version(args) else own(args))
        setattr(TrainingArguments, name, answer)

    @classmethod
    def _start(cls, state: Any, *args: Any, **kwargs: Any) -> None:
        if not cls.alone or PartialState._shared_state:
            cls._form(state, *args, **kwargs)
            return
        hidden = {name: os.environ.pop(name) for name in GROUP_VARIABLES if name in os.environ}
        try:
            kwargs.pop("backend", None)
            cls._form(state, *args, **kwargs)
        finally:
            os.environ.update(hidden)
        state.process_index = int(hidden.get("RANK", 0))
        state.local_process_index = int(hidden.get("LOCAL_RANK", 0))
        if state.device.type != "cpu" and state.device.index is None:
            state.device = torch.device(state.device.type, state.local_process_index)
            torch.accelerator.set_device_index(state.local_process_index)

    @classmethod
    def _one_device(cls, args: Any) -> Any:
        device = cls._set_up(args)
        if cls.alone and args._n_gpu > 0:
            args._n_gpu, device = 1, args.distributed_state.device
        return device
