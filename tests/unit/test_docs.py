"""What the documentation refers to is there: pages, headings, modules, and the tests and names that papers.md cites."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

import elaunch
from tests.helpers import ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md"))]
PAPERS = (ROOT / "docs" / "papers.md").read_text()


def headings(page: Path) -> set[str]:
    """Returns the anchors of a page's headings, made as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def source_files() -> list[str]:
    """Returns the paths of all Python files, each with a slash in front."""
    folders = ("elaunch", "rendezvous", "workers", "tests", "examples", "benchmarks")
    return [f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = Path(os.path.normpath(page.parent / path)) if path else page
        if not target.exists() or (anchor and anchor not in headings(target)):
            broken.append(link)
    assert broken == []


def test_every_module_that_a_page_names_is_there() -> None:
    files = source_files()
    # Names without a folder, such as train.py, may be the reader's own.
    named = {
        (page.name, path) for page in PAGES for path in re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.py)", page.read_text())
    }
    assert named
    assert [one for one in sorted(named) if not any(file.endswith(f"/{one[1]}") for file in files)] == []


def test_every_test_that_the_papers_page_cites_is_there() -> None:
    cited = set(re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", PAPERS))
    assert cited
    missing = [
        f"{path}::{test}" for path, test in sorted(cited) if f"def {test}(" not in (ROOT / "tests" / path).read_text()
    ]
    assert missing == []


def test_every_name_that_the_papers_page_cites_is_in_its_module() -> None:
    cited = re.findall(r"((?:`\w+`(?:, | and )?)+) of `([\w/]+\.py)`", PAPERS)
    assert cited
    missing = [
        f"{name} of {path}"
        for names, path in cited
        for name in re.findall(r"`(\w+)`", names)
        if not re.search(rf"^\s*(?:def |class )?{name}\b", (ROOT / path).read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_the_newest_entry_of_the_changelog_is_this_version() -> None:
    versions = re.findall(r"^## \[([\d.]+)\] - (\d{4}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0][0] == elaunch.__version__
    numbers = [tuple(map(int, version.split("."))) for version, _ in versions]
    assert numbers == sorted(numbers, reverse=True)
    assert [day for _, day in versions] == sorted((day for _, day in versions), reverse=True)


def test_the_readme_can_be_read_at_once() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 1200
