"""Stands in for the agent: starts the fork server while it has one thread, then passes bytes between it and a test.

`plain_agent.py PORT`: the test listens at that port of the loopback interface. Standard error goes to a file `errors`.
"""

from __future__ import annotations

import os
import select
import socket
import sys


def main() -> None:
    errors = os.open("errors", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(errors, 2)
    os.close(errors)
    from elaunch.agent import forkserver

    link, pid = forkserver.start()
    test = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
    test.sendall(f'{{"fork server": {pid}}}\n'.encode())
    ways = {link: test, test: link}
    while True:
        for source in select.select(list(ways), [], [])[0]:
            data = source.recv(1 << 16)
            if not data:
                link.close()
                os.waitpid(pid, 0)
                return
            ways[source].sendall(data)


if __name__ == "__main__":
    main()
