"""A list of tensors seen as one byte string: cut among sources, sent from and received into the tensors' memory.

The string is the tensors' memory one after the other, in list order. All of this is pure; who sends what to whom over
which link is decided elsewhere.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from elaunch.plan.shares import share
from elaunch.workers.state.codec import Manifest, describe, dtype_of

CHUNK_BYTES = 1 << 20
"""No chunk that receivers pass on is smaller: that would not be worth a link between them."""


def cut(total_bytes: int, sources: Sequence[str]) -> list[tuple[str, int, int]]:
    """Which source sends which interval: (source, start, stop), contiguous, in order, sizes differ by at most 1 byte.

    Sources for which nothing is left do not appear.
    """
    if not sources:
        raise ValueError(f"no source for {total_bytes} bytes")
    parts = ((source, share(total_bytes, len(sources), index)) for index, source in enumerate(sources))
    return [(source, part.start, part.stop) for source, part in parts if part]


def scatter(start: int, stop: int, n_sources: int, receivers: Sequence[int]) -> list[tuple[int, int, int]]:
    """Which receiver gets which chunk of a source's interval, to pass it on to all others: (receiver, start, stop).

    So a source sends its interval once, and a receiver about as much as it receives. None, and the source sends all of
    it to each, where there are no more receivers than sources or nothing of `CHUNK_BYTES` for two of them.
    """
    n_chunks = min(len(receivers), (stop - start) // CHUNK_BYTES)
    if len(receivers) <= n_sources or n_chunks < 2:
        return []
    parts = [share(stop - start, n_chunks, index) for index in range(n_chunks)]
    return [(to, start + part.start, start + part.stop) for to, part in zip(receivers, parts, strict=False)]


def total_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Length of the byte string."""
    return sum(tensor.nbytes for tensor in tensors)


def allocate(manifest: Manifest, into: Mapping[str, Any] | None = None) -> list[torch.Tensor]:
    """Tensors in host memory to receive the state that `manifest` describes; their content is arbitrary.

    Args:
        into: objects that will be restored from the result. The modules among them lend their own memory where it
            has the right form, so that parameters are received into place; they are spoilt if the transfer fails.
    """
    own = _own_tensors(into or {})
    result = []
    for spec in manifest["tensors"]:
        shape, dtype = spec["shape"], dtype_of(spec["dtype"])
        strides = spec.get("strides")
        tensor = (
            torch.empty(shape, dtype=dtype) if strides is None else torch.empty_strided(shape, strides, dtype=dtype)
        )
        mine = own.pop(spec["path"], None)
        result.append(mine if mine is not None and _form(mine) == _form(tensor) else tensor)
    return result


def stage(tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[torch.Tensor]:
    """The same list with host copies of those device tensors that overlap bytes start..stop-1."""
    staged = list(tensors)
    for index, tensor, _, _ in _overlaps(tensors, start, stop):
        staged[index] = tensor.cpu()
    return staged


def windows(tensors: Sequence[torch.Tensor], start: int, stop: int) -> list[memoryview]:
    """Writable views, of bytes, of the tensors' memory that together are bytes start..stop-1 of the string.

    A view keeps its memory alive. The tensors are in host memory (`stage` copies those that are not) and dense.
    """
    found = []
    for _, tensor, first, last in _overlaps(tensors, start, stop):
        if tensor.device.type != "cpu":
            raise ValueError(f"a tensor on {tensor.device} has no host memory to view: stage it first")
        found.append(_memory(tensor)[first:last])
    return found


def checksum(views: Iterable[memoryview | bytes]) -> int:
    """CRC-32 of the concatenation: the same for any way to cut the same bytes into views."""
    value = 0
    for view in views:
        value = zlib.crc32(view, value)
    return value


def _overlaps(tensors: Sequence[torch.Tensor], start: int, stop: int) -> Iterator[tuple[int, torch.Tensor, int, int]]:
    """(index, tensor, first byte, end byte) of each tensor's part of the interval, in order; no empty parts."""
    total = total_bytes(tensors)
    if not 0 <= start <= stop <= total:
        raise ValueError(f"the interval {start}:{stop} is not within 0:{total}")
    offset = 0
    for index, tensor in enumerate(tensors):
        first, last = max(start - offset, 0), min(stop - offset, tensor.nbytes)
        if first < last:
            yield index, tensor, first, last
        offset += tensor.nbytes


def _memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a dense tensor in the order of its memory."""
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    if torch.empty_like(tensor, device="meta").stride() != tensor.stride():
        raise ValueError(f"a tensor of shape {list(tensor.shape)} and strides {tensor.stride()} is not dense")
    return flat.view(torch.uint8).numpy().data


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.device.type, tensor.dtype, tensor.shape, tensor.stride()


def _own_tensors(objects: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    manifest, tensors = describe({name: thing for name, thing in objects.items() if isinstance(thing, nn.Module)})
    return {spec["path"]: tensor for spec, tensor in zip(manifest["tensors"], tensors)}
