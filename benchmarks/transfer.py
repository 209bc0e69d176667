"""State moved between two plans, memory to memory, beside a checkpoint and beside bare sockets.

    python benchmarks/transfer.py
    python benchmarks/transfer.py --quick --json transfer.json

Four processes on one machine, links over loopback, real bytes: a small Llama (bfloat16 parameters, float32 masters and
two moments) changes its degrees of parallelism. After DynaTran's figure 8, tables 1 and 3, scaled to this machine. Side
by side, in turn, after the same change:

- *elaunch*: `elaunch.workers.state.reshard` as jobs run it, new memory allocated, no bound.
- *elaunch, checked*: with a checksum of each message.
- *elaunch, bounded*: with 64 MiB of memory beside the old state.
- *elaunch, straight*: nothing is passed on by receivers; all comes from those who had it.
- *buffered*: messages packed in the same way, one pair of workers at a time, each waiting for the other.
- *naive*: each tensor's part by itself, blocking, one pair at a time, straight from those who had it.
- *sockets*: the same number of bytes between the same pairs over bare TCP sockets, from and into buffers that exist.
- *checkpoint*: `torch.distributed.checkpoint` save and load of the same boxes, on tmpfs and on the disk.

Timed is from a barrier until the last process has all that it needs. The result of each way of elaunch is compared with
the state as the new plan makes it, bit by bit. *Most sent* is what the busiest worker sends, with and without passing
on; in *one to many* it is parameters alone that move, which all need whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from benchmarks.crew import PATIENCE_S, Rank, crew
from benchmarks.jobs import limit_time
from benchmarks.report import Report, add_arguments, spread
from benchmarks.routes import Parameters, described
from elaunch.plan import OptimizerLayout, Plan, symmetric
from elaunch.workers.state.boxes import Box
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.layout import LayerSpec
from elaunch.workers.state.reshard import plan_stages, reshard
from elaunch.workers.state.routes import Router, n_bytes
from elaunch.workers.state.space import OPTIMIZER, Holdings, Item, holdings_of_plan, items_of_layers

WORKERS = [f"n{number // 2}/{number % 2}#0" for number in range(4)]
WIDTH, INNER, WORDS = 1024, 2816, 8192
BOUND_BYTES = 64 << 20

Chunks = dict[str, list[Chunk]]


class Pieces:
    """One tensor in boxes, as torch.distributed.checkpoint wants to see it."""

    def __init__(self, shape: Sequence[int], parts: Sequence[tuple[Box, Tensor]]) -> None:
        self.shape = torch.Size(shape)
        self._parts = {tuple(start for start, _ in box): part for box, part in parts}

    def _chunk(self, offsets: tuple[int, ...]) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(offsets), self._parts[offsets].shape)

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(name, torch.Size(offsets)),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    self._chunk(offsets), TensorProperties.create_from_tensor(part), self.shape
                ),
            )
            for offsets, part in self._parts.items()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk(offsets) for offsets in self._parts]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self._parts[tuple(index.offset)]


class SavePlanner(dcp.DefaultSavePlanner):
    """Finds the tensors of `Pieces`; torch's looks into tensors only."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        found: Pieces = self.state_dict[index.fqn]
        return found.__get_tensor_shard__(index)


class LoadPlanner(dcp.DefaultLoadPlanner):
    """Reads into `Pieces`."""

    def __init__(self, pieces: Mapping[str, Pieces]) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._pieces = pieces

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        found = []
        for name, pieces in self._pieces.items():
            stored = self.metadata.state_dict_metadata[name]
            assert isinstance(stored, TensorStorageMetadata)
            found += create_read_items_for_chunk_list(name, stored, pieces.__create_chunk_list__())
        return LoadPlan(found)

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        return self._pieces[index.fqn].__get_tensor_shard__(index)


@dataclasses.dataclass(frozen=True)
class Degrees:
    """Of a plan; the workers that it does not need are idle."""

    dp: int = 1
    pp: int = 1
    tp: int = 1
    zero: OptimizerLayout = "interleaved"

    def plan(self, n_layers: int) -> Plan:
        used = self.dp * self.pp * self.tp
        plan = symmetric(WORKERS[:used], n_layers, 16, 1, dp=self.dp, pp=self.pp, tp=self.tp, zero=self.zero)
        return dataclasses.replace(plan, idle=tuple(WORKERS[used:]))

    def __str__(self) -> str:
        degrees = {"DP": self.dp, "PP": self.pp, "TP": self.tp}
        text = " ".join(f"{name}{degree}" for name, degree in degrees.items() if degree > 1) or "one worker"
        return text if self.zero == "interleaved" else f"{text}, contiguous"


ONE_TO_MANY = "one to many"

