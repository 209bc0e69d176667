"""What jobs and clusters would do over hours and days, on a simulated clock: `elaunch simulate`.

The decisions are those of the real thing: `elaunch.policy` chooses each job's plan and prices its steps and its way
there, `elaunch.scheduler` shares out the devices. Here is only what they are asked about: the clock and its events
(`clock`), what happens to nodes (`traces`, `faults`) and which jobs come (`traces`, `arrivals`); one job over it
(`job`, by the policies in `strategies`), or many on a cluster (`cluster`). Everything is pure and seeded: the same
inputs give the same result.
"""
