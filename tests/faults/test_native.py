"""Gradients over a native group: workers are killed and stopped in it, and the others go on with the same step."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from elaunch.rendezvous.embedded import EmbeddedEtcd
from tests.devices import BACKENDS, DEVICES, WORKERS, on_gpu
from tests.helpers import Spawner, once_a_session, soak
from tests.jobs.watch import (
    SCRIPT,
    Node,
    assert_same,
    digests,
    elaunch,
    losses,
    wait_for,
    wait_for_members,
    wait_for_step,
)

STEPS = 40
JOB = ("--steps", str(STEPS), "--dropout", "0")


def natively(workers: int) -> tuple[str, ...]:
    """Flags of a job of so many workers with native groups."""
    return ("--standalone", f"--nproc-per-node={workers}", "--collectives=native")


def slow(workers: int) -> tuple[str, ...]:
    """Flags of the script: it waits for the others while there are fewer."""
    return ("--sleep", "0.005", "--crew", str(workers))


def swaps(node: Node) -> dict[int, int]:
    """By generation, the step from which on its members used their native group."""
    return {event["generation"]: event["step"] for event in node.events("collectives")}


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    "deaths",
    [
        ("1:10:compute", "0:20:passed", "3:30:half"),
        soak(("2:10:enter", "0:18:compute", "1:26:half", "3:34:passed")),
    ],
    ids=["three", "four"],
)
def test_workers_are_killed_while_the_others_sum_natively(
    spawn: Spawner, tmp_path: Path, deaths: tuple[str, ...]
) -> None:
    flags = [flag for death in deaths for flag in ("--die", death)]
    node = elaunch(spawn, tmp_path, *natively(4), script=(SCRIPT, *JOB, *slow(4), *flags), name="native")
    assert node.agent.wait(150) == 0, node.agent.tail()
    alone = elaunch(spawn, tmp_path, "--standalone", script=(SCRIPT, *JOB), name="alone")
    assert alone.agent.wait(60) == 0, alone.agent.tail()
    assert sorted(losses(node)) == list(range(STEPS))
    assert_same(losses(node), losses(alone), 1e-9)
    assert digests(node) == digests(alone)
    found = swaps(node)
    assert len(found) > len(deaths), f"each crew that lasts has a native group: {found}"
    assert min(found.values()) < 10


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("device", "deaths"),
    [("cpu", ("1:10:compute", "0:20:passed")), on_gpu("cuda", ("1:10:compute",))],  # where who comes may come late
)
def test_whoever_comes_gets_the_state_over_a_native_group(
    spawn: Spawner, tmp_path: Path, device: str, deaths: tuple[str, ...]
) -> None:
    workers = WORKERS[device]
    dying = [flag for death in deaths for flag in ("--die", death)]
    script: tuple[str | Path, ...] = (SCRIPT, *JOB, *slow(workers), *dying)
    over_groups = {"ELAUNCH_STATE_PATH": "native"}
    flags = natively(workers)
    node = elaunch(spawn, tmp_path, *flags, script=script, name="native", environment=over_groups, device=device)
    assert node.agent.wait(150) == 0, node.agent.tail()
    alone = elaunch(spawn, tmp_path, "--standalone", script=(SCRIPT, *JOB), name="alone", device="cpu")
    assert alone.agent.wait(60) == 0, alone.agent.tail()
    assert digests(node) == digests(alone)
    moves = [event for event in node.events("transition") if event["bytes_moved"]]
    assert len(moves) > len(deaths), "at the start, and after each death"
    assert {event["moved_over"] for event in moves} == {"native"}
    assert len(swaps(node)) > len(deaths), "the groups of the moves stay, for the sums"
    replacements = {f"node0/{death.partition(':')[0]}#1" for death in deaths}
    assert replacements < set(node.members())
    assert len(node.members()) == workers


HURT = Path(__file__).parents[1] / "jobs" / "native.py"
LAST = 60


def hurt(
    spawn: Spawner,
    folder: Path,
    *arguments: str,
    workers: int = 4,
    flags: tuple[str, ...] = (),
    device: str = "cpu",
) -> Node:
    """Runs tests/jobs/native.py to its end by a crew, and sees that it has trained as one worker alone does."""
    script: tuple[str | Path, ...] = (HURT, f"--steps={LAST}", f"--crew={workers}", "--ends-whole", *arguments)
    patient = "--hang-timeout=30"  # that a machine stands still costs nobody its place; a deadlock would
    node = elaunch(spawn, folder, *natively(workers), patient, *flags, script=script, name="crew", device=device)
    assert node.agent.wait(150) == 0, node.agent.tail()
    found, samples, norm = undisturbed(spawn, folder, device)
    assert sorted(losses(node)) == list(range(LAST))
    assert_same(losses(node), found, 1e-9)
    assert digests(node) == samples
    assert norms(node) == pytest.approx([norm] * workers, rel=1e-9)
    return node


def undisturbed(spawn: Spawner, folder: Path, device: str = "cpu") -> tuple[dict[int, float], list[str], float]:
    """Returns losses, samples and norm of the weights of an undisturbed run by one worker; done once a session."""

    def run() -> tuple[dict[int, float], list[str], float]:
        node = elaunch(spawn, folder, "--standalone", script=(HURT, f"--steps={LAST}"), name="alone", device=device)
        assert node.agent.wait(60) == 0, node.agent.tail()
        (norm,) = norms(node)
        return losses(node), digests(node), norm

    return once_a_session((HURT, LAST, device), run)


def norms(node: Node) -> list[float]:
    """Norms of the weights with which the workers ended."""
    return [float.fromhex(norm) for norm in re.findall(r"ended \S+ norm (\S+) after", node.agent.text())]


def carried(node: Node) -> dict[int, tuple[int, bool]]:
    """By step, the generation in which it committed, and whether its gradients were summed natively."""
    found = swaps(node)
    return {
        event["step"]: (event["generation"], event["step"] >= found.get(event["generation"], LAST))
        for event in node.events("step")
    }


MOMENTS = ("forward", "issue", "sum", "enter", "half")


def rotated(kind: str, turn: int, workers: int) -> tuple[str, ...]:
    """A fault for each worker, each at another moment; all turns have each worker at each moment.

    Three workers in a row meet one in a forward, one in a sum of backward, and one on the way to the commit or at it.
    """
    moments = [MOMENTS[(2 * slot + turn) % len(MOMENTS)] for slot in range(workers)]
    return tuple(f"{slot}:{8 + 12 * slot}:{moment}:{kind}" for slot, moment in enumerate(moments))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "turn", "device"),
    [("kill", 0, "cpu"), ("stop", 3, "cpu"), *(soak("kill", turn, "cpu") for turn in (1, 2, 3, 4))]
    + [soak("stop", turn, "cpu") for turn in (0, 1, 2, 4)]
    + [on_gpu("kill", 0, "cuda"), on_gpu("stop", 3, "cuda")],
)
def test_whoever_dies_or_stops_in_a_collective_the_others_are_freed_and_do_the_step_again(
    spawn: Spawner, tmp_path: Path, kind: str, turn: int, device: str
) -> None:
    workers = WORKERS[device]
    faults = (f"--fault={fault}" for fault in rotated(kind, turn, workers))
    node = hurt(spawn, tmp_path, *faults, workers=workers, device=device)
    ends = [event for event in node.events("worker_exited") if event.get("signal")]
    assert [event["worker"] for event in ends] == [f"node0/{slot}#0" for slot in range(workers)]
    assert {event["signal"] for event in ends} == {signal.SIGKILL}
    steps, generations = node.events("step"), node.events("generation")
    by_step = carried(node)
    for end in ends:
        after = next(event for event in steps if event["t"] > end["t"] and event["members"] == workers - 1)
        told = next(event for event in generations if event["generation"] == after["generation"])
        assert end["worker"] not in told["workers"]
        assert told["t"] <= after["t"]
        before, _ = by_step[after["step"] - 1]
        assert swaps(node)[before] <= after["step"], "it died in a native group, be it in the first step of that"
        assert not by_step[after["step"]][1], "the step is done again over links"


@pytest.mark.timeout(200)
@pytest.mark.parametrize("device", DEVICES)
def test_a_second_death_while_the_survivors_open_their_group_is_survived(
    spawn: Spawner, tmp_path: Path, device: str
) -> None:
    """They wait in the opening for the one that died, until the next generation ends it."""
    node = hurt(spawn, tmp_path, "--fault=0:8:sum:kill", "--fault=1:8:open:kill", device=device)
    first, second = (event for event in node.events("worker_exited") if event.get("signal"))
    assert (first["worker"], second["worker"]) == ("node0/0#0", "node0/1#0")
    (between,) = (
        event["generation"]
        for event in node.events("generation")
        if event["workers"] == [f"node0/{n}#0" for n in (1, 2, 3)]
    )
    found = swaps(node)
    assert between not in found, "its group was never used"
    assert min(found) < between < max(found)
    assert re.findall(r"groups that still open: (\d+)", node.agent.text()) == ["0"] * 4, "one still waits for the dead"
    assert {event["backend"] for event in node.events("collectives")} == {BACKENDS[device]}


@pytest.mark.timeout(300)
def test_whoever_dies_while_summands_travel_the_others_are_freed_and_do_the_step_again(
    spawn: Spawner, tmp_path: Path
) -> None:
    faults = ("--fault=2:8:issue:kill", "--fault=0:20:sum:kill", "--fault=3:32:sum:stop")
    node = hurt(spawn, tmp_path, *faults, flags=("--consistency=bitwise",))
    ends = [event["worker"] for event in node.events("worker_exited") if event.get("signal")]
    assert ends == ["node0/2#0", "node0/0#0", "node0/3#0"]
    assert len(swaps(node)) > len(ends), "each crew that lasts sums natively"


@pytest.mark.timeout(300)
def test_a_node_that_was_stopped_while_the_others_waited_natively_finds_that_it_is_out(
    etcd: EmbeddedEtcd, spawn: Spawner, tmp_path: Path
) -> None:
    conf = "--rdzv-conf=lease_ttl=5,last_call_timeout=60,attach_timeout=90,stop_timeout=600"
    flags = ("--nnodes=1:2", f"--rdzv-endpoint={etcd.endpoint}", "--rdzv-id=job", conf, "--collectives=native")
    script = (HURT, f"--steps={LAST}", "--crew=3", "--fault=1:8:issue:stop")
    a, b = (
        elaunch(spawn, tmp_path, *flags, f"--nproc-per-node={n}", f"--node-name={name}", script=script, name=name)
        for name, n in (("a", 1), ("b", 2))
    )
    wait_for_members([a, b], 3)
    pids = b.pids()
    stopped = psutil.Process(pids["b/1#0"])
    wait_for([a, b], lambda: stopped.status() == psutil.STATUS_STOPPED, 60, "a worker that is stopped in a sum")
    for pid in (b.agent.pid, pids["b/0#0"]):
        os.kill(pid, signal.SIGSTOP)
    wait_for(a, lambda: a.members() == ["a/0#0"], 60, "a generation without the node")
    wait_for_step(a, a.last_step() + 2)
    for pid in (*pids.values(), b.agent.pid):
        os.kill(pid, signal.SIGCONT)
    for node in (a, b):
        assert node.agent.wait(100) == 0, node.agent.tail()
    assert not {"b/0#0", "b/1#0"} & set(a.members())
    expected, samples, _ = undisturbed(spawn, tmp_path)
    assert_same(losses([a, b]), expected, 1e-9)
    assert digests([a, b]) == samples


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("device", "stand_in", "backend"), [("cpu", ("--device",), "device-like"), on_gpu("cuda", (), BACKENDS["cuda"])]
)
def test_no_worker_keeps_an_update_from_garbage(
    spawn: Spawner, tmp_path: Path, device: str, stand_in: tuple[str, ...], backend: str
) -> None:
    """What is cut off ends with garbage in the gradients, first since a worker dies, then where all live."""
    faults = ("--fault=2:8:sum:kill", "--break-at=1:30")
    node = hurt(spawn, tmp_path, *stand_in, *faults, workers=WORKERS[device], device=device)
    assert {event["backend"] for event in node.events("collectives")} == {backend}
    assert len([event for event in node.events("worker_exited") if event.get("signal")]) == 1
    broke = next(event for event in node.events("transition") if "link" in event["cause"])
    (step,) = map(int, re.findall(r"the connections break in step (\d+)", node.agent.text()))
    by_step = carried(node)
    before, _ = by_step[step - 1]
    assert swaps(node)[before] <= step
    assert by_step[step] == (broke["generation"], False)


@pytest.mark.timeout(200)
@pytest.mark.parametrize(
    ("device", "workers", "consistency", "rounding"),
    [("cpu", 2, "fast", 0.0), ("cpu", 4, "bitwise", 0.0)]
    + [on_gpu("cuda", 2, "fast", 1e-9), on_gpu("cuda", 4, "bitwise", 0.0)],
)
def test_links_and_native_groups_give_the_same_weights_at_whichever_steps_they_take_turns(
    spawn: Spawner, tmp_path: Path, device: str, workers: int, consistency: str, rounding: float
) -> None:
    """Sums of two numbers are the same in any order, so on the CPU two workers' are bitwise; more, where asked for."""
    swapped, links = tmp_path / "swapped", tmp_path / "links"
    for folder in (swapped, links):
        folder.mkdir()
    flags = ("--slow-policy=report", f"--consistency={consistency}")  # shares of other sizes are other sums
    turns = ("--native-from=10", "--native-from=40", "--relink-at=25")
    node = hurt(spawn, swapped, *turns, workers=workers, flags=flags, device=device)
    # A crew of one waits for no native group.
    by_links = ("--collectives=links", *flags)
    over_links = hurt(spawn, links, "--crew=1", workers=workers, flags=by_links, device=device)
    by_step = [was_native for _, (_, was_native) in sorted(carried(node).items())]
    assert by_step == [False] * 10 + [True] * 15 + [False] * 15 + [True] * 20
    assert norms(node) == pytest.approx(norms(over_links), rel=rounding, abs=0.0)
    assert losses(node) == pytest.approx(losses(over_links), rel=rounding, abs=0.0)