CASES = [
    ("DP", Degrees(dp=2), Degrees(dp=4)),
    ("TP", Degrees(tp=4), Degrees(dp=2, tp=2)),
    ("PP", Degrees(pp=4), Degrees(dp=2, pp=2)),
    (ONE_TO_MANY, Degrees(), Degrees(dp=4)),
    ("ZeRO", Degrees(dp=4), Degrees(dp=4, zero="contiguous")),
    ("hybrid", Degrees(dp=2, pp=2), Degrees(dp=2, tp=2)),
    ("hybrid", Degrees(pp=2, tp=2), Degrees(dp=4)),
]


def small_llama(blocks: int) -> list[LayerSpec]:
    """Its parameters with Megatron's placements."""
    block: Parameters = {
        "attention.qkv": ((3 * WIDTH, WIDTH), 0),
        "attention.o": ((WIDTH, WIDTH), 1),
        "mlp.gate": ((INNER, WIDTH), 0),
        "mlp.up": ((INNER, WIDTH), 0),
        "mlp.down": ((WIDTH, INNER), 1),
        "norm1": ((WIDTH,), None),
        "norm2": ((WIDTH,), None),
    }
    words: Parameters = {"words": ((WORDS, WIDTH), 0)}
    return described([words, *[block] * blocks, words])


@dataclasses.dataclass(frozen=True)
class Change:
    """One case, with everything that follows from it."""

    name: str
    old: Degrees
    new: Degrees
    items: Mapping[str, Item]
    before: Mapping[str, Holdings]
    after: Mapping[str, Holdings]

    @property
    def routers(self) -> tuple[Router, Router]:
        """As jobs have it, and without passing on."""
        with_, without = (Router(self.items, self.before, self.after, relays=relays) for relays in (True, False))
        return with_, without


def value_of(item: Item, number: int, box: Box) -> tuple[Tensor, ...]:
    """What a box of an item holds: numbers that tell elements, tensors and items apart."""
    whole = torch.zeros(())
    for dim, (start, stop) in enumerate(box):
        stride = 1
        for size in item.shape[dim + 1 :]:
            stride *= size
        ends = torch.arange(start, stop, dtype=torch.float32) * (stride % 8191 + 1)
        whole = whole + ends.view([-1 if axis == dim else 1 for axis in range(len(box))])
    return tuple(((whole + 13 * number + which) % 253).to(dtype) for which, dtype in enumerate(item.dtypes))


