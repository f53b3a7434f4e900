"""docs/errors.md has every message that torchdali raises or warns with, and no other; they are read from the source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import torchdali
from torchdali.runtime.exceptions import CLOSED

PACKAGE = Path(torchdali.__file__).parent
PAGE = PACKAGE.parent / "docs" / "errors.md"

NOT_FOR_USERS = ("tools/parity", "tools/bench/loading.py", "tools/bench/training.py")
"""Where messages are about the project's own work."""

NO_ERRORS = {"Unsupported"}
"""What is raised and never seen as an error: why a transform runs in torch is told by explain()."""

LAST_IS_THE_REASON = {"SampleError", "TargetError", "SampleTransformError", "error", "make_error", "_make_error"}
"""Calls whose last argument is the message, after the sample that it is about."""

TELLING = {"explain_unavailability", "_find_warning", "_describe_fault", "_describe_mismatch"}
"""Functions that give a message, or a reason which another module puts into its message."""

ANY = "..."
_DEPTH = 4


class Module:
    """The messages of one module of torchdali."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text())
        self.functions = {node.name: node for node in ast.walk(self.tree) if isinstance(node, ast.FunctionDef)}
        self.assigned: dict[str, list[ast.expr]] = {}
        for node in ast.walk(self.tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            targets = [node.target] if isinstance(node, (ast.AugAssign, ast.AnnAssign, ast.NamedExpr)) else targets
            for target in targets:
                for one in target.elts if isinstance(target, ast.Tuple) else [target]:
                    if isinstance(one, (ast.Name, ast.Attribute)) and node.value is not None:
                        name = one.id if isinstance(one, ast.Name) else one.attr
                        self.assigned.setdefault(name, []).append(node.value)
        self.imported = {
            alias.name: PACKAGE.parent / f"{node.module.replace('.', '/')}.py"
            for node in ast.walk(self.tree)
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("torchdali.")
            for alias in node.names
            if alias.name.isupper()
        }

    def messages(self) -> Iterator[str]:
        """Each message, with three dots for what is put into it."""
        for node in ast.walk(self.tree):
            for expression in _said(node):
                yield from self.texts(expression)

    def texts(self, node: ast.expr, depth: int = 0) -> list[str]:
        """What an expression may be as text; three dots for what cannot be told."""
        if depth > _DEPTH:
            return [ANY]
        if isinstance(node, ast.Constant):
            return [str(node.value)] if isinstance(node.value, str) else [ANY]
        if isinstance(node, ast.JoinedStr):
            return self.joined(node.values, depth)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            return self.joined([node.left, node.right], depth)
        if isinstance(node, ast.IfExp):
            return [*self.texts(node.body, depth), *self.texts(node.orelse, depth)]
        if isinstance(node, (ast.Name, ast.Attribute)) and depth < 2:
            name = node.id if isinstance(node, ast.Name) else node.attr
            values = self.assigned.get(name, [])
            if not values and name in self.imported:
                return Module(self.imported[name]).texts(node, depth)
            return [text for value in values for text in self.texts(value, depth + 1)] or [ANY]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            function = self.functions[node.func.id]
            returned = [one.value for one in ast.walk(function) if isinstance(one, ast.Return) and one.value]
            return [text for value in returned for text in self.texts(value, depth + 1)]
        return [ANY]

    def joined(self, parts: list[ast.expr], depth: int) -> list[str]:
        texts = [""]
        for part in parts:
            found = self.put_in(part.value, depth) if isinstance(part, ast.FormattedValue) else self.texts(part, depth)
            texts = [text + one for text in texts for one in found]
        return texts

    def put_in(self, node: ast.expr, depth: int) -> list[str]:
        """What a message is given: it is followed where it is text that has a name of its own."""
        values = self.assigned.get(node.id, []) if isinstance(node, ast.Name) else []
        return self.texts(values[0], depth + 1) if len(values) == 1 else [ANY]


def _said(node: ast.AST) -> Iterator[ast.expr]:
    """The expressions of a node that are messages."""
    if isinstance(node, ast.FunctionDef) and node.name in TELLING:
        yield from (one.value for one in ast.walk(node) if isinstance(one, ast.Return) and one.value is not None)
    call = node.exc if isinstance(node, ast.Raise) else node
    if not isinstance(call, ast.Call):
        return
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if isinstance(node, ast.Raise) and name not in NO_ERRORS and name != "_make_dtype_error":
        yield from call.args[-1:] if name in LAST_IS_THE_REASON else call.args[:1]
    elif name in ("warn", "warn_user", "exit", "RefusedError", "end"):
        yield from call.args[:1]
    elif name in ("GuardedCollate", "Problem", "add_note"):
        yield from call.args[-1:]


def plain(message: str) -> str:
    """A message in the form in which it is compared: one line, with three dots once for what is put into it."""
    text = re.sub(r"(\.\.\.)+", ANY, " ".join(message.split()))
    return text.replace("`", "'").replace("|", "/")


@cache
def raised() -> dict[str, str]:
    """Every message, and the module that has it."""
    found: dict[str, str] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE)
        if not str(module).startswith(NOT_FOR_USERS):
            for message in map(plain, Module(path).messages()):
                if re.search(r"[a-z]{2}", message):
                    found.setdefault(message, str(module))
    return found


@cache
def documented() -> list[str]:
    """The first column of the page's tables."""
    return [plain(found) for found in re.findall(r"^\| `(.+?)` \|", PAGE.read_text(), re.MULTILINE)]


