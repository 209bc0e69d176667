"""Copies of the optimizer's state in other workers' host memory, kept current step by step (ElasWave 5).

Each worker's state is copied by others, in another failure domain or on another node if there is one. What a copy needs
in a step is the gradient of its shards: it applies the same update to them on the host, in a thread, while the next
step goes on.
A new copy is made in batches, one in each step, of the state as it is when the step begins; from that step on the
gradients of the batch's shards follow. A batch counts when its step commits, so a dropped step leaves a copy as it was.

    step k     owner ──state of some shards; the gradient of each shard as soon as it is summed──> holder
    commit k   holder: takes the batch in, updates all its shards
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from elaunch.plan.tiling import Plan
from elaunch.rendezvous.membership import node_of
from elaunch.workers.comm.group import memory
from elaunch.workers.comm.traffic import Traffic
from elaunch.workers.layers.change.held_state import forms_from_json, forms_to_json
from elaunch.workers.layers.messages import Kind, peers, tag
from elaunch.workers.layers.shards import Form, MakeOptimizer, MakeScheduler, Shards
from elaunch.workers.member.keepers import KeeperRing, Place
from elaunch.workers.state.chunks import Chunk
from elaunch.workers.state.layout import OptimizerShard, ParameterPiece, StateLayout
from elaunch.workers.state.staging import begun_to_host

BATCH_BYTES = 16 << 20
"""Of state that a worker sends to each holder in a step while a copy is being made; a single shard may be larger."""

BUNDLE_BYTES = 1 << 20
"""Gradients of small shards travel together, up to so much: what a message costs depends little on its size."""

_LENGTHS = struct.Struct("<QQ")


def ring(workers: Sequence[str], copies: int, place: Place = node_of) -> dict[str, tuple[str, ...]]:
    """Returns who copies whose state: for each worker `copies` others, in other places and on other nodes first."""
    ordered = KeeperRing(workers, place)
    return {worker: ordered.keepers(worker, copies) for worker in workers}


def links(plan: Plan, worker: str, copies: int, place: Place = node_of) -> frozenset[str]:
    """Returns the workers to which `worker` needs a link under a plan: for its rows and gradients, and for copies."""
    holders = ring(plan.workers, copies, place)
    owners = {owner for owner, others in holders.items() if worker in others}
    return peers(plan, worker) | owners | frozenset(holders[worker])


@dataclass(eq=False)
class _OwnerCopy:
    """Of one worker's state. `count` is the number of its shards that are complete."""

    owner: str
    shards: tuple[OptimizerShard, ...]
    pieces: tuple[ParameterPiece, ...]
    state: Shards | None = None
    count: int = 0
    batch: int = 0
    heads: Tensor = field(default_factory=lambda: torch.empty(_LENGTHS.size, dtype=torch.uint8))
    came: tuple[dict[str, Any], Tensor] | None = None
    gradients: dict[OptimizerShard, Tensor] = field(default_factory=dict)

    def n_pieces(self, shards: int) -> int:
        """In the first so many shards."""
        known = set(self.shards[:shards])
        return sum(piece.shard in known for piece in self.pieces)


