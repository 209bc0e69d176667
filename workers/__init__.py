"""What runs inside a training process: the runtime and recovery, the jobs over them, state, and links.

A training script sees `elaunch.init()` (`data_parallel`), `elaunch.hybrid()` (`layers`) or `elaunch.attach()`. The
control plane imports nothing from here, and nothing here imports h2 or the etcd client: a worker knows its
job through its agent alone.
"""
