"""torchrun's agents beside elaunch's, for agents.py: rendezvous by c10d, and the restart after a worker's death."""

from __future__ import annotations

import os
import signal
import statistics
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.agents_crew import Crew, compile_member, cpu_s, wait_calm
from benchmarks.jobs import JobFailed
from tests.forks import Forked, ForkServer

MODULES = (
    "torch.distributed.run,torch.distributed.elastic.agent.server.local_elastic_agent,"
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend"
)
START_S, RESTART_S = 120.0, 90.0


def measure_torchrun(count: int, restarts: int, port: int) -> dict[str, list[float]]:
    """Starts so many agents of one worker each, the one that hosts the store last, and kills workers.

    Returns:
        seconds from the start of that last agent until all workers run; from the death of one until all run again; and
        processor seconds of all agents for the former.

    Raises:
        JobFailed: it does not come to that in time.
    """
    found: dict[str, list[float]] = {"rendezvous": [], "restart": [], "agents_cpu": []}
    with tempfile.TemporaryDirectory(prefix="e", dir="/tmp") as name:
        folder = Path(name)
        crew, program = Crew(folder / "crew"), compile_member(folder)
        env = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).resolve().parent.parent)}
        env |= {"TMPDIR": name, "OMP_NUM_THREADS": "1"}
        forks = ForkServer(MODULES, env)
        agents: list[Forked] = []
        try:
            for number in reversed(range(count)):
                arguments = [
                    f"--nnodes={count}",
                    "--nproc-per-node=1",
                    "--max-restarts=100",
                    "--rdzv-backend=c10d",
                    f"--rdzv-endpoint=127.0.0.1:{port}",
                    "--rdzv-id=agents",
                    f"--rdzv-conf=is_host={int(number == 0)},timeout=300,read_timeout=300,join_timeout=300",
                    "--no-python",
                    str(program),
                    str(folder / "crew"),
                ]
                if number == 0:
                    wait_calm([one.pid for one in agents], START_S)  # they wait for it by then
                    before_s = _cpu_s(agents)
                    begin_s = time.monotonic()
                log = folder / f"t{number}.log"
                agents.append(forks.start("torch.distributed.run", arguments, env, folder, log, log))
            _all_run(crew, count, 0, START_S, folder)
            found["rendezvous"].append(max(one.begun_s for one in crew.members.values()) - begin_s)
            found["agents_cpu"].append(_cpu_s(agents) - before_s)
            for _ in range(restarts):
                time.sleep(1.0)
                former, begin_s = crew.begun, time.monotonic()
                victim = next(one for one in psutil.Process(agents[0].pid).children() if one.name() == "member")
                victim.send_signal(signal.SIGKILL)
                _all_run(crew, count, former, RESTART_S, folder)
                found["restart"].append(max(one.begun_s for one in crew.members.values()) - begin_s)
        finally:
            crew.close()
            for agent in agents:
                agent.kill()
            forks.close()
    return found


def _all_run(crew: Crew, count: int, former: int, limit_s: float, folder: Path) -> None:
    """Waits until so many workers run that were started after so many others."""
    if not crew.wait(lambda members: len(members) == count and crew.begun >= former + count, limit_s):
        logs = sorted(folder.glob("t*.log"), key=lambda path: -path.stat().st_size)[:2]
        tail = "\n".join(path.read_text(errors="replace")[-600:] for path in logs)
        raise JobFailed(f"torchrun: {len(crew.members)} of {count} workers run after {limit_s:g} s\n{tail}")


def _cpu_s(agents: list[Forked]) -> float:
    return cpu_s(one.pid for one in agents)


def rows(count: int, found: dict[str, list[float]]) -> list[dict[str, str | int | float]]:
    """Returns the rows of a table."""
    return [
        {
            "torchrun_agents": count,
            "what": what,
            "count": len(values),
            "median": round(statistics.median(values), 3),
            "least": round(min(values), 3),
            "worst": round(max(values), 3),
        }
        for what, values in found.items()
        if values
    ]
