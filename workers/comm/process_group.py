"""A `torch.distributed.ProcessGroup` whose members can change.

    group = ElasticProcessGroup(lambda: session.group)
    group.register()                                    # now dist.all_reduce(t) and friends use it
    model = DistributedDataParallel(net, process_group=group, init_sync=False)

Each operation asks for the current `Group`. Where the members have a native group for tensors of that device, it begins
there and returns its work. Else a collective runs over links, in the calling thread, and returns a finished work; a
message goes its own way (`mail`) while the caller goes on. An interruption (`StepInterrupted`) is raised by the call or
by the work's `wait`, also in `backward()`; the next call finds the next group.
"""

# torch declares overloads for calls with and without an options object; here come only those with one.
# mypy: disable-error-code="override,assignment"

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ReduceOp, distributed_c10d

from elaunch.errors import StepInterrupted
from elaunch.workers.comm.c10d import tables
from elaunch.workers.comm.c10d.mail import Channel
from elaunch.workers.comm.c10d.native import Issues
from elaunch.workers.comm.c10d.subgroups import Numbers, Ranks, Some
from elaunch.workers.comm.c10d.tables import NAME
from elaunch.workers.comm.c10d.tensors import flat_of, reduction_of, refuse_layout
from elaunch.workers.comm.c10d.works import BatchedWork, FinishedWork, Interrupted, MessageWork, SeveralWorks
from elaunch.workers.comm.group import Group, memory


def _operation(*names: str) -> Callable[[Callable[..., dist.Work]], Callable[..., dist.Work]]:
    """Makes a method an operation, which begins in the native group where it can.

    An interruption goes to the group's owner, if it wants that.

    Args:
        names: of the backend's method; none: it goes over links.
    """

    def decorate(operation: Callable[..., dist.Work]) -> Callable[..., dist.Work]:
        @functools.wraps(operation)
        def call(group: ElasticProcessGroup, *args: Any, **kwargs: Any) -> dist.Work:
            try:
                if names and not kwargs and group._native is not None:
                    work = group._native.issue(group._group(), names, args, group._interrupted)
                    if work is not None:
                        return group._begun(work)
                return group._begun(operation(group, *args, **kwargs))
            except StepInterrupted as error:
                if group._interrupted is None:
                    raise
                group._interrupted(error)
                return FinishedWork(args[0] if args else [])

        return call

    return decorate