class Snapshots:
    """What this worker keeps of others, and sends to those who keep its own.

    Args:
        layout: of the shards.
        workers: of the plan.
        worker: this one.
        local: its shards.
        copies: of each worker's state.
        make_optimizer, make_scheduler: as for the shards themselves.
        place: of each worker.
    """

    def __init__(
        self,
        layout: StateLayout,
        workers: Sequence[str],
        worker: str,
        local: Shards,
        copies: int,
        make_optimizer: MakeOptimizer,
        make_scheduler: MakeScheduler | None,
        place: Place = node_of,
    ) -> None:
        self._layout, self._local = layout, local
        self._make = make_optimizer, make_scheduler
        holders = ring(workers, copies, place)
        self._numbers = {shard: number for number, shard in enumerate(layout.all_shards)}
        self._holders = holders[worker]
        self._own = _OwnerCopy(worker, _shards(local.pieces), local.pieces)
        self._copies = [
            _OwnerCopy(owner, _shards(pieces), pieces)
            for owner in workers
            if worker in holders[owner] and (pieces := layout.pieces(owner))
        ]
        self._commits = 0  # under this plan
        # Of the step in flight: gradients that wait for the others of their message, and messages on their way to host
        # memory.
        self._unsent: dict[OptimizerShard, tuple[OptimizerShard, ...]] = {}
        self._given: dict[OptimizerShard, Tensor] = {}
        self._leaving: list[tuple[int, Callable[[], Tensor]]] = []
        self._thread: ThreadPoolExecutor | None = None
        self._updating: Future[None] | None = None

    # -- in a step ------------------------------------------------------------------------------------------------

    def begin(self, traffic: Traffic) -> None:
        """Sends the next batch of this worker's state, and has those of others received."""
        self.settle()
        self._forget()
        if self._holders:
            self._own.batch = self._next_batch(self._own)
            if self._own.batch:
                self._send_batch(traffic)
            self._unsent = {shard: shards for shards in self._bundles(self._own) for shard in shards}
        for copy in self._copies:
            copy.batch = self._next_batch(copy)
            copy.came = None
            if copy.batch:
                traffic.post(copy.owner, self._tag(copy, 0), memory(copy.heads))
            copy.gradients = {}
            for shards in self._bundles(copy):
                sizes = [shard.stop - shard.start for shard in shards]
                whole = torch.empty(sum(sizes), dtype=self._layout.sum_dtype(shards[0].layer))
                copy.gradients |= zip(shards, whole.split(sizes), strict=True)
                traffic.post(copy.owner, self._bundle_tag(shards), memory(whole))

    def keep(self, traffic: Traffic, shard: OptimizerShard, gradient: Tensor) -> None:
        """Sends the gradient of one of this worker's shards to those who copy it, while the step goes on.

        That of a device is copied to pinned memory beside what it computes, and sent by `ship`: nothing waits here.
        """
        shards = self._unsent.get(shard)
        if shards is None:
            return
        self._given[shard] = gradient
        if not all(one in self._given for one in shards):
            return
        parts = [self._given.pop(one) for one in shards]
        for one in shards:
            del self._unsent[one]
        whole = torch.cat(parts) if parts[1:] else parts[0]
        leaving = self._bundle_tag(shards), begun_to_host(whole)
        if _is_on_host(whole):
            self._send(traffic, *leaving)
        else:
            self._leaving.append(leaving)

    def ship(self, traffic: Traffic, gradients: Mapping[OptimizerShard, Tensor]) -> None:
        """Sends what has not left yet of the gradients of this worker's shards."""
        for shard in list(self._unsent):
            if shard not in self._given:
                self.keep(traffic, shard, gradients[shard])
        leaving, self._leaving = self._leaving, []
        for number, coming in leaving:
            self._send(traffic, number, coming)

    def arrive(self, traffic: Traffic) -> None:
        """Waits until all of the step is here: after that it may commit."""
        for copy in self._copies:
            if copy.batch:
                traffic.wait(copy.owner, self._tag(copy, 0))
                head_bytes, body_bytes = _LENGTHS.unpack(bytes(memory(copy.heads)))
                head, body = torch.empty(head_bytes, dtype=torch.uint8), torch.empty(body_bytes, dtype=torch.uint8)
                traffic.post(copy.owner, self._tag(copy, 1), memory(head))
                traffic.post(copy.owner, self._tag(copy, 2), memory(body))
                traffic.wait(copy.owner, self._tag(copy, 1))
                traffic.wait(copy.owner, self._tag(copy, 2))
                copy.came = json.loads(bytes(memory(head))), body
            for shards in self._bundles(copy):
                traffic.wait(copy.owner, self._bundle_tag(shards))

    def commit(self, coefficient: float) -> None:
        """Updates the copies in the background, now that the step has committed."""
        self._own.count, self._own.batch = self._own.count + self._own.batch, 0
        self._commits += 1
        if self._copies:
            self._thread = self._thread or ThreadPoolExecutor(1, "elaunch-snapshots")
            self._updating = self._thread.submit(self._update, coefficient)

    def drop(self) -> None:
        """Drops what came of a step that is done again."""
        self._forget()
        for copy in (self._own, *self._copies):
            copy.batch, copy.came, copy.gradients = 0, None, {}

    def settle(self) -> None:
        """Waits until the copies stand where the last committed step left the state."""
        updating, self._updating = self._updating, None
        if updating is not None:
            updating.result()

    def close(self) -> None:
        """Ends the thread."""
        self.settle()
        if self._thread is not None:
            self._thread.shutdown()

    # -- for a change of plan ---------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Returns whether all of this worker's state has its copies."""
        return not self._holders or self._own.count == len(self._own.shards)

    @property
    def behind(self) -> int | None:
        """Returns by how many steps the copies of this worker's state lag, if the step in flight commits.

        They follow each step once they are whole; until then they lag by all steps under this plan. None: it has none.
        """
        if not self._holders:
            return None
        return 0 if self._own.count + self._own.batch == len(self._own.shards) else self._commits + 1

    def pieces(self) -> dict[str, int]:
        """Returns, by owner, how many of its pieces are copied here."""
        self.settle()
        return {copy.owner: copy.n_pieces(copy.count) for copy in self._copies if copy.count}

    def forms(self) -> dict[str, Form]:
        """Returns what the optimizers of the copies keep, by name of a parameter."""
        self.settle()
        found: dict[str, Form] = {}
        for copy in self._copies:
            if copy.state is not None:
                found |= copy.state.forms(copy.n_pieces(copy.count))
        return found

    def schedule(self) -> dict[str, Any] | None:
        """Returns the state of the scheduler of a copy."""
        return next((copy.state.schedule() for copy in self._copies if copy.state is not None), None)

    def chunks(self) -> dict[str, list[Chunk]]:
        """Returns all that is copied here, by item."""
        self.settle()
        found: dict[str, list[Chunk]] = {}
        for copy in self._copies:
            if copy.state is not None:
                for name, chunks in copy.state.chunks(copy.n_pieces(copy.count)).items():
                    found.setdefault(name, []).extend(chunks)
        return found

    # ---------------------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self._unsent, self._given, self._leaving = {}, {}, []

    def _send(self, traffic: Traffic, number: int, coming: Callable[[], Tensor]) -> None:
        sent = coming()
        for holder in self._holders:
            traffic.send(holder, number, memory(sent), sent)

    def _next_batch(self, copy: _OwnerCopy) -> int:
        """How many more shards come in this step; both ends find the same, since it follows from the layout."""
        taken, size = 0, 0
        for shard in copy.shards[copy.count :]:
            # A master and two moments: what it really is, only the owner knows.
            size += 3 * (shard.stop - shard.start) * self._layout.sum_dtype(shard.layer).itemsize
            if taken and size > BATCH_BYTES:
                break
            taken += 1
        return taken

    def _bundles(self, copy: _OwnerCopy) -> list[tuple[OptimizerShard, ...]]:
        """Shards whose gradients are one message of this step, of one type; both ends find the same."""
        found: list[list[OptimizerShard]] = []
        kind, size = None, 0
        for shard in copy.shards[: copy.count + copy.batch]:
            dtype = self._layout.sum_dtype(shard.layer)
            n_bytes = (shard.stop - shard.start) * dtype.itemsize
            if dtype != kind or size + n_bytes > BUNDLE_BYTES:
                found.append([])
                kind, size = dtype, 0
            found[-1].append(shard)
            size += n_bytes
        return [tuple(shards) for shards in found]

    def _bundle_tag(self, shards: Sequence[OptimizerShard]) -> int:
        return tag(Kind.SNAPSHOT_GRADIENT, self._numbers[shards[0]])

    def _tag(self, copy: _OwnerCopy, which: int) -> int:
        return tag(Kind.SNAPSHOT_STATE, 3 * self._numbers[copy.shards[copy.count]] + which)

    def _send_batch(self, traffic: Traffic) -> None:
        copy = self._own
        chosen = set(copy.shards[copy.count : copy.count + copy.batch])
        places = [place for place, piece in enumerate(copy.pieces) if piece.shard in chosen]
        parts = [
            part.detach().cpu().contiguous().view(torch.uint8)
            for place in places
            for part in self._local.tensors(place)
        ]
        body = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8)
        forms = self._local.forms()
        told = {
            "forms": forms_to_json({name: forms[name] for name in {copy.pieces[place].parameter for place in places}}),
            "schedule": self._local.schedule(),
        }
        text = json.dumps(told).encode()
        head = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        lengths = torch.frombuffer(bytearray(_LENGTHS.pack(len(text), body.nbytes)), dtype=torch.uint8)
        for holder in self._holders:
            for which, message in enumerate((lengths, head, body)):
                traffic.send(holder, self._tag(copy, which), memory(message), message)

    def _update(self, coefficient: float) -> None:
        for copy in self._copies:
            if copy.batch:
                self._take_in(copy)
            if copy.state is not None:
                copy.state.step(copy.gradients, coefficient, copy.n_pieces(copy.count))
            copy.gradients = {}

    def _take_in(self, copy: _OwnerCopy) -> None:
        assert copy.came is not None
        told, body = copy.came
        forms = forms_from_json(told["forms"])
        if copy.state is None:
            masters = [
                (torch.zeros(piece.elements, dtype=self._layout.sum_dtype(piece.shard.layer)),) for piece in copy.pieces
            ]
            copy.state = Shards(copy.pieces, masters, *self._make)
            copy.state.set_schedule(told["schedule"])
        copy.state.set_options(forms)
        chosen = set(copy.shards[copy.count : copy.count + copy.batch])
        first = 0
        for place, piece in enumerate(copy.pieces):
            if piece.shard not in chosen:
                continue
            form = forms[piece.parameter]
            parts = []
            for dtype in (self._layout.sum_dtype(piece.shard.layer), *form.dtypes):
                n_bytes = piece.elements * dtype.itemsize
                # Of its own, aligned memory.
                parts.append(body[first : first + n_bytes].clone().view(dtype))
                first += n_bytes
            copy.state.put(place, parts, form)
        copy.count, copy.batch, copy.came = copy.count + copy.batch, 0, None


def _shards(pieces: Sequence[ParameterPiece]) -> tuple[OptimizerShard, ...]:
    return tuple(dict.fromkeys(piece.shard for piece in pieces))


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"
