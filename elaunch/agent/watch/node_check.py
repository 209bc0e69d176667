"""`--node-check`: what a node shows that it can do before it joins: a matmul on each device, an all-reduce with itself.

A process of its own computes, since the launcher imports no torch: `python -m elaunch.agent.watch.node_check SLOTS`
prints the figures as JSON. The rest here is the launcher's: it starts that process, leaves the figures for the peers in
the store (`checks/<node>` under the job's prefix) and judges this node by them, with a pure function.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from elaunch.errors import LaunchError, ProtocolError, StoreUnavailable
from elaunch.policy.stragglers.track import spread
from elaunch.rendezvous.codec import read_json
from elaunch.rendezvous.etcd_trouble import gave_up, with_cause
from elaunch.waits import Watched

if TYPE_CHECKING:
    from elaunch.rendezvous.store import Store

LIMIT_S = 180.0  # for all of it: importing torch from a cold network file system takes a minute
SETTLE_S = 1.0  # between two looks for the figures of peers that start at the same time
WAIT_S = 10.0  # for them
RETRY_S = 0.2
LEASE_S = 60.0  # of the figures, until the node has joined and keeps them itself

SIGMAS = 6.0
SLOW = 0.7  # of the peers' median, with at least three peers
SLOW_OF_FEW = 0.4  # with one or two
MANY = 3


# -- figures and the decision: pure -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Figures:
    """What a node can do: rates by name ("matmul cuda:0 NVIDIA H100"), the more the better; and what went wrong.

    Matmuls are in TFLOP/s, the all-reduce in GB/s of the reduced tensor.
    """

    rates: Mapping[str, float] = field(default_factory=dict)
    problems: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Returns its text, for the store."""
        text = json.dumps({"v": 1, "rates": dict(self.rates), "problems": list(self.problems)}, ensure_ascii=False)
        return text.encode(errors="replace").decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Figures:
        """Reads its text.

        Raises:
            ProtocolError: it is none. No text raises anything else.
        """
        try:
            found = read_json(text)
            if found["v"] != 1:
                raise ValueError("another version")
            rates, problems = found["rates"], found["problems"]
            if not (isinstance(problems, list) and all(isinstance(one, str) for one in problems)):
                raise ValueError("problems are no list of texts")
            for words in (*rates, *problems):
                words.encode()  # half of a surrogate pair cannot be written again
            return cls({name: _rate(rate) for name, rate in rates.items()}, tuple(problems))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            why = str(error).encode("ascii", "backslashreplace").decode()[:200]
            raise ProtocolError(f"expected the figures of a node check, found {text[:80]!a} ({why})") from error

    def text(self) -> str:
        """Returns the figures in a line for the user."""
        return ", ".join(f"{name} {rate:.3g} {unit(name)}" for name, rate in self.rates.items())


