"""What monitoring is given: metrics, traces and pictures of a job, all made of its events and of a node's state.

What makes them is pure, and works on events of a running agent as on those of a log. `prometheus_client`,
`opentelemetry` and `rich` are imported by the modules that are named after what they are for, and only when asked for.
"""
