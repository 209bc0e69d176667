"""Start elaunch jobs in tests, and read what their event logs say."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.devices import environment_on
from tests.helpers import LAUNCHER_MODULES, Spawned, Spawner, is_running, wait_until
from tests.jobs.forked import NAMESPACE

SCRIPT = Path(__file__).parent / "train.py"
START_S = 90.0  # four imports of torch on two loaded cores

Event = dict[str, Any]


@dataclass
class Node:
    """One agent, and its event log."""

    agent: Spawned
    log: Path

    def events(self, kind: str | None = None) -> list[Event]:
        """What it has logged so far, whole lines only."""
        if not self.log.exists():
            return []
        lines = self.log.read_bytes().split(b"\n")[:-1]
        events = [json.loads(line) for line in lines]
        return [event for event in events if kind in (None, event["kind"])]

    def pids(self) -> dict[str, int]:
        """Workers of this node that were started and have not ended."""
        started = {event["worker"]: event["pid"] for event in self.events("worker_started")}
        for event in self.events("worker_exited"):
            started.pop(event["worker"], None)
        return started

    def all_pids(self) -> list[int]:
        return [event["pid"] for event in self.events("worker_started")]

    def last_step(self) -> int:
        return max((event["step"] for event in self.events("step")), default=-1)

    def members(self) -> list[str]:
        """The newest training generation that this agent has heard of."""
        found: list[str] = []
        for event in self.events("generation"):
            if event["stage"] == "train":
                found = event["workers"]
        return found


_EAGER = "tests.jobs.preloaded"
WARM = f"{_EAGER},{LAUNCHER_MODULES}"
"""The modules of the fork server that most launchers come from (`Spawner.fork`); one for all tests of a process."""

_COMPILER = f"torch,torch._dynamo,torch.distributed.tensor.debug,{_EAGER}"

_TRANSFORMERS = "tests.jobs.preloaded_hf"

_LIGHTNING = f"{_COMPILER},lightning.pytorch,elaunch.integrations.lightning"

PRELOADS = {
    "train.py": _EAGER,
    "steps.py": _EAGER,
    "streams.py": _EAGER,
    "train_habits.py": _EAGER,
    "amp.py": _EAGER,
    "native.py": _EAGER,
    "layers.py": _EAGER,
    "planned.py": _EAGER,
    "plans.py": _EAGER,
    "early.py": _EAGER,
    "curves.py": _EAGER,
    "smallest_runtime.py": _EAGER,
    "c10d_calls.py": _COMPILER,
    "collectives.py": _EAGER,
    "hf.py": _TRANSFORMERS,
    "hf_accelerate.py": _TRANSFORMERS,
    "hf_trl.py": f"{_TRANSFORMERS},trl.trainer.sft_trainer,trl.trainer.dpo_trainer",
    "train_transformers.py": _TRANSFORMERS,
    "train_accelerate.py": _TRANSFORMERS,
    "dtensor.py": _COMPILER,
    "train_dtensor.py": _COMPILER,
    "train_gpt_hybrid.py": _COMPILER,
    "techniques.py": _COMPILER,
    "soak.py": _COMPILER,
    "elastic.py": _COMPILER,
    "elastic_top.py": _COMPILER,
    "lightning_fit.py": _LIGHTNING,
    "lightning_fabric.py": _LIGHTNING,
    "train_lightning.py": _LIGHTNING,
    "fsdp_hooks.py": _COMPILER,
    "megatron_gpt.py": f"{_COMPILER},megatron.core.models.gpt,megatron.core.optimizer",
}
"""What scripts import: a process that imports torch takes a second or two, and the tests run hundreds of workers."""


def elaunch(
    spawn: Spawner,
    folder: Path,
    *flags: str,
    script: Sequence[str | Path] = (SCRIPT,),
    name: str = "n0",
    warm: bool = True,
    environment: Mapping[str, str | None] | None = None,
    within: Sequence[str] = (),
    host: str = "",
    device: str = "",
) -> Node:
    """Start one agent with its event log in `folder`.

    `warm`: the launcher is a fork where it may be one, and workers of known scripts share their imports.
    `within`: what the command begins with, such as a shell that sets limits.
    `device`: the type of device that workers compute on, where the test has several; on a GPU nothing is a fork of the
    test's, so that workers begin there as they do for users.
    `host`: the network namespace of a host of `tests.netns`; the launcher is a fork that enters it.
    """
    log = folder / f"events-{name}.jsonl"
    preload = PRELOADS.get(Path(script[0]).name)
    env = (environment_on(device) if device else {}) | dict(environment or {})
    warm = warm and device != "cuda"
    arguments = ["--events", str(log), *flags, *map(str, script)]
    assert not host or (warm and preload), "only a fork enters a network namespace"
    if warm and preload:
        env |= {"ELAUNCH_WARM_START": "1", "ELAUNCH_PRELOAD": preload, NAMESPACE: host}
    # What LD_LIBRARY_PATH says counts only when a program begins.
    if warm and not within and "LD_LIBRARY_PATH" not in env:
        modules = f"{preload},{LAUNCHER_MODULES}" if preload else LAUNCHER_MODULES
        return Node(spawn.fork(modules, "elaunch", *arguments, env=env, name=name), log)
    return Node(spawn([*within, sys.executable, "-m", "elaunch", *arguments], name=name, env=env), log)


def wait_for(nodes: Node | Sequence[Node], condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Wait for a condition; fail with all logs, and at once if every agent has ended."""
    many = [nodes] if isinstance(nodes, Node) else list(nodes)

    def told() -> str:
        return what + "\n" + "\n".join(node.agent.tail() for node in many)

    def there() -> Any:
        # Asked before the condition: what an agent logged last then counts.
        ended = [node for node in many if node.agent.process.poll() is not None]
        value = condition()
        if not value and len(ended) == len(many):
            pytest.fail(f"every agent has ended, without {told()}")
        return value

    return wait_until(there, timeout_s, told)


