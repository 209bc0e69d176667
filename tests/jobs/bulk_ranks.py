"""A member of native groups by itself, without a job: `python -m tests.jobs.bulk_ranks --rank 0 ... SCENARIO...`

Several members of one machine may share a GPU (NCCL_HOSTID, as benchmarks/one_device.py has it). Each scenario is
a function that all members call, and that raises what is wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from elaunch import threads
from elaunch.detect.heartbeat import Phase, Reader
from elaunch.errors import CollectiveFailed
from elaunch.workers import heartbeat
from elaunch.workers.comm.c10d.native import NativeWorks
from elaunch.workers.comm.group import SMALL_BYTES
from elaunch.workers.comm.native import ended, nccl
from elaunch.workers.comm.native.bulk import Bulk
from elaunch.workers.comm.native.choice import maker
from elaunch.workers.comm.native.groups import NativeGroups
from elaunch.workers.comm.native.nccl2 import Nccl2Bulk
from elaunch.workers.comm.process_group import ElasticProcessGroup
from elaunch.workers.data_parallel.reducer import NativeSums, Reducer

PATIENCE = timedelta(seconds=60)
FREED_S = 30.0
"""Far more than any machine takes; without an abort it would be for ever."""


class Member:
    """One of the ranks.

    Args:
        rank, size: of it.
        port: of the store, which the test hosts.
        device: where it computes.
    """

    def __init__(self, rank: int, size: int, port: int, device: torch.device) -> None:
        self.rank, self.size, self.port, self.device = rank, size, port, device
        self.store = self.client()
        made = maker("127.0.0.1", device)
        assert made is not None
        self.make = made

    def client(self) -> dist.Store:
        """Returns a client of the store, for one thread."""
        return dist.TCPStore("127.0.0.1", self.port, is_master=False, timeout=PATIENCE)

    def meet(self, name: str, of: Sequence[int] | None = None) -> None:
        """Returns when these ranks, by default all, have come to a place of this name."""
        of = range(self.size) if of is None else of
        self.store.set(f"meet/{name}/{self.rank}", "1")
        self.store.wait([f"meet/{name}/{rank}" for rank in of])

    def opened(self, name: str, of: Sequence[int] | None = None, bulk: Bulk | None = None) -> Bulk:
        """Returns a native group of these ranks, by default all, once it is open in all of them.

        One that poisons it while another still opens it spoils that.
        """
        of = range(self.size) if of is None else of
        bulk = self.make() if bulk is None else bulk
        bulk.open(dist.PrefixStore(f"group/{name}", self.client()), of.index(self.rank), len(of), messages=True)
        self.meet(f"{name} is open", of)
        return bulk

    def group(self) -> Any:
        """Returns what stands in for the group of all ranks: links that are well, and carry nothing."""
        names = tuple(f"m{rank}" for rank in range(self.size))
        return SimpleNamespace(
            size=self.size,
            rank=self.rank,
            members=names,
            others=[name for name in names if name != names[self.rank]],
            generation=1,
            number=0,
            transport=SimpleNamespace(worker=names[self.rank], check=lambda peers: None),
        )

    def filled(self, value: float) -> torch.Tensor:
        """Returns a tensor on the device."""
        return torch.full((1 << 16,), value, device=self.device)

    def total(self, bulk: Bulk, value: float) -> float:
        """Returns the sum of a value over a group, which must be right in every place."""
        tensor = self.filled(value)
        bulk.all_reduce(tensor).wait()
        found = tensor.unique().tolist()
        assert len(found) == 1, found
        return float(found[0])

    def is_freed(self, bulk: Bulk, work: dist.Work, tensor: torch.Tensor) -> None:
        """Returns when an operation of a poisoned group is over here, and sees to it that it does not count."""
        begin_s = time.monotonic()
        if self.device.type == "cpu":
            try:
                work.wait(timedelta(seconds=FREED_S))
            except RuntimeError:
                pass
            else:
                raise AssertionError(f"a sum without one of its members has {tensor[0]}")
        else:
            work.wait()  # the stream does
            ended.reach(self.device, ended.here(self.device), bulk.errored)
            assert bulk.errored(), "a stream that an abort freed goes on with garbage, and the group does not say so"
        assert time.monotonic() - begin_s < FREED_S


def freed(me: Member) -> None:
    """An abort frees who waits for a silent member; tensors stay, the device works; the survivors have a new group."""
    bulk, kept = me.opened("freed"), torch.arange(1 << 16, device=me.device)
    if me.rank == me.size - 1:
        me.meet("all wait")
        me.meet("all are free")
    else:
        tensor = me.filled(1.0)
        work = bulk.all_reduce(tensor)
        me.meet("all wait")
        aborting = threads.start("poison", bulk.poison, lambda _: None)
        me.is_freed(bulk, work, tensor)
        aborting.join()
        assert torch.equal(kept.cpu(), torch.arange(1 << 16)), "a tensor of another matter has changed"
        assert (kept * 2).sum().item() == (1 << 16) * ((1 << 16) - 1), "the device does not compute"
        survivors = range(me.size - 1)
        again = me.opened("freed, survivors", survivors)
        assert me.total(again, me.rank + 1.0) == sum(rank + 1.0 for rank in survivors)
        me.meet("all are free")
        again.poison()
        again.close()
    bulk.poison()
    me.meet("all have left")
    bulk.close()


def beside(me: Member) -> None:
    """A second group opens beside one that is in use, and stays when that is aborted."""
    first = me.opened("first")
    assert me.total(first, 1.0) == me.size
    second = me.opened("second")
    for number in range(3):
        assert me.total(first, number) == me.size * number
        assert me.total(second, 2.0 * number) == 2 * me.size * number
    me.meet("both have summed")
    first.poison()
    assert me.total(second, 3.0) == 3 * me.size
    me.meet("the second has summed")
    second.poison()
    me.meet("both are over")
    first.close()
    second.close()


def eager(me: Member) -> None:
    """What a group needs it has when it is open: neither sums nor messages make a further communicator."""
    bulk = me.opened("eager")
    left, right = (me.rank - 1) % me.size, (me.rank + 1) % me.size
    assert me.total(bulk, 1.0) == me.size
    out = [me.filled(me.rank) if rank != me.rank else me.filled(0)[:0] for rank in range(me.size)]
    into = [me.filled(-1) if rank != me.rank else me.filled(0)[:0] for rank in range(me.size)]
    for work in bulk.exchange(out, into):
        work.wait()
    assert [one[0].item() for rank, one in enumerate(into) if rank != me.rank] == [
        rank for rank in range(me.size) if rank != me.rank
    ]
    came = me.filled(-1)
    # Of the two ends of a message of NCCL one after the other is given to the device: the first rank receives first.
    if me.rank:
        works = [bulk.send(me.filled(me.rank), right), bulk.receive(came, left)]
    else:
        works = [bulk.receive(came, left), bulk.send(me.filled(me.rank), right)]
    for work in works:
        work.wait()
    assert came.unique().tolist() == [left]
    me.meet("all is sent")
    if me.device.type == "cuda":
        log = Path(os.environ["NCCL_DEBUG_FILE"].replace("%p", str(os.getpid()))).read_text()
        assert log.count("Init COMPLETE") == 1, log
    bulk.poison()
    me.meet("all have left eager")
    bulk.close()


def ordered(me: Member) -> None:
    """Sums in a fixed order have the bits of that order; one that lacks summands is freed, and does not count."""
    bulk, group = me.opened("ordered"), me.group()
    failed: list[int] = []
    reducer, random = Reducer(failed.append, in_order=True), torch.Generator().manual_seed(0)
    reducer.begin(group, 0.3, bulk)
    of_all, mine = [], []
    for length in (1, 1000, SMALL_BYTES, 1 << 20):
        for dtype in (torch.float32, torch.bfloat16):
            numbers = torch.randn(me.size, length, generator=random) * torch.tensor([[1e3], [1.0], [1e-3]])[: me.size]
            of_all.append(list(numbers.to(dtype)))
            mine.append(of_all[-1][me.rank].to(me.device, copy=True))
            reducer.launch(mine[-1])
    reducer.wait()
    reducer.raise_error()
    for found, summands in zip(mine, of_all, strict=True):
        total = summands[0].clone()
        for one in summands[1:]:
            total += one
        assert torch.equal(found.cpu(), total.mul_(0.3)), (found.dtype, len(found))
    reducer.begin(group, 1.0, bulk)
    me.meet("all have summed in order")
    if me.rank != me.size - 1:
        tensor = me.filled(1.0)
        reducer.launch(tensor)
        aborting = threads.start("poison", bulk.poison, lambda _: None)
        reducer.wait()
        with pytest.raises(CollectiveFailed):
            reducer.raise_error()
        assert failed == [1]
        aborting.join()
    me.meet("all are free of summands")
    bulk.poison()
    reducer.cancel()
    reducer.close()
    me.meet("all have left ordered")
    bulk.close()


def batch(me: Member) -> None:
    """All send large tensors first and then receive, in one batch of torch.distributed: none waits for ever."""
    bulk, group = me.opened("batch"), me.group()
    works = NativeWorks(lambda: bulk, me.device.type)
    pg = ElasticProcessGroup(lambda: group, None, works)
    pg.register()
    left, right = (me.rank - 1) % me.size, (me.rank + 1) % me.size
    for number in range(3):
        sent = torch.full((1 << 24,), me.rank + 0.5 * number, device=me.device)
        came = torch.full_like(sent, -1)
        begin_s = time.monotonic()
        found = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, right), dist.P2POp(dist.irecv, came, left)])
        for work in found:
            work.wait()
        works.finish()
        assert came.unique().tolist() == [left + 0.5 * number], came
        assert time.monotonic() - begin_s < FREED_S
        if me.device.type == "cuda":
            assert len(found) == 1, found
    dist.all_reduce(came := me.filled(1.0))  # one whose work NCCL does not return
    works.finish()
    assert came.unique().tolist() == [me.size]
    dist.destroy_process_group()
    me.meet("all batches have arrived")
    bulk.poison()
    me.meet("all have left batch")
    bulk.close()


def options(me: Member) -> None:
    """Torch neither ends the process when a peer dies, nor waits for the dead."""
    bulk = me.opened("options")
    if me.device.type == "cuda":
        assert {name: os.environ.get(name) for name in nccl.SETTINGS} == nccl.SETTINGS
        assert nccl.NONBLOCKING_TIMEOUT in os.environ
        assert bulk.backend_group().options.config.blocking == 0
    bulk.poison()
    me.meet("all have left it")
    bulk.close()


def order(me: Member) -> None:
    """One after the other revokes; nothing is given back before all have; then the next generation stands."""
    groups, members = NativeGroups(me.make), tuple(f"m{rank}" for rank in range(me.size))

    def enter(generation: int) -> Bulk:
        groups.enter(generation, members, me.rank, me.client)
        end_s = time.monotonic() + PATIENCE.total_seconds()
        while not groups.ready():
            assert time.monotonic() < end_s, "it does not open"
            time.sleep(0.01)
        me.meet(f"{generation} is open")
        assert groups.passed((generation, generation))
        assert groups.current is not None
        return groups.current

    bulk, tensor = enter(1), me.filled(1.0)
    last = me.rank == me.size - 1  # it is silent, and the last to revoke
    work = None if last else bulk.all_reduce(tensor)
    for rank in range(me.size):
        if rank == me.rank:
            groups.poison(2)
        me.meet(f"{rank} has revoked")
    if work is not None:
        me.is_freed(bulk, work, tensor)
    groups.pause()
    with pytest.raises(RuntimeError, match="a member still is in them"):
        groups.settled((1,))
    me.meet("all have left")
    assert me.total(enter(2), 2.0) == 2 * me.size
    me.meet("all have summed in 2")
    groups.poison(3)
    groups.pause()
    me.meet("all have left again")
    groups.settled(())
    groups.close()


def anew(me: Member) -> None:
    """A group that has been left is connected anew among fewer members (torch 2.14 and later)."""
    bulk = me.opened("before")
    assert isinstance(bulk, Nccl2Bulk), type(bulk)
    assert me.total(bulk, 1.0) == me.size
    me.meet("all have summed before")
    object_of_torch = bulk.backend_group()
    bulk.poison()
    bulk.leave()
    me.meet("all have left before")
    bulk.close()
    fewer = range(me.size - 1)
    if me.rank in fewer:
        again = me.opened("after", fewer)
        assert again.backend_group() is object_of_torch
        assert me.total(again, 1.0) == len(fewer)
        me.meet("all have summed after", fewer)
        again.poison()
        again.close()


def seen_to_wait(me: Member, name: str, bulk: Bulk, waits: Callable[[torch.Tensor], None]) -> None:
    """Has all ranks but the last wait for it until each has been seen to, by what it shows, which names the last."""
    beats, last = heartbeat.open_heartbeat(), f"m{me.size - 1}"
    if me.rank == me.size - 1:
        me.meet(f"{name}: they are seen")
    else:
        tensor, seen = me.filled(1.0), list[str]()

        def watch() -> None:
            heartbeat.in_background()
            reader = Reader(beats.fd)
            while (reading := reader.read()) is None or not reading.waits or reading.phase is not Phase.STEP:
                time.sleep(0.01)
            seen.extend(reading.awaited.peers)
            me_too.meet(f"{name}: they are seen", range(me.size - 1))
            me_too.store.set(f"meet/{name}: they are seen/{me.size - 1}", "1")
            bulk.poison()

        me_too = Member(me.rank, me.size, me.port, me.device)
        watching = threads.start("watch", watch, lambda _: None)
        waits(tensor)
        watching.join()
        assert seen == [last], seen
    heartbeat.close()
    bulk.poison()
    me.meet(f"{name}: all have been seen")
    bulk.close()


def pulse(me: Member) -> None:
    """Whoever waits for a hung member shows it while no Python of its training thread runs: its peers are named."""
    bulk = me.opened("pulse")

    def waits(tensor: torch.Tensor) -> None:
        work = bulk.all_reduce(tensor)
        heartbeat.enter(Phase.STEP, 1)
        with heartbeat.waiting([f"m{me.size - 1}"], 1):
            me.is_freed(bulk, work, tensor)

    seen_to_wait(me, "pulse", bulk, waits)


def blocked(me: Member) -> None:
    """Whoever asks a device for a value that a hung member holds up is seen to wait for that member."""
    bulk = me.opened("blocked")

    def waits(tensor: torch.Tensor) -> None:
        sums = NativeSums(bulk)
        sums.add(tensor)
        heartbeat.enter(Phase.STEP if me.device.type == "cpu" else Phase.BETWEEN, 1)
        with contextlib.suppress(RuntimeError), heartbeat.waiting([f"m{me.size - 1}"], 1):
            sums.join(lambda: None)  # on a device, it returns at once
        heartbeat.enter(Phase.STEP, 1)  # the agent looks from here on
        tensor[0].item()

    seen_to_wait(me, "blocked", bulk, waits)


def death(me: Member) -> None:
    """A member is killed while the others wait for it: they are freed, and a group of the survivors stands."""
    bulk = me.opened("death")
    if me.rank == me.size - 1:
        me.meet("all wait for the dead")
        os.kill(os.getpid(), signal.SIGKILL)
    tensor = me.filled(1.0)
    work = bulk.all_reduce(tensor)
    me.meet("all wait for the dead")
    aborting = threads.start("poison", bulk.poison, lambda _: None)
    me.is_freed(bulk, work, tensor)
    aborting.join()
    survivors = range(me.size - 1)
    me.meet("survivors have left", survivors)
    bulk.close()
    again = me.opened("survivors", survivors)
    assert me.total(again, me.rank + 1.0) == sum(rank + 1.0 for rank in survivors)
    me.meet("survivors have summed", survivors)
    again.poison()
    me.meet("survivors are done", survivors)
    again.close()


SCENARIOS: dict[str, Callable[[Member], None]] = {
    run.__name__: run for run in (freed, beside, eager, ordered, batch, options, order, anew, pulse, blocked, death)
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("scenarios", nargs="+", choices=SCENARIOS)
    args = parser.parse_args()
    me = Member(args.rank, args.size, args.port, torch.device(args.device))
    for name in args.scenarios:
        SCENARIOS[name](me)
        print(f"{name}: right", flush=True)


if __name__ == "__main__":
    main()
