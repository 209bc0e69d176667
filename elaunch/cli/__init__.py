"""What a person types: `elaunch` itself, and its commands for jobs that run. It starts the agent, or talks to etcd."""
