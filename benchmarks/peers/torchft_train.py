"""One replica group (of one worker) of the small job under torchft, written after its train_ddp.py.

Needs torchft 0.2.0, hence its own virtual environment. The store of the group is opened here rather than by a torchrun
around each replica, which only saves torchft the time of another launcher. TORCHFT_LIGHTHOUSE names the lighthouse.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
from torch._C._distributed_c10d import TCPStore
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.pg_transport import PGTransport

from benchmarks.small_model import MICRO_BATCHES, CommitLog, Samples, arguments, build, loss_of


class TolerantDataParallel(DistributedDataParallel):  # type: ignore[misc, unused-ignore]
    """torchft's DDP with a communication hook that survives a failed all-reduce.

    The hook of 0.2.0 returns a future that exists only if the all-reduce succeeded: on the CPU the survivors of a
    killed replica end with an AssertionError (torchft/ddp.py, `assert fut._fut`). The manager has noted the failure
    and refuses the step, so the content of the bucket does not matter then.
    """

    @staticmethod
    def _comm_hook(state, bucket):  # type: ignore[no-untyped-def]  # torch rejects annotations that are text
        state.allreduce(bucket.buffer()).wait()
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done


def main() -> None:
    parser = arguments()
    parser.add_argument("--replica", type=int, required=True)
    parser.add_argument("--replicas", type=int, required=True)
    parser.add_argument("--group-timeout-s", type=float, required=True, help="of the Gloo group")
    parser.add_argument("--transport-timeout-s", type=float, required=True, help="of the state transfer to a joiner")
    parser.add_argument("--manager-timeout-s", type=float, required=True)
    parser.add_argument("--heartbeat-s", type=float, required=True)
    args = parser.parse_args()
    commits = CommitLog(args.commits)
    commits.started(args.replica)

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    net = build(args.micro_batch_s)
    group = ProcessGroupGloo(timeout=timedelta(seconds=args.group_timeout_s))

    def load_state_dict(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    def state_dict() -> dict[str, dict[str, object]]:
        return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    manager = Manager(
        pg=group,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        min_replica_size=1,
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        hostname="127.0.0.1",
        replica_id=f"replica_{args.replica}",
        timeout=timedelta(seconds=args.manager_timeout_s),
        heartbeat_interval=timedelta(seconds=args.heartbeat_s),
        checkpoint_transport=PGTransport(
            group, timeout=timedelta(seconds=args.transport_timeout_s), device=torch.device("cpu")
        ),
    )
    model = TolerantDataParallel(manager, net)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    samples = Samples()
    # The batch of a replica does not depend on how many there are: torchft lets the global batch shrink.
    share = range(args.replica * MICRO_BATCHES // args.replicas, (args.replica + 1) * MICRO_BATCHES // args.replicas)

    while manager.current_step() < args.steps:
        step = manager.current_step()
        optimizer.zero_grad()
        for sample in share:
            rows = samples.micro_batch(step, sample)
            if sample == share[-1]:
                torch.autograd.backward(loss_of(model(rows), rows) / len(share))
            else:
                with model.no_sync():
                    torch.autograd.backward(loss_of(model(rows), rows) / len(share))
        optimizer.step()
        if manager.current_step() > step:
            # The number of the quorum tells a step that the survivors committed from one begun before the death.
            commits.commit(manager.current_step(), manager.num_participants(), manager._quorum_id)
    manager.shutdown()
    os._exit(0)


if __name__ == "__main__":
    main()
