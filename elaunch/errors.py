"""Every exception that elaunch raises, in one tree.

    ElaunchError
    ├── UsageError             a value of the command line cannot be used
    │   └── MeshError          a mesh cannot be made of the members
    ├── LaunchError            the job cannot start or go on
    │   ├── StoreUnavailable   the rendezvous store did not answer in time
    │   ├── EtcdNotFound       no etcd program to start
    │   ├── SettingsMismatch   this node's settings differ from the job's
    │   └── JobFailed          the job ended without success
    ├── RequestRefused         a job cannot do what was asked of it
    ├── ProtocolError          a message or document that this version cannot read
    ├── StateError             training state that cannot be described, moved or restored
    │   ├── StateLost          no survivor has some part of it
    │   ├── WentBack           the job went back to a checkpoint while a plan was asked for
    │   └── CheckpointDamaged  a checkpoint is not what was written; the one before it may be whole
    ├── DeviceError            an accelerator cannot be found, read or set
    │   ├── NvmlNotFound       pynvml cannot be imported
    │   ├── DeviceNotFound     no driver, or no such device
    │   └── ClockError         the clock of a device cannot be read or set
    │       ├── ClocksDenied       this process may not set it
    │       └── ClocksUnsupported  the device or its driver cannot
    └── StepInterrupted        the step in flight cannot finish; never reaches a training script
        ├── GenerationChanged  a newer generation was announced
        ├── LinkLost           the connection to one peer broke
        └── CollectiveFailed   a collective of a native group failed, and whose fault it was is not known

A message names the values, what was expected and what to do about it.
"""

from __future__ import annotations


class ElaunchError(Exception):
    """Base of all errors of this package."""


class UsageError(ElaunchError):
    """The command line or an environment variable holds a value that cannot be used."""


class MeshError(UsageError, ValueError):
    """A mesh of these sizes cannot be made of the members."""


class LaunchError(ElaunchError):
    """The job cannot start, or cannot go on."""


class StoreUnavailable(LaunchError):
    """The rendezvous store did not answer in time; the caller may retry."""


class EtcdNotFound(LaunchError):
    """There is no etcd program on this machine."""


class SettingsMismatch(LaunchError):
    """This node was started with settings that differ from those of the running job."""


class JobFailed(LaunchError):
    """The job ended without success.

    Attributes:
        failures: by rank, how workers of this node failed, as far as known: `rank`, `local_rank`, `host`, `pid`,
            `exitcode` (negative for a signal), `error_file`, `timestamp` (Unix seconds) and `message`.
    """

    def __init__(self, message: str, failures: dict[int, dict[str, object]] | None = None) -> None:
        super().__init__(message)
        self.failures = failures or {}


class RequestRefused(ElaunchError):
    """A job that runs cannot do what was asked of it, or has not done it in time."""


class ProtocolError(ElaunchError):
    """A message or document came from another version, or is damaged."""


class StateError(ElaunchError):
    """Training state cannot be described, moved or restored."""


class StateLost(StateError):
    """No surviving worker has some part of the state: it is only in a checkpoint, if there is one."""


class WentBack(StateError):
    """The job went back to a checkpoint while the script asked for a plan: go on from the job's step."""


class CheckpointDamaged(StateError):
    """What lies on the disk is not the checkpoint that was written there.

    Attributes:
        problem: where the damage is, for people.
    """

    def __init__(self, path: object, problem: str) -> None:
        super().__init__(f"the checkpoint {path} is damaged: {problem}")
        self.problem = problem


class DeviceError(ElaunchError):
    """An accelerator cannot be found, read or set."""


class NvmlNotFound(DeviceError):
    """The binding of NVIDIA's management library cannot be imported."""


class DeviceNotFound(DeviceError):
    """There is no driver, or it has no such device."""


class ClockError(DeviceError):
    """The clock of a device cannot be read or set."""


class ClocksDenied(ClockError):
    """Setting clocks needs rights that this process does not have."""


class ClocksUnsupported(ClockError):
    """The device or its driver cannot lock its clock, or not at this frequency."""


class StepInterrupted(ElaunchError):
    """The step in flight cannot finish with the present membership."""


class GenerationChanged(StepInterrupted):
    """A newer generation was announced while an operation of an older one was under way."""

    def __init__(self, generation: int) -> None:
        super().__init__(f"interrupted by generation {generation}")
        self.generation = generation


class LinkLost(StepInterrupted):
    """The link to one peer broke: the peer died, or the network between the two did."""

    def __init__(self, peer: str, why: str) -> None:
        super().__init__(f"link to {peer} lost: {why}")
        self.peer = peer
        self.why = why


class CollectiveFailed(StepInterrupted):
    """A collective of a native group failed: a member died, or the network between some of them did."""

    def __init__(self, generation: int, why: str) -> None:
        super().__init__(f"a collective of generation {generation} failed: {why}")
        self.generation = generation
        self.why = why
