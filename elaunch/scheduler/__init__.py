"""Many elastic jobs on one cluster: how many devices each job gets, and where (Suika 3.2.3, algorithm 2).

`model` and the policies are pure and are what `elaunch simulate` runs, too; the daemon, its state in etcd and the
clusters (Slurm, Kubernetes, Ray) are the shell around them.
"""
