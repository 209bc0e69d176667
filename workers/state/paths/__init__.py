"""What carries state that moves: every path takes the same messages, and one pure function chooses among them.

    choice   which path is quickest, by bytes, rates and the seconds until a path stands; pure
    links    over links, through host memory: staged, two messages at a time; always there
    native   over a native group, from device to device
    in_step  over a native group, in the background of a step
    nixl     over NIXL, between nodes with RDMA
    offers   what the members have and have measured, and the path that follows from it
    codes    checksums of messages
    packing  a message as one run of memory

Use `Offers`; `reshard` asks it by the group.
"""

from __future__ import annotations
