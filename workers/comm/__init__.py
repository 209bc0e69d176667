"""Communication between workers: links, groups over links, and the torch adapter.

A *link* is one connection to one peer. It is keyed by the peer's identity and outlives generations.

    wire            what travels on a link: the handshake lines and the frame header
    connection      one connection: bytes in, bytes out, what its kernel knows of it, and that it breaks
    here            within a machine: Unix sockets, and reading in another worker's memory
    link            a connection that carries frames, and what an interrupted operation left half done
    outgoing        its sending half; `incoming` is its receiving half
    drive           the loop that moves an operation's bytes over links, in whichever thread runs it
    listener        the thread that accepts and dials connections
    traffic         an operation that stays open: messages are posted over time, a thread moves them
    transport       all links of this worker, and the operations on them (`Transport.exchange`, `Transport.open`)
    group           collectives of one generation, written over `exchange`, and `Group.open`
    process_group   a `torch.distributed.ProcessGroup` over whatever group is current
    c10d/           what it is made of; there `mail` has the messages that go beside the operations of links

Use `Transport`, `Group`, their `Traffic` and `ElasticProcessGroup`; the rest is theirs. What a transport is made of
does not import torch.
"""

from __future__ import annotations
