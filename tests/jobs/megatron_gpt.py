"""An elastic function that trains a tiny GPT of Megatron-core over Gloo, in its own pipeline schedules and optimizers.

    elaunch --standalone --nproc-per-node=4 tests/jobs/megatron_gpt.py --layouts 2x1,1x1 --die 3:5

`--die LOCAL_RANK:STEP` kills the first process of a slot in that step, before its optimizer steps. `--join-after FILE`:
replacements join once the first member has entered again, and made FILE.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")  # Megatron's, on what is not installed beside it

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import (  # noqa: E402
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.models.gpt.gpt_model import GPTModel  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func  # noqa: E402
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker  # noqa: E402
from megatron.core.transformer.transformer_config import TransformerConfig  # noqa: E402

import elaunch  # noqa: E402
from elaunch.integrations import megatron  # noqa: E402
from tests.jobs import join_after  # noqa: E402

VOCABULARY, LENGTH, SAMPLES, BATCH, MICRO = 64, 8, 24 * 20, 24, 2

parser = argparse.ArgumentParser()
parser.add_argument("--layouts", default="1x1", help="TPxPP,...")
parser.add_argument("--die", action="append", default=[])
parser.add_argument("--join-after", type=Path)
parser.add_argument("--sharded-optimizer", action="store_true", help="Megatron's distributed optimizer")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--sleep", type=float, default=0.0)
arguments = parser.parse_args()
LAYOUTS: list[tuple[int, int]] = [
    (int(tensor), int(pipeline)) for tensor, pipeline in (pair.split("x") for pair in arguments.layouts.split(","))
]


class OnCpu(TorchFunctionMode):
    """Has what Megatron makes on "cuda" made on the CPU, and gives tensors there the type that it expects."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        answer = args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
        if func is torch.Tensor.type and isinstance(answer, str):
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer


@contextlib.contextmanager
def no_fork(self: CudaRNGStatesTracker, name: str = "") -> Iterator[None]:
    yield


def run_on_cpu() -> contextlib.AbstractContextManager[Any]:
    """Answers what Megatron asks of CUDA where it works without it: the device, and random states for dropout."""
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    torch.cuda.synchronize = lambda device=None: None
    CudaRNGStatesTracker.fork = no_fork
    return OnCpu()


def die(step: int) -> None:
    if os.environ["ELAUNCH_WORKER"].endswith("#0") and f"{os.environ['LOCAL_RANK']}:{step}" in arguments.die:
        os.kill(os.getpid(), signal.SIGKILL)


def begin_alike(model: Any) -> None:
    """Gives each weight a value that does not depend on the layout, so that all layouts train alike."""
    for name, shard in megatron.model_shards([model]).items():
        if len(shard.shape) > 1:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            whole = torch.randn(shard.shape, generator=generator) * 0.1
            shard.to_local().copy_(whole[tuple(slice(start, stop) for start, stop in shard.box)])


def build(tensor: int, pipeline: int) -> tuple[Any, Any, Any]:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=4,
        ffn_hidden_size=32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=True,
        position_embedding_type="learned_absolute",
    )
    begin_alike(model)
    sharded: bool = arguments.sharded_optimizer
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=sharded), model)
    model.broadcast_params()
    settings = OptimizerConfig(
        optimizer="adam", lr=1e-2, min_lr=1e-3, weight_decay=0.01, clip_grad=1.0, use_distributed_optimizer=sharded
    )
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-2,
        min_lr=1e-3,
        lr_warmup_steps=2 * BATCH,
        lr_decay_steps=40 * BATCH,
        lr_decay_style="cosine",
        start_wd=0.01,
        end_wd=0.01,
        wd_incr_steps=40 * BATCH,
        wd_incr_style="constant",
    )
    return model, optimizer, scheduler


def forward(batches: Iterator[torch.Tensor], model: Any) -> tuple[torch.Tensor, Any]:
    tokens = next(batches)
    mask = torch.ones(1, 1, LENGTH, LENGTH).triu(1).bool()
    output = model(tokens[:, :-1], torch.arange(LENGTH).expand(len(tokens), LENGTH), mask, labels=tokens[:, 1:])

    def loss_of(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.mean()
        return loss, {"loss": loss.detach().clone()}  # Megatron divides it in place

    return output, loss_of


@elaunch.elastic
def train(state: elaunch.ElasticState) -> None:
    megatron.reset()
    dist.init_process_group("gloo")
    if state.entry > 1 and state.rank == 0 and arguments.join_after is not None:
        arguments.join_after.touch()
    tensor, pipeline = megatron.layout(state, *LAYOUTS)
    parallel_state.initialize_model_parallel(tensor, pipeline)
    model, optimizer, scheduler = build(tensor, pipeline)
    state.bind(training=megatron.TrainingState(state, [model], optimizer, scheduler))
    _, replicas = replica = megatron.replica()
    sys.stdout.write(f"entry {state.entry}: TP {tensor}, PP {pipeline}, DP {replicas}, step {state.step}\n")
    tokens = torch.randint(VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    loader = DataLoader(TensorDataset(tokens), batch_size=BATCH, shuffle=True)
    step = get_forward_backward_func()
    for (batch,) in state.steps(loader, epochs=10, global_batch_size=BATCH, replica=replica):
        if state.step == arguments.steps:
            break
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = step(
            forward_step_func=forward,
            data_iterator=iter(batch.split(MICRO)),
            model=model,
            num_microbatches=len(batch) // MICRO,
            seq_length=LENGTH,
            micro_batch_size=MICRO,
            forward_only=False,
        )
        die(state.step)
        optimizer.step()
        scheduler.step(BATCH)
        total = torch.tensor(sum(one["loss"].item() for one in losses) / max(1, len(losses)), dtype=torch.float64)
        dist.all_reduce(total)
        time.sleep(arguments.sleep)
        state.commit(loss=total.item() / (tensor * replicas))
    sys.stdout.write(f"rank {state.rank} of {state.size}: {state.step} steps.\n")


if arguments.join_after is not None:
    join_after(arguments.join_after)
with run_on_cpu():
    train()
sys.exit(0)
