"""elaunch: a drop-in replacement for torchrun that keeps a training job alive.

A training script uses `elaunch.init()` and the `Job` that it returns, or, with a model given in layers,
`elaunch.hybrid()` and the `HybridJob` that it returns; one with an engine of its own makes its training a function for
`elaunch.elastic`, or the body of a loop over
`elaunch.Elastic`, or calls `elaunch.elastic_script()`; a framework that takes part in recovery itself uses
`elaunch.attach()` and `elaunch.hooks`; a program that starts jobs uses `LaunchConfig` and `elastic_launch` or
`launch_agent`; `Stream` says how data is read that comes in order. Nothing else here is public. The import is light:
torch is loaded only when one of those for training scripts is called, or `Stream`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elaunch.api import LaunchConfig, elastic_launch, launch_agent
    from elaunch.workers.data.stream import Stream
    from elaunch.workers.data_parallel.job import Job, init
    from elaunch.workers.frameworks.attach import attach
    from elaunch.workers.layers.job import HybridJob, hybrid
    from elaunch.workers.reentry.forms import Elastic, elastic, elastic_script
    from elaunch.workers.reentry.state import ElasticState
    from elaunch.workers.runtime import Member

__version__ = "0.2.0"
__all__ = [
    "Elastic",
    "ElasticState",
    "HybridJob",
    "Job",
    "LaunchConfig",
    "Member",
    "Stream",
    "__version__",
    "attach",
    "elastic",
    "elastic_launch",
    "elastic_script",
    "hybrid",
    "init",
    "launch_agent",
]


def __getattr__(name: str) -> Any:
    if name in ("Job", "init"):
        from elaunch.workers.data_parallel import job

        return getattr(job, name)
    if name in ("HybridJob", "hybrid"):
        from elaunch.workers.layers import job as layers_job

        return getattr(layers_job, name)
    if name == "Member":
        from elaunch.workers.runtime import Member

        return Member
    if name == "Stream":
        from elaunch.workers.data.stream import Stream

        return Stream
    if name in ("Elastic", "elastic", "elastic_script"):
        from elaunch.workers.reentry import forms

        return getattr(forms, name)
    if name == "ElasticState":
        from elaunch.workers.reentry.state import ElasticState

        return ElasticState
    if name == "attach":
        from elaunch.workers.frameworks.attach import attach

        return attach
    if name in ("LaunchConfig", "elastic_launch", "launch_agent"):
        from elaunch import api

        return getattr(api, name)
    raise AttributeError(f"module 'elaunch' has no attribute {name!r}")
