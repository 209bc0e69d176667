"""The agent: one process a node. It starts the workers, watches them, and takes part in the rendezvous."""
