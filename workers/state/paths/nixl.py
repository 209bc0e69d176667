"""State over NIXL, between nodes with RDMA: who needs it reads it in the memory of who has it.

    register memory -> tell agent, addresses and lengths over links -> read -> say so over links -> deregister

What the members of one host exchange goes over links, which are quicker there. Addresses travel as JSON: NIXL's own
form of them is a pickle.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import importlib
import importlib.util
import json
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from elaunch.errors import CollectiveFailed, ElaunchError, ProtocolError
from elaunch.workers import heartbeat
from elaunch.workers.comm.group import Group
from elaunch.workers.comm.native.ended import LINKS_S, POLL_S
from elaunch.workers.comm.paths import Parcel, Parcels, StatePath
from elaunch.workers.state.paths.codes import CODE_BYTES, code_of
from elaunch.workers.state.paths.links import damaged
from elaunch.workers.state.paths.packing import flat_of, pack, room_for, unpack

MESSAGE_BYTES = 32 << 20

BATCH_BYTES = 256 << 20
"""What is registered for a peer at a time, where memory is not bounded more tightly."""

PORTS = Path("/sys/class/infiniband")
_FAILED = threading.Event()
_KINDS = {"cpu": "DRAM", "cuda": "VRAM"}


def has_fabric() -> bool:
    """Returns whether NIXL is installed, a port of an RDMA device is active, and an agent comes up on it."""
    return not _FAILED.is_set() and _finds_fabric()


@functools.cache
def _finds_fabric() -> bool:
    if importlib.util.find_spec("nixl") is None or not has_active_port(PORTS):
        return False
    try:
        return "UCX" in agent().backends
    except Exception as error:  # whatever its libraries raise
        _say(f"NIXL is installed and cannot be used, so state moves without it: {error}")
        return False


def has_active_port(ports: Path) -> bool:
    """Returns whether a port of an RDMA device is active.

    Args:
        ports: what the kernel shows of these devices.
    """
    for state in ports.glob("*/ports/*/state"):
        with contextlib.suppress(OSError):
            if "ACTIVE" in state.read_text():
                return True
    return False


@functools.cache
def agent() -> Any:
    """Returns the agent of this process."""
    api = importlib.import_module("nixl")
    name = f"elaunch-{time.time_ns()}-{id(api)}"
    return api.nixl_agent(name, api.nixl_agent_config(backends=["UCX"]))


def path(group: Group, hosts: Sequence[str], device: torch.device, links: StatePath, is_bounded: bool) -> NixlPath:
    """Returns the path of a move.

    Args:
        group: of the members.
        hosts: of the members, in their order.
        device: where this member computes.
        links: for those on the host of this one.
        is_bounded: whether memory is short.
    """
    far = frozenset(rank for rank, host in enumerate(hosts) if host != hosts[group.rank])
    return NixlPath(agent(), group, far, device, links, 1 if is_bounded else BATCH_BYTES)


@dataclass(eq=False)
class _Batch:
    """Messages of one direction with one peer: where they are, and what is registered of it."""

    parcels: list[Parcel] = field(default_factory=list)
    flats: list[Tensor] = field(default_factory=list)
    scratch_bytes: int = 0
    registered: list[Any] = field(default_factory=list)

    @property
    def addresses(self) -> list[tuple[int, int, int]]:
        """Address, length and device of each message."""
        return [(flat.data_ptr(), flat.numel(), max(0, flat.get_device())) for flat in self.flats]


class NixlPath:
    """NIXL to the members on other hosts.

    Args:
        agent: NIXL's, of this process.
        group: of the members.
        far: ranks of the members to whom it is used.
        device: where messages are read from and to; what lies elsewhere is copied.
        links: for the others.
        batch_bytes: of messages that are registered for a peer at a time; there is always one.
    """

    name = "nixl"
    message_bytes = MESSAGE_BYTES

    def __init__(
        self,
        agent: Any,
        group: Group,
        far: frozenset[int],
        device: torch.device,
        links: StatePath,
        batch_bytes: int = BATCH_BYTES,
    ) -> None:
        self._agent, self._group, self._far, self._device, self._links = agent, group, far, device, links
        self._kind, self._batch_bytes = _KINDS[device.type], batch_bytes
        self._registered: list[Any] = []

    def move(self, outgoing: Parcels, incoming: Parcels, checksum: bool, hold: Callable[[int], None]) -> None:
        """Moves messages, batch by batch: the k-th of each pair of members at a time."""
        near = [{rank: way[rank] for rank in way if rank not in self._far} for way in (outgoing, incoming)]
        self._links.move(near[0], near[1], checksum, hold)
        sends, receives = (
            {rank: _batches(way[rank], self._batch_bytes) for rank in way if rank in self._far}
            for way in (outgoing, incoming)
        )
        while sends or receives:
            self._turn(_next_of(sends), _next_of(receives), checksum, hold)

    def finish(self) -> None:
        """Does nothing: what was read is there."""

    def close(self) -> None:
        """Gives back what is still registered after an error: others may not read it any more."""
        while self._registered:
            with contextlib.suppress(Exception):  # of NIXL's: it is given back, or the process is about to end
                self._agent.deregister_memory(self._registered.pop())

    def _turn(
        self,
        sends: Mapping[int, list[Parcel]],
        receives: Mapping[int, list[Parcel]],
        checksum: bool,
        hold: Callable[[int], None],
    ) -> None:
        out = {rank: self._batch(parcels, hold, fill=True) for rank, parcels in sends.items()}
        into = {rank: self._batch(parcels, hold, fill=False) for rank, parcels in receives.items()}
        with self._failing():
            if self._device.type != "cpu":
                torch.accelerator.synchronize()  # what is to be read has been packed
            offers = {rank: self._offer(batch, checksum) for rank, batch in out.items()}
        told = {rank: bytearray() for rank in into}
        self._group.exchange(
            [(rank, memoryview(offer)) for rank, offer in offers.items()], [(rank, told[rank]) for rank in told]
        )
        codes = {rank: self._read(rank, batch, bytes(told[rank])) for rank, batch in into.items()}
        # Only then may the others use their memory for something else.
        self._group.exchange([(rank, memoryview(b"read")) for rank in into], [(rank, bytearray()) for rank in out])
        with self._failing():
            for batch in (*out.values(), *into.values()):
                self._deregister(batch)
                hold(-batch.scratch_bytes)
        for rank, batch in into.items():
            self._take(rank, batch, codes[rank] if checksum else None)

    def _batch(self, parcels: list[Parcel], hold: Callable[[int], None], fill: bool) -> _Batch:
        batch = _Batch(parcels)
        for parcel in parcels:
            flat = flat_of(parcel.views, self._device)
            if flat is None:
                flat = room_for(parcel.views, self._device)
                batch.scratch_bytes += flat.nbytes
                if fill:
                    pack(flat, parcel.views)
            batch.flats.append(flat)
        hold(batch.scratch_bytes)
        return batch

    def _offer(self, batch: _Batch, checksum: bool) -> bytes:
        self._register(batch)
        codes = b"".join(bytes(code_of(flat).tolist()) for flat in batch.flats) if checksum else b""
        note = {
            "agent": base64.b64encode(self._agent.get_agent_metadata()).decode(),
            "kind": self._kind,
            "addresses": batch.addresses,
            "codes": base64.b64encode(codes).decode(),
        }
        return json.dumps(note).encode()

    def _read(self, rank: int, batch: _Batch, offer: bytes) -> bytes:
        """Reads what a member offers; returns its checksums."""
        try:
            note = json.loads(offer)
            metadata, codes = base64.b64decode(note["agent"]), base64.b64decode(note["codes"])
            theirs = [(int(at), int(size), int(number)) for at, size, number in note["addresses"]]
            kind = str(note["kind"])
        except (ValueError, KeyError, TypeError) as error:
            raise ProtocolError(f"{self._group.members[rank]} offers its memory in no known form: {error!r}") from error
        ours = batch.addresses
        if [size for _, size, _ in theirs] != [size for _, size, _ in ours]:
            raise ProtocolError(f"{self._group.members[rank]} offers {theirs}, and this worker expects {ours}")
        others = [self._group.members[rank]]
        with heartbeat.waiting(others, self._group.generation), self._failing():
            self._register(batch)
            name = self._agent.add_remote_agent(metadata)
            local = self._agent.get_xfer_descs(ours, self._kind)
            remote = self._agent.get_xfer_descs(theirs, kind)
            handle = self._agent.initialize_xfer("READ", local, remote, name)
            try:
                state, look_s = self._agent.transfer(handle), time.monotonic() + LINKS_S
                while state == "PROC":
                    if time.monotonic() >= look_s:
                        look_s += LINKS_S
                        self._group.transport.check(others)
                    self._group.transport.check((), self._group.generation)
                    time.sleep(POLL_S)
                    state = self._agent.check_xfer_state(handle)
            finally:
                self._agent.release_xfer_handle(handle)
            if state != "DONE":
                raise RuntimeError(f"a read from {others[0]} ended with {state}")
            self._agent.remove_remote_agent(name)
        return codes

    def _take(self, rank: int, batch: _Batch, codes: bytes | None) -> None:
        """Puts what was read where it belongs."""
        for number, (parcel, flat) in enumerate(zip(batch.parcels, batch.flats, strict=True)):
            code = codes[CODE_BYTES * number : CODE_BYTES * (number + 1)] if codes is not None else b""
            if codes is not None and bytes(code_of(flat).tolist()) != code:
                raise damaged(parcel.name, self._group.members[rank])
            if flat_of(parcel.views, self._device) is None:
                unpack(flat, parcel.views)

    def _register(self, batch: _Batch) -> None:
        made = self._agent.register_memory([(*one, "") for one in batch.addresses], self._kind)
        batch.registered.append(made)
        self._registered.append(made)

    def _deregister(self, batch: _Batch) -> None:
        for made in batch.registered:
            self._agent.deregister_memory(made)
            self._registered.remove(made)

    @contextlib.contextmanager
    def _failing(self) -> Iterator[None]:
        """Whatever NIXL raises ends the generation, and this worker offers it no more."""
        try:
            yield
        except ElaunchError:
            raise
        except Exception as error:
            give_up(str(error))
            raise CollectiveFailed(self._group.generation, f"NIXL: {error}") from error


def give_up(why: str) -> None:
    """Has this process offer NIXL no more."""
    _FAILED.set()
    _say(f"NIXL has failed, so state moves without it from now on: {why}")


def _batches(parcels: Iterator[Parcel], most_bytes: int) -> Iterator[list[Parcel]]:
    """Runs of messages of one kind of memory, which the sizes decide alone; there is one message in each at least."""
    batch: list[Parcel] = []
    size = 0
    for parcel in parcels:
        n_bytes = sum(view.nbytes for view in parcel.views)
        if batch and size + n_bytes > most_bytes:
            yield batch
            batch, size = [], 0
        batch.append(parcel)
        size += n_bytes
    if batch:
        yield batch


def _next_of(batches: dict[int, Iterator[list[Parcel]]]) -> dict[int, list[Parcel]]:
    found = {rank: next(batches[rank], None) for rank in list(batches)}
    for rank, batch in found.items():
        if batch is None:
            del batches[rank]
    return {rank: batch for rank, batch in found.items() if batch is not None}


def _say(line: str) -> None:
    print(f"[elaunch] {line}", file=sys.stderr, flush=True)
