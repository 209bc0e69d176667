"""The store at which the workers of a plain script meet: what torch's TCPStore serves, without torch.

`data` and `conversation` are pure: bytes in, bytes out. `server` has the sockets, `process` the process that runs it.
The clients are torch's own, so what they send and expect is given: torch/csrc/distributed/c10d/TCPStore*.cpp.
"""
