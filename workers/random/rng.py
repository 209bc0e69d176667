"""Random numbers that belong to (seed, step, logical micro-batch, layer) and not to the worker that uses them."""

from __future__ import annotations

import hashlib
import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from elaunch.workers.random.rows import (
    RandomRows,
    RowsOfUnit,
    default_generator,
    math_attention,
)
from elaunch.workers.random.trace import GENERATORS, RandomTrace
from elaunch.workers.random.uncompiled import uncompiled


def mix(*values: int) -> int:
    """Returns a number 0..2^64-1 that depends on every bit of `values` (BLAKE2b), so that neighbours are unrelated."""
    return int.from_bytes(hashlib.blake2b(repr(values).encode(), digest_size=8).digest(), "little")


def seed_micro_batch(seed: int, step: int, index: int) -> None:
    """Starts the random numbers of micro-batch `index` (of the whole group's) of step `step`.

    Seeds torch's generators of the CPU and, once it is in use, of this process's current accelerator. Transforms of
    data sets often draw from Python's `random` and numpy's global generator, so these are seeded too: call this before
    the micro-batch is loaded.
    """
    number = mix(seed, step, index)
    torch.default_generator.manual_seed(number)
    accelerator = _accelerator()
    if accelerator is not None:
        accelerator.manual_seed(number)
    random.seed(number)
    np.random.seed([number & 0xFFFFFFFF, number >> 32])


def _accelerator() -> Any:
    """Returns torch's module of this process's accelerator, such as `torch.cuda`; None if it has none in use."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    module = torch.get_device_module(accelerator)
    # Before its first use the device would queue one more call per micro-batch instead of seeding.
    return module if getattr(module, "is_initialized", lambda: True)() else None


Generators = tuple[torch.Tensor, Any, Any, torch.Tensor | None]
"""Where the generators stand that `seed_micro_batch` seeds: torch's, Python's, numpy's, and the device's, if it is in
use.
"""


def read_generators() -> Generators:
    """Returns where the generators stand."""
    accelerator = _accelerator()
    of_device = None if accelerator is None else accelerator.get_rng_state()
    return torch.default_generator.get_state(), random.getstate(), np.random.get_state(), of_device


def set_generators(generators: Generators) -> None:
    """Has the generators go on from where `read_generators` found them."""
    of_torch, of_python, of_numpy, of_device = generators
    torch.default_generator.set_state(of_torch)
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    accelerator = _accelerator()
    if of_device is not None and accelerator is not None:
        accelerator.set_rng_state(of_device)


def pack_generators() -> bytes:
    """Returns where the generators stand in a process that uses no device, for another one."""
    of_torch, of_python, of_numpy, _ = read_generators()
    return pickle.dumps((of_torch.numpy(), of_python, of_numpy))


def generators_drawn_from(before: bytes) -> bytes:
    """Returns where the generators stand now, as `pack_generators` does; empty if nothing was drawn since `before`."""
    now = pack_generators()
    return now if now != before else b""


def continue_generators(drawn: bytes) -> None:
    """Has the generators go on from where another process of this worker has left them (`generators_drawn_from`)."""
    if drawn:
        of_torch, of_python, of_numpy = pickle.loads(drawn)  # noqa: S301
        set_generators((torch.from_numpy(of_torch), of_python, of_numpy, None))


def seed_layer(seed: int, step: int, unit: int, layer: int, device: torch.device | None = None) -> None:
    """Starts the random numbers of layer `layer` for the logical micro-batch `unit` of step `step`.

    Seeds torch's default generators of the CPU and of `device`, on which tensors lie already.
    """
    number = mix(seed, step, unit, layer)
    for generator in {default_generator(where) for where in (torch.device("cpu"), device) if where is not None}:
        generator.manual_seed(number)


@contextmanager
def layer_randomness(
    trace: RandomTrace,
    *,
    seed: int,
    step: int,
    layer: int,
    rows_by_unit: tuple[RowsOfUnit, ...],
    micro_batch_size: int,
    tp_rank: int = 0,
    tp_size: int = 1,
    device: torch.device,
) -> Iterator[None]:
    """Runs one call of a layer in it: each row of a unit sees the same random numbers whichever plan brought it here.

    A whole unit without tensor parallelism draws natively from generators that are seeded for it, and leaves them where
    they stop. All else draws through `RandomRows`, and leaves the generators alone. To recompute activations, run the
    layer again in a context with the same arguments; backward itself draws nothing. Attention with dropout draws the
    same numbers in both ways only if the engine runs whole units under `math_attention` (see `RandomTrace.fused`).

    Args:
        trace: of the layer, from `trace_random`.
        seed, step, layer: with the unit, what the numbers belong to.
        rows_by_unit: (unit, rows inside the unit, first row in the micro-batch), in the order of the rows.
        micro_batch_size: rows in a unit, here and when the layer was traced.
        tp_rank, tp_size: this worker runs the shard `tp_rank` of `tp_size` of the layer.
        device: of the layer.

    Raises:
        StateError: rows cannot be drawn alone (`RandomTrace.obstacles`), or the layer does not draw what it drew when
            it was traced.
    """
    if not trace.ops:
        yield
        return
    assert micro_batch_size == trace.micro_batch_size, f"{micro_batch_size} rows, traced: {trace.micro_batch_size}"
    n_rows = 0
    for unit, rows, first in rows_by_unit:
        assert first == n_rows, f"{rows} of unit {unit} starts at row {first}, but {n_rows} rows precede"
        assert set(rows) <= set(range(micro_batch_size)), f"{rows} of {micro_batch_size} in unit {unit}"
        n_rows += len(rows)
    if tp_size == 1 and len(rows_by_unit) == 1 and n_rows == micro_batch_size:
        with GENERATORS:
            seed_layer(seed, step, rows_by_unit[0][0], layer, device)
            yield
        return
    mode = RandomRows(trace, lambda unit: mix(seed, step, unit, layer), layer, rows_by_unit, tp_rank, tp_size)
    with uncompiled(), math_attention(trace, device), mode:
        yield
    mode.finish()
