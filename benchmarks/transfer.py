"""State moved between two plans, memory to memory, beside a checkpoint and beside bare sockets.

    python benchmarks/transfer.py
    python benchmarks/transfer.py --quick --json transfer.json

Four processes on one machine, links within it, real bytes: a small Llama (bfloat16 parameters, float32 masters and
two moments) changes its degrees of parallelism. After DynaTran's figure 8, tables 1 and 3, scaled to this machine. Side
by side, in turn, after the same change:

- *elaunch*: `elaunch.workers.state.reshard` as jobs run it, new memory allocated, no bound.
- *elaunch, checked*: with a checksum of each message.
- *elaunch, bounded*: with 64 MiB of memory beside the old state.
- *elaunch, straight*: nothing is passed on by receivers; all comes from those who had it.
- *buffered*: messages packed in the same way, one pair of workers at a time, each waiting for the other.
- *naive*: each tensor's part by itself, blocking, one pair at a time, straight from those who had it.
- *tcp*, *unix*, *shared*: the same number of bytes between the same pairs, from and into memory that is there and was
  used before, over bare TCP sockets, Unix sockets, and shared memory (each pair has two slots of 1 MiB, which one
  process fills and the other empties). *new*: the best of the three, into memory that was allocated for it, which is
  what a change needs.
- *checkpoint*: `torch.distributed.checkpoint` save and load of the same boxes, on tmpfs and on the disk.

Timed is from a barrier until the last process has all that it needs. The result of each way of elaunch is compared with
the state as the new plan makes it, bit by bit. *Most sent* is what the busiest worker sends, with and without passing
on; in *one to many* it is parameters alone that move, which all need whole.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import mmap
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
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
from elaunch.workers.comm.group import memory
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


BARE = ("tcp", "unix", "shared")
BARE_NEW = ("tcp new", "unix new", "shared new")
SLOT_BYTES = 1 << 20

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

    def _tcp(self, _: str, after: contextlib.ExitStack, new: bool = False) -> Callable[[], None]:
        return self._over_sockets(self._bare_links(after, socket.AF_INET), new)

    def _unix(self, _: str, after: contextlib.ExitStack, new: bool = False) -> Callable[[], None]:
        return self._over_sockets(self._bare_links(after, socket.AF_UNIX), new)

    def _tcp_new(self, folder: str, after: contextlib.ExitStack) -> Callable[[], None]:
        return self._tcp(folder, after, new=True)

    def _unix_new(self, folder: str, after: contextlib.ExitStack) -> Callable[[], None]:
        return self._unix(folder, after, new=True)

    def _shared_new(self, folder: str, after: contextlib.ExitStack) -> Callable[[], None]:
        return self._shared(folder, after, new=True)

    def _sizes(self) -> tuple[dict[int, int], dict[int, int]]:
        """Bytes that go to each peer, and that come from it."""
        routes = self.router.of(self.worker)
        sent = {
            peer: n_bytes(self.change.items, [piece for piece in routes.send if piece.to == worker])
            for peer, worker in enumerate(WORKERS)
        }
        taken = {
            peer: n_bytes(self.change.items, [piece for piece in routes.receive if piece.source == worker])
            for peer, worker in enumerate(WORKERS)
        }
        return {peer: n for peer, n in sent.items() if n}, {peer: n for peer, n in taken.items() if n}

    def _over_sockets(self, links: Mapping[int, socket.socket], new: bool) -> Callable[[], None]:
        sent, taken = self._sizes()
        outgoing = {peer: _used(n) for peer, n in sent.items()}
        warm = {} if new else {peer: _used(n) for peer, n in taken.items()}

        def receive(peer: int, into: Tensor) -> None:
            left = memory(into)
            while left:
                left = left[links[peer].recv_into(left) :]

        def work() -> None:
            incoming = warm or {peer: torch.empty(n, dtype=torch.uint8) for peer, n in taken.items()}
            _all_at_once(
                [partial(links[peer].sendall, memory(body)) for peer, body in outgoing.items()]
                + [partial(receive, peer, into) for peer, into in incoming.items()]
            )

        return work

    def _shared(self, _: str, after: contextlib.ExitStack, new: bool = False) -> Callable[[], None]:
        links = self._bare_links(after, socket.AF_UNIX)
        sent, taken = self._sizes()
        outgoing = {peer: _used(n) for peer, n in sent.items()}
        warm = {} if new else {peer: _used(n) for peer, n in taken.items()}
        ours = {peer: self._slots(after, self.place, peer, create=True) for peer in outgoing}
        dist.barrier()
        theirs = {peer: self._slots(after, peer, self.place, create=False) for peer in taken}
        # A link carries single bytes: "filled" of one direction and "emptied" of the other.
        filled = {peer: threading.Semaphore(0) for peer in links}
        emptied = {peer: threading.Semaphore(2) for peer in links}

        def listen(peer: int) -> None:
            left = -(-outgoing[peer].numel() // SLOT_BYTES) if peer in outgoing else 0
            left += -(-taken[peer] // SLOT_BYTES) if peer in taken else 0
            while left:
                for word in links[peer].recv(64):
                    left -= 1
                    (filled if word == 1 else emptied)[peer].release()

        def fill(peer: int) -> None:
            for number, part in enumerate(outgoing[peer].split(SLOT_BYTES)):
                emptied[peer].acquire()
                ours[peer][number % 2][: len(part)].copy_(part)
                links[peer].sendall(b"\1")

        def empty(peer: int, into: Tensor) -> None:
            for number, part in enumerate(into.split(SLOT_BYTES)):
                filled[peer].acquire()
                part.copy_(theirs[peer][number % 2][: len(part)])
                links[peer].sendall(b"\2")

        def work() -> None:
            incoming = warm or {peer: torch.empty(n, dtype=torch.uint8) for peer, n in taken.items()}
            _all_at_once(
                [partial(listen, peer) for peer in links]
                + [partial(fill, peer) for peer in outgoing]
                + [partial(empty, peer, into) for peer, into in incoming.items()]
            )

        return work

    def _slots(self, after: contextlib.ExitStack, from_: int, to: int, create: bool) -> list[Tensor]:
        """Two of them, of the memory that a pair shares in one direction, warm."""
        path = Path(f"/dev/shm/elaunch-transfer-{os.getppid()}-{from_}-{to}")
        if create:
            path.write_bytes(bytes(2 * SLOT_BYTES))
            after.callback(path.unlink)
        with path.open("r+b") as file:
            shared = mmap.mmap(file.fileno(), 2 * SLOT_BYTES)
        whole = torch.frombuffer(shared, dtype=torch.uint8)
        whole.add_(0)
        return list(whole.split(SLOT_BYTES))

    def _bare_links(self, after: contextlib.ExitStack, family: int) -> dict[int, socket.socket]:
        listener = after.enter_context(socket.socket(family))
        listener.bind(("127.0.0.1", 0) if family == socket.AF_INET else f"\0elaunch-transfer-{os.getpid()}")
        listener.listen()
        addresses: list[Any] = [None] * len(WORKERS)
        dist.all_gather_object(addresses, listener.getsockname())
        links = {}
        for peer in range(self.place):
            links[peer] = after.enter_context(socket.socket(family))
            links[peer].connect(addresses[peer])
            links[peer].sendall(bytes([self.place]))
        for _ in range(self.place + 1, len(WORKERS)):
            link = after.enter_context(listener.accept()[0])
            links[link.recv(1)[0]] = link
        for link in links.values():
            if family == socket.AF_INET:
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            else:
                link.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
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


def _used(n_bytes: int) -> Tensor:
    """Memory that the kernel has mapped already."""
    return torch.ones(n_bytes, dtype=torch.uint8)


def _all_at_once(calls: Sequence[Callable[[], None]]) -> None:
    running = [threading.Thread(target=call) for call in calls]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()


def _part(state: Chunks, piece: Any) -> tuple[Tensor, ...]:
    for chunk in state[piece.item]:
        if all(a <= c and d <= b for (a, b), (c, d) in zip(chunk.box, piece.box, strict=True)):
            return chunk.part(piece.box)
    raise AssertionError(piece)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--cases", default="", help="of all, those with these numbers, as in 0,1,4")
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
        **{way: (way.replace(" ", "_"), None) for way in (*BARE, *BARE_NEW)},
        "checkpoint tmpfs": ("checkpoint", Path("/dev/shm")),
        "checkpoint disk": ("checkpoint", args.disk),
    }
    report = Report(
        "transfer: a change of plan, four processes on this machine",
        notes=[
            f"{sum(n for n in (_elements(item) for name, item in items.items() if '@' not in name)) / 1e6:.0f} M "
            "parameters in bfloat16, 12 bytes of optimizer state each; seconds: median of "
            f"{2 if args.quick else args.repeat}, in turn",
            "no device and no network: memory is copied by the same cores that send and receive",
        ],
    )
    limit_time(1500)
    with crew(WORKERS, TransferRank) as all_of:
        numbers = [int(number) for number in args.cases.split(",") if number]
        chosen = [CASES[number] for number in numbers] or CASES[:: 3 if args.quick else 1]
        for name, old, new in chosen:
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
                    **{f"{way}_s": median for way, median in medians.items() if way not in BARE_NEW},
                    "new_s": min(medians[way] for way in BARE_NEW),
                    "gb_per_s": sum(moved) / 1e9 / medians["elaunch"],
                }
            )
            case = f"{old} to {new}"
            if sum(moved) > 64 << 20:
                for kind, bare in (("", BARE), (", into new memory", BARE_NEW)):
                    best = min(medians[way] for way in bare)
                    report.target(f"bare bandwidth{kind}, {case}", best / medians["elaunch"], "of it", at_least=0.8)
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
