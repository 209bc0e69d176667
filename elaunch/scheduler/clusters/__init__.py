"""Clusters: one protocol, and behind it Slurm, Kubernetes and Ray."""
