"""The parts of the leader's rule, all pure: `decide` says which of them applies; and `edit`, what its outcome changes.

`attempts` begins a job again or fails it, `early` deals with failures before the first step, `training` keeps the list
of members true, `connectivity` picks nodes to leave out, `escalate` ends a streak of changes without a step, `deadlock`
finds members that all wait for each other, `holders` says who is waited for because nobody else holds the state.
"""
