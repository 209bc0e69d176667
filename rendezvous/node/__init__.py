"""One node's part in the rendezvous, in the order in which each uses those before it; `participant` puts them together.

`mailbox` holds what other threads leave for the participant's, `setbacks` and `waiting` say when a line is due,
`reporter` tells the agent what is new, `replica` is the node's copy of the job's documents, `session` its connection to
the store, its lease and its report, `requests` asks other nodes to act, `leader` campaigns and applies the rule, and
`servers` has the nodes serve the store that should.
"""
