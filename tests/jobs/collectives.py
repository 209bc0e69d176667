"""A job whose members wait in native collectives while one of them dies or stops there, fault after fault.

    elaunch --standalone --nproc-per-node=4 --max-restarts=1000 --collectives=native tests/jobs/collectives.py kill stop

Each fault comes once the whole crew has native groups. It is the next of a rotation (`fault_of`), in which each rank
meets each collective after 4 blocks of all collectives, and each moment of it after 12:

    forward    the others wait in the call
    backward   they wait in a call that autograd makes
    barrier    they have begun it, and come to the commit barrier with it

Who dies has begun its own part, or has not. The event log says which fault it was (`fault`), and how long the others
waited after the news (`transition`, `freed_s`). The kinds:

    kill       SIGKILL
    stop       SIGSTOP, until the agent finds that and kills it
    silent     SIGKILL, but a child holds its connections open: no kernel tells the others, as when a machine is lost
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

import elaunch
from elaunch.hooks import Generation, Verdict, Vote
from tests.jobs import say
from tests.jobs.eager import compile_nothing
from tests.jobs.stateless import Stateless

KINDS = ("silent", "kill", "stop")
MOMENTS = ("forward", "backward", "barrier")
ELEMENTS = 1 << 20
"""Of a tensor: 4 MiB, more than sockets take at once."""

OTHERS_S = 0.1
"""For the others to come to where they wait."""

SILENT_S = 4
PAUSE_S = 0.002
"""Between two steps in which nothing happens."""


@dataclass(frozen=True)
class CollectiveFault:
    """Who is to die or to stop, and where.

    Attributes:
        rank: of the victim.
        how: it ends, one of KINDS.
        begun: whether it begins its own part of the collective first.
    """

    rank: int
    collective: str
    moment: str
    how: str
    begun: bool


class Collectives:
    """The collectives, by name; each begins and returns what to wait for.

    Args:
        rank: of this member, and `size` the number of members.
        victim: rank of who dies; what has a root has it there.
    """

    def __init__(self, rank: int, size: int, victim: int) -> None:
        self.rank, self.size, self.victim = rank, size, victim
        self._own, self._whole = torch.ones(ELEMENTS), torch.ones(size * ELEMENTS)

    def all_reduce(self) -> Any:
        return dist.all_reduce(self._own, async_op=True)

    def broadcast(self) -> Any:
        return dist.broadcast(self._own, self.victim, async_op=True)

    def reduce_scatter(self) -> Any:
        return dist.reduce_scatter_tensor(self._own, self._whole, async_op=True)

    def all_gather(self) -> Any:
        return dist.all_gather_into_tensor(self._whole, self._own, async_op=True)

    def all_to_all(self) -> Any:
        return dist.all_to_all_single(torch.empty_like(self._whole), self._whole, async_op=True)

    def messages(self) -> Any:
        """The victim sends something to all others."""
        if self.rank != self.victim:
            return dist.irecv(self._own, self.victim)
        works = [dist.isend(self._own, rank) for rank in range(self.size) if rank != self.rank]
        return works[-1]

    def coalesced(self) -> Any:
        with _coalescing_manager(async_ops=True) as works:
            for tensor in self._own.chunk(3):
                dist.all_reduce(tensor)
        return works

    def barrier(self) -> Any:
        return dist.barrier(async_op=True)


NAMES = ("all_reduce", "broadcast", "reduce_scatter", "all_gather", "all_to_all", "messages", "coalesced", "barrier")


def fault_of(number: int, kinds: tuple[str, ...], blocks: int, ranks: int) -> CollectiveFault:
    """Returns a fault of the rotation, from 0; each kind has so many blocks, and a block all collectives."""
    block, place = divmod(number, len(NAMES))
    how, block = kinds[block // blocks], block % blocks
    moment = MOMENTS[(place + 2 * block) % len(MOMENTS)]
    return CollectiveFault((place + block) % ranks, NAMES[place], moment, how, (place + block // ranks) % 2 == 1)


class InBackward(torch.autograd.Function):
    """Waits for a collective in the backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, begin: Callable[[], Any]) -> torch.Tensor:
        ctx.begin = begin
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.begin().wait()
        return gradients[0], None


class Crew(Stateless):
    """A framework whose state is the number of its step, and of the faults that it has met."""

    def __init__(self, kinds: tuple[str, ...], blocks: int, size: int) -> None:
        self.kinds, self.blocks, self.size = kinds, blocks, size
        self.n_faults = len(NAMES) * blocks * len(kinds)
        self.member = elaunch.attach(self)
        super().__init__()
        self.faults, self.meets = 0, False
        self.under_way: Any = None

    def train(self) -> None:
        self.member.join()
        assert self.member.process_group is dist.group.WORLD
        while not self.is_over() or not self.member.finish(self.is_over):
            with self.member.attempt():
                if self.is_whole() and self.faults < self.n_faults:
                    self.meet(fault_of(self.faults, self.kinds, self.blocks, self.size))
                else:
                    time.sleep(PAUSE_S)
                self.member.commit()
                self.step += 1
                self.member.report(self.step - 1)

    def is_over(self) -> bool:
        return self.faults >= self.n_faults and self.is_whole()

    def is_whole(self) -> bool:
        """Whether all are there and have native groups: all members find the same."""
        return self.member.size == self.size and self.member.native.current is not None

    def meet(self, fault: CollectiveFault) -> None:
        self.meets = True
        begin = getattr(Collectives(self.member.rank, self.size, fault.rank), fault.collective)
        if self.member.rank == fault.rank:
            self.member.send("fault", asdict(fault))
            if fault.begun:
                self.under_way = begin()
            else:
                time.sleep(OTHERS_S)
            end(fault.how)
        elif fault.moment == "forward":
            begin().wait()
        elif fault.moment == "backward":
            waits: Any = InBackward
            waits.apply(torch.ones(1, requires_grad=True), begin).sum().backward()
        else:
            self.under_way = begin()

    # The hooks.

    def vote(self) -> Vote:
        return replace(super().vote(), facts={"faults": self.faults})

    def pause(self) -> None:
        self.faults += self.meets
        self.meets, self.under_way = False, None

    def agreed(self, generation: Generation, verdict: Verdict) -> None:
        self.faults = max(facts["faults"] for facts in verdict.facts)
        super().agreed(generation, verdict)


def end(how: str) -> None:
    """Ends or stops this process."""
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    libc = ctypes.CDLL(None)
    if how == "silent" and libc.fork() == 0:  # without what Python does in a child: it closes the connections
        libc.setsid()  # the agent ends what is left of the worker's session
        libc.sleep(SILENT_S)
        libc._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def main() -> None:
    compile_nothing()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="+", choices=KINDS)
    parser.add_argument("--blocks", type=int, default=1, help="of each kind; a block has each collective once")
    parser.add_argument("--crew", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(1)
    crew = Crew(tuple(args.kinds), args.blocks, args.crew)
    crew.train()
    if args.kinds[-1] == "silent":
        time.sleep(SILENT_S)  # no child outlives the job
    say(f"ended {crew.member.worker} after {crew.faults} faults")


if __name__ == "__main__":
    main()
