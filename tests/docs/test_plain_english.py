"""The pages are written in short sentences, without the phrases that readers stumble over."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "recipes/README.md", *DOCS)

MEAN = 16
"""A page's mean sentence has fewer words."""

LONGEST = 35
"""No sentence has more words."""

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


@pytest.mark.parametrize("page", PAGES)
def test_sentences_are_short(page: str) -> None:
    text = (ROOT / page).read_text()
    counts = [(count_words(sentence), sentence) for sentence in sentences(text)]
    too_long = [f"{count} words: {sentence}" for count, sentence in counts if count > LONGEST]
    assert not too_long, "\n".join([page, *too_long])
    mean = sum(count for count, _ in counts) / len(counts)
    assert mean < MEAN, f"the mean sentence of {page} has {mean:.1f} words"


@pytest.mark.parametrize("page", PAGES)
def test_phrases_are_avoided(page: str) -> None:
    prose = " ".join(strip_code((ROOT / page).read_text()).lower().split())
    assert not [phrase for phrase in AVOIDED if re.search(rf"\b{phrase}\b", prose)]


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