def _rate(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ValueError("a rate is no number")
    return float(value)


def unit(name: str) -> str:
    """Returns the unit of a rate."""
    return "TFLOP/s" if name.startswith("matmul") else "GB/s"


def kind_of(name: str) -> str:
    """Returns what a rate is compared with: "matmul cuda:0 X" is one of "matmul X", on any device of that model."""
    what, _, rest = name.partition(" ")
    return f"{what} {rest.partition(' ')[2]}" if what == "matmul" else name


def why_refused(own: Figures, peers: Sequence[Figures]) -> str:
    """Returns why this node should not join, with the figures; empty if it may.

    A rate is too low when it is below a part of the median over the peers' rates of the same kind (SLOW; SLOW_OF_FEW
    where these are of fewer than three nodes), and by more than SIGMAS robust standard deviations. A peer that failed
    its own check is no measure.
    """
    if own.problems:
        return "; ".join(own.problems)
    reasons = []
    sound = [peer for peer in peers if not peer.problems]
    for name, rate in own.rates.items():
        by_node = [[value for other, value in peer.rates.items() if kind_of(other) == kind_of(name)] for peer in sound]
        by_node = [values for values in by_node if values]
        if not by_node:
            continue
        values = [value for values in by_node for value in values]
        middle, deviation = statistics.median(values), spread(values)
        part = SLOW if len(by_node) >= MANY else SLOW_OF_FEW
        if rate < part * middle and rate < middle - SIGMAS * deviation:
            nodes = "1 peer" if len(by_node) == 1 else f"{len(by_node)} peers"
            reasons.append(
                f"{name}: {rate:.3g} {unit(name)}, where the median of {nodes} is {middle:.3g} (robust deviation "
                f"{deviation:.2g}); at least {part:.0%} of the median is expected"
            )
    return "; ".join(reasons)


# -- the launcher's part ----------------------------------------------------------------------------------------------


def measure(
    slots: int,
    environment: Mapping[str, str],
    limit_s: float = LIMIT_S,
    say: Callable[[str], None] = lambda line: None,
) -> Figures:
    """Lets a process of its own find out what this node can do; whatever goes wrong with it is in the figures."""
    command = [environment.get("PYTHON_EXEC") or sys.executable, "-m", "elaunch.agent.watch.node_check", str(slots)]
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
    try:
        done = _run(command, {**environment, "PYTHONPATH": path}, limit_s, say)
    except subprocess.TimeoutExpired:
        return Figures(problems=(f"the check was not done after {limit_s:g} s: a device or the network hangs",))
    except OSError as error:
        return Figures(problems=(f"{command[0]} cannot be run: {error.strerror}",))
    try:
        return Figures.from_json(done.stdout.splitlines()[-1] if done.stdout else "")
    except ProtocolError:
        how = f"code {done.returncode}" if done.returncode >= 0 else f"signal {-done.returncode}"
        output = (done.stderr or done.stdout).strip().splitlines()
        return Figures(problems=(f"the check ended with {how}: {output[-1] if output else 'no output'}",))


def _run(
    command: list[str], environment: Mapping[str, str], limit_s: float, say: Callable[[str], None]
) -> subprocess.CompletedProcess[str]:
    """Runs a program, and says now and then that it runs.

    Raises:
        OSError: it cannot be run.
        subprocess.TimeoutExpired: it was not done in time, and was killed.
    """
    watched, end_s = Watched(say), time.monotonic() + limit_s
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:  # type: ignore[call-overload]
        while True:
            left_s = end_s - time.monotonic()
            try:
                output, errors = process.communicate(timeout=max(0.0, min(1.0, left_s)))
                return subprocess.CompletedProcess(command, process.returncode, output, errors)
            except subprocess.TimeoutExpired:
                if left_s <= 0:
                    process.kill()
                    raise
                watched.tell("the check of this node", end_s - time.monotonic())
            except BaseException:
                process.kill()
                raise


def compare(store: Store, prefix: str, node: str, own: Figures, nodes: int, wait_s: float = WAIT_S) -> str:
    """Leaves the figures for the peers, and judges this node by theirs.

    Args:
        store: of the job.
        prefix: of its documents.
        node: name of this node.
        own: its figures.
        nodes: how many the job may have: where that many have left theirs, there are no more to wait for.
        wait_s: how long to wait for others that start at the same time.

    Returns:
        As `why_refused`. The figures of a node that is refused are taken back.
    """
    key = f"{prefix}checks/{node}"
    lease = store.grant(LEASE_S)
    if not own.problems:
        store.put(key, own.to_json().encode(), lease)
    end_s = time.monotonic() + (0.0 if own.problems else wait_s)
    while True:
        peers = [entry.value for entry in store.range(f"{prefix}checks/")[0] if entry.key != key]
        figures = _readable(peers)
        if len(figures) >= min(MANY, nodes - 1) or time.monotonic() >= end_s:
            break
        time.sleep(min(SETTLE_S, max(0.0, end_s - time.monotonic())))
    reason = why_refused(own, figures)
    if reason:
        store.revoke(lease)
    return reason


def _readable(values: Sequence[bytes]) -> list[Figures]:
    """Reads the figures of peers; what a stranger has written is no measure."""
    found = []
    for value in values:
        with contextlib.suppress(ProtocolError):
            found.append(Figures.from_json(value))
    return found


def check(
    open_store: Callable[[], Store],
    prefix: str,
    node: str,
    slots: int,
    nodes: int,
    environment: Mapping[str, str],
    connect_s: float,
    say: Callable[[str], None] = lambda line: None,
    hosted: bool = False,
) -> Figures:
    """Checks this node before it joins.

    Args:
        open_store: connects to the store of the job.
        prefix, node, nodes: as in `compare`.
        slots, environment: of its workers.
        connect_s: how long to try to reach the store, which another node may be about to start.
        say: tells the user what is waited for.
        hosted: whether a node of the job hosts the store.

    Returns:
        Its figures, which the node keeps in the store from now on.

    Raises:
        LaunchError: it is refused, with the figures; or the store cannot be reached.
    """
    own = measure(slots, environment, say=say)
    watched, end_s = Watched(say), time.monotonic() + connect_s
    while True:
        try:
            with contextlib.closing(open_store()) as store:
                reason = compare(store, prefix, node, own, nodes)
            break
        except StoreUnavailable as error:
            if time.monotonic() >= end_s:
                raise StoreUnavailable(gave_up(error, connect_s, hosted)) from error
            what = f"the rendezvous, for the figures of other nodes: {with_cause(error, hosted)}"
            watched.tell(what, end_s - time.monotonic())
            time.sleep(RETRY_S)
    if reason:
        raise LaunchError(f"--node-check: node {node} does not join: {reason}")
    return own


# -- the process that computes ----------------------------------------------------------------------------------------

CPU_SIDE = 512
DEVICE_SIDE = 4096
REPEATS = 7  # of which the best counts: what else runs for a moment is not the node's fault
REDUCED_BYTES = 8 << 20
REDUCE_S = 60.0


def _matmuls(slots: int) -> dict[str, float]:
    """TFLOP/s of each device that the workers would use, and of the CPU where there is none."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return {"matmul cpu float32": _matmul("cpu", CPU_SIDE, torch.float32)}
    rates = {}
    for index in range(min(slots, torch.accelerator.device_count())):
        device = f"{accelerator.type}:{index}"
        module = torch.get_device_module(accelerator)
        model = module.get_device_name(index) if hasattr(module, "get_device_name") else accelerator.type
        rates[f"matmul {device} {model}"] = _matmul(device, DEVICE_SIDE, torch.bfloat16)
    return rates


def _matmul(device: str, side: int, dtype: Any) -> float:
    """The best of some matmuls of ones by 1/8, each checked: every element of a product is side / 8, unrounded.

    Raises:
        ArithmeticError: a product is wrong.
    """
    import torch

    one = torch.ones(side, side, dtype=dtype, device=device)
    eighth = torch.full((side, side), 0.125, dtype=dtype, device=device)
    best_s = float("inf")
    for _ in range(REPEATS):
        _synchronize(device)
        began_s = time.perf_counter()
        product = one @ eighth
        _synchronize(device)
        best_s = min(best_s, time.perf_counter() - began_s)
        wrong = int((product != side / 8).sum().item())
        if wrong:
            raise ArithmeticError(f"{wrong} of {side * side} elements of a product on {device} are wrong")
    return 2 * side**3 / best_s / 1e12


def _synchronize(device: str) -> None:
    import torch

    if device != "cpu":
        torch.accelerator.synchronize(device)


def _all_reduce() -> float:
    """GB/s of an all-reduce between two processes of this node, over its network stack, checked.

    Raises:
        ArithmeticError: the sum is wrong.
        RuntimeError: they cannot reach each other.
    """
    import torch.distributed as dist

    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    other = subprocess.Popen([sys.executable, "-m", "elaunch.agent.watch.node_check", "--peer", str(server.port)])
    try:
        return _reduce(server, 0)
    finally:
        try:
            other.wait(10)
        except subprocess.TimeoutExpired:
            other.kill()
            other.wait()


def _reduce(store: Any, rank: int) -> float:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    group: Any = dist.ProcessGroupGloo(store, rank, 2, timedelta(seconds=REDUCE_S))
    best_s = float("inf")
    for repeat in range(REPEATS):
        tensor = torch.full((REDUCED_BYTES // 4,), float(rank + 1 + repeat))
        began_s = time.perf_counter()
        group.allreduce([tensor]).wait()
        best_s = min(best_s, time.perf_counter() - began_s)
        if not bool((tensor == 3 + 2 * repeat).all()):
            raise ArithmeticError("the sum of an all-reduce over the loopback interface is wrong")
    return REDUCED_BYTES / best_s / 1e9


def main(arguments: Sequence[str]) -> int:
    """Computes, and prints the figures."""
    if arguments[0] == "--peer":
        from datetime import timedelta

        import torch.distributed as dist

        _reduce(dist.TCPStore("127.0.0.1", int(arguments[1]), timeout=timedelta(seconds=REDUCE_S)), 1)
        return 0
    rates: dict[str, float] = {}
    problems = []
    checks: dict[str, Callable[[], dict[str, float]]] = {
        "matmul": lambda: _matmuls(int(arguments[0])),
        "all-reduce": lambda: {"all-reduce loopback": _all_reduce()},
    }
    for what, run in checks.items():
        try:
            rates |= run()
        except Exception as error:  # whatever a sick device or driver brings about
            problems.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}")
    print(Figures(rates, tuple(problems)).to_json(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
