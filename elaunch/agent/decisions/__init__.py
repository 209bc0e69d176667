"""What the agent does about what it observes: pure functions of values, which return actions and carry out none.

`lifecycle` has the node's part in the job, `slots` the table of what each event does to a slot, `local_workers` the
effects of its rows, `node_state` what a node knows besides, and `actions` what the agent's loop is asked to do.
"""
