"""Membership: how the agents of a job agree on numbered generations of workers through etcd.

`membership` holds the documents and `intake` reads them, `decide` is the leader's rule (pure; its values are in `view`,
its parts in `rules`), `participant` one node's part (the only thread that talks to the store; its parts are in `node`),
`store` the interface to a key-value store with leases and watches, and `etcd`, `embedded` and `memory` what stands
behind it; `cluster` has several nodes serve it. Nothing here but `torchrun` imports torch.
"""
