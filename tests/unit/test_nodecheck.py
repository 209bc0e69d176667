"""The check of a node before it joins: what is refused, and what its peers are told."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elaunch.agent.watch.node_check import SLOW, SLOW_OF_FEW, Figures, check, compare, measure, why_refused
from elaunch.errors import LaunchError, ProtocolError, StoreUnavailable
from elaunch.rendezvous.memory import MemoryStore
from tests.helpers import scaled
from tests.unit.test_membership import HOSTILE, mutated

H100 = "matmul cuda:{} NVIDIA H100"


def node(*tflops: float, model: str = H100, reduces: float = 5.0) -> Figures:
    rates = {model.format(index): rate for index, rate in enumerate(tflops)}
    return Figures({**rates, "all-reduce loopback": reduces})


def test_a_node_that_is_as_fast_as_its_peers_may_join() -> None:
    peers = [node(600, 610), node(590, 605), node(580, 620)]
    assert why_refused(node(585, 600), peers) == ""
    assert why_refused(node(585, 600), []) == ""


def test_one_slow_device_is_named_with_the_figures() -> None:
    peers = [node(600, 610), node(590, 605), node(580, 620)]
    assert why_refused(node(600, 310), peers) == (
        "matmul cuda:1 NVIDIA H100: 310 TFLOP/s, where the median of 3 peers is 602 (robust deviation 15); at least "
        "70% of the median is expected"
    )


def test_a_slow_all_reduce_is_found_too() -> None:
    reason = why_refused(node(600, reduces=1.0), [node(600), node(600), node(600)])
    assert reason.startswith("all-reduce loopback: 1 GB/s, where the median of 3 peers is 5")


def test_devices_of_another_model_are_no_measure() -> None:
    assert why_refused(node(300), [node(600, model="matmul cuda:{} NVIDIA H200")] * 5) == ""


def test_few_peers_are_a_weak_measure() -> None:
    assert why_refused(node(300), [node(600)]) == ""
    assert "the median of 1 peer is 600" in why_refused(node(200), [node(600)])
    assert why_refused(node(300), [node(600)] * 3) != ""


def test_peers_that_failed_are_no_measure() -> None:
    failed = Figures({H100.format(0): 1e9}, ("all-reduce: it hangs",))
    assert why_refused(node(600), [failed] * 3) == ""


def test_problems_are_the_reason_whatever_the_peers_do() -> None:
    assert why_refused(Figures(problems=("matmul: OutOfMemoryError", "x")), []) == "matmul: OutOfMemoryError; x"


@given(st.lists(st.floats(100, 1000), min_size=1, max_size=20), st.floats(1, 2000))
def test_a_node_is_refused_only_if_it_is_far_below_the_median(peers: list[float], own: float) -> None:
    refused = bool(why_refused(node(own), [node(rate) for rate in peers]))
    part = SLOW if len(peers) >= 3 else SLOW_OF_FEW
    if own >= part * median(peers) or own >= min(peers):
        # Nobody slower than a peer that was taken is turned away for it, unless that peer was an exception.
        assert not refused or own < part * median(peers)
    if len(set(peers)) == 1:
        assert refused == (own < part * peers[0])


@given(st.dictionaries(st.text(max_size=9), st.floats(0, 1e9)), st.lists(st.text(max_size=9)))
def test_figures_survive_the_store(rates: dict[str, float], problems: list[str]) -> None:
    figures = Figures(rates, tuple(problems))
    assert Figures.from_json(figures.to_json()) == figures


@pytest.mark.parametrize(
    "text", ["", "7", "{}", '{"v":2,"rates":{},"problems":[]}', '{"v":1,"rates":[],"problems":[]}']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="expected the figures of a node check"):
        Figures.from_json(text)


@pytest.mark.parametrize("value", HOSTILE)
@pytest.mark.parametrize(
    "form", [b"%s", b'{"v":%s}', b'{"v":1,"rates":{"x":%s},"problems":[]}', b'{"v":1,"rates":{},"problems":[%s]}']
)
def test_hostile_text_is_refused(form: bytes, value: bytes) -> None:
    try:
        read = Figures.from_json(form % value)
    except ProtocolError:
        return
    assert Figures.from_json(read.to_json()) == read


@settings(deadline=None, derandomize=True, max_examples=scaled(100, 400))
@given(mutated([node(600, 610).to_json().encode(), Figures(problems=("it hangs",)).to_json().encode()]))
def test_whatever_comes_is_figures_or_a_protocol_error(data: bytes) -> None:
    try:
        read = Figures.from_json(data)
    except ProtocolError:
        return
    assert Figures.from_json(read.to_json()) == read


@pytest.mark.parametrize("rate", ["1e999", "NaN", "9" * 400, "-1", "true", '"7"', "null"])
def test_a_rate_is_a_finite_number(rate: str) -> None:
    with pytest.raises(ProtocolError, match="expected the figures of a node check"):
        Figures.from_json(f'{{"v":1,"rates":{{"x":{rate}}},"problems":[]}}')


# -- the process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("echo 'CUDA error: uncorrectable ECC error' >&2; exit 3", "ended with code 3: CUDA error: uncorrectable ECC"),
        ("kill -SEGV $$", "ended with signal 11: no output"),
        ("echo hello", "ended with code 0: hello"),
        ("sleep 60", "was not done after 1 s: a device or the network hangs"),
    ],
)
def test_a_process_that_fails_is_a_problem(tmp_path: Path, body: str, problem: str) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec 2>&1\n{body.replace('sleep', 'exec sleep')}\n")
    program.chmod(0o755)
    figures = measure(1, {"PYTHON_EXEC": str(program), "PATH": "/usr/bin:/bin"}, 1.0 if "sleep" in body else 60.0)
    assert figures.rates == {}
    assert problem in figures.problems[0]


def test_a_python_that_is_not_there_is_a_problem() -> None:
    (problem,) = measure(1, {"PYTHON_EXEC": "/no/such/python"}).problems
    assert problem == "/no/such/python cannot be run: No such file or directory"


# -- with the peers ---------------------------------------------------------------------------------------------------


def test_figures_are_left_for_the_peers_and_taken_back_by_a_node_that_is_refused() -> None:
    server = MemoryStore()
    store = server.session()
    for name in ("a", "b", "c"):
        assert compare(store, "/elaunch/job/", name, node(600), 4, wait_s=0.0) == ""
    assert [entry.key for entry in store.range("/elaunch/job/checks/")[0]] == [
        f"/elaunch/job/checks/{name}" for name in "abc"
    ]
    server.put("/elaunch/job/checks/ghost", b"[" * 100_000)  # is no measure, and no reason to refuse anybody
    assert "100 TFLOP/s, where the median of 3 peers is 600" in compare(store, "/elaunch/job/", "d", node(100), 4)
    assert compare(store, "/elaunch/job/", "e", Figures(problems=("it hangs",)), 4) == "it hangs"
    assert len(store.range("/elaunch/job/checks/")[0]) == 4


def test_a_store_that_is_not_there_yet_is_tried_again_and_the_refusal_names_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("elaunch.waits.WAITED_S", 0.01)
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho '" + node(600).to_json() + "'\n")
    program.chmod(0o755)
    environment = {"PYTHON_EXEC": str(program), "PATH": "/usr/bin:/bin"}
    server, tries = MemoryStore(), []

    def open_store() -> object:
        tries.append(1)
        if len(tries) < 3:
            raise StoreUnavailable("etcd is not there")
        return server.session()

    said: list[str] = []
    found = check(open_store, "/p/", "a", 1, 1, environment, 60.0, said.append, hosted=True)  # type: ignore[arg-type]
    assert found == node(600)
    assert len(tries) == 3
    ended = "has not started it yet or cannot be reached from here, or the job has ended, and its rendezvous with it"
    what = rf"the rendezvous, for the figures of other nodes: etcd is not there; the node .* {ended}"
    assert re.fullmatch(rf"waiting for 0 s, 60 s left: {what}", said[0])
    tries.clear()
    with pytest.raises(StoreUnavailable) as raised:
        check(open_store, "/p/", "a", 1, 1, environment, 0.0, hosted=True)  # type: ignore[arg-type]
    assert str(raised.value).startswith("etcd is not there; gave up after 0 s (--rdzv-conf connect_timeout=SECONDS")
    assert str(raised.value).endswith(ended)
    tries.clear()
    with pytest.raises(StoreUnavailable, match=r"is an etcd v3 server running there, and reachable"):
        check(open_store, "/p/", "a", 1, 1, environment, 0.0)  # type: ignore[arg-type]
    program.write_text("#!/bin/sh\necho sick >&2\nexit 1\n")
    with pytest.raises(LaunchError, match=r"^--node-check: node b does not join: the check ended with code 1: sick$"):
        check(server.session, "/p/", "b", 1, 1, environment, 0.0)


@pytest.mark.job
def test_this_machine_passes_its_own_check() -> None:
    """Torch's own matmul and all-reduce, in processes of their own."""

    figures = measure(1, {**os.environ, "PYTHON_EXEC": sys.executable, "CUDA_VISIBLE_DEVICES": ""})
    assert figures.problems == ()
    assert sorted(figures.rates) == ["all-reduce loopback", "matmul cpu float32"]
    assert min(figures.rates.values()) > 0
