"""Pictures of what benchmarks have measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import plots

ROWS: list[dict[str, Any]] = [
    {
        "SIGKILL -> next commit": name,
        "kills": 5,
        "step_ms": 100.0,
        "median_less_step_ms": median,
        "worst_less_step_ms": 2 * median,
    }
    for name, median in (("elaunch", 64.0), ("torchrun", 4477.0))
]
ROWS += [
    {
        "failure-free step": "elaunch",
        "compute": "real",
        "median_ms": 43.0,
        "least_run_median_ms": 39.0,
        "worst_run_median_ms": 47.0,
    },
    {"a node is lost": "a spare", "step_ms": 100.0, "next_commit_median_ms": 250.0, "whole_median_ms": 250.0},
    {"loss": "silent", "hosts": 3, "servers": 1, "went_on": 2, "least_s": 5.0, "median_s": 5.2, "worst_s": 5.4},
    {"model": "7B", "lost": 0, "policy": "before", "samples_per_s": 52.0},
    {"model": "7B", "lost": 1, "policy": "auto", "samples_per_s": 48.0},
    {"model": "7B", "lost": 1, "policy": "reroute", "samples_per_s": 40.0},
    {"of another kind": 1},
]


def test_each_kind_of_row_is_drawn_alike_each_time_into_a_small_file_with_its_words(tmp_path: Path) -> None:
    first, again = (plots.draw(ROWS, tmp_path / name) for name in ("first", "again"))
    names = ["recovery", "overhead", "spares", "lost-host", "lost-nodes"]
    assert [path.name for path in first] == [f"{name}.svg" for name in names]
    for one, other in zip(first, again, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert one.stat().st_size < 60_000
        ElementTree.parse(one)
    words = first[0].read_text()
    assert "torchrun" in words
    assert "recovery, median" in words
    assert "silent, 3 hosts, etcd on 1" in first[3].read_text()
    assert "before" in first[4].read_text()


def test_rows_come_from_files_and_files_without_any_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, nothing = tmp_path / "spares.json", tmp_path / "nothing.json"
    file.write_text(json.dumps({"machine": {}, "rows": ROWS[3:4], "targets": []}))
    nothing.write_text(json.dumps({"machine": {}, "rows": ROWS[-1:], "targets": []}))
    monkeypatch.setattr(sys, "argv", ["plots.py", str(file), str(nothing), f"--out={tmp_path}/out"])
    assert plots.main() == 0
    assert capsys.readouterr().err == f"{tmp_path}/out/spares.svg\n"
    monkeypatch.setattr(sys, "argv", ["plots.py", str(nothing), f"--out={tmp_path}/none"])
    assert plots.main() == 1
    assert list((tmp_path / "none").iterdir()) == []
