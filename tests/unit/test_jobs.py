"""Jobs that host their rendezvous on this machine are found while their agents live."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elaunch.agent import local_jobs
from elaunch.agent.local_jobs import LocalJob, make_folder, register, running
from tests.helpers import child_environment

HOLDER = """
import sys
from elaunch.agent.local_jobs import LocalJob, make_folder, register
file = register(make_folder(), LocalJob("other", "127.0.0.1:7", 1))
print("registered", flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def other_process(temporary: Path) -> Iterator[subprocess.Popen[bytes]]:
    """One with a job of its own."""
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=child_environment({"TMPDIR": str(temporary)}),
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"registered\n"
        yield holder
        holder.kill()


def test_without_any_there_is_nothing_to_find() -> None:
    assert running() == []


def test_jobs_are_found_by_id_while_they_are_registered() -> None:
    late, early = LocalJob("b", "127.0.0.1:2", 12), LocalJob("a", "127.0.0.1:3", 11)
    with register(make_folder(), late), register(make_folder(), early):
        assert running() == [early, late]
    assert running() == []
    assert str(early) == "a at 127.0.0.1:3 (pid 11)"


def test_a_folder_that_is_removed_takes_its_job_with_it() -> None:
    folder = make_folder()
    with register(folder, LocalJob("a", "127.0.0.1:2", 12)):
        os.unlink(Path(folder, "job.json"))
        os.rmdir(folder)
        assert running() == []


def test_the_file_of_a_killed_agent_is_removed_though_its_pid_may_live_again(
    temporary: Path, other_process: subprocess.Popen[bytes]
) -> None:
    assert running() == [LocalJob("other", "127.0.0.1:7", 1)]
    other_process.send_signal(signal.SIGKILL)
    other_process.wait()
    assert list(temporary.glob("*/job.json"))
    assert running() == []
    assert not list(temporary.glob("*/job.json"))


def test_a_job_that_is_about_to_be_written_is_neither_found_nor_removed() -> None:
    hidden = Path(make_folder(), ".job.json")
    hidden.write_text("{")
    assert running() == []
    assert hidden.exists()


def test_only_folders_of_this_user_are_looked_at(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = make_folder()
    assert Path(own).stat().st_mode & 0o077 == 0
    with register(own, LocalJob("a", "127.0.0.1:2", 12)):
        (temporary / f"{local_jobs.FOLDER_PREFIX}link").symlink_to(own)
        assert len(running()) == 1
        monkeypatch.setattr(os, "getuid", lambda: 12345)
        assert running() == []


def test_what_another_version_has_written_is_passed_over(temporary: Path) -> None:
    folder = make_folder()
    with register(folder, LocalJob("a", "127.0.0.1:2", 12)) as file:
        for text in (b"", b"[]", b'{"id":"a"}', b'{"id":"a","endpoint":"x","pid":1,"more":2}'):
            file.truncate(0)
            file.seek(0)
            file.write(text)
            file.flush()
            assert running() == []
        assert Path(folder, "job.json").exists()
