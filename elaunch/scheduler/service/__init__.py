"""The daemon of the scheduler: its documents in etcd, what it decides by them (pure), and the loop that acts."""
