"""Plans that a job could go on by: each policy is a pure function (plan, members, profile) -> plan, or `NotPossible`.

`reroute`, `resize`, `reparallelize` and `expand` are the policies for models in layers, `data_parallel` has those of
jobs whose members hold the whole model. The others are what they are made of: `partition` (minimax), `balance` (greedy,
by heap), `matching` (Kuhn-Munkres) and `structure`.
"""
