"""Plans that a job could go on by: each policy is a pure function (plan, members, profile) -> plan, or `NotPossible`.

`reroute`, `resize`, `reparallelize` and `expand` are the policies. The others are what they are made of: `partition`
(minimax), `balance` (greedy, by heap), `matching` (Kuhn-Munkres) and `structure`.
"""