def covers(entry: str, message: str) -> bool:
    """Whether an entry of the page is about a message: three dots in it stand for anything."""
    pattern = ".*".join(map(re.escape, entry.split(ANY)))
    return re.fullmatch(pattern, message) is not None


def test_every_message_is_on_the_page() -> None:
    missing = [
        f"{module}: {text}" for text, module in raised().items() if not any(covers(e, text) for e in documented())
    ]
    assert not missing, "\n".join(["docs/errors.md says nothing of", *missing])


def test_every_entry_is_a_message() -> None:
    stale = [entry for entry in documented() if not any(covers(entry, text) for text in raised())]
    assert not stale, "\n".join(["nothing says any more what docs/errors.md has", *stale])


def test_entries_are_said_once_and_say_something() -> None:
    entries = documented()
    assert len(entries) == len(set(entries))
    vague = [one for one in entries if len(re.findall(r"[A-Za-z]", one.replace(ANY, ""))) < 8]
    assert not vague


@pytest.mark.parametrize(
    ("code", "messages"),
    [
        ("raise ValueError(f'size is {x!r}, not {y}' + ' here')", ["size is ..., not ... here"]),
        ("_OWN = 'a word'\nraise RuntimeError(_OWN)", ["a word"]),
        ("raise ValueError('one' if x else f'two {x}')", ["one", "two ..."]),
        ("raise SampleError(3, f'image {x}', 'it is bad')", ["it is bad"]),
        ("raise source.error(3, f'it is {x}') from error", ["it is ..."]),
        ("warnings.warn(f'{x} is slow', stacklevel=2)", ["... is slow"]),
        ("def f():\n    self.over = 'it is over'\n    raise RuntimeError(self.over)", ["it is over"]),
        ("def f():\n    return 'from f'\nraise ValueError(f())", ["from f"]),
        ("why = 'because'\nraise ValueError(f'no: {why}')", ["no: because"]),
        ("from torchdali.runtime.exceptions import CLOSED\nraise RuntimeError(CLOSED)", [CLOSED]),
        ("raise Unsupported('no rule')", []),
        ("raise", []),
    ],
)
def test_messages_are_found(code: str, messages: list[str], tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(code)
    assert [plain(text) for text in Module(tmp_path / "module.py").messages()] == messages


def test_every_exception_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert all(f"`{name}`" in page or f".{name}`" in page for name in torchdali.errors.__all__)
    assert len(raised()) > 100
