"""What the environment says of the members, for scripts and for torch.distributed."""

from __future__ import annotations

import os

from elaunch.rendezvous.membership import Generation, node_of
from elaunch.workers.comm.group import Group


def tell_environment(generation: Generation, group: Group) -> None:
    """Sets the variables by which scripts and torch.distributed find the members. RANK and WORLD_SIZE are set."""
    nodes = list(dict.fromkeys(map(node_of, group.members)))
    own = node_of(group.members[group.rank])
    here = sum(node_of(member) == own for member in group.members)
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(here),
        "GROUP_RANK": str(nodes.index(own)),
        "GROUP_WORLD_SIZE": str(len(nodes)),
        "ROLE_RANK": str(group.rank),
        "ROLE_WORLD_SIZE": str(group.size),
        "MASTER_ADDR": generation.master.addr,
        "MASTER_PORT": str(generation.master.port),
    }