def wait_for_step(nodes: Node | Sequence[Node], step: int, timeout_s: float = START_S) -> None:
    """Wait until a step has committed, whichever agent logs it."""
    many = [nodes] if isinstance(nodes, Node) else list(nodes)
    wait_for(many, lambda: max(node.last_step() for node in many) >= step, timeout_s, f"step {step}")


def wait_for_members(nodes: Node | Sequence[Node], count: int, timeout_s: float = START_S) -> None:
    """Wait until steps commit with that many members."""
    many = [nodes] if isinstance(nodes, Node) else list(nodes)

    def there() -> bool:
        steps = [event for node in many for event in node.events("step")]
        latest = max(steps, key=lambda event: (event["step"], event["t"]), default=None)
        announced = max(
            (node.events("generation")[-1:] for node in many), key=lambda last: [e["generation"] for e in last]
        )
        return (
            latest is not None
            and latest["members"] == count
            and [len(event["workers"]) for event in announced] == [count]
            and latest["generation"] == announced[0]["generation"]
        )

    wait_for(many, there, timeout_s, f"steps with {count} members")


def losses(nodes: Node | Sequence[Node]) -> dict[int, float]:
    """Loss by step; a step that was reported twice must have been the same one."""
    many = [nodes] if isinstance(nodes, Node) else list(nodes)
    found: dict[int, Event] = {}
    for event in sorted((e for node in many for e in node.events("step")), key=lambda event: event["t"]):
        before = found.get(event["step"])
        if before is not None:
            assert before["digest"] == event["digest"], f"step {event['step']} was done with other samples"
            assert before["loss"] == event["loss"], f"step {event['step']} committed twice: {before} {event}"
        found[event["step"]] = event
    assert sorted(found) == list(range(len(found))), f"steps are missing: {sorted(found)}"
    return {step: event["loss"] for step, event in found.items()}


def digests(nodes: Node | Sequence[Node]) -> list[str]:
    """Digest of the samples of each step, in order."""
    many = [nodes] if isinstance(nodes, Node) else list(nodes)
    found = {event["step"]: event["digest"] for node in many for event in node.events("step")}
    return [found[step] for step in sorted(found)]


def assert_same(found: dict[int, float], expected: dict[int, float], relative: float) -> None:
    """Both runs have the same steps, and losses that differ by rounding only."""
    assert len(found) == len(expected)
    for step, loss in found.items():
        assert abs(loss - expected[step]) <= relative * abs(expected[step]), (
            f"step {step}: loss {loss!r}, undisturbed {expected[step]!r}"
        )


def kill_node(node: Node) -> None:
    """End an agent as the loss of its machine would, and see that its workers go with it."""
    node.agent.signal(signal.SIGKILL)
    node.agent.wait(10)
    assert_gone(node.all_pids())


def assert_gone(pids: Sequence[int], timeout_s: float = 10.0) -> None:
    """No process of these is left after a while."""
    wait_until(lambda: not any(map(is_running, pids)), timeout_s, f"the end of {pids}")
