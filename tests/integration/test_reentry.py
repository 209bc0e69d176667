"""Elastic functions: entered again with the state of the last commit, whoever dies, joins, or has a part alone."""

from __future__ import annotations

import os
import re
import signal
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.devices import DEVICES, on_gpu
from tests.helpers import ROOT, Spawner, once_a_session, scaled, soak
from tests.jobs.watch import Node, elaunch, kill_node, wait_for, wait_for_step

SCRIPT = ROOT / "tests" / "jobs" / "elastic.py"
STEPS = 50  # two passes over 600 samples in steps of 24


def run(
    spawn: Spawner, folder: Path, *flags: str, workers: int = 3, name: str = "elastic", device: str = "cpu"
) -> Node:
    command = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=6")
    node = elaunch(spawn, folder, *command, script=(SCRIPT, *flags), name=name, device=device)
    assert node.agent.wait(scaled(100, 250)) == 0, node.agent.tail()
    return node


def in_turn(folder: Path) -> tuple[str, str]:
    """Flags: nobody is replaced before the others have entered again, as a replacement can be on a busy machine."""
    return ("--join-after", str(folder / "entered-again"))


def weights(node: Node) -> float:
    """Of the models at the end; those of all workers are the same."""
    found = set(re.findall(rf"{STEPS} steps, weights (\S+)\.", node.agent.text()))
    assert len(found) == 1, node.agent.tail()
    return float(found.pop())


def steps(node: Node) -> list[tuple[int, float, str]]:
    """Number, loss and samples of each step, as logged."""
    return [(event["step"], event["loss"], event["digest"]) for event in node.events("step")]


@dataclass(frozen=True)
class Course:
    """What a run went through, however its model is sharded: its steps as `steps` has them, and its weights."""

    steps: list[tuple[int, float, str]]
    weights: float


def undisturbed(spawn: Spawner, folder: Path, device: str = "cpu") -> Course:
    def make() -> Course:
        calm = run(spawn, folder, name="calm", device=device)
        return Course(steps(calm), weights(calm))

    return once_a_session(("re-entry", device), make)


def assert_as_undisturbed(node: Node, calm: Course) -> None:
    assert [(step, digest) for step, _, digest in steps(node)] == [(step, digest) for step, _, digest in calm.steps]
    for (step, loss, _), (_, expected, _) in zip(steps(node), calm.steps, strict=True):
        assert loss == pytest.approx(expected, rel=1e-8), f"step {step}"
    assert weights(node) == pytest.approx(calm.weights, rel=1e-8)
    assert {event["attempt"] for event in node.events("worker_started") if "attempt" in event} <= {0}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("workers", "flags", "device"),
    [(3, (), "cpu"), soak(3, ("--late",), "cpu"), soak(18, (), "cpu"), on_gpu(3, (), "cuda")],
)
def test_whoever_dies_the_others_enter_again_and_each_sample_is_used_once(
    spawn: Spawner, tmp_path: Path, workers: int, flags: tuple[str, ...], device: str
) -> None:
    """Also where there are so many that not all have links to all."""
    calm = undisturbed(spawn, tmp_path, device)
    assert [step for step, _, _ in calm.steps] == list(range(STEPS))
    deaths = ("--die", "1:7:step", "--die", "0:20:step", "--sleep", "0.02")
    flags = (*deaths, *flags, *in_turn(tmp_path))
    node = run(spawn, tmp_path, *flags, workers=workers, name="deaths", device=device)
    assert_as_undisturbed(node, calm)
    assert f"{workers - 1} members, step 7" in node.agent.text()


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_a_part_that_one_worker_has_alone_survives_it(spawn: Spawner, tmp_path: Path, device: str) -> None:
    calm = undisturbed(spawn, tmp_path, device)
    deaths = ("--die", "2:9:step", "--die", "0:30:step")
    node = run(spawn, tmp_path, "--shards", "3", *deaths, *in_turn(tmp_path), name="deaths", device=device)
    assert_as_undisturbed(node, calm)
    # The first member needs half of it, and has a third of its own and the one that it kept for the other end.
    assert node.events("restored")[0]["bytes_moved"] > 0


@pytest.mark.timeout(200)
def test_who_kept_the_part_of_one_that_died_may_die_before_the_next_commit(spawn: Spawner, tmp_path: Path) -> None:
    """Once all have bound, what each has is with another one again."""
    calm = undisturbed(spawn, tmp_path)
    deaths = ("--die", "1:9:step", "--die", "2:9:bound")
    node = run(spawn, tmp_path, "--shards", "3", *deaths, *in_turn(tmp_path), name="deaths")
    assert_as_undisturbed(node, calm)


