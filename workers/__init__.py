"""What runs inside a training process: the session, recovery, state, links and the engine.

A training script sees `elaunch.init()` only (`session`). The control plane imports nothing from here, and nothing here
imports grpc, protobuf or the etcd client: a worker knows its job through its agent alone.
"""
