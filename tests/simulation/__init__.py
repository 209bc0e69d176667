"""Whole jobs in simulated time: the control plane, and the runtime and recovery of workers over simulated links."""
