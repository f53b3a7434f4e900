"""What the tests with Lightning share: datasets, loaders, and a network that keeps what it was given."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from helpers import ranked
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision.transforms import v2

from torchdali import DALILoader

COUNT, BATCH = 23, 4
SIZE = 8
TRAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32)])
DEVICE = os.environ.get("TRAINED_ON", "cpu")
"""Where networks train and batches are made: "cpu" or "cuda"."""
KINDS = {"read": 0, "read, workers": 2, "asked": 0, "asked, workers": 2}
"""Loaders, and how many workers they have."""

MARKS = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]
"""Of all tests with a Trainer."""

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Labels(Dataset[Any]):
    """The labels without pictures, for DataLoader."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(3, SIZE, SIZE), index


def numbered(pictures: Path, count: int = COUNT) -> Subset[Any]:
    """Some of the pictures, of which each has its index as label."""
    return Subset(ranked.numbered(pictures), range(count))


def dataset(kind: str, pictures: Path) -> Any:
    """What a loader of this kind loads from."""
    subset: Any = numbered(pictures)
    return ranked.Numbered(subset.dataset, COUNT) if kind.startswith("asked") else subset


def loader(kind: str, pictures: Path, **options: Any) -> DALILoader[Any]:
    """A loader of this kind."""
    options = {"batch_size": BATCH, "num_workers": KINDS[kind], "transform": TRAIN, **options}
    options.setdefault("device", "auto" if DEVICE == "cuda" else DEVICE)
    return DALILoader(dataset(kind, pictures), **options)


def plain(**options: Any) -> DataLoader[Any]:
    """DataLoader on the labels alone."""
    return DataLoader(Labels(), **{"batch_size": BATCH, **options})


class Net(pl.LightningModule):
    """Keeps of each batch the epoch, its number, and labels and images.

    Args:
        skip_from: The batch of each epoch before which the rest of it is skipped.
    """

    def __init__(self, skip_from: int | None = None) -> None:
        super().__init__()
        self.head = torch.nn.Linear(3 * SIZE * SIZE, 1)
        self.skip_from = skip_from
        self.seen: list[Any] = []
        self.validated: list[Any] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == self.skip_from else None

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch.values() if isinstance(batch, dict) else [batch]
        kept = [[part[1].tolist(), part[0].cpu().clone()] for part in parts if part is not None]
        self.seen.append([self.current_epoch, batch_idx, *kept])
        return sum(self.head(part[0].flatten(1)).mean() for part in parts if part is not None)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.validated.append([self.current_epoch, batch_idx, dataloader_idx, batch[1].tolist()])

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[1]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.0)

    def labels(self) -> list[Any]:
        """What came, without the images."""
        return [[epoch, number, *(labels for labels, _ in parts)] for epoch, number, *parts in self.seen]


def trainer(root: Path, *callbacks: Any, **options: Any) -> pl.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet["enable_checkpointing"] = any(isinstance(one, pl.callbacks.Checkpoint) for one in callbacks)
    fixed = {
        "accelerator": {"cuda": "gpu"}.get(DEVICE, DEVICE),
        "devices": 1,
        "default_root_dir": root,
        "callbacks": list(callbacks),
    }
    return pl.Trainer(**{"max_epochs": 3, **quiet, **fixed, **options})


def every_step(folder: Path) -> Any:
    """Writes a checkpoint after each step; :func:`after` names them."""
    return pl.callbacks.ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=1)


def after(folder: Path, step: int) -> Path:
    return folder / f"step={step}.ckpt"
