"""The layout of the tests: what several of them use is in ``helpers`` or ``conftest``."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]


def imported(path: Path) -> set[str]:
    """Return the last part of each module name that a file imports."""
    modules: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules.extend(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            modules.extend([node.module or "", *(alias.name for alias in node.names)])
    return {module.rpartition(".")[2] for module in modules}


def test_no_test_module_is_imported() -> None:
    names = {path.stem for path in TESTS.rglob("test_*.py")}
    importers = {str(path.relative_to(TESTS)): imported(path) & names for path in TESTS.rglob("*.py")}
    assert {path: found for path, found in importers.items() if found} == {}


def test_each_test_module_has_a_name_of_its_own() -> None:
    """Without packages, pytest imports each module by its bare name."""
    names = sorted(path.stem for path in TESTS.rglob("*.py"))
    assert names == sorted(set(names))
