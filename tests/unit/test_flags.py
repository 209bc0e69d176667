"""What `--help` shows of each command, and what a command line that cannot be read is told."""

from __future__ import annotations

import argparse
import os
import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest

from elaunch.cli import ctl, plan, run, schedule, simulate, trace, ui
from elaunch.cli.flags.launcher import parser
from elaunch.cli.flags.parser import VERBATIM
from elaunch.cli.rendezvous.keys import conf_keys
from elaunch.rendezvous.conf import KEYS, EtcdCredentials, KeepAlive, RendezvousConf, WorkerLimits
from elaunch.rendezvous.security.secret import NodeFiles
from tests.helpers import ROOT

PARSERS = {
    "elaunch": parser,
    "elaunch ctl": ctl.parser,
    "elaunch plan": plan.parser,
    "elaunch schedule": schedule.parser,
    "elaunch simulate": simulate.parser,
    "elaunch trace": trace.parser,
    "elaunch ui": ui.parser,
}


@pytest.fixture(autouse=True)
def a_clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(("PET_", "ELAUNCH_")) and not name.startswith("ELAUNCH_TEST"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("NO_COLOR", "1")


def parsers(of: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """A parser, and those of its commands."""
    commands = [action for action in of._actions if isinstance(action, argparse._SubParsersAction)]
    return [of, *(one for action in commands for one in action.choices.values())]


@pytest.mark.parametrize("command", PARSERS)
def test_help_names_every_flag_once_and_no_default_that_is_none(command: str) -> None:
    for one in parsers(PARSERS[command]()):
        text = one.format_help()
        assert "None" not in text
        assert "(default: )" not in text
        for action in one._actions:
            dashed = [name for name in action.option_strings if "_" not in name]
            assert all(re.search(rf"^  .*{re.escape(name)}\b", text, re.MULTILINE) for name in dashed), dashed
            assert not any(name in text for name in action.option_strings if "_" in name)


@pytest.mark.parametrize("command", PARSERS)
def test_every_example_of_help_can_be_run(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PARSERS[command]().format_help()
    examples = re.findall(r"^ {4,}(elaunch .*)$", text, re.MULTILINE)
    assert examples
    monkeypatch.setattr("elaunch.agent.config.parse_nproc", lambda text: 1)
    monkeypatch.setattr("elaunch.cli.run.parse_nproc", lambda text: 1)
    for example in examples:
        words = shlex.split(example.replace("... ", ""))[1:]
        if f"elaunch {words[0]}" in PARSERS:
            own = words[1 : words.index("--")] if "--" in words else words[1:]  # behind it is a job's command
            PARSERS[f"elaunch {words[0]}"]().parse_args(own)
        else:
            given = [] if "--rdzv-endpoint" in example or "--nnodes" not in example else ["--rdzv-endpoint=etcd"]
            config = run.parse([*given, *words])
            assert config.program.script in ("train.py", "package.train", "./train.sh")


def test_help_names_every_other_command() -> None:
    assert {f"elaunch {name}" for name in run.COMMANDS} == PARSERS.keys() - {"elaunch"}
    _, epilog = parser().format_help().split("Other commands")
    assert sorted(re.findall(r"^    (\w+) +\w", epilog, re.MULTILINE)) == sorted(run.COMMANDS)


def test_every_group_of_flags_has_an_example() -> None:
    groups = {group.title: group.description or "" for group in parser()._action_groups if group._group_actions}
    assert {title for title, text in groups.items() if "    elaunch " not in text} == {"other"}


def test_help_explains_the_keys_of_rdzv_conf() -> None:
    keys = {one.name for kind in (RendezvousConf, EtcdCredentials, NodeFiles, WorkerLimits) for one in fields(kind)}
    keys -= {"etcd", "keep_alive", "node", "workers"}
    keys |= {f"keep_alive_{one.name}" for one in fields(KeepAlive)}
    assert set(KEYS) == keys
    text = parser().format_help()
    assert all(line.strip() in text for line in conf_keys(VERBATIM).splitlines())
    assert re.search(r"^ +lease_ttl +5  a node that is silent", conf_keys(VERBATIM), re.MULTILINE)
    assert re.search(r"^ +first_steps_timeout +1800  how long a worker", conf_keys(VERBATIM), re.MULTILINE)
    assert re.search(r"^ +connect_timeout +how long", conf_keys(VERBATIM), re.MULTILINE), "no default of its own"


def test_the_pages_explain_the_keys_too() -> None:
    pages = "".join((ROOT / "docs" / name).read_text() for name in ("settings.md", "torchrun.md"))
    assert [key for key in KEYS if f"`{key}`" not in pages] == []


@pytest.mark.parametrize("word", ["--log", "--log=3", "--no", "--nproc", "--rdzv", "--n", "-r3", "--help"])
def test_a_flag_of_the_scripts_own_may_be_short_for_some_of_the_launchers(word: str) -> None:
    assert run.parse(["--standalone", "train.py", word, "x"]).program.args == (word, "x")
    assert run.parse(["--standalone", "--", "train.py", "--lr", "--", word]).program.args == ("--lr", "--", word)


@pytest.mark.parametrize("place", ["x.py", "--log-d"])
def test_the_launchers_own_flags_must_be_clear(place: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse(["--log", place, "x.py"])
    assert "ambiguous option: --log could match" in capsys.readouterr().err


def test_the_script_is_found_after_every_flag() -> None:
    flags = parser()
    for name, action in flags._option_string_actions.items():
        words = [name] if action.nargs == 0 else [name, "value"]
        own = ["--standalone", *words, "train.py"]
        assert flags.split_at_script([*own, "--log", "train.py"]) == (own, ["--log", "train.py"]), name
        if action.nargs != 0:
            short = name.removesuffix("-dir") + "=value"
            assert flags.split_at_script([short, "train.py", "-m"]) == ([short, "train.py"], ["-m"])


def test_what_follows_the_script_at_once_is_dropped_if_it_is_two_hyphens_as_by_torchrun() -> None:
    from torch.distributed.run import parse_args

    words = ["--standalone", "train.py", "--", "--lr", "--"]
    assert run.parse(words).program.args == tuple(parse_args(words).training_script_args) == ("--lr", "--")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--nodes=2", "x.py"], "elaunch: error: unrecognized arguments: --nodes=2; did you mean --nnodes?"),
        (["--zzz", "x.py"], "elaunch: error: unrecognized arguments: --zzz"),
        (
            ["--max-restarts=x", "x.py"],
            "elaunch: error: argument --max-restarts/--max_restarts: invalid int value: 'x'",
        ),
        (["ctl", "status", "--jsn"], "elaunch ctl: error: unrecognized arguments: --jsn"),
        (["ctl", "plan", "--timeout=x"], "elaunch ctl plan: error: argument --timeout: expected a number of seconds"),
        (["plan", "--plan=p"], "elaunch plan: error: the following arguments are required: --profile"),
    ],
)
def test_a_line_says_what_is_wrong_and_another_where_to_read_on(
    words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main(words)
    assert ended.value.code == 2
    usage, first, second = capsys.readouterr().err.splitlines()
    assert usage.startswith("usage: elaunch ")
    assert first.startswith(line)
    assert second == f"  `{line.partition(':')[0]} --help` shows what can be given, with examples"
