"""Reads all that stands in etcd of a scheduler: for the daemon, and for people."""

from __future__ import annotations

from dataclasses import dataclass, field

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import from_json
from elaunch.rendezvous.store import Entry, Store
from elaunch.scheduler.service.documents import PREFIX, JobProgress, JobSpec, ScheduleDoc


@dataclass(slots=True)
class Stored:
    """The documents of a scheduler.

    Attributes:
        jobs: in the order of their coming; those of which a document is damaged are left out.
        progress: of those that a daemon has seen, by name.
        schedule: the newest one.
        leader: the daemon that leads; empty: none.
        cancelled: who wants jobs to end, by their names.
        revisions: of the last changes, by key without the scheduler's prefix.
        unreadable: why a key holds no document, by key.
    """

    jobs: list[JobSpec] = field(default_factory=list)
    progress: dict[str, JobProgress] = field(default_factory=dict)
    schedule: ScheduleDoc = field(default_factory=ScheduleDoc)
    leader: str = ""
    cancelled: dict[str, str] = field(default_factory=dict)
    revisions: dict[str, int] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)

    def progress_of(self, spec: JobSpec) -> JobProgress:
        """Returns how far a job is; one that no daemon has seen waits."""
        return self.progress.get(spec.name, JobProgress(attempt=spec.first_attempt))


def read_all(store: Store, scheduler: str) -> Stored:
    """Returns what stands in etcd; raises `StoreUnavailable` where that does not answer."""
    prefix, found = f"{PREFIX}{scheduler}/", Stored()
    for entry in store.range(prefix)[0]:
        key = entry.key.removeprefix(prefix)
        found.revisions[key] = entry.revision
        try:
            _take(found, key, entry)
        except ProtocolError as error:
            found.unreadable[entry.key] = str(error)
    damaged = {key.rpartition("/")[2] for key in found.unreadable}
    found.jobs = sorted((spec for spec in found.jobs if spec.name not in damaged), key=lambda spec: spec.submitted_t)
    return found


def _take(found: Stored, key: str, entry: Entry) -> None:
    what, _, name = key.partition("/")
    if what == "jobs":
        spec = from_json(JobSpec, entry.value)
        if spec.name != name:
            raise ProtocolError(f"the name of the job in it is {spec.name!r}")
        found.jobs.append(spec)
    elif what == "progress":
        found.progress[name] = from_json(JobProgress, entry.value)
    elif what == "schedule":
        found.schedule = from_json(ScheduleDoc, entry.value)
    elif what == "leader":
        found.leader = entry.value.decode(errors="replace")
    elif what == "cancel":
        found.cancelled[name] = entry.value.decode(errors="replace")
