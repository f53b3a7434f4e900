"""Pages, notebooks and docstrings are written in short sentences, without the phrases that readers stumble over."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
NOTEBOOKS = sorted(f"docs/notebooks/{path.name}" for path in (ROOT / "docs" / "notebooks").glob("*.ipynb"))
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md", *DOCS, *NOTEBOOKS)

MEAN = 16
"""A page's mean sentence has fewer words."""

LONGEST = 35
"""No sentence has more words."""

NO_VERBS = ("A", "An", "Equal", "For", "How", "If", "It", "One", "Something", "The", "This", "What", "Whether", "Which")
"""No function's docstring begins with one of these words."""

AVOIDED = ("nobody", "in the midst", "goes on", "gone on", "all the same")


def strip_code(text: str) -> str:
    """Remove code blocks, comments, HTML tags, links' targets and pictures; make inline code a single word."""
    text = re.sub(r"^( *)```.*?^\1```$", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "code", text, flags=re.DOTALL)
    text = re.sub(r"!\[[^\]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"</?\w[^>]*>", "", text)


def sentences(text: str) -> list[str]:
    """Return the sentences of a page. Headings and tables are no sentences; each list item begins a new one."""
    paragraphs: list[list[str]] = [[]]
    for line in strip_code(text).splitlines():
        stripped = line.strip()
        if not stripped or re.match(r"#|\||-{3,}$", stripped):
            paragraphs.append([])
        elif re.match(r"([-*]|\d+\.) ", stripped):
            paragraphs.append([re.sub(r"^\S+ +", "", stripped)])
        else:
            paragraphs[-1].append(stripped)
    # A full stop ends a sentence where a space and a capital, a digit, a quote, emphasis or code follow.
    ends = r"(?<=[.!?])[*\")]* +(?=[*\"(]*(?:[A-Z0-9]|code))"
    return [one for lines in paragraphs for one in re.split(ends, " ".join(lines)) if count_words(one)]


def count_words(sentence: str) -> int:
    """Return the number of words. Dashes, numbers and symbols between spaces count if they have a letter or digit."""
    return sum(re.search(r"\w", word) is not None for word in sentence.split())


def read_page(page: str) -> str:
    """Return the text of a page; of a notebook that of its text cells."""
    text = (ROOT / page).read_text()
    if not page.endswith(".ipynb"):
        return text
    cells = json.loads(text)["cells"]
    return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")


def find_faults(page: str, text: str) -> list[str]:
    """Return what is over the bounds, or an empty list."""
    counts = [(count_words(sentence), sentence) for sentence in sentences(text)]
    faults = [f"{page}: {count} words: {sentence}" for count, sentence in counts if count > LONGEST]
    mean = sum(count for count, _ in counts) / len(counts) if counts else 0
    return faults if mean < MEAN else [*faults, f"{page}: the mean sentence has {mean:.1f} words"]


def find_docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield the docstrings of a module, its classes and functions, and those below the names that it assigns."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
        if isinstance(node, (ast.Module, ast.ClassDef)):
            for assignment, below in pairwise(node.body):
                if isinstance(assignment, (ast.Assign, ast.AnnAssign)) and isinstance(below, ast.Expr):
                    value = below.value
                    yield value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else ""


def strip_docstring(docstring: str) -> str:
    """Make a page of a docstring: values in quotes are code, and each argument or exception begins a paragraph."""
    text = re.sub(r":\w+:(?=`)", "", inspect.cleandoc(docstring) + "\n")
    text = re.sub(r"::\n((?:\n| +.*\n)+)", ".\n\n", re.sub(r'"[\w-]+"', "`code`", text))
    text = re.sub(r"^ *(?:Args|Attributes|Raises|Returns|Yields):$", "", text, flags=re.MULTILINE)
    return re.sub(r"^ +\*{0,2}[\w.]+(?:, \*{0,2}[\w.]+)*: ", "\n", text, flags=re.MULTILINE)


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    assert not (faults := find_faults(page, read_page(page))), "\n".join(faults)


def test_docstrings_have_short_sentences() -> None:
    """Those of all modules, as the page on the API shows some of each kind. A module is a page."""
    faults: list[str] = []
    for path in sorted((ROOT / "torchdali").rglob("*.py")):
        docstrings = map(strip_docstring, find_docstrings(ast.parse(path.read_text())))
        faults += find_faults(str(path.relative_to(ROOT)), "\n\n".join(docstrings))
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("package", ["torchdali", "benchmarks"])
def test_docstrings_of_functions_begin_with_a_verb(package: str) -> None:
    """Those of properties name a value, and those of commands are a page of help."""
    wrong: list[str] = []
    for path in sorted((ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                continue
            first = (ast.get_docstring(node) or "").partition(" ")[0]
            decorators = " ".join(map(ast.unparse, node.decorator_list))
            if first.rstrip(".,:") in NO_VERBS and not re.search(r"property|click", decorators):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name}: {first}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("page", PAGES)
def test_phrases_are_avoided(page: str) -> None:
    prose = " ".join(strip_code(read_page(page)).lower().split())
    assert not [phrase for phrase in AVOIDED if re.search(rf"\b{phrase}\b", prose)]


def test_docstrings_are_read() -> None:
    source = '"""A module."""\nX = 1\n"""A name."""\ndef f(a):\n    """Call it::\n\n        Not. This.\n\n    Args:\n'
    source += '        a: "b" is. "c"\n            too.\n        *d, e: No.\n'
    source += '\n    Raises:\n        E: If :class:`it` is.\n    """\n'
    found = [sentence for text in find_docstrings(ast.parse(source)) for sentence in sentences(strip_docstring(text))]
    assert found == ["A module.", "A name.", "Call it.", "code is.", "code too.", "No.", "If code is."]


def test_sentences_are_found() -> None:
    text = (
        "# A heading. With two.\n\nThe first line\ngoes over two. `a.b()` is one word.\n\n```\nnot. This.\n```\n"
        "- An item [of a link](to/some where.md)\n- with torch 2.8 (really). **Bold.** Then\n  more.\n\n"
        "| a | table. Too. |\n|---|---|\n\n<!-- a comment. Here. --><b>Tags</b> go!\n"
    )
    assert sentences(text) == [
        "The first line goes over two.",
        "code is one word.",
        "An item of a link",
        "with torch 2.8 (really).",
        "**Bold.",
        "Then more.",
        "Tags go!",
    ]
    assert [count_words(one) for one in ("Three - words, here", "`a`", "1 x 2")] == [3, 1, 3]