@pytest.mark.timeout(200)
def test_shards_with_replicas_are_cut_anew_for_fewer_members(spawn: Spawner, tmp_path: Path) -> None:
    calm = undisturbed(spawn, tmp_path)
    node = run(spawn, tmp_path, "--shards", "2", "--die", "3:9:step", *in_turn(tmp_path), workers=4, name="deaths")
    assert_as_undisturbed(node, calm)
    assert "entry 2: 3 members" in node.agent.text()


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("shards", "workers", "deaths"),
    [
        (0, 3, ("1:7:step", "0:2:bind")),
        soak(0, 3, ("2:50:end",)),
        soak(4, 4, ("1:7:step", "3:2:bind")),
        soak(3, 3, ("1:7:step", "2:50:end")),
    ],
)
def test_a_death_on_the_way_back_or_at_the_end_is_one_more_change(
    spawn: Spawner, tmp_path: Path, shards: int, workers: int, deaths: tuple[str, ...]
) -> None:
    flags = [flag for death in deaths for flag in ("--die", death)]
    node = run(spawn, tmp_path, "--shards", str(shards), *flags, workers=workers)
    assert [step for step, _, _ in steps(node)] == list(range(STEPS))
    assert len(node.events("worker_started")) == workers + len(deaths)
    weights(node)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("flags", [("--overtaken", "2"), soak(("--overtaken", "0", "--direct", "0"))])
def test_nobody_waits_in_the_function_for_one_that_has_gone_on_to_the_next_generation(
    spawn: Spawner, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """A replacement joins as one worker is still on its way back: the others know from the links.

    Where votes go up a tree, and that worker is its root, nothing else would come to them.
    """
    node = run(spawn, tmp_path, "--die", "1:7:step", *flags, *in_turn(tmp_path), "--sleep", "0.02")
    assert node.agent.text().count("overtaken on the way into generation") == 1, node.agent.tail()
    assert "entry 2: 2 members" not in node.agent.text()  # the barrier before it ended with the news of the link
    assert [step for step, _, _ in steps(node)] == list(range(STEPS))
    weights(node)


@pytest.mark.timeout(200)
def test_a_part_that_died_with_its_guard_is_named_and_all_start_again(spawn: Spawner, tmp_path: Path) -> None:
    node = run(spawn, tmp_path, "--shards", "3", "--die", "1:7:step", "--die", "0:2:bind")
    assert "no surviving worker has all of" in node.agent.text()
    assert "all workers are started again (attempt 1)" in node.agent.text()
    weights(node)


@pytest.mark.timeout(200)
def test_a_part_that_died_with_its_guard_comes_from_the_checkpoint_of_the_script(
    spawn: Spawner, tmp_path: Path
) -> None:
    calm = undisturbed(spawn, tmp_path)
    deaths = ("--die", "1:13:step", "--die", "0:2:bind")
    node = run(spawn, tmp_path, "--shards", "3", *deaths, "--checkpoint", str(tmp_path / "own.pt"), name="deaths")
    (found,) = node.events("resume")
    assert found["step"] == 10
    assert found["again"] in (2, 3)  # a shipment may have been on its way to the guard when that died
    text = f"goes on from step 10, which the script's own load function brought; {found['again']} steps are done again"
    assert text in node.agent.text()
    again = 10 + found["again"]
    assert [step for step, _, _ in steps(node)] == [*range(again), *range(10, STEPS)]
    for first, second in zip(steps(node)[10:again], steps(node)[again : again + found["again"]], strict=True):
        assert first[2] == second[2]
        assert first[1] == pytest.approx(second[1], rel=1e-8)
    assert {event["attempt"] for event in node.events("worker_started") if "attempt" in event} <= {0}
    assert weights(node) == pytest.approx(calm.weights, rel=1e-8)


@pytest.mark.timeout(120)
def test_an_error_of_the_script_ends_it_with_its_traceback(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(
        spawn, tmp_path, "--standalone", "--nproc-per-node=2", "--max-restarts=0", script=(SCRIPT, "--raise-at", "5")
    )
    assert node.agent.wait(60) == 1, node.agent.tail()
    assert "ArithmeticError: as told, in step 5" in node.agent.text()


@pytest.mark.timeout(120)
def test_what_changes_while_it_is_copied_is_named(spawn: Spawner, tmp_path: Path) -> None:
    node = elaunch(
        spawn, tmp_path, "--standalone", "--nproc-per-node=1", "--max-restarts=0", script=(SCRIPT, "--change-late")
    )
    assert node.agent.wait(60) == 1, node.agent.tail()
    assert "model.module.0.weight changed after commit(), while it was copied" in node.agent.text()


@pytest.mark.timeout(120)
def test_under_torchrun_the_function_is_entered_once(spawn: Spawner) -> None:
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT), "--epochs", "1")
    process = spawn.python(*command, name="torchrun")
    assert process.wait(100) == 0, process.tail()
    assert process.text().count("entry 1: 2 members, step 0") == 2
    assert "25 steps, weights" in process.text()


