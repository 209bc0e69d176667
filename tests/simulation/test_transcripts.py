"""Recoveries of simulated jobs, compared line by line with the transcripts in tests/data/transcripts.

`python -m tests.simulation.test_transcripts --write` writes them anew. Read what `git diff` shows then: each line is a
change of what the control plane does.
"""

from __future__ import annotations

import argparse
import difflib
from pathlib import Path

import pytest

from tests.simulation.scenarios import SCENARIOS
from tests.simulation.scripted import Scenario

FOLDER = Path(__file__).parent.parent / "data" / "transcripts"
WRITE = "python -m tests.simulation.test_transcripts --write"
NAMES = [scenario.name for scenario in SCENARIOS]


def path_of(scenario: Scenario) -> Path:
    return FOLDER / f"{scenario.name}.txt"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_recovery_has_what_its_scenario_is_there_to_show(scenario: Scenario) -> None:
    scenario.check(scenario.play())


@pytest.mark.parametrize("scenario", SCENARIOS, ids=NAMES)
def test_a_job_recovers_as_its_transcript_says(scenario: Scenario) -> None:
    path = path_of(scenario)
    expected = path.read_text() if path.exists() else ""
    found = scenario.transcript(scenario.play())
    if found != expected:
        diff = difflib.unified_diff(
            expected.splitlines(), found.splitlines(), f"{path.name}, as committed", f"{path.name}, now", lineterm=""
        )
        hint = f"If this is how the job is to recover from now on: {WRITE}"
        pytest.fail("\n".join([*diff, "", hint]), pytrace=False)


def test_each_transcript_has_its_scenario() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(NAMES)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the transcripts anew, after each scenario's own check.")
    parser.add_argument("--write", action="store_true", required=True, help="write tests/data/transcripts")
    parser.add_argument("names", nargs="*", metavar="NAME", help="of scenarios; all by default")
    wanted = parser.parse_args().names or NAMES
    if unknown := sorted(set(wanted) - set(NAMES)):
        parser.error(f"no scenario has the name {', '.join(unknown)}; there are {', '.join(NAMES)}")
    FOLDER.mkdir(exist_ok=True)
    for scenario in SCENARIOS:
        if scenario.name in wanted:
            played = scenario.play()
            scenario.check(played)
            path_of(scenario).write_text(scenario.transcript(played))


if __name__ == "__main__":
    main()
