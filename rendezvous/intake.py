"""Tells which keys of a job are its own, whether they can be read, and what the user hears of those that cannot.

Everybody with access to the store can write under a job's prefix. What is not the job's is ignored, with one line.
What is the job's and cannot be read freezes the job: the leader decides nothing until it is written anew or deleted,
the last version that could be read counts, and training goes on with the present members. No input or output happens
here.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from elaunch.errors import ProtocolError
from elaunch.rendezvous.codec import from_json
from elaunch.rendezvous.membership import Generation, JobSize, NodeDoc, node_of
from elaunch.rendezvous.store import Entry

MOST_LINES = 100
"""Lines about strangers' keys that one agent prints; somebody may write them without end."""

_NAMES = {
    "config",
    "leader",
    "generation",
    "edit",
    "size",
    "spares",
    "result",
    "servers",
    "founding",
    "absent",
    "moved",
    "profile",
    "status",
    "waiting",
    "requests/plan",
    "requests/size",
}
_FOLDERS = ("nodes/", "checks/", "left/", "requests/drain/", "requests/deadlock/")
_NUMBER = r"#\d{1,15}"
_NODE = re.compile(r"[A-Za-z0-9._-]{1,255}")


def is_known(name: str) -> bool:
    """Returns whether a key, without the job's prefix, is one that elaunch writes."""
    return name in _NAMES or name.startswith(_FOLDERS)


def read_node(node: str, value: bytes, created: int) -> NodeDoc:
    """Reads the report of a node; raises `ProtocolError` where it is damaged, or not of the node that its key names."""
    doc = from_json(NodeDoc, value)
    if doc.node != node:
        raise ProtocolError(f"it is the report of a node {doc.node[:80]!a}")
    own = re.compile(f"{re.escape(node)}/(\\d{{1,4}}){_NUMBER}")
    for worker in doc.workers:
        match = own.fullmatch(worker.id)
        if match is None or int(match[1]) != worker.local_rank:
            raise ProtocolError(f"{worker.id[:80]!a} is no worker of local rank {worker.local_rank} of this node")
    _check_unique([worker.id for worker in doc.workers])
    return with_order(doc, created)


def read_reports(prefix: str, entries: Iterable[Entry]) -> dict[str, NodeDoc]:
    """Returns the reports of nodes among the entries of a job, by node, without what a stranger has put there."""
    reports, folder = {}, prefix + "nodes/"
    for entry in entries:
        if entry.key.startswith(folder):
            node = entry.key.removeprefix(folder)
            with suppress(ProtocolError):
                reports[node] = read_node(node, entry.value, entry.created)
    return reports


def read_generation(value: bytes) -> Generation:
    """Reads a generation; raises `ProtocolError` if it is damaged, or names of its workers and nodes do not agree."""
    generation = from_json(Generation, value)
    for worker in generation.workers:
        slot = f"{worker.node}/{worker.local_rank}"
        if worker.id != slot and not (worker.id.startswith(slot) and re.fullmatch(_NUMBER, worker.id[len(slot) :])):
            raise ProtocolError(f"{worker.id[:80]!a} is no worker of {slot[:80]!a}")
    _check_unique(generation.ids)
    return generation


def read_size(value: bytes) -> JobSize:
    """Reads a size; raises `ProtocolError` where it is damaged, or no size that a job can have."""
    size = from_json(JobSize, value)
    if not 1 <= size.min_nodes <= size.max_nodes:
        raise ProtocolError(f"{size.min_nodes} to {size.max_nodes} nodes are no size of a job")
    return size


def read_name(value: bytes) -> str:
    """Reads the name of a node, as `leader` holds it; raises `ProtocolError` where it is none."""
    name = value[:256].decode(errors="replace")
    if _NODE.fullmatch(name) is None:
        raise ProtocolError(f"expected the name of a node, found {value[:80]!r}")
    return name


def read_text(value: bytes) -> str:
    """Reads text that is only shown: on one line, without what a terminal acts on."""
    return "".join(char if char.isprintable() else "?" for char in value[:4000].decode(errors="replace"))


def is_ours(name: str, own: str, nodes: Collection[str], generation: Generation | None) -> bool:
    """Returns whether a damaged key is one that the job depends on.

    Args:
        name: of the key, without the job's prefix.
        own: name of the node that asks.
        nodes: names of those whose reports were read.
        generation: the present one.
    """
    if not name.startswith("nodes/"):
        return name in ("config", "leader", "generation", "size", "result")
    node = node_of(name.removeprefix("nodes/"))
    if name != f"nodes/{node}":
        return False
    return node == own or node in nodes or (generation is not None and node in generation.node_set)


@dataclass(slots=True)
class Intake:
    """Keeps which of the job's documents are damaged, and what the user was told.

    Attributes:
        prefix: of the job's keys, for messages.
        damaged: why each damaged document cannot be read, by its key without the prefix.
    """

    prefix: str
    damaged: dict[str, str] = field(default_factory=dict)
    _told: dict[str, int] = field(default_factory=dict)
    _lines: int = 0

    def ignore(self, name: str, revision: int, why: str) -> str:
        """Leaves out a stranger's key; returns a line for the user, empty if this revision was told before."""
        self.damaged.pop(name, None)
        if self._told.get(name) == revision or self._lines >= MOST_LINES:
            return ""
        self._told[name] = revision
        self._lines += 1
        last = "; further ones are ignored without a line" if self._lines == MOST_LINES else ""
        return f"{self.prefix}{name} is ignored: {why}{last}"

    def freeze(self, name: str, revision: int, why: str) -> str:
        """Notes a damaged document of the job; returns a line for the user, empty if this revision was told before."""
        is_new = name not in self.damaged
        self.damaged[name] = why
        if self._told.get(name) == revision or (not is_new and self._lines >= MOST_LINES):
            return ""
        self._told[name] = revision
        self._lines += not is_new
        key = self.prefix + name
        itself = " its node writes it again, if it is still here; else" if name.startswith("nodes/") else ""
        return (
            f"{key} is damaged: {why}. Training goes on with the present members, and nothing about them changes until "
            f"the key is written anew or deleted;{itself} delete it with `etcdctl del {key}`"
        )

    def accept(self, name: str) -> str:
        """Notes that a key can be read, or is gone; returns a line for the user if it was damaged before."""
        if self.damaged.pop(name, None) is None:
            return ""
        rest = f"; still damaged: {', '.join(self.damaged)}" if self.damaged else "; changes of the job go on"
        return f"{self.prefix}{name} is in order again{rest}"


def _check_unique(workers: Collection[str]) -> None:
    if len(set(workers)) != len(workers):
        raise ProtocolError("it names a worker twice")


def with_order(doc: NodeDoc, created: int) -> NodeDoc:
    """Attaches the revision at which the node joined, which orders nodes."""
    return replace(doc, order=created)
