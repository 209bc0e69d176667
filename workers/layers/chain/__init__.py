"""Layers that run one after the other on a worker: forward, and backward, whole or in two parts."""
