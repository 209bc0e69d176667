"""What frameworks with engines of their own get on top of the hooks: copies of their state, and FSDP2."""
