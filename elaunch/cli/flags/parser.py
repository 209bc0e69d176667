"""How command lines are read: flags in both spellings, with defaults from variables, and help with examples."""

from __future__ import annotations

import argparse
import copy
import difflib
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from elaunch.errors import UsageError

VERBATIM = "    "
"""Lines of a description that begin so are examples: they are printed as they are."""


class HelpFormatter(argparse.HelpFormatter):
    """Prints examples as they are, one spelling of each flag, and the defaults that there are."""

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, **{"max_help_position": 30, **options})

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            if line.startswith(VERBATIM):
                lines.append(indent + line)
            else:
                lines += [indent + part for part in self._split_lines(line, width - len(indent))] or [""]
        return "\n".join(lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Leaves the names of flags whole, which have hyphens."""
        return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_told = re.search(r"\b(default|not given|no effect)\b", text) is not None
        if is_told or action.default in (None, "", False, argparse.SUPPRESS) or not action.option_strings:
            return text
        return f"{text} (default: %(default)s)"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        shown = copy.copy(action)
        shown.option_strings = [name for name in action.option_strings if "_" not in name]
        return super()._format_action_invocation(shown)


class FlagParser(argparse.ArgumentParser):
    """An argument parser whose flags take their defaults from PET_<NAME>, as torchrun's do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": HelpFormatter, **options})
        self._section: argparse.ArgumentParser | argparse._ArgumentGroup = self

    def section(self, title: str, description: str) -> None:
        """Begins a group, to which the flags that follow belong."""
        self._section = self.add_argument_group(title, description)

    def flag(self, *names: str, in_environment: bool = True, **options: Any) -> None:
        """Adds a flag in both spellings, with dashes and with underscores.

        Its default is the value of PET_<NAME> where that is set, unless `in_environment` is False. `options` are
        those of `add_argument`.
        """
        long = next(name for name in names if name.startswith("--"))
        dashed = long.removeprefix("--")
        spellings = dict.fromkeys((*names, long, "--" + dashed.replace("-", "_")))
        dest = dashed.replace("-", "_")
        variable = f"PET_{dest.upper()}"
        value = os.environ.get(variable) if in_environment else None
        if value is not None:
            options["default"] = parse_switch(variable, value) if "action" in options else value
        self._section.add_argument(*spellings, dest=dest, **options)

    def own(self, name: str, variable: str, default: str | None = "", **options: Any) -> None:
        """Adds a flag that torchrun does not have; its default is the value of `variable` where that is set."""
        value = os.environ.get(variable)
        if "action" in options:
            options["default"] = parse_switch(variable, value or "")
        else:
            options["default"] = default if value is None else value
        self._section.add_argument(name, **options)

    def use_defaults(self, values: Mapping[str, str]) -> None:
        """Sets defaults of flags of `flag`, by the names of their values; a variable PET_<NAME> goes before them."""
        self.set_defaults(**{name: text for name, text in values.items() if f"PET_{name.upper()}" not in os.environ})

    def split_at_script(self, words: Sequence[str]) -> tuple[list[str], list[str]]:
        """Returns the launcher's own words, the script among them, and the script's arguments.

        argparse looks for flags among the latter too, and up to Python 3.12.6 refuses one that is short for several of
        the launcher's. A `--` right after the script is dropped, as torchrun drops it.
        """
        at = 0
        while at < len(words):
            word = words[at]
            if word == "--" or not word.startswith("-"):
                end = at + (2 if word == "--" else 1)
                rest = list(words[end:])
                return list(words[:end]), rest[1:] if rest[:1] == ["--"] else rest
            at += 2 if self._takes_next_word(word) else 1
        return list(words), []

    def _takes_next_word(self, word: str) -> bool:
        """Whether a flag's value is the word that follows; not of one that argparse will refuse."""
        known = self._option_string_actions
        names = [word] if word in known else [name for name in known if word.startswith("--") and name.startswith(word)]
        actions = {known[name].dest: known[name] for name in names}
        return len(actions) == 1 and all(action.nargs != 0 for action in actions.values())

    def error(self, message: str) -> NoReturn:
        """Says in one line what is wrong and in another where to read on, after a short usage, and exits with 2."""
        unknown = re.match(r"unrecognized arguments: (--[\w-]+)", message)
        if unknown is not None:
            near = difflib.get_close_matches(
                unknown[1], [name for name in self._option_string_actions if "_" not in name]
            )
            message += f"; did you mean {near[0]}?" if near else ""
        usage = f"usage: {self.usage or f'{self.prog} [FLAGS] ...'}"
        self.exit(2, f"{usage}\n{self.prog}: error: {message}\n{where_to_read(self.prog)}\n")


def parse_switch(variable: str, text: str) -> bool:
    """Reads the environment variable of a flag without a value: a number, as for torchrun, or a word.

    Raises:
        UsageError: it is neither.
    """
    word = text.strip().lower()
    if word in ("", "false", "no", "off"):
        return False
    if word in ("true", "yes", "on"):
        return True
    try:
        return int(word) != 0
    except ValueError:
        raise UsageError(f"{variable}={text}: expected 1 or 0, true or false") from None


def where_to_read(prog: str) -> str:
    """Returns the line that follows a usage error."""
    return f"  `{prog} --help` shows what can be given, with examples"
