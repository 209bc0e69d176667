"""An elastic function: DistributedDataParallel or FSDP2 over Gloo, as a script of its own would have them.

With a GPU it is over NCCL, and several workers may share that GPU.

    elaunch --standalone --nproc-per-node=4 tests/jobs/elastic.py --shards 4 --die 1:10:step

`--die LOCAL_RANK:STEP:WHERE` kills the first process of a slot: in a collective for which the others wait (step),
before it binds its state after a change (bind: STEP is then the entry), before STEP where an entry begins with it, when
all have bound, and guard what others have (bound), or at the end, after STEP steps (end).
`--join-after FILE`: replacements join once the others have entered again, and made FILE. `--overtaken LOCAL_RANK`, with
it: on its first way back that worker hears of the next generation when all others have entered the present one, and
made FILE. `--stuck LOCAL_RANK:STEP`: its first process waits there for what never comes.
`--late`: each commit counts with the next one, as it does on a device, whoever has parts.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import elaunch
from benchmarks.one_device import device_of
from elaunch.errors import GenerationChanged
from elaunch.workers.comm import group as group_module
from elaunch.workers.recovery import Recovery
from elaunch.workers.reentry import copies, run
from tests.jobs import join_after

SAMPLES, BATCH = 600, 24
HERE = device_of(int(os.environ.get("LOCAL_RANK", "0")))

parser = argparse.ArgumentParser()
parser.add_argument("--shards", type=int, default=0, help="members along a shard axis; 0: DistributedDataParallel")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--die", action="append", default=[])
parser.add_argument("--raise-at", type=int, default=-1)
parser.add_argument("--change-late", action="store_true", help="a parameter is changed by another than the optimizer")
parser.add_argument("--sleep", type=float, default=0.0)
parser.add_argument("--join-after", type=Path)
parser.add_argument("--overtaken", default="")
parser.add_argument("--direct", type=int, help="up to so many members have links to all others")
parser.add_argument("--stuck", default="")
parser.add_argument("--once", type=Path, help="who dies in a step waits for this file, which who is stuck makes")
parser.add_argument("--late", action="store_true")
parser.add_argument("--checkpoint", type=Path, help="a file of the script's own, written every 5 steps")
arguments = parser.parse_args()
if arguments.direct is not None:
    group_module.DIRECT_MEMBERS = arguments.direct


def enter_in_turn(recovery: Recovery) -> None:
    """Activates a generation; on the first way back, the next one comes before the last part of what others send."""
    comes_back = bool(recovery._activated)
    if comes_back and is_overtaken and not overtaken:
        group, number = recovery._group, recovery.generation.number
        assert group is not None
        overtaken.append(number)
        gather = group.all_gather_bytes

        def gather_late(content: bytes) -> list[bytes]:
            gather(content)
            while (newest := recovery._client.newest()) is None or newest.number == number:
                time.sleep(0.01)
            sys.stdout.write(f"overtaken on the way into generation {number} by {newest.number}\n")
            raise GenerationChanged(newest.number)

        group.all_gather_bytes = gather_late  # type: ignore[assignment, method-assign]
    activate(recovery)
    if comes_back and not is_overtaken:
        arguments.join_after.touch()


activate = Recovery._activate
overtaken: list[int] = []
if arguments.overtaken:
    is_overtaken = os.environ["LOCAL_RANK"] == arguments.overtaken
    Recovery._activate = enter_in_turn  # type: ignore[assignment, method-assign]


def copy_late(copying: copies._Copying) -> None:
    time.sleep(1.0)
    copy_at_once(copying)


if arguments.late:
    run.is_sharded = lambda thing: True  # type: ignore[attr-defined]
copy_at_once = copies._Copying._copy
if arguments.change_late:  # so that the copy of a small model is under way then
    copies._Copying._copy = copy_late  # type: ignore[assignment]


def die(where: str, number: int) -> None:
    worker = os.environ.get("ELAUNCH_WORKER", "")
    if worker.endswith("#0") and f"{os.environ['LOCAL_RANK']}:{number}:{where}" in arguments.die:
        while where == "step" and arguments.once is not None and not arguments.once.exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGKILL)


def stick(step: int) -> None:
    if os.environ.get("ELAUNCH_WORKER", "").endswith("#0") and f"{os.environ['LOCAL_RANK']}:{step}" == arguments.stuck:
        arguments.once.touch()
        threading.Event().wait()


def build(size: int) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 63), nn.ReLU(), nn.Linear(63, 1)).double()
    net.to(HERE)
    if not arguments.shards:
        return DistributedDataParallel(net)
    whole = size % arguments.shards == 0 and size > arguments.shards
    shape, names = ((size // arguments.shards, arguments.shards), ("replicas", "shards")) if whole else ((size,), None)
    mesh = init_device_mesh(HERE.type, shape, mesh_dim_names=names)
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return net


def whole(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.full_tensor().detach() if hasattr(parameter, "full_tensor") else parameter.detach()


@elaunch.elastic
def train(state: elaunch.ElasticState) -> None:
    dist.init_process_group(dist.get_default_backend_for_device(HERE))
    model = build(state.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 16, generator=generator).double()
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    file, whole_state = arguments.checkpoint, StateDictOptions(full_state_dict=True)

    def load() -> None:
        if file.exists():
            saved = torch.load(file)
            parts = {"model_state_dict": saved["model"], "optim_state_dict": saved["optimizer"]}
            set_state_dict(model, optimizer, **parts, options=whole_state)
            scheduler.load_state_dict(saved["scheduler"])
            state.load_state_dict(saved["elastic"])

    def save() -> None:
        of_model, of_optimizer = get_state_dict(model, optimizer, options=whole_state)
        if state.rank == 0:
            own = {"scheduler": scheduler.state_dict(), "elastic": state.state_dict()}
            torch.save({"model": of_model, "optimizer": of_optimizer, **own}, file.with_suffix(".new"))
            file.with_suffix(".new").replace(file)

    die("bind", state.entry)
    state.bind(model=model, optimizer=optimizer, scheduler=scheduler, load=load if file is not None else None)
    assert state.values.get("steps", 0) == state.step
    sys.stdout.write(f"entry {state.entry}: {state.size} members, step {state.step}\n")
    if state.entry > 1 and arguments.join_after is not None:
        arguments.join_after.touch()
    if any(death.endswith(f":{state.step}:bound") for death in arguments.die):
        state.all_gather(None)
        die("bound", state.step)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True)
    for x, y in state.steps(loader, epochs=arguments.epochs, global_batch_size=BATCH):
        if state.rank == 0 and arguments.raise_at == state.step:
            raise ArithmeticError(f"as told, in step {state.step}")
        if arguments.change_late:
            with torch.no_grad():
                next(model.parameters()).mul_(1.0)
        time.sleep(arguments.sleep)
        loss = nn.functional.mse_loss(model(x.to(HERE)), y.to(HERE)) * state.weight
        optimizer.zero_grad()
        die("step", state.step)
        stick(state.step)
        loss.backward()
        optimizer.step()
        scheduler.step()
        total = loss.detach()
        dist.all_reduce(total)
        state.values["steps"] = state.step + 1
        state.commit(loss=total.item() / state.size)
        if file is not None and state.step % 5 == 0:
            save()
    die("end", state.step)
    squares = sum(whole(parameter).square().sum().item() for parameter in model.parameters())
    sys.stdout.write(f"rank {state.rank} of {state.size}: {state.step} steps, weights {squares:.9f}.\n")


if arguments.join_after is not None:
    join_after(arguments.join_after)
train()
sys.exit(0)
