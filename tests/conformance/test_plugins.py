"""Entry points of other packages, which a flag names: where logs go, and how nodes meet."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.conformance.conftest import JOBS, WORKER, Launcher, read_records
from tests.helpers import ROOT, find_free_port

ENTRY_POINTS = "[torchrun.logs_specs]\nmine = plug:Specs\n[torchrun.handlers]\nmine = plug:handler\n"

PLUG = """
import os
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest

class Specs(DefaultLogsSpecs):
    def reify(self, envs):
        folder = os.environ["PLUG_FOLDER"]
        for rank, variables in envs.items():
            variables["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, f"{rank}-error.json")
            variables["PLUG_SAYS"] = "rank {RANK} of {WORLD_SIZE}, {LOCAL_RANK} here".format(**variables)
        path = lambda rank, name: os.path.join(folder, f"{rank}-{name}")
        return LogsDest(
            {rank: path(rank, "out") for rank in envs},
            {rank: path(rank, "err") for rank in envs},
            {rank: path(rank, "out") for rank in envs if rank == 1},
            {},
            {rank: path(rank, "error.json") for rank in envs},
            "",
            "",
        )

def handler():
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
    from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

    def create(params):
        open(os.path.join(os.environ["PLUG_FOLDER"], "used"), "w").close()
        backend, store = create_backend(params)
        made = create_handler(store, backend, params)
        made.get_backend = lambda: "mine"
        return made

    return create
"""


@pytest.fixture
def plugged(tmp_path: Path) -> dict[str, str | None]:
    """An environment with a package that has the entry points."""
    metadata = tmp_path / "site" / "plug-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    (metadata.parent / "plug.py").write_text(PLUG)
    folder = tmp_path / "plug"
    folder.mkdir()
    paths = os.pathsep.join((str(ROOT), str(metadata.parent)))
    return {"PYTHONPATH": paths, "PLUG_FOLDER": str(folder)}


def test_a_named_class_says_where_logs_go(launch: Launcher, tmp_path: Path, plugged: dict[str, str | None]) -> None:
    flags = ("--logs-specs", "mine", "--nproc-per-node", 2)
    ended = launch.run(*flags, WORKER, tmp_path, "*=say:out+cry:err", env=plugged)
    assert ended.code == 0
    folder = tmp_path / "plug"
    assert [(folder / f"{rank}-{name}").read_text() for rank in (0, 1) for name in ("out", "err")] == [
        "out\n",
        "err\n",
    ] * 2
    assert "[default1]:out" in ended.output
    assert "[default0]:out" not in ended.output
    records = read_records(tmp_path)
    assert [records[rank].environment["PLUG_SAYS"] for rank in (0, 1)] == ["rank 0 of 2, 0 here", "rank 1 of 2, 1 here"]
    assert [records[rank].environment["TORCHELASTIC_ERROR_FILE"] for rank in (0, 1)] == [
        str(folder / f"{rank}-error.json") for rank in (0, 1)
    ]


def test_a_class_that_fails_is_named(launch: Launcher, tmp_path: Path, plugged: dict[str, str | None]) -> None:
    broken = {**plugged, "PLUG_FOLDER": None}
    ended = launch.run("--logs-specs", "mine", WORKER, tmp_path, env=broken)
    assert ended.code == 1
    assert "KeyError: 'PLUG_FOLDER'" in ended.stderr
    assert not read_records(tmp_path)


def test_a_class_that_nobody_has_registered_is_named(launch: Launcher, tmp_path: Path) -> None:
    ended = launch.run("--logs-specs", "no-such-specs", WORKER, tmp_path)
    assert ended.code == 1
    assert "no-such-specs" in ended.stderr or "torchrun.logs_specs" in ended.stderr


def test_a_named_handler_brings_the_nodes_together(
    launch: Launcher, tmp_path: Path, plugged: dict[str, str | None]
) -> None:
    endpoint = f"localhost:{find_free_port()}"
    flags = ("--rdzv-backend", "mine", "--rdzv-endpoint", endpoint, "--nproc-per-node", 2)
    ended = launch.run(*flags, JOBS / "worker.py", tmp_path, "*=say:out", env=plugged, limit_s=90.0)
    assert ended.code == 0
    assert ended.stdout == "out\nout\n"
    assert (tmp_path / "plug" / "used").exists()
    assert len(read_records(tmp_path)) == 2
