"""The code cells of the notebooks run, from top to bottom, and they show what was run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.anchors import anchors

from torchdali.tools.cli import commands

NOTEBOOKS = Path(__file__).parents[2] / "docs" / "notebooks"


def cells(name: str, kind: str) -> list[dict[str, Any]]:
    notebook = json.loads((NOTEBOOKS / name).read_text())
    return [cell for cell in notebook["cells"] if cell["cell_type"] == kind]


def run(name: str, replaced: dict[str, str]) -> dict[str, Any]:
    """Run the code cells, and return their names. A line ``!torchdali ...`` calls the command in this process."""
    code = "\n".join("".join(cell["source"]) for cell in cells(name, "code"))
    for written, instead in replaced.items():
        assert written in code, f"{name} no longer says {written}"
        code = code.replace(written, instead)
    code = re.sub(r"^!torchdali (.*)$", r"call('\1')", code, flags=re.MULTILINE)
    names: dict[str, Any] = {"call": lambda line: commands().main(shlex.split(line), standalone_mode=False)}
    exec(compile(code, name, "exec"), names)
    return names


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty working directory, on a machine without a GPU."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_quickstart() -> None:
    names = run("quickstart.ipynb", {"RandomResizedCrop(128)": "RandomResizedCrop(32)", "range(2)": "range(1)"})
    assert names["images"].shape == (8, 3, 32, 32)
    assert torch.isfinite(names["loss"])


def test_the_preview(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("preview.ipynb", {"--samples 4": "--samples 2", '\nImage.open("preview.png")': ""})
    said = capsys.readouterr().out
    assert "2 images by torchdali" in said
    assert "ColorJitter" in said
    with names["Image"].open("preview.png") as image:
        assert image.width > 2 * 160


@pytest.mark.parametrize("name", sorted(path.name for path in NOTEBOOKS.glob("*.ipynb")))
def test_a_notebook_was_run(name: str) -> None:
    """Its cells are numbered in order, no output is an error, and its links lead somewhere."""
    code = cells(name, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    for cell in cells(name, "markdown"):
        for target in re.findall(r"\]\(([^)]+)\)", "".join(cell["source"])):
            path, _, anchor = target.partition("#")
            assert (NOTEBOOKS / path).exists(), target
            assert not anchor or anchor in anchors(NOTEBOOKS / path), target
