"""Membership: how the agents of a job agree on numbered generations of workers through etcd.

`membership` holds the documents, `decide` the leader's rule (pure), `participant` one node's part
(the only thread that talks to the store), `store` the interface to a key-value store with leases
and watches, and `etcd`, `embedded` and `memory` what stands behind it. Nothing here imports torch.
"""
