"""The code of the pages on frameworks runs, page by page, where the framework is installed."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Script

DOCS = Path(__file__).parents[2] / "docs"
PAGES = ("lightning", "accelerate", "transformers", "hugging_face", "timm", "fastai", "ray_train", "inference")

pytestmark = [
    pytest.mark.timeout(110),
    pytest.mark.filterwarnings("ignore"),  # those of the frameworks
]


def code_of(page: str) -> str:
    text = (DOCS / f"{page}.md").read_text()
    return "\n".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def make_small(page: str, replaced: dict[str, str] | None = None) -> str:
    """Return a page's code for small images."""
    code = code_of(page)
    for written, instead in {"(224": "(32", **(replaced or {})}.items():
        assert written in code or written == "(224", f"{page}.md no longer says {written}"
        code = code.replace(written, instead)
    return code


def run(page: str, replaced: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a page's code with small images, and return its names."""
    code = make_small(page, replaced)
    names: dict[str, Any] = {"__name__": page}
    exec(compile(code, f"docs/{page}.md", "exec"), names)
    return names


@pytest.fixture
def in_folder(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory with ``data/train`` and ``data/val``, three classes each, on a machine without a GPU."""
    for split in ("train", "val"):
        shutil.copytree(pictures, tmp_path / "data" / split)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_imports_all_names_that_it_uses(page: str) -> None:
    tree = ast.parse(code_of(page))
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
    found = run("lightning", {"Trainer(": "Trainer(accelerator='cpu', logger=False, "})
    assert found["trainer"].global_step == 2
    assert 0 <= found["trainer"].callback_metrics["acc"] <= 1


@pytest.mark.usefixtures("in_folder")
def test_accelerate() -> None:
    pytest.importorskip("accelerate", reason="needs accelerate")
    found = run("accelerate", {"Accelerator(grad": "Accelerator(cpu=True, grad"})
    assert type(found["loader"].base_dataloader).__base__ is found["DataLoader"]
    assert torch.isfinite(found["loss"])


@pytest.mark.usefixtures("in_folder")
def test_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    found = run("transformers")
    settings = {"report_to": [], "use_cpu": True, "save_strategy": "no", "per_device_train_batch_size": 12}
    data = found["ImageFolder"]("data/train")
    arguments = transformers.TrainingArguments(str(tmp_path), num_train_epochs=1, **settings)
    assert found["Trainer"](Net(), arguments, train_dataset=data).train().global_step == 2


@pytest.mark.usefixtures("in_folder")
def test_datasets(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="needs datasets")
    found = run("hugging_face", {'split="train"': f'split="train", cache_dir={str(tmp_path / "cache")!r}'})
    assert found["batch"]["image"].shape == (12, 3, 32, 32)
    assert found["batch"]["label"].max() <= 2
    images, labels = next(iter(found["loader"]))
    assert type(found["loader"].dataset) is found["HuggingFace"]
    assert images.shape == (12, 3, 32, 32)
    assert labels.max() <= 2


@pytest.mark.usefixtures("in_folder")
def test_timm() -> None:
    pytest.importorskip("timm", reason="needs timm")
    small = "config['input_size'] = (3, 32, 32)\ntrain = create_transform("
    found = run("timm", {"train = create_transform(": small})
    assert found["images"].shape == (12, 3, 32, 32)
    assert next(iter(found["val_loader"]))[0].shape == (12, 3, 32, 32)


@pytest.mark.usefixtures("in_folder")
@pytest.mark.skipif(importlib.util.find_spec("fastai") is None, reason="needs fastai")
def test_fastai(run_script: Script) -> None:
    """In a process of its own, because fastai changes methods of ``torch.Tensor``."""
    done = run_script(make_small("fastai") + "\nprint(*predictions.shape)", CUDA_VISIBLE_DEVICES="")
    assert done.stdout.endswith("24 3\n"), done


@pytest.mark.usefixtures("in_folder")
def test_inference() -> None:
    found = run("inference", {"Resize(256)": "Resize(32)"})
    assert [path for path, _ in found["table"]] == [path for path, _ in found["dataset"].samples]
    assert found["scores"].shape == (4, 3)
    expected = found["model"](next(iter(found["loader"]))[0][:4]).softmax(1)
    torch.testing.assert_close(found["scores"], expected)


class Net(torch.nn.Module):
    """Takes what the Trainer gives it by name."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3, 3)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(pixel_values.mean((2, 3)))
        return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}
