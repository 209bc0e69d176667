"""A process with no file descriptor left: its link listener waits without spinning, and goes on when there are some."""

from __future__ import annotations

import os
import resource
import socket
import time

from elaunch.rendezvous.membership import split_address
from elaunch.workers.comm.transport import Transport


def main() -> None:
    """Take all descriptors, let strangers and a peer knock, give the descriptors back."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    a, b = Transport("a/0#0", "secret"), Transport("a/1#0", "secret")
    members = {a.worker: a.address, b.worker: b.address}
    knocking = [socket.socket() for _ in range(4)]
    taken = []
    try:
        while True:
            taken.append(os.dup(0))
    except OSError:
        pass
    for stranger in knocking:
        stranger.connect(split_address(a.address))
    before_s = time.process_time()
    time.sleep(1.0)
    spent_s = time.process_time() - before_s
    assert spent_s < 0.5, f"{spent_s:.2f} s of processor time in a second without anything to do"
    for descriptor in taken:
        os.close(descriptor)
    for transport in (a, b):
        transport.prepare(members)
    for transport in (a, b):
        transport.connect(members, generation=1, timeout_s=30)
    assert a.peers == (b.worker,)
    for transport in (a, b):
        transport.close()


if __name__ == "__main__":
    main()