class TransferRank(Rank):
    """One process of the benchmark."""

    def __init__(self, workers: Sequence[str], place: int, store: dist.Store) -> None:
        super().__init__(workers, place, store)
        gloo = dist.PrefixStore("gloo", store)
        dist.init_process_group(
            "gloo", store=gloo, rank=place, world_size=len(workers), timeout=timedelta(seconds=PATIENCE_S)
        )
        self.state: Chunks = {}

    def begin(self, change: Change) -> None:
        """Make the state that the old plan gives."""
        self.change = change
        self.router, self.straight = change.routers
        numbers = {name: number for number, name in enumerate(change.items)}
        self.state = {
            name: [Chunk(box, value_of(change.items[name], numbers[name], box)) for box in boxes]
            for name, boxes in change.before[self.worker].items()
        }

    def allocate(self, name: str, box: Box) -> tuple[Tensor, ...]:
        shape = tuple(stop - start for start, stop in box)
        return tuple(torch.empty(shape, dtype=dtype) for dtype in self.change.items[name].dtypes)

    def run(self, way: str, folder: str) -> float:
        """Do the change once; the seconds from a barrier to this process's end."""
        with contextlib.ExitStack() as after:
            work: Callable[[], Chunks | None] = getattr(self, "_" + way.replace(" ", "_"))(folder, after)
            self.group.barrier()
            start_s = time.perf_counter()
            found = work()
            self.group.barrier()
            seconds = time.perf_counter() - start_s
            if found is not None:
                self._check(found, way)
        return seconds

    def _check(self, found: Chunks, way: str) -> None:
        numbers = {name: number for number, name in enumerate(self.change.items)}
        needed = self.change.after[self.worker]
        assert set(found) == {name for name, boxes in needed.items() if boxes}
        for name, chunks in found.items():
            assert {chunk.box for chunk in chunks} == set(needed[name])
            for chunk in chunks:
                expected = value_of(self.change.items[name], numbers[name], chunk.box)
                assert all(map(torch.equal, chunk.tensors, expected)), f"{way}: {name} {chunk.box} is wrong"

    # -- the ways; each gives what is to be timed -----------------------------------------------------------------

    def _elaunch(self, _: str, __: contextlib.ExitStack, **settings: Any) -> Callable[[], Chunks]:
        return lambda: reshard(self.group, self.router, dict(self.state), self.allocate, **settings)[0]

    def _straight(self, _: str, __: contextlib.ExitStack) -> Callable[[], Chunks]:
        return lambda: reshard(self.group, self.straight, dict(self.state), self.allocate)[0]

    def _checked(self, folder: str, after: contextlib.ExitStack) -> Callable[[], Chunks]:
        return self._elaunch(folder, after, checksum=True)

    def _bounded(self, folder: str, after: contextlib.ExitStack) -> Callable[[], Chunks]:
        return self._elaunch(folder, after, max_extra_bytes=BOUND_BYTES)

    def _buffered(self, folder: str, after: contextlib.ExitStack) -> Callable[[], Chunks]:
        """Both directions of a pair one after the other, one pair of a worker at a time."""
        stream = self.group.stream

        def one_by_one(outgoing: Mapping[int, Any], incoming: Mapping[int, Any]) -> None:
            for step in (step for stage in plan_stages(self.group.size, 1) for step in stage.steps):
                peer = self.place ^ step
                ways = [(outgoing, {}), ({}, incoming)]
                for out, into in ways if self.place < peer else ways[::-1]:
                    stream(
                        {peer: out[peer]} if peer in out else {},
                        {peer: into[peer]} if peer in into else {},
                    )

        self.group.stream = one_by_one  # type: ignore[method-assign]
        after.callback(lambda: self.group.__dict__.pop("stream"))
        return self._elaunch(folder, after)

    def _naive(self, _: str, __: contextlib.ExitStack) -> Callable[[], Chunks]:
        routes = self.straight.of(self.worker)

        def work() -> Chunks:
            found = {
                name: [Chunk(box, self.allocate(name, box)) for box in boxes]
                for name, boxes in self.change.after[self.worker].items()
            }
            for piece in routes.retain:
                for to, from_ in zip(_part(found, piece), _part(self.state, piece), strict=True):
                    to.copy_(from_)
            for step in range(1, len(WORKERS)):
                peer = self.place ^ step
                sends = [piece for piece in routes.send if piece.to == WORKERS[peer]]
                takes = [piece for piece in routes.receive if piece.source == WORKERS[peer]]
                for turn in (0, 1):
                    if (self.place < peer) == (turn == 0):
                        for piece in sends:
                            for tensor in _part(self.state, piece):
                                self.group.send(tensor.contiguous().view(-1), peer)
                    else:
                        for piece in takes:
                            for tensor in _part(found, piece):
                                whole = torch.empty(tensor.shape, dtype=tensor.dtype)
                                self.group.receive(whole.view(-1), peer)
                                tensor.copy_(whole)
            return found

        return work

    def _sockets(self, _: str, after: contextlib.ExitStack) -> Callable[[], None]:
        routes = self.router.of(self.worker)
        links = self._bare_links(after)
        outgoing: dict[int, memoryview] = {}
        incoming: dict[int, memoryview] = {}
        for peer, worker in enumerate(WORKERS):
            sent = n_bytes(self.change.items, [piece for piece in routes.send if piece.to == worker])
            taken = n_bytes(self.change.items, [piece for piece in routes.receive if piece.source == worker])
            outgoing |= {peer: memoryview(bytearray(sent))} if sent else {}
            incoming |= {peer: memoryview(bytearray(taken))} if taken else {}

        def receive(peer: int) -> None:
            left = incoming[peer]
            while left:
                left = left[links[peer].recv_into(left) :]

        def work() -> None:
            threads = [threading.Thread(target=links[peer].sendall, args=(body,)) for peer, body in outgoing.items()]
            threads += [threading.Thread(target=receive, args=(peer,)) for peer in incoming]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return work

    def _bare_links(self, after: contextlib.ExitStack) -> dict[int, socket.socket]:
        listener = after.enter_context(socket.create_server(("127.0.0.1", 0)))
        ports: list[Any] = [None] * len(WORKERS)
        dist.all_gather_object(ports, listener.getsockname()[1])
        links = {}
        for peer in range(self.place):
            links[peer] = after.enter_context(socket.create_connection(("127.0.0.1", ports[peer]), PATIENCE_S))
            links[peer].sendall(bytes([self.place]))
        for _ in range(self.place + 1, len(WORKERS)):
            link = after.enter_context(listener.accept()[0])
            links[link.recv(1)[0]] = link
        for link in links.values():
            link.settimeout(None)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return links

    def _checkpoint(self, folder: str, _: contextlib.ExitStack) -> Callable[[], Chunks]:
        def work() -> Chunks:
            writer = dcp.FileSystemWriter(folder, sync_files=True)
            dcp.save(self._as_pieces(self.state), storage_writer=writer, planner=SavePlanner())
            found = {
                name: [Chunk(box, self.allocate(name, box)) for box in boxes]
                for name, boxes in self.change.after[self.worker].items()
            }
            pieces = self._as_pieces(found)
            # torch's loader hands on what it knows, and drops the rest.
            dcp.load(dict.fromkeys(pieces), storage_reader=dcp.FileSystemReader(folder), planner=LoadPlanner(pieces))
            return found

        return work

    def _as_pieces(self, state: Chunks) -> dict[str, Any]:
        return {
            f"{name}.{which}": Pieces(
                self.change.items[name].shape, [(chunk.box, chunk.tensors[which]) for chunk in chunks]
            )
            for name, chunks in state.items()
            for which in range(len(self.change.items[name].dtypes))
        }


