"""Training state as data: every tensor lives in one space, a worker holds chunks of it, and what differs moves.

`codec` turns the state_dicts of registered objects into a manifest (JSON) and tensors, and back, without pickle;
`objects` makes a space of these. Whatever a space consists of, `routes` finds who sends what to whom, and `reshard`
moves it.
"""
