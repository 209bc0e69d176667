"""Data-parallel training: every member holds the whole model and does some of the micro-batches of a step.

A script uses `job` alone. `layout` cuts the samples of a step into shares, and `plans` has the policy selector choose
how; `in_flight` is what a job knows of the step in flight. `gradients` sums the gradients of the micro-batches in flat
buckets, `reducer` reduces a bucket over the members while backward runs, `buffers` makes the model's buffers a part of
the step transaction, and `takeover` the optimizers and schedulers of the script,
`scaler` its GradScaler, and `refusals` what cannot be made part of it.
"""

from __future__ import annotations