def _part(state: Chunks, piece: Any) -> tuple[Tensor, ...]:
    for chunk in state[piece.item]:
        if all(a <= c and d <= b for (a, b), (c, d) in zip(chunk.box, piece.box, strict=True)):
            return chunk.part(piece.box)
    raise AssertionError(piece)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()), help="a folder on the disk")
    args = parser.parse_args()
    torch.set_num_threads(1)
    specs = small_llama(1 if args.quick else 4)
    items = items_of_layers(specs)
    ways = {
        "elaunch": ("elaunch", None),
        "checked": ("checked", None),
        "bounded": ("bounded", None),
        "straight": ("straight", None),
        "buffered": ("buffered", None),
        "naive": ("naive", None),
        "sockets": ("sockets", None),
        "checkpoint tmpfs": ("checkpoint", Path("/dev/shm")),
        "checkpoint disk": ("checkpoint", args.disk),
    }
    report = Report(
        "transfer: a change of plan, four processes on this machine, links over loopback",
        notes=[
            f"{sum(n for n in (_elements(item) for name, item in items.items() if '@' not in name)) / 1e6:.0f} M "
            "parameters in bfloat16, 12 bytes of optimizer state each; seconds: median of "
            f"{2 if args.quick else args.repeat}, in turn",
            "no device and no network: memory is copied by the same cores that send and receive",
        ],
    )
    limit_time(1500)
    with crew(WORKERS, TransferRank) as all_of:
        for name, old, new in CASES[:: 3 if args.quick else 1]:
            before, after = (_held(name, one.plan(len(specs)), specs) for one in (old, new))
            change = Change(name, old, new, items, before, after)
            all_of("begin", change)
            relayed, straight = ([router.of(worker) for worker in WORKERS] for router in change.routers)
            moved = [n_bytes(items, routes.receive) for routes in relayed]
            seconds: dict[str, list[float]] = {way: [] for way in ways}
            for turn in range(1 + (2 if args.quick else args.repeat)):
                for way, (method, base) in ways.items():
                    if base is not None and turn > 2:
                        continue  # they take long, and vary little
                    folder = tempfile.mkdtemp(prefix="elaunch-transfer-", dir=base) if base is not None else ""
                    try:
                        took = max(all_of("run", method, folder))
                    finally:
                        if folder:
                            shutil.rmtree(folder)
                    if turn:  # the first one warms memory up
                        seconds[way].append(took)
            medians = {way: spread(values).median for way, values in seconds.items()}
            report.row(
                {
                    "change": name,
                    "from": str(old),
                    "to": str(new),
                    "moved_mb": sum(moved) / 1e6,
                    "most_sent_mb": max(n_bytes(items, routes.send) for routes in relayed) / 1e6,
                    "most_sent_straight_mb": max(n_bytes(items, routes.send) for routes in straight) / 1e6,
                    **{f"{way}_s": median for way, median in medians.items()},
                    "gb_per_s": sum(moved) / 1e9 / medians["elaunch"],
                }
            )
            case = f"{old} to {new}"
            if sum(moved) > 64 << 20:
                report.target(
                    f"bandwidth of bare sockets, {case}", medians["sockets"] / medians["elaunch"], "of it", at_least=0.8
                )
            report.target(
                f"checkpoint on tmpfs, {case}", medians["checkpoint tmpfs"] / medians["elaunch"], "x", at_least=10
            )
    report.print()
    report.write(args.json)
    return 0


def _held(name: str, plan: Plan, specs: Sequence[LayerSpec]) -> dict[str, Holdings]:
    """By worker; of the parameters alone, where one has them and all get them."""
    return {
        worker: {item: boxes for item, boxes in held.items() if name != ONE_TO_MANY or not item.endswith(OPTIMIZER)}
        for worker, held in holdings_of_plan(plan, specs).items()
    }


def _elements(item: Item) -> int:
    return torch.Size(item.shape).numel()


if __name__ == "__main__":
    sys.exit(main())
