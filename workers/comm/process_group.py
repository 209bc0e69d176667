"""A `torch.distributed.ProcessGroup` whose members can change.

    group = ElasticProcessGroup(lambda: session.group)
    group.register()                                    # now dist.all_reduce(t) and friends use it
    model = DistributedDataParallel(net, process_group=group, init_sync=False)

Each operation asks for the current `Group`, runs in the calling thread, and returns a finished `Work`. So an
interruption (`StepInterrupted`) is raised by the call itself, or by `backward()`; the next call finds the next group.
"""

# torch declares overloads for calls with and without an options object; here come only those with one.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d

from elaunch.errors import StepInterrupted
from elaunch.workers.comm.group import Group, Reduction

NAME = "elaunch"

_REDUCTIONS: tuple[tuple[Any, Reduction], ...] = (
    (ReduceOp.SUM, "sum"),
    (ReduceOp.AVG, "sum"),
    (ReduceOp.PRODUCT, "product"),
    (ReduceOp.MAX, "max"),
    (ReduceOp.MIN, "min"),
)


class FinishedWork(dist.Work):
    """The result of an operation that is over when it returns."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(result)

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        return True

    def is_completed(self) -> bool:
        """Returns True."""
        return True

    def is_success(self) -> bool:
        """Returns True: an operation that fails raises and returns no work."""
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Returns a finished future of the tensors."""
        return self._future