@pytest.mark.timeout(200)
def test_a_step_is_done_again_in_the_new_group_where_that_is_quicker_also_if_one_dies_while_all_wait_for_it(
    spawn: Spawner, tmp_path: Path
) -> None:
    node = hurt(spawn, tmp_path, "--awaits", "--fault=1:8:sum:kill", "--dies-opening=2:8")
    ends = [event for event in node.events("worker_exited") if event.get("signal")]
    assert [event["worker"] for event in ends] == ["node0/1#0", "node0/2#0"]
    natively, together = carried(node), [event for event in node.events("step") if event["members"] > 1]
    over_links = [event["step"] for event in together if not natively[event["step"]][1]]
    assert not over_links
    again = next(event for event in together if event["t"] > ends[1]["t"])
    assert again["members"] < WORKERS["cpu"]
    change = next(event for event in node.events("transition") if event["generation"] == again["generation"])
    assert change["interrupted"]
    assert change["first_step"]["over"] == "native"
    assert change["first_step"]["waited_s"] > 0
    assert (change["first_step"]["open_s"], change["first_step"]["links_s"]) == (30.0, 120.0)


@pytest.mark.timeout(200)
def test_where_one_member_cannot_open_its_group_links_serve_and_a_line_says_so(spawn: Spawner, tmp_path: Path) -> None:
    node = hurt(spawn, tmp_path, "--refuse=1", workers=2)
    assert node.events("collectives") == []
    told = [line for line in node.agent.text().splitlines() if "cannot be used" in line]
    assert [line.partition("gloo cannot")[2] for line in told] == [
        " be used in generation 2; links serve: no route to host"
    ]


