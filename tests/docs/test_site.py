"""The site's configuration: names of other projects become links to their pages."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = """# Page

{py:class}`torch.Tensor`
"""


def write_inventory(file: Path, entry: str) -> None:
    head = "# Sphinx inventory version 2\n# Project: other\n# Version: 1\n# The remainder is compressed using zlib.\n"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(head.encode() + zlib.compress(f"{entry}\n".encode()))


@pytest.mark.timeout(60)
def test_names_of_torch_are_links(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "docs/conf.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs" / "index.md").write_text(PAGE)
    for name in ("python", "torchvision", "numpy", "lightning"):
        write_inventory(tmp_path / "build" / "inventories" / f"{name}.inv", "other py:class 1 other.html -")
    write_inventory(tmp_path / "build" / "inventories" / "torch.inv", "torch.Tensor py:class 1 tensors.html#$ -")
    command = [sys.executable, "-m", "sphinx", "--quiet", tmp_path / "docs", tmp_path / "site"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=50, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    assert 'href="https://docs.pytorch.org/docs/stable/tensors.html#torch.Tensor"' in page
