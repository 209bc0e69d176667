"""Collectives of torch's own backends, beside the links: as fast as the vendor's, and gone when a member is.

    generation entered -> a group is opened in the background; until then collectives go over links
    all have it        -> they say so in a commit barrier, and use it from the next step on
    generation ended   -> whoever waits in it is freed (`poison`), a new group opens, the step is done again over links,
                          or in that group where the members wait for it (`elaunch.workers.member.swaps`)

    bulk         what a native group can do, whatever its backend
    gloo         over Gloo, for tensors in host memory
    gloo_work    its operations: nobody waits for one longer than its group lasts
    nccl         over NCCL
    nccl2        over NCCL by the backend of torch 2.14 and later
    hccl         over HCCL, of Ascend NPUs
    ended        when a device has come to the end of its work, for a thread that looks and never waits in a driver
    reconfigure  a group that is connected anew among other members, as `nccl2` does
    hangups      when a peer closes a connection
    sockets      which sockets of this process belong to a Gloo group
    choice       which of them a worker has
    opening      the groups of one generation, and their names
    groups       the group of this worker: opened, taken into use, freed, closed

Use `NativeGroups`.
"""

from __future__ import annotations
