"""Names of many files in one string: braces as in a shell, and ``*``."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path

__all__ = ["Pattern", "expand"]

Pattern = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_BRACES = re.compile(r"\{([^{}]*)\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def expand(pattern: Pattern) -> list[str]:
    """Return the files that a pattern names.

    Args:
        pattern: A path, or several. ``{000..146}`` and ``{a,b}`` stand for several texts, in this order. ``*``, ``?``
            and ``[...]`` stand for the names of existing files, in the order of names.

    Raises:
        FileNotFoundError: No file has such a name.
    """
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    paths = [path for one in patterns for path in _expand_one(str(Path(one).expanduser()))]
    if not paths:
        raise FileNotFoundError(f"no file has a name like {str(pattern)!r}")
    return paths


def _expand_one(pattern: str) -> list[str]:
    texts = _BRACES.split(pattern)
    choices = [_list_choices(text) if i % 2 else [text] for i, text in enumerate(texts)]
    names = ["".join(parts) for parts in product(*choices)]
    return [path for name in names for path in (sorted(glob.glob(name)) if glob.has_magic(name) else [name])]  # noqa: PTH207 - keeps the path as it is given


def _list_choices(text: str) -> list[str]:
    if limits := _RANGE.fullmatch(text):
        first, last = limits.groups()
        return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    # Braces around a single text are part of a name, as in a shell.
    return text.split(",") if "," in text else [f"{{{text}}}"]