TOP_LEVEL = """
import os, signal, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import elaunch
from tests.jobs import join_after

entered_again = Path(os.environ["ENTERED_AGAIN"])
join_after(entered_again)
state = elaunch.elastic_script()
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(nn.Linear(4, 1).double())
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
state.bind(model=model, optimizer=optimizer)
if state.entry > 1:
    entered_again.touch()
number = state.values.get("number", 0)
while number < 30:
    torch.manual_seed(number)
    model(torch.randn(8, 4).double()).square().mean().backward()
    if number == 9 and os.environ.get("ELAUNCH_WORKER") == "node0/1#0":
        os.kill(os.getpid(), signal.SIGKILL)
    optimizer.step()
    optimizer.zero_grad()
    number = state.values["number"] = number + 1
    state.commit()
print(f"after {number}: {model.module.weight.double().sum().item():.12f} {__name__}", flush=True)
sys.exit(0)
"""


BEGIN = "state = elaunch.elastic_script()\n"
IMPORTS, BODY = TOP_LEVEL.removesuffix("sys.exit(0)\n").split(BEGIN)
LOOP = f"""{IMPORTS}
def reset(name):
    left = dist.is_initialized()
    print(f"reset {{name}}: {{os.environ['RANK']}} of {{os.environ['WORLD_SIZE']}}, groups: {{left}}.", flush=True)

for state in elaunch.Elastic(reset=lambda: reset("always")):
    with state:
        state.on_reset(lambda: reset("once"))
{textwrap.indent(BODY, " " * 8)}"""


@pytest.mark.timeout(120)
def test_a_script_at_its_top_level_and_the_body_of_a_loop_are_run_again_in_the_same_process(
    spawn: Spawner, tmp_path: Path
) -> None:
    script = tmp_path / "elastic_top.py"
    ended = []
    for number, (workers, text) in enumerate(((1, TOP_LEVEL), (3, TOP_LEVEL), (3, LOOP))):
        script.write_text(text)
        flags = ("--standalone", f"--nproc-per-node={workers}", "--max-restarts=1")
        environment = {"ENTERED_AGAIN": str(tmp_path / f"entered-again-{number}")}
        node = elaunch(spawn, tmp_path, *flags, script=(script,), name=f"top{number}", environment=environment)
        assert node.agent.wait(60) == 0, node.agent.tail()
        assert [event["step"] for event in node.events("step")] == list(range(30))
        ended.append(set(re.findall(r"after 30: (\S+) __main__", node.agent.text())))
        assert len(node.events("worker_started")) == workers + (workers > 1)
    assert len(ended[0]) == 1
    assert ended[0] == ended[1] == ended[2]
    for name in ("always", "once"):
        after_death = re.findall(rf"reset {name}: (\d) of 2, groups: False\.", node.agent.text())
        assert sorted(after_death) == ["0", "1"], f"{name}: {node.agent.tail()}"


@pytest.mark.timeout(150)
def test_a_worker_that_is_stopped_in_a_collective_is_replaced(spawn: Spawner, tmp_path: Path) -> None:
    command = ("--standalone", "--nproc-per-node=3", "--max-restarts=3")
    node = elaunch(spawn, tmp_path, *command, script=(SCRIPT, "--sleep", "0.05"))
    wait_for(node, lambda: node.last_step() >= 5, 60, "some steps")
    pid = next(pid for worker, pid in node.pids().items() if worker.endswith("/1#0"))
    os.kill(pid, signal.SIGSTOP)
    assert node.agent.wait(100) == 0, node.agent.tail()
    assert [step for step, _, _ in steps(node)] == list(range(STEPS))
    weights(node)


@pytest.mark.timeout(150)
def test_a_worker_that_does_not_leave_its_function_is_replaced(spawn: Spawner, tmp_path: Path) -> None:
    calm = undisturbed(spawn, tmp_path)
    once = ("--once", str(tmp_path / "stuck"))
    node = run(spawn, tmp_path, "--die", "1:7:step", "--stuck", "2:7", *once, name="stuck")
    assert_as_undisturbed(node, calm)
    assert "in its function, in step 7, which it is to leave, asleep" in node.agent.text()


@pytest.mark.timeout(200)
def test_the_node_whose_agent_serves_the_store_of_process_groups_may_die(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    conf = "lease_ttl=2,last_call_timeout=30,attach_timeout=90"
    flags = ("--nnodes=1:2", "--nproc-per-node=1", f"--rdzv-endpoint={etcd.endpoint}", f"--rdzv-conf={conf}")
    nodes = {
        name: elaunch(
            spawn,
            tmp_path,
            *flags,
            f"--node-name={name}",
            script=(SCRIPT, "--sleep", "0.1", "--epochs", "1"),
            name=name,
        )
        for name in ("a", "b")
    }
    wait_for_step(list(nodes.values()), 4)
    first = nodes["a"].members()[0].partition("/")[0]  # MASTER_ADDR and MASTER_PORT are that of its agent
    kill_node(nodes.pop(first))
    (other,) = nodes.values()
    assert other.agent.wait(60) == 0, other.agent.tail()
    assert max(event["step"] for event in other.events("step")) == STEPS // 2 - 1
