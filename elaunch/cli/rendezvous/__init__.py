"""Where the nodes of a job meet: what the flags say, and what Slurm says where they leave it to Slurm."""
