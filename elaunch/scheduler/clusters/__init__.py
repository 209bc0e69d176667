"""Clusters: one protocol, and Slurm behind it."""
