"""A state means what it means in torchdata's StatefulDataLoader."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import PER_BATCH, Numbered
from torch.utils.data import Dataset
from torchvision.transforms import v2

stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="needs torchdata")

from torchdali import DALILoader  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

COUNT = 24


class Labels(Dataset[Any]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return torch.zeros(1), index


@pytest.mark.parametrize(("workers", "batches"), [*((0, at) for at in (0, 3, COUNT // PER_BATCH, None)), (2, 3)])
def test_epochs_after_loading_are_torchdatas(
    pictures: Path, numbered: Numbered, workers: int, batches: int | None
) -> None:
    """From before the epoch, within it, after its last batch, and after its end."""

    def run(make: Any) -> list[list[int]]:
        torch.manual_seed(3)
        loader = make()
        list(islice(iter(loader), batches)) if batches != 0 else None
        state = loader.state_dict()
        torch.manual_seed(4)
        again = make()
        again.load_state_dict(state)
        return [[label for _, labels in again for label in labels.tolist()] for _ in range(2)]

    options: dict[str, Any] = {"batch_size": PER_BATCH, "num_workers": workers}
    exact = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])
    ours = run(lambda: DALILoader(numbered(pictures, exact), device="cpu", **options))
    theirs = run(lambda: stateful.StatefulDataLoader(Labels(), **options))
    assert ours == theirs
    assert ours[1] == list(range(COUNT))
