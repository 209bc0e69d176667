"""What `Member`, the runtime of a worker, is made of.

    runtime_hooks     the framework's hooks, and what the runtime does at the same moments
    policy            the policy selector and the plans of the job: what this member tells the others, and what it hears
    planner           how the members go on: one of them decides, and all get the same decision
    notes             what members tell each other beside the record of the commit barrier; pure
    reports           the lines of the event log on steps that have committed
    transition_times  how long a change takes, for the event log; pure
    swaps             when the members go over from links to their native group
    swap_choice       whether they wait for it before the first step of a generation; pure
    torch_groups      the default group of `torch.distributed`, and device meshes

Use `Member` of `elaunch.workers.runtime`. Only `torch_groups` imports torch.
"""

from __future__ import annotations
