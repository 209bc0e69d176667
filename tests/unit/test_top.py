"""What `elaunch ctl top` draws."""

from __future__ import annotations

import builtins
import io
import sys
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from elaunch.cli import run as cli
from elaunch.cli.top import MISSING, draw
from elaunch.rendezvous.membership import Result, Worker
from elaunch.rendezvous.observer import Documents
from tests.unit.test_ctl import GENERATION, MEMBER, NOW_T, STATUS, TRAINING, A, node

SLOW = '{"workers": {"b/0": {"speed": 0.5}}}'


def drawn(documents: Documents, width: int = 100, height: int = 60, encoding: str = "utf-8") -> list[str]:
    """The lines of a frame, without colours."""
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    terminal = Console(file=file, width=width, height=height)
    terminal.print(draw(documents, "run-17", "etcd:2379", NOW_T, terminal.options, height))
    file.flush()
    assert isinstance(file.buffer, io.BytesIO)
    lines = file.buffer.getvalue().decode(encoding).splitlines()
    assert all(len(line) <= width for line in lines)
    return [line.strip("│ ").rstrip() for line in lines]


def test_a_job_that_trains_is_shown_with_its_members_rate_recovery_and_slow_workers() -> None:
    lines = drawn(replace(TRAINING, status=STATUS, profile=SLOW))
    assert "job run-17 at etcd:2379: trains" in lines
    assert "2 members on 2 nodes, generation 5, attempt 0: b/0#3 joins" in lines
    assert "step 1,240 0.5 s ago   3.41 steps/s   loss 2.89614" in lines
    assert "last recovery 3 min ago, in 963 ms: worker a/0#0 was killed by SIGKILL" in lines
    (phases,) = [line for line in lines if line.startswith("■")]
    assert phases.split("  ") == [
        "■ detect 16.3 ms",
        "■ agree 129 ms",
        "■ plan 0.1 ms",
        "■ transfer 3.6 ms",
        "■ resume 814 ms",
    ]
    (bar,) = [line for line in lines if line.startswith("█")]
    assert 90 <= len(bar) <= 100
    assert "slow: b/0 takes 2.00 times as long as others" in lines
    assert [line.split() for line in lines[-2:]] == [
        ["0", "a/0#0", "member", "a:1"],
        ["1", "b/0#3", "member", "2.00", "times", "as", "long", "b:1"],
    ]


def test_of_many_workers_those_in_trouble_are_shown_first_and_all_fits_the_terminal() -> None:
    names = [f"n{number}" for number in range(400)]
    workers = tuple(Worker(f"{name}/0#0", name, 0, f"{name}:1") for name in names)
    nodes = tuple(node(name, 0, MEMBER) for name in names if name != "n377")
    documents = Documents(nodes, replace(GENERATION, workers=workers), status=STATUS)
    lines = drawn(documents, width=80, height=30)
    assert len(lines) <= 30
    assert lines[-1] == "and 385 more"
    (missing,) = [line.split() for line in lines if "not here" in line]
    assert missing == ["377", "n377/0#0", "not", "here", "n377:1"]
    assert len(drawn(documents, height=1000)) > 400


@pytest.mark.parametrize(
    "documents, told",
    [
        (Documents(), "its nodes meet"),
        (Documents((A,)), "its nodes meet"),
        (replace(TRAINING, result=Result(False, "a/0#0 raised ValueError")), "ended with a failure: a/0#0 raised"),
        (replace(TRAINING, unreadable=(("generation", "is no JSON"),)), "generation: is no JSON"),
        (replace(TRAINING, status=replace(STATUS, recovery=None, loss=None, steps_per_s=0.0)), "step 1,240 0.5 s ago"),
        (replace(TRAINING, status=replace(STATUS, has_diverged=True)), "the loss is not a finite number"),
    ],
)
def test_whatever_a_job_does_can_be_drawn(documents: Documents, told: str) -> None:
    for width in (20, 80):
        drawn(documents, width)
    assert any(told in line for line in drawn(documents, 120))


def test_a_terminal_that_knows_ascii_only_is_drawn_to_too() -> None:
    lines = drawn(replace(TRAINING, status=STATUS, profile=SLOW), encoding="ascii")
    assert any(line.startswith("* detect 16.3 ms") for line in lines)
    assert any(line.startswith("####") for line in lines)


def test_without_the_package_that_draws_a_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = builtins.__import__

    def lacks_rich(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == "rich":
            raise ModuleNotFoundError(name=name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", lacks_rich)
    assert cli.main(["ctl", "top", "--rdzv-endpoint=127.0.0.1:1"]) == 1
    assert capsys.readouterr().err == f"elaunch ctl: error: {MISSING}\n"
