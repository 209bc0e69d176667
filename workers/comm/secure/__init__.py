"""Links that others cannot read or change: TLS 1.3, with a certificate of the job at both ends.

`sockets` has the encrypted end of a connection, and `security` decides which connections are encrypted. The files come
from the agent (`elaunch.rendezvous.security`). Unix sockets, and TCP within a machine unless the user wants that, stay
as they are.
"""
