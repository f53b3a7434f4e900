"""Text in columns: wrapped for a terminal, or as a table for a notebook."""

from __future__ import annotations

import html
import importlib
import os
import shutil
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

__all__ = ["LABEL", "Explanation", "make_table", "wrap_columns"]

LABEL = 11
"""Width of the column of labels."""
_SECOND = 21
_WIDTH = 80
"""Lines are no longer than this, unless the environment variable COLUMNS says so."""
_MIN_WIDTH = 40
"""Leaves room for text beside the columns in a narrow terminal."""


def wrap_columns(text: str) -> str:
    """Wrap lines of a label and text to 80 columns, to the terminal's width if it has fewer, or to COLUMNS.

    Continued lines are indented to the column of the text: 21 if the two places before it are blank, else 11. A word
    is broken if it does not fit a line of its own, such as a long path.
    """
    width = shutil.get_terminal_size().columns
    if not os.environ.get("COLUMNS", "").isdecimal():
        width = min(width, _WIDTH)
    width = max(width, _MIN_WIDTH)

    def wrap(line: str) -> str:
        indent = " " * (_SECOND if line[_SECOND - 2 : _SECOND].isspace() else LABEL)
        return textwrap.fill(line, width, subsequent_indent=indent, break_on_hyphens=False)

    return "\n".join(map(wrap, text.splitlines()))


def make_table(heading: str, text: str) -> str:
    """Return HTML of a heading, and of a table with lines of a label and text. All of it is escaped."""
    cell = "text-align: left; vertical-align: baseline; border: none; padding: 1px 12px 1px 0; font-size: 13px"
    text_cell = f"{cell}; white-space: pre-wrap; overflow-wrap: anywhere; font-family: monospace"
    rows = "".join(
        f'<tr style="background: none"><th style="{cell}">{html.escape(line[:LABEL].strip())}</th>'
        f'<td style="{text_cell}">{html.escape(line[LABEL:])}</td></tr>'
        for line in text.splitlines()
    )
    return f'<div><p><b>{html.escape(heading)}</b></p><table style="border: none">{rows}</table></div>'


@dataclass(frozen=True, repr=False)
class Explanation:
    """The text of ``explain()``. ``str`` wraps it for a terminal, and notebooks show a table.

    Attributes:
        answer: What runs in DALI, in a sentence.
        to_do: What to change; empty if there is nothing to change.
        rows: The plan, in lines of a label and text.
    """

    answer: str
    to_do: str
    rows: str

    def __str__(self) -> str:
        return f"{textwrap.fill(self.answer, _WIDTH)}\n{wrap_columns(self._lines)}\n"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return make_table(self.answer, self._lines)

    @property
    def _lines(self) -> str:
        return f"{'to do':<{LABEL}}{self.to_do}\n{self.rows}" if self.to_do else self.rows

    def show(self, file: TextIO | None = None) -> None:
        """Write the text to ``file``; without one, show the table in a notebook, and else write to standard output."""
        display = _find_display() if file is None else None
        if display is not None:
            display(self)
        else:
            (file or sys.stdout).write(str(self))


def _find_display() -> Callable[[Any], Any] | None:
    """Return IPython's ``display`` in the kernel of a notebook, and None elsewhere."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if not hasattr(shell, "kernel"):
        return None
    return importlib.import_module("IPython.display").display
