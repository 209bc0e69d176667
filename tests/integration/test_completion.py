"""The shell completes commands, flags and their values: a real bash asks, with the function that argcomplete makes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import child_environment

LIMIT_S = 60

ASK = """
eval "$(register-python-argcomplete elaunch)"
COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 COMP_WORDS=($1) COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_python_argcomplete elaunch
printf '%s\\n' "${COMPREPLY[@]}"
"""


def offered(line: str, folder: Path) -> set[str]:
    """What bash offers at the end of a line."""
    scripts = os.path.dirname(sys.executable)
    done = subprocess.run(
        ["bash", "--norc", "-c", ASK, "bash", line],
        cwd=folder,
        env=child_environment({"PATH": f"{scripts}:{os.environ['PATH']}", "TMPDIR": str(folder)}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    return {word.strip() for word in done.stdout.splitlines()} - {""}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("elaunch --checkpoint-", {"--checkpoint-dir", "--checkpoint-every"}),
        ("elaunch --rdzv-backend ", {"static", "c10d", "etcd", "etcd-v3", "slurm"}),
        ("elaunch --slow-policy re", {"rebalance", "replace", "report"}),
        ("elaunch --standalone train", {"train.py"}),
        ("elaunch ct", {"ctl"}),
        ("elaunch ctl ", {"status", "top", "plan", "profile", "drain", "resize"}),
        ("elaunch ctl status --j", {"--json"}),
        ("elaunch plan --lo", {"--lose"}),
    ],
)
def test_a_line_is_completed(line: str, words: set[str], tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    found = offered(line, tmp_path)
    assert words <= found
    assert found <= words | {"-h", "--help"}
