"""How large a module, a folder and a class may be, and which are larger, each with its reason."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from tests.unit.test_layering import package_files

MOST_LINES = 500
MOST_MODULES = 16
MOST_ARGUMENTS = 15
MOST_ATTRIBUTES = 20

LARGE_CLASSES = {
    "elaunch.api.LaunchConfig": "torch's own class has these fields, and programs give them by name",
    "elaunch.policy.profile.Profile": "what stands in the file of a profile, by name",
    "elaunch.rendezvous.conf.RendezvousConf": "what --rdzv-conf may say, by name",
    "elaunch.rendezvous.membership.Generation": "a document of the store",
    "elaunch.rendezvous.membership.NodeDoc": "a document of the store",
    "elaunch.scheduler.model.JobState": "all that a scheduling policy may look at, by name",
    "elaunch.scheduler.service.documents.JobProgress": "a document of the store",
    "elaunch.scheduler.service.documents.JobSpec": "what a user may write in the file of a job",
    "elaunch.simulator.job._Simulation": "what a job of the real system has in many processes",
}


def class_sizes(source: str) -> Iterator[tuple[str, int, int]]:
    """Name, number of arguments of the constructor, and number of attributes of each class.

    The fields of a dataclass count as both. What is inherited does not count.
    """
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ClassDef):
            continue
        fields = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and _is_field(one)}  # type: ignore[union-attr]
        attributes = fields | {
            one.attr
            for one in ast.walk(node)
            if isinstance(one, ast.Attribute)
            and isinstance(one.ctx, ast.Store)
            and isinstance(one.value, ast.Name)
            and one.value.id == "self"
        }
        made = [one.args for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"]
        n_arguments = len(made[0].args) - 1 + len(made[0].kwonlyargs) if made else len(fields)
        yield node.name, n_arguments, len(attributes)


def _is_field(statement: ast.AnnAssign) -> bool:
    return isinstance(statement.target, ast.Name) and "ClassVar" not in ast.unparse(statement.annotation)


def test_attributes_and_arguments_are_counted_wherever_they_are_named() -> None:
    plain = "class A:\n def __init__(self, a, *, b=0):\n  self.x = self.y = a\n def f(self):\n  self.z, other.v = 1, 2"
    fields = "class B:\n n: int\n m: int = 0\n LEAST: ClassVar[int] = 1\n"
    assert list(class_sizes(plain)) == [("A", 2, 3)]
    assert list(class_sizes(fields)) == [("B", 2, 2)]


def test_no_module_is_long() -> None:
    long = {name for name, path in package_files() if len(path.read_text().splitlines()) > MOST_LINES}
    assert not long


def test_no_folder_holds_many_modules() -> None:
    counts = Counter(path.parent for _, path in package_files())
    assert not {folder.name: count for folder, count in counts.items() if count > MOST_MODULES}


def test_no_class_is_made_of_many_parts() -> None:
    large = {
        f"{module}.{name}"
        for module, path in package_files()
        for name, n_arguments, n_attributes in class_sizes(path.read_text())
        if n_arguments > MOST_ARGUMENTS or n_attributes > MOST_ATTRIBUTES
    }
    assert large == set(LARGE_CLASSES)


def test_no_two_classes_have_the_same_name() -> None:
    """A reader who meets a name need not ask whose it is."""
    counts = Counter(name for _, path in package_files() for name, _, _ in class_sizes(path.read_text()))
    assert not {name for name, count in counts.items() if count > 1}