class ElasticProcessGroup(dist.ProcessGroup):
    """A process group over the group that `current` returns at the time of each call.

    An operation that is interrupted raises `StepInterrupted`; with `interrupted`, it tells that the error instead and
    leaves unspecified contents, for a step that will be done again. Ranks are positions in that group.

    Args:
        current: returns the group.
        interrupted: takes interruptions.
        native: what its members do in their native group; None: all goes over links.
        store: of the job; without it the group has one of its own, in memory.
    """

    supports_splitting = True
    supports_coalescing = supports_time_estimate = False
    options = None

    def __init__(
        self,
        current: Callable[[], Group],
        interrupted: Interrupted | None = None,
        native: Issues | None = None,
        store: dist.Store | None = None,
    ) -> None:
        group = current()
        super().__init__(group.rank, group.size)  # type: ignore[call-arg]  # the overload without a store is undeclared
        self._current = current
        self._interrupted = interrupted
        self._native = native
        self._store = dist.HashStore() if store is None else store
        self._numbers = Numbers()
        self._coalesced: list[dist.Work] | None = None
        self.ranks = Ranks(self._places)

    def register(self) -> None:
        """Makes this the default group of `torch.distributed`; `dist.destroy_process_group()` undoes it.

        Raises `RuntimeError` when there is a default group already.
        """
        tables.enter_default(self)

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

    @property
    def group_desc(self) -> str:
        """Returns what the group is for, for people."""
        return "default_pg"

    def shutdown(self) -> None:
        """Leaves the links as they are, which belong to the transport; torch has its own functions again."""
        tables.leave_default()

    abort = shutdown

    # -- what torch asks of a backend ---------------------------------------------------------------------------

    def _get_backend(self, device: torch.device) -> ElasticProcessGroup:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return [torch.device("cpu"), *([torch.device(accelerator.type)] if accelerator is not None else [])]

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Returns False: any memory will do."""
        return False

    def get_group_store(self) -> dist.Store:
        """Returns the store of the members."""
        return self._store

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _start_coalescing(self, device: torch.device) -> bool:
        self._coalesced = []
        return self._native is not None and self._native.start_batch(self._group(), device)

    def _end_coalescing(self, device: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        others = [work for work in works if not isinstance(work, BatchedWork)]
        try:
            batch = self._native.end_batch(self._interrupted) if self._native is not None else None
        except StepInterrupted as error:
            if self._interrupted is None:
                raise
            self._interrupted(error)
            batch = None
        return batch if batch is not None and not others else SeveralWorks([*others, *([batch] if batch else [])], [])

    def give_up_coalescing(self) -> None:
        """Forgets operations that were to begin together, after an error between them."""
        self._coalesced = None
        if self._native is not None:
            self._native.give_up_batch()

    def begin_together(
        self, device: torch.device, operations: Sequence[Callable[[], object]]
    ) -> list[dist.Work] | None:
        """Begins messages as one batch, and returns its work; None, with none begun: each may begin by itself.

        Args:
            device: of their tensors.
            operations: begin one message each.
        """
        if not self._start_coalescing(device):
            self._coalesced = None
            return None
        try:
            for begin in operations:
                begin()
            return [self._end_coalescing(device)]
        except BaseException:
            self.give_up_coalescing()
            raise

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """Returns when every member has called it. Who does not come, the agents find out, in their own time."""
        self.barrier()

    def new_group(self, ranks: Sequence[int], *, group_name: str, group_desc: str | None = None, **options: Any) -> Any:
        """Returns a group of some members, by their ranks in this one; None: this worker is not among them.

        It stays as it is when others leave or join. Once one of its own has left, its operations raise `StateError`.
        """
        whole = self._group()
        members = tuple(whole.members[rank] for rank in ranks)
        if whole.rank not in ranks:
            return None
        number = self._numbers.next(whole.generation, members)
        native = self._native.of_subgroup(number) if self._native is not None else None
        some = Some(self._current, members, number)
        return Subgroup(some, group_name, group_desc or "", self._interrupted, native, self._store)

    @_operation("allreduce")
    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Reduces each tensor in place: SUM, AVG, PRODUCT, MAX or MIN."""
        for tensor in tensors:
            with flat_of(tensor) as flat:
                self._reduce(flat, opts)
        return FinishedWork(list(tensors))

    @_operation()
    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> dist.Work:
        """Does `allreduce` for several tensors."""
        options = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts is not None else ReduceOp.SUM
        return SeveralWorks([self.allreduce([tensor], options) for tensor in tensors], list(tensors))

    @_operation("reduce")
    def reduce(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Does as `allreduce`, but only the root's tensors change."""
        for tensor in tensors:
            total = tensor.detach().clone(memory_format=torch.contiguous_format)
            self._reduce(total.view(-1), opts)
            if opts.rootRank == self.rank():
                tensor.copy_(total)
        return FinishedWork(list(tensors))

    @_operation("broadcast")
    def broadcast(self, tensors: Sequence[Tensor], opts: Any) -> dist.Work:
        """Replaces each tensor by the root's."""
        for tensor in tensors:
            with flat_of(tensor) as flat:
                self._group().broadcast(flat, opts.rootRank)
        return FinishedWork(list(tensors))

    @_operation("allgather")
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

    @_operation("all_gather_single", "_allgather_base")
    def all_gather_single(self, output: Tensor, own: Tensor, opts: Any = None) -> dist.Work:
        """Puts the inputs of all members, one after the other, into one output."""
        group = self._group()
        with flat_of(output) as flat:
            flat.view(group.size, -1)[group.rank].copy_(own.detach().reshape(-1))
            group.all_gather(flat)
        return FinishedWork(output)

    _allgather_base = all_gather_single

    @_operation()
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Does `all_gather_single` for several pairs."""
        pairs = zip(outputs, inputs, strict=True)
        return SeveralWorks([self.all_gather_single(output, own) for output, own in pairs], list(outputs))

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @_operation("reduce_scatter")
    def reduce_scatter(
        self, outputs: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduces the lists of inputs element by element; this member gets the one of its rank."""
        for output, parts in zip(outputs, inputs, strict=True):
            whole = torch.cat([part.detach().reshape(-1) for part in parts])
            output.copy_(self._scatter(whole, [part.numel() for part in parts], opts).view(output.shape))
        return FinishedWork(list(outputs))

    @_operation("reduce_scatter_single", "_reduce_scatter_base")
    def reduce_scatter_single(self, output: Tensor, whole: Tensor, opts: Any = None) -> dist.Work:
        """Reduces the input, whose equal parts belong to the members; this member gets its part."""
        output.copy_(self._scatter(whole.detach().reshape(-1).clone(), None, opts).view(output.shape))
        return FinishedWork(output)

    _reduce_scatter_base = reduce_scatter_single

    @_operation()
    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> dist.Work:
        """Does `reduce_scatter_single` for several pairs."""
        pairs = zip(outputs, inputs, strict=True)
        works = [self.reduce_scatter_single(output, whole, opts) for output, whole in pairs]
        return SeveralWorks(works, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @_operation("alltoall")
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

    @_operation("all_to_all_single", "alltoall_base")
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

    @_operation("gather")
    def gather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any) -> dist.Work:
        """Does as `allgather`, but only the root has outputs."""
        group = self._group()
        for index, own in enumerate(inputs):
            parts = outputs[index] if group.rank == opts.rootRank else [torch.empty_like(own)] * group.size
            self.allgather([parts], [own])
        return FinishedWork([list(parts) for parts in outputs])

    @_operation("scatter")
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

    @_operation()
    def barrier(self, opts: Any = None) -> dist.Work:
        """Returns when every member has called it."""
        self._group().barrier()
        return FinishedWork([])

    @_operation("send")
    def send(self, tensors: Sequence[Tensor], to: int, tag: int = 0) -> dist.Work:
        """Begins to send to one member; the work is over when the tensor may change again."""
        group, (tensor,) = self._group(), tensors
        refuse_layout(tensor)
        host = tensor.detach().contiguous().cpu()
        channel = Channel(group.generation, group.number, tag)
        letter = group.transport.mail.send(group.members[to], channel, memory(host), host)
        return MessageWork(letter, lambda: None, self._interrupted, tensors, group.rank)

    @_operation("recv")
    def recv(self, tensors: Sequence[Tensor], from_: int, tag: int = 0) -> dist.Work:
        """Begins to receive from one member: its next message with this tag."""
        group, (tensor,) = self._group(), tensors
        refuse_layout(tensor)
        plain = tensor.detach()
        host = plain.contiguous().cpu()
        is_there = host.data_ptr() == plain.data_ptr()
        channel = Channel(group.generation, group.number, tag)
        letter = group.transport.mail.receive(group.members[from_], channel, memory(host), host)
        arrives = (lambda: None) if is_there else lambda: _put(plain, host)
        return MessageWork(letter, arrives, self._interrupted, tensors, from_)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> dist.Work:
        """Refuses: whose message came first is not the same when a step is done again."""
        raise ValueError("a message from any member cannot be received here: name the sender by src or group_src")

    def _group(self) -> Group:
        return self._current()

    def _begun(self, work: dist.Work) -> dist.Work:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _places(self) -> dict[int, int]:
        """Places in this group by the ranks in the default group."""
        return {rank: rank for rank in range(self._group().size)}

    def _reduce(self, flat: Tensor, opts: Any) -> None:
        group = self._group()
        reduction, average = reduction_of(opts)
        group.all_reduce(flat, 1.0 / group.size if average else None, reduction)

    def _scatter(self, whole: Tensor, counts: Sequence[int] | None, opts: Any) -> Tensor:
        group = self._group()
        reduction, average = reduction_of(opts)
        return group.reduce_scatter(whole, counts, 1.0 / group.size if average else None, reduction)


class Subgroup(ElasticProcessGroup):
    """Some members, as this worker, one of them, sees them. Its messages go over links.

    Args:
        some: the members.
        name: under which functional collectives find it, and `desc` is for people.
        interrupted: takes interruptions.
        native: where its collectives begin, in a native group of its own; None: they go over links.
        store: of the job.
    """

    def __init__(
        self,
        some: Some,
        name: str,
        desc: str,
        interrupted: Interrupted | None,
        native: Issues | None,
        store: dist.Store,
    ) -> None:
        super().__init__(some, interrupted, native, dist.PrefixStore(f"{name}/", store))
        self._some, self._name, self._desc, self._place = some, name, desc, some().rank

    def size(self) -> int:
        """Returns how many members it was made of."""
        return len(self._some.members)

    def rank(self) -> int:
        """Returns this worker's position in it."""
        return self._place

    getSize = size
    getRank = rank

    @property
    def group_name(self) -> str:
        """Returns the name under which functional collectives find this group."""
        return self._name

    def getGroupName(self) -> str:
        """Returns `group_name`; torch calls it from C++."""
        return self._name

    @property
    def group_desc(self) -> str:
        """Returns what the group is for, for people."""
        return self._desc

    def shutdown(self) -> None:
        """Does nothing: the links belong to the transport."""

    abort = shutdown

    def _group(self) -> Group:
        # Torch has put a table of its own there when it was made, of the ranks of that time.
        if self in distributed_c10d._world.pg_group_ranks:
            distributed_c10d._world.pg_group_ranks[self] = self.ranks
        return super()._group()

    def _places(self) -> dict[int, int]:
        return self._some.ranks()


def _put(tensor: Tensor, came: Tensor) -> None:
    tensor.copy_(came)
