"""The house rules that a machine can check: sizes, layers, private names, documentation."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_wheel"
MODULES = sorted(PACKAGE.rglob("*.py"))
CODE = [*MODULES, *sorted((ROOT / "tests" / "support").glob("*.py"))]
TESTS = sorted((ROOT / "tests").rglob("test_*.py"))

MAX_FILE = 400
MAX_FUNCTION = 40

#: Rooms from the ground up. A module imports from its own room and from those before it.
FLOORS = (
    ("errors", "clock", "task", "instants"),
    ("envelope", "settings", "places", "wheels"),
    ("stores",),
    ("connection",),
    ("_compat", "remote"),
    ("worker", "timer", "beat", "beats", "metrics", "testing", "notice"),
    ("drain", "backlog", "cli"),
)
#: These rooms know nothing of Celery; the first set nothing but the standard library.
STDLIB_ONLY = {"errors", "clock", "task", "instants", "settings", "wheels"}
WITHOUT_CELERY = STDLIB_ONLY | {"envelope", "stores"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def ids(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def floor(name: str) -> int:
    return next((number for number, rooms in enumerate(FLOORS) if name in rooms), len(FLOORS))


def imports(path: Path) -> Iterator[tuple[str, str]]:
    """``(module, name)`` of everything imported anywhere in a file; name "" for a module."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            yield from ((node.module or "", alias.name) for alias in node.names)


@pytest.mark.parametrize("path", CODE, ids=ids(CODE))
def test_files_and_functions_are_short(path: Path):
    """No file has more than 400 lines, no function more than 40 without its docstring."""
    lines = len(path.read_text().splitlines())
    assert lines <= MAX_FILE, f"{path.name} has {lines} lines"
    for node in ast.walk(tree(path)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.lineno
        if ast.get_docstring(node) is not None and node.body[0].end_lineno:
            first = node.body[0].end_lineno + 1
        length = (node.end_lineno or first) - first + 1
        assert length <= MAX_FUNCTION, f"{path.name}:{node.lineno} {node.name}: {length} lines"


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_modules_import_only_from_below(path: Path):
    """Nothing imports from a room above its own, and the lower rooms know no Celery."""
    here = room(path)
    for module, name in imports(path):
        top, _, rest = module.partition(".")
        if top == "celery_wheel":
            target = rest.partition(".")[0] or name
            if here != "__init__":
                assert floor(target) <= floor(here), f"{here} imports {module}"
        elif here in STDLIB_ONLY:
            assert top in sys.stdlib_module_names, f"{here} imports {module}"
        elif here in WITHOUT_CELERY:
            assert top not in {"celery", "kombu", "billiard", "vine"}, f"{here} imports {module}"


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_only_compat_touches_private_names(path: Path):
    """Private names of Celery and Kombu are reached through ``_compat`` alone."""
    if room(path) == "_compat":
        return
    for module, name in imports(path):
        if module.partition(".")[0] in {"celery", "kombu", "billiard", "vine"}:
            parts = [*module.split("."), name]
            private = [p for p in parts if p.startswith("_") and not p.endswith("__")]
            assert not private, f"{module} {name}"
    if any(module.partition(".")[0] in {"celery", "kombu"} for module, _ in imports(path)):
        assert "noqa: SLF" not in path.read_text(), "a private name of another object: see _compat"


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_only_the_clock_asks_for_the_time(path: Path):
    """Time comes from ``celery_wheel.clock``, so that tests can turn it."""
    if room(path) != "clock":
        assert "time" not in {module for module, _ in imports(path)}


@pytest.mark.parametrize("path", MODULES, ids=ids(MODULES))
def test_modules_say_what_is_public(path: Path):
    """Every module that is not empty has ``__all__``."""
    body = tree(path).body
    names = [
        target.id
        for node in body
        if isinstance(node, (ast.Assign, ast.AnnAssign))
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    ]
    nothing = all(
        isinstance(node, ast.Expr)
        or (isinstance(node, ast.ImportFrom) and node.module == "__future__")
        for node in body
    )
    assert nothing or "__all__" in names or path.name == "__main__.py"


@pytest.mark.parametrize("path", TESTS, ids=ids(TESTS))
def test_every_test_says_what_it_holds(path: Path):
    """Every test has a docstring: one sentence on the behaviour."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
            assert ast.get_docstring(node), f"{path.name}:{node.lineno} {node.name}"