def _guarded(operation: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
    """Lets the group's owner take an interruption, if it wants to."""

    @functools.wraps(operation)
    def call(group: ElasticProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
        try:
            return operation(group, *args, **kwargs)
        except StepInterrupted as error:
            if group._interrupted is None:
                raise
            group._interrupted(error)
            return FinishedWork(args[0] if args else [])

    return call


class ElasticProcessGroup(dist.ProcessGroup):
    """A process group over the group that `current` returns at the time of each call.

    An operation that is interrupted raises `StepInterrupted`; with `interrupted`, it tells that the error instead and
    leaves unspecified contents, for a step that will be done again. Ranks are positions in that group. Tags of `send`
    and `recv` are ignored: messages are matched in their order.
    """

    def __init__(
        self, current: Callable[[], Group], interrupted: Callable[[StepInterrupted], None] | None = None
    ) -> None:
        group = current()
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the overload without a store is undeclared
        self._current = current
        self._interrupted = interrupted
        self._seen: Group | None = None
        self._ranks: dict[int, int] = {}

    def register(self) -> None:
        """Makes this the default group of `torch.distributed`; `dist.destroy_process_group()` undoes it.

        Raises `RuntimeError` when there is a default group already.
        """
        world = distributed_c10d._world
        if world.default_pg is not None:
            raise RuntimeError(
                "torch.distributed is initialized already; this group takes the place of its default group"
            )
        # The tables that `init_process_group` fills; it offers no way to bring one's own group.
        world.pg_map[self] = (NAME, None)
        world.pg_names[self] = NAME
        world.pg_group_ranks[self] = self._ranks
        world.pg_backend_config[self] = f"cpu:{NAME},cuda:{NAME}"
        world.pg_to_tag[self] = "default"
        world.tags_to_pg.setdefault("default", []).append(self)
        distributed_c10d._register_process_group(distributed_c10d.GroupName(NAME), self)
        distributed_c10d._update_default_pg(self)
        self._group()

    def size(self) -> int:
        """Returns how many members the current group has."""
        return self._group().size

    def rank(self) -> int:
        """Returns this worker's position in the current group."""
        return self._group().rank

    # torch calls these names from C++.
    getSize = size
    getRank = rank

    def name(self) -> str:
        """Returns the backend's name."""
        return NAME

    getBackendName = name
    getGroupName = name

    @property
    def group_name(self) -> str:
        """Returns the name under which functional collectives find this group."""
        return NAME

    def shutdown(self) -> None:
        """Does nothing: the links belong to the transport."""

    abort = shutdown

    @_guarded
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduces each tensor in place: SUM, AVG, PRODUCT, MAX or MIN."""
        for tensor in tensors:
            with _flat(tensor) as flat:
                self._reduce(flat, opts)
        return FinishedWork(list(tensors))

    allreduce_coalesced = allreduce

    @_guarded
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Does as `allreduce`, but only the root's tensors change."""
        for tensor in tensors:
            total = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._reduce(total.view(-1), opts)
            if opts.rootRank == self.rank():
                tensor.copy_(total)
        return FinishedWork(list(tensors))

    @_guarded
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Replaces each tensor by the root's."""
        for tensor in tensors:
            with _flat(tensor) as flat:
                self._group().broadcast(flat, opts.rootRank)
        return FinishedWork(list(tensors))

    @_guarded
    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Gives each member's input to the output of its rank, on all members."""
        group = self._group()
        for parts, own in zip(outputs, inputs, strict=True):
            counts = [part.numel() for part in parts]
            whole = own.new_empty(sum(counts))
            pieces = whole.split(counts)
            pieces[group.rank].copy_(own.detach().reshape(-1))
            group.all_gather(whole, counts)
            for part, piece in zip(parts, pieces, strict=True):
                part.copy_(piece.view(part.shape))
        return FinishedWork([list(parts) for parts in outputs])

    @_guarded
    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """Puts the inputs of all members, one after the other, into one output."""
        group = self._group()
        with _flat(output) as flat:
            flat.view(group.size, -1)[group.rank].copy_(own.detach().reshape(-1))
            group.all_gather(flat)
        return FinishedWork(output)

    _allgather_base = all_gather_single

    @_guarded
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Does `all_gather_single` for several pairs."""
        for output, own in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, own)
        return FinishedWork(list(outputs))

    @_guarded
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduces the lists of inputs element by element; this member gets the one of its rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            output.copy_(self._scatter(whole, [part.numel() for part in parts], opts).view(output.shape))
        return FinishedWork(list(outputs))

    @_guarded
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """Reduces the input, whose equal parts belong to the members; this member gets its part."""
        output.copy_(self._scatter(whole.detach().reshape(-1).clone(), None, opts).view(output.shape))
        return FinishedWork(output)

    _reduce_scatter_base = reduce_scatter_single

    @_guarded
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Does `reduce_scatter_single` for several pairs."""
        for output, whole in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, whole, opts)
        return FinishedWork(list(outputs))

    @_guarded
    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Gives input j to member j, whose own goes to output j. Makes links to all members, also in a ring."""
        group = self._group()
        received = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
        peers = [peer for peer in range(group.size) if peer != group.rank]
        group.exchange(
            [(peer, inputs[peer].detach().contiguous()) for peer in peers], [(peer, received[peer]) for peer in peers]
        )
        received[group.rank] = inputs[group.rank].detach().reshape(outputs[group.rank].shape)
        for output, part in zip(outputs, received, strict=True):
            output.copy_(part)
        return FinishedWork(list(outputs))

    @_guarded
    def all_to_all_single(
        self, output: Tensor, whole: Tensor, output_rows: Sequence[int], input_rows: Sequence[int], opts: Any = None
    ) -> dist.Work:
        """Does `alltoall` with the rows of one tensor, cut evenly where no numbers of rows are given."""
        size = self.size()
        self.alltoall(
            output.split(list(output_rows) or output.shape[0] // size),
            whole.split(list(input_rows) or whole.shape[0] // size),
        )
        return FinishedWork(output)

    alltoall_base = all_to_all_single

    @_guarded
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Does as `allgather`, but only the root has outputs."""
        group = self._group()
        for index, own in enumerate(inputs):
            parts = outputs[index] if group.rank == opts.rootRank else [torch.empty_like(own)] * group.size
            self.allgather([parts], [own])
        return FinishedWork([list(parts) for parts in outputs])

    @_guarded
    def scatter(self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any) -> dist.Work:
        """Gives the root's input j to the output of member j."""
        group = self._group()
        for index, output in enumerate(outputs):
            whole = output.new_empty((group.size, *output.shape))
            if group.rank == opts.rootRank:
                torch.stack([part.detach() for part in inputs[index]], out=whole)
            group.broadcast(whole.view(-1), opts.rootRank)
            output.copy_(whole[group.rank])
        return FinishedWork(list(outputs))

    @_guarded
    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns when every member has called it."""
        self._group().barrier()
        return FinishedWork([])

    @_guarded
    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        """Sends to one member."""
        for tensor in tensors:
            self._group().send(tensor.detach().contiguous(), to)
        return FinishedWork(list(tensors))

    @_guarded
    def recv(self, tensors: Sequence[Tensor], from_: int, tag: int = 0) -> dist.Work:
        """Receives from one member."""
        for tensor in tensors:
            with _flat(tensor) as flat:
                self._group().receive(flat, from_)
        return FinishedWork(list(tensors))

    def _group(self) -> Group:
        group = self._current()
        if group is not self._seen:
            self._seen = group
            # torch keeps a reference to this table, so it is changed and not replaced.
            self._ranks.clear()
            self._ranks.update({rank: rank for rank in range(group.size)})
        return group

    def _reduce(self, flat: Tensor, opts: Any) -> None:
        group = self._group()
        reduction, average = _reduction(opts)
        group.all_reduce(flat, 1.0 / group.size if average else None, reduction)

    def _scatter(self, whole: Tensor, counts: Sequence[int] | None, opts: Any) -> Tensor:
        group = self._group()
        reduction, average = _reduction(opts)
        return group.reduce_scatter(whole, counts, 1.0 / group.size if average else None, reduction)


def _reduction(opts: Any) -> tuple[Reduction, bool]:
    """The reduction that `opts` names, and whether it is an average."""
    wanted = getattr(opts, "reduceOp", opts)
    if wanted is None:
        return "sum", False
    for op, reduction in _REDUCTIONS:
        if wanted == op:
            return reduction, bool(op == ReduceOp.AVG)
    raise ValueError(f"reduction {wanted} is not supported: use SUM, AVG, PRODUCT, MAX or MIN")


@contextmanager
def _flat(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor as a contiguous 1-D one; what is written to it ends up in the tensor."""
    if tensor.layout is not torch.strided:
        raise ValueError(f"a {tensor.layout} tensor cannot be sent: hand over tensor.to_dense()")
    plain = tensor.detach()
    flat = plain.contiguous().view(-1)
    yield flat
    if not plain.is_contiguous():
        plain.copy_(flat.view(plain.shape))
