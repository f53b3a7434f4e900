"""Text in columns, wrapped for a terminal."""

from __future__ import annotations

import shutil
import textwrap

__all__ = ["wrap_columns"]

_LABEL = 11
_SECOND = 21


def wrap_columns(text: str) -> str:
    """Wrap lines of a label and text to the terminal's width, or to 80 columns without one.

    Continued lines are indented to the column of the text: 21 if the two places before it are blank, else 11. Words
    are not broken, so that a long path can be copied.
    """
    width = shutil.get_terminal_size().columns

    def wrap(line: str) -> str:
        indent = " " * (_SECOND if line[_SECOND - 2 : _SECOND].isspace() else _LABEL)
        return textwrap.fill(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    return "\n".join(map(wrap, text.splitlines()))
