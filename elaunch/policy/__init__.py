"""How a job goes on after a change: candidate plans, their estimates and the choice. Imports no torch.

Pure, but for `ahead`, which has plans for likely events made by a process of its own. `settings` is what the user
wants, `measure` and `profile` what plans cost. In `stragglers`, slow workers and links are found.
"""
