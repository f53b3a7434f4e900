"""Names of many files in one string: braces as in a shell, and ``*``."""

from __future__ import annotations

import fnmatch
import glob
import os
import re
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path
from typing import Any, cast

from torchdali.sources.remote import is_uri

__all__ = ["Pattern", "expand", "list_patterns"]

Pattern = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_BRACES = re.compile(r"\{([^{}]*)\}")
_NESTED = re.compile(r"\{[^{}]*,[^{}]*\{[^{}]*\}|\{[^{}]*\}[^{}]*,[^{}]*\}")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")
_NO_SHARD = re.compile(r"\.(idx|json|npz(\.lock|\.\d+\.unfinished)?)$|(^|/)(classes\.txt|lock\.mdb)$")
"""What lies beside shards: indexes of torchdali, DALI, MXNet and wids, names of classes, and locks of LMDB."""


def list_patterns(pattern: Pattern, what: str) -> list[Any]:
    """Return the patterns that an argument has.

    Args:
        pattern: The argument.
        what: What they name, for messages.

    Raises:
        TypeError: It has something else.
    """
    is_several = isinstance(pattern, Iterable) and not isinstance(pattern, str)
    patterns: list[Any] = list(cast("Any", pattern)) if is_several else [pattern]
    if not all(isinstance(one, (str, os.PathLike)) for one in patterns):
        raise TypeError(f"{what} must be a path, a pattern or several, got {pattern!r}")
    return patterns


def expand(pattern: Pattern, list_objects: Callable[[str], list[str]] | None = None) -> list[str]:
    """Return the files that a pattern names.

    Args:
        pattern: A path, or several. ``{000..146}`` and ``{a,b}`` stand for several texts, in this order. ``*``, ``?``
            and ``[...]`` stand for the names of existing files, in the order of names. They leave out indexes.
        list_objects: Returns the objects in a folder of an object store, and in the folders in it.

    Raises:
        FileNotFoundError: No file has such a name.
        ValueError: Braces are nested, or there is no pattern.
    """
    patterns = [pattern] if isinstance(pattern, (str, os.PathLike)) else list(pattern)
    paths: list[str] = []
    for one in patterns:
        if list_objects and is_uri(one):
            for name in _expand_braces(str(one)):
                # A server of https:// has no lists. "?" begins a query there, which split_uri() refuses.
                can_list = glob.has_magic(name) and not name.startswith("http")
                paths += _leave_out(_find_objects(name, list_objects)) if can_list else [name]
        else:
            for name in _expand_braces(str(Path(one).expanduser())):
                paths += _leave_out(sorted(glob.glob(name))) if glob.has_magic(name) else [name]  # noqa: PTH207 - keeps the path as it is given
    if not patterns:
        raise ValueError("shards must be a path, a pattern or several, got an empty list")
    if not paths:
        raise FileNotFoundError(f"no file has a name like {', '.join(map(str, patterns))}")
    return paths


def _leave_out(names: list[str]) -> list[str]:
    """Return the names that a pattern found, without indexes: a second call would take the first call's for a shard."""
    return [name for name in names if not _NO_SHARD.search(name)]


def _expand_braces(pattern: str) -> list[str]:
    if _NESTED.search(pattern):
        raise ValueError(f"braces in a pattern must not be nested, got {pattern!r}; give several patterns")
    texts = _BRACES.split(pattern)
    choices = [_list_choices(text) if i % 2 else [text] for i, text in enumerate(texts)]
    return ["".join(parts) for parts in product(*choices)]


def _find_objects(pattern: str, list_objects: Callable[[str], list[str]]) -> list[str]:
    """Return the objects with such a name. As for files, ``*`` stands for no ``/``."""
    folder = pattern[: pattern.rindex("/", 0, re.search(r"[*?[]", pattern).start()) + 1]  # pyright: ignore[reportOptionalMemberAccess]
    parts = pattern.split("/")
    return [
        uri
        for uri in list_objects(folder)
        if len(names := uri.split("/")) == len(parts) and all(map(fnmatch.fnmatchcase, names, parts))
    ]


def _list_choices(text: str) -> list[str]:
    if limits := _RANGE.fullmatch(text):
        first, last = limits.groups()
        return [f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1)]
    # Braces around a single text are part of a name, as in a shell.
    return text.split(",") if "," in text else [f"{{{text}}}"]
