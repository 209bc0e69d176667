"""Training state as data: every tensor lives in one space, a worker holds regions of it, and what moves is the difference.

`codec` turns the state_dicts of registered objects into a manifest (JSON) and tensors, and back, without pickle;
`objects` makes these a space. Whatever a space is made of, `routes` finds who sends what to whom, and `reshard` does it.
"""
