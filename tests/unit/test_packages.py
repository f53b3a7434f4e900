"""The order of packages: each imports only from those before it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ORDER = (
    "errors < runtime < transforms < sources < datasets < samples < pipeline | state < workers < loader"
    " < __init__, lightning, accelerate, ray < tools < __main__"
)
"""Packages beside ``|`` do not know each other. Those beside ``,`` may."""
IMPORTS_DALI = "pipeline/graph.py"
LONGEST = 400


@cache
def modules(package: str) -> dict[str, ast.Module]:
    """The syntax tree of each file, by its path within the package."""
    root = ROOT / package
    return {str(path.relative_to(root)): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


def imported(tree: ast.Module) -> Iterator[str]:
    """All names that a module imports, also inside functions and by ``import_module`` with a literal."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            yield from (value.value for value in ast.walk(node.args[0]) if isinstance(value, ast.Constant))


def test_packages_import_only_from_those_before_them() -> None:
    floors = [{name.strip() for name in floor.replace("|", ",").split(",")} for floor in ORDER.split("<")]
    floor_of = {name: number for number, floor in enumerate(floors) for name in floor}
    trees = modules("torchdali")
    assert {path.partition("/")[0].removesuffix(".py") for path in trees} == set(floor_of)
    wrong: list[str] = []
    for path, tree in trees.items():
        own = path.partition("/")[0].removesuffix(".py")
        for name in imported(tree):
            root, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            other = other if other in floor_of else "__init__"
            beside = floor_of[other] == floor_of[own] and not {own, other} <= {
                "lightning",
                "accelerate",
                "ray",
                "__init__",
            }
            if root == "torchdali" and other != own and (floor_of[other] > floor_of[own] or beside):
                wrong.append(f"{path} imports {name}")
    assert not wrong


@pytest.mark.parametrize("package", ["torchdali", "benchmarks"])
def test_no_module_imports_itself_by_way_of_others(package: str) -> None:
    trees = modules(package)
    module_of = {f"{package}.{path.removesuffix('.py').replace('/', '.')}": path for path in trees}
    graph: dict[str, set[str]] = {}
    for module, path in module_of.items():
        names = set(imported(trees[path]))
        graph[module] = {other for other in module_of if other != module and names & {other, *_members(other, names)}}
    try:
        TopologicalSorter(graph).prepare()
        circle: list[str] = []
    except CycleError as error:
        circle = error.args[1]
    assert not circle


def _members(module: str, names: set[str]) -> set[str]:
    return {name for name in names if name.rpartition(".")[0] == module}


def test_one_module_imports_dali() -> None:
    def mentions(tree: ast.Module) -> bool:
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in docs]
        names = [*imported(tree), *(text for text in texts if isinstance(text, str) and " " not in text)]
        return any(name == "nvidia" or name.startswith("nvidia.dali.") or name == "nvidia.dali" for name in names)

    assert [path for path, tree in modules("torchdali").items() if mentions(tree)] == [IMPORTS_DALI]


def test_files_are_short() -> None:
    lengths = {path: len((ROOT / "torchdali" / path).read_text().splitlines()) for path in modules("torchdali")}
    assert {path: lines for path, lines in lengths.items() if lines > LONGEST} == {}


def test_the_root_holds_ten_packages_and_four_modules() -> None:
    names = {path.name for path in (ROOT / "torchdali").iterdir()} - {"__pycache__", "__init__.py", "__main__.py"}
    assert len(names - {"py.typed"}) == 14, sorted(names)
