"""The code of docs/frameworks.md runs, section by section, where the framework is installed."""

from __future__ import annotations

import ast
import builtins
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

PAGE = Path(__file__).parents[2] / "docs" / "frameworks.md"

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks
]


def code_of(heading: str) -> str:
    section = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)
    (text,) = [one for one in section if one.startswith(heading)]
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


@pytest.fixture
def in_folder(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with ``data/train`` and ``data/val``, three classes each, on a machine without a GPU."""
    for split in ("train", "val"):
        shutil.copytree(pictures, tmp_path / "data" / split)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("heading", re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE))
def test_a_section_imports_all_names_that_it_uses(heading: str) -> None:
    tree = ast.parse(code_of(heading))
    nodes = list(ast.walk(tree))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | set(dir(builtins))
    bound |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    bound |= {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    imports = [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom))]
    bound |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    assert {node.id for node in names} - bound == set()


@pytest.mark.usefixtures("in_folder")
def test_lightning() -> None:
    pytest.importorskip("lightning", reason="needs lightning")
    found: dict[str, Any] = {}
    code = code_of("Lightning").replace("Trainer(", "Trainer(accelerator='cpu', logger=False, ").replace("(224", "(32")
    exec(compile(code, "docs/frameworks.md", "exec"), found)
    assert found["trainer"].global_step == 2
    assert 0 <= found["trainer"].callback_metrics["acc"] <= 1


@pytest.mark.usefixtures("in_folder")
def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    found: dict[str, Any] = {}
    code = code_of("Accelerate").replace("Accelerator(grad", "Accelerator(cpu=True, grad").replace("(224", "(32")
    exec(compile(code, "docs/frameworks.md", "exec"), found)
    assert type(found["loader"].base_dataloader).__base__ is found["DataLoader"]
    assert torch.isfinite(found["loss"])


@pytest.mark.usefixtures("in_folder")
def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    found: dict[str, Any] = {}
    exec(compile(code_of("The Trainer of transformers").replace("(224", "(32"), "docs/frameworks.md", "exec"), found)
    settings = {"report_to": [], "use_cpu": True, "save_strategy": "no", "per_device_train_batch_size": 12}
    data = found["ImageFolder"]("data/train")
    arguments = transformers.TrainingArguments(str(tmp_path), num_train_epochs=1, **settings)
    assert found["Trainer"](Net(), arguments, train_dataset=data).train().global_step == 2


@pytest.mark.usefixtures("in_folder")
def test_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets", reason="needs datasets")
    found: dict[str, Any] = {}
    code = code_of("datasets").replace('split="train"', f'split="train", cache_dir={str(tmp_path / "cache")!r}')
    exec(compile(code.replace("(224", "(32"), "docs/frameworks.md", "exec"), found)
    assert found["batch"]["image"].shape == (12, 3, 32, 32)
    assert found["batch"]["label"].max() <= 2


@pytest.mark.usefixtures("in_folder")
def test_fastai() -> None:
    pytest.importorskip("fastai", reason="needs fastai")
    found: dict[str, Any] = {}
    exec(compile(code_of("fastai").replace("(224", "(32"), "docs/frameworks.md", "exec"), found)
    assert found["predictions"].shape == (24, 3)


class Net(torch.nn.Module):
    """Takes what the Trainer gives it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(pixel_values.mean((2, 3)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
