"""Clusters: one protocol, and behind it Slurm and Ray."""
