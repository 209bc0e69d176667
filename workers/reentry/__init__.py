"""Re-entry: a function that every worker enters, and enters again whenever the members of its job change.

entered -> process groups of its own, over the members there are -> bind: the state of the last commit is there
commit  -> a copy of all that is bound, in this worker's memory; it counts as soon as all members have come to it and
           what one alone has of it is with its guard
change  -> whoever waits in a process group is freed, the function is left, and entered again

groups  the process groups that a function makes: freed and forgotten
gloo_waits  waits for Gloo's collectives that end with an entry
copies  copies of the state in host memory
shares  which part of each tensor a worker needs, and where it comes from
data    batches in an order that does not depend on the members
sampler  deals the samples of each step to the members there are
state   what the function sees
guards  copies of what one worker alone has, for another to keep
run     the loop around the function
tensor_shard  parts of tensors that no DTensor describes
forms   a function, the body of a loop, or a script
"""

from __future__ import annotations
