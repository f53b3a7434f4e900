"""What is slow on purpose, for tests of where the time goes."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali.pipeline.engine import PipelineRunner

NAP = 0.04
COUNT = 24


def nap(value: Any) -> Any:
    """Much slower than all else that is done in these tests."""
    time.sleep(NAP)
    return value


def epochs(loader: Any, count: int = 2, between: float = 0) -> None:
    """Iterates; the first epoch of a loader also builds its pipeline."""
    for _ in range(count):
        for _ in loader:
            time.sleep(between)


def with_transform(dataset: ImageFolder, *transforms: Any) -> ImageFolder:
    """What follows the dataset's own, in its chain."""
    dataset.transform = v2.Compose([*dataset.transform.transforms, *transforms])
    return dataset


class Asked(Dataset[Any]):
    """Is asked for samples, and takes its time.

    Args:
        files: Photographs.
        seconds: For each of them.
    """

    def __init__(self, files: list[Path], seconds: float = 0) -> None:
        self.files, self.seconds = files, seconds

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Path, int]:
        time.sleep(self.seconds)
        return self.files[index], index


def slow_engine(monkeypatch: pytest.MonkeyPatch, where: Callable[[PipelineRunner], bool] = lambda _: True) -> None:
    take = PipelineRunner.take

    def late(self: PipelineRunner, *run: Any) -> Any:
        return nap(take(self, *run)) if where(self) else take(self, *run)

    monkeypatch.setattr(PipelineRunner, "take", late)
