"""The places in a Markdown file that links lead to."""

from __future__ import annotations

import re
from pathlib import Path


def anchors(path: Path) -> set[str]:
    lines = [line for line in path.read_text().splitlines() if line.startswith("#")]
    return {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in lines}
