"""The package: a wheel that is built from the sdist runs the quickstart."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from email import message_from_bytes
from pathlib import Path
from zipfile import ZipFile

import pytest
from conftest import Script

import torchdali

ROOT = Path(__file__).parents[2]
NEEDED = ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "MANIFEST.in")
QUICKSTART = re.findall(r"^```python\n(.*?)^```$", (ROOT / "docs/quickstart.md").read_text(), re.MULTILINE | re.DOTALL)[
    :2
]


@pytest.mark.slow
def test_the_wheel_runs_the_quickstarts_loader(tmp_path: Path, pictures: Path, run_script: Script) -> None:
    source, built, site = tmp_path / "source", tmp_path / "built", tmp_path / "site"
    shutil.copytree(ROOT / "torchdali", source / "torchdali", ignore=shutil.ignore_patterns("__pycache__"))
    for name in NEEDED:
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", built, source]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    sdist, wheel = sorted(built.iterdir(), key=lambda path: path.suffix)
    assert sdist.name == f"torchdali-{torchdali.__version__}.tar.gz"
    assert wheel.name == f"torchdali-{torchdali.__version__}-py3-none-any.whl"

    with ZipFile(wheel) as files:
        files.extractall(site)
    metadata = message_from_bytes((site / f"torchdali-{torchdali.__version__}.dist-info/METADATA").read_bytes())
    assert metadata["Requires-Python"] == "<3.15,>=3.10"
    assert any(requirement.startswith("nvidia-dali-cuda120") for requirement in metadata.get_all("Requires-Dist", []))
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "torchdali").rglob("*.py")} == {
        str(path.relative_to(site)) for path in (site / "torchdali").rglob("*.py")
    }
    assert (site / "torchdali/py.typed").exists()

    shutil.copytree(pictures, tmp_path / "data" / "train")
    printed = run_script(
        f"""
        import os, sys
        os.chdir({str(tmp_path)!r})
        exec({"".join(QUICKSTART)!r})
        import torchdali
        print(torchdali.__file__)
        print(*next(iter(loader))[0].shape)
        """,
        fresh=True,
        PYTHONPATH=str(site),
        CUDA_VISIBLE_DEVICES="",
    )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.splitlines()[-2:] == [str(site / "torchdali/__init__.py"), "8 3 224 224"]
    assert "RandomResizedCrop" in printed.stdout
