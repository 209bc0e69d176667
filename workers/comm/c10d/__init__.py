"""What `torch.distributed` sees of the groups of a job, beside `process_group` and `mesh`.

    mail       messages between two workers, beside the operations of links
    works      the work that an operation returns: finished, in the native group, or on its way as a message
    tensors    what operations over links do with tensors and reductions
    native     the operations of a member in its native group, and what becomes of them at the end of a step
    subgroups  groups of some members, known by identity
    tables     the default group in the tables of `torch.distributed`, and the functions that it answers
    store      the store of the job, as `torch.distributed` wants one

Use `ElasticProcessGroup`, which is made of these.
"""

from __future__ import annotations
