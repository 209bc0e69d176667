"""Data-parallel training: every member holds the whole model and does some of the micro-batches of a step.

A script uses `job` alone. `gradients` sums the gradients of the micro-batches in flat buckets, `reducer` reduces a
bucket over the members while backward runs, `buffers` makes the model's buffers a part of the step transaction.
"""

from __future__ import annotations