AGAIN = """
import os
import time
import torch
from torch import nn
import elaunch
from elaunch.workers.comm.native import groups

job, first = elaunch.init(), os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
meet = groups.meet
if not first and job.rank == 1:  # the other one meets what is left of the former attempt, if anything
    groups.meet = lambda *arguments: (time.sleep(1), meet(*arguments))
net = nn.Linear(4, 2)
model, optimizer = job.wrap(net), torch.optim.SGD(net.parameters(), lr=0.01)
job.register(model=net, optimizer=optimizer)
samples = [(torch.randn(4), torch.randn(2)) for _ in range(64)]
for step in job.steps(samples, global_batch_size=8, micro_batch_size=2, steps=2000):
    for inputs, targets in step:
        nn.functional.mse_loss(model(inputs), targets).backward()
    optimizer.step()
    if job._member.native.backend:
        if first and job.rank == 1:
            raise SystemExit(3)
        if not first:
            print(f"attempt 2, rank {job.rank}: {job._member.native.backend}.", flush=True)
            job.stop()
"""


@pytest.mark.soak
@pytest.mark.timeout(150)
def test_the_next_attempt_of_torchrun_has_a_group_of_its_own(spawn: Spawner, tmp_path: Path) -> None:
    script = tmp_path / "again.py"
    script.write_text(AGAIN)
    run = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1")
    process = spawn.python(*run, script, env={"ELAUNCH_COLLECTIVES": "native"}, name="torchrun")
    assert process.wait(120) == 0, process.tail()
    for rank in range(2):
        assert f"attempt 2, rank {rank}: gloo." in process.text(), process.tail()
