"""Sources of users whose targets have boxes, and files of their own that are read ahead."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.sources import InputKind, Source

COUNT = 6
CHAIN = v2.Compose([v2.ToImage(), v2.CenterCrop(24), v2.Pad(4)])


class Boxed(Dataset[Any]):
    """Images of 40x50, whose targets have a box each, in a file of its own. A file may be missing at first."""

    def __init__(self, root: Path, missing: int | None = None) -> None:
        self.root, self.missing, self.calls = root, missing, list[str]()
        for i in range(COUNT):
            pixels = np.random.default_rng(i).integers(256, size=(40, 50, 3), dtype=np.uint8)
            PIL.Image.fromarray(pixels).save(root / f"{i}.png")
            (root / f"{i}.txt").write_text(f"{i} 2 {20 + i} 30")

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return CHAIN(PIL.Image.open(self.root / f"{index}.png"), self.make_target(self.read_box(index)))

    def read_box(self, index: int) -> list[int]:
        return [int(word) for word in (self.root / f"{index}.txt").read_text().split()]

    def make_target(self, box: list[int]) -> dict[str, Any]:
        return {"boxes": tv_tensors.BoundingBoxes([box], format="XYXY", canvas_size=(40, 50))}  # pyright: ignore

    def torchdali_source(self) -> Source:
        return BoxedSource(self)


class BoxedSource(Source):
    kind = InputKind.ENCODED
    annotations = frozenset[Any]({tv_tensors.BoundingBoxes})
    has_target_files = True

    def __init__(self, dataset: Boxed) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return COUNT

    def read(self, rows: Any) -> Any:
        return [(self.dataset.root / f"{row}.png").read_bytes() for row in rows.tolist()]

    def name(self, row: int) -> str:
        return f"{row}.png"

    def target(self, row: int) -> Any:
        self.dataset.calls.append("target")
        return self.dataset.make_target(self.dataset.read_box(row))

    def read_target_files(self, row: int) -> Any:
        if row == self.dataset.missing:
            raise FileNotFoundError
        return self.dataset.read_box(row)

    def make_annotated_targets(self, rows: Any, size: Any, files: Any) -> list[Any]:
        assert size.tolist() == [[40, 50]] * len(rows)
        self.dataset.calls.append("files")
        return [self.dataset.make_target(box) for box in files]


@pytest.mark.parametrize("missing", [None, 4])
@pytest.mark.parametrize("draws", [False, True])
def test_what_cannot_be_read_ahead_is_read_when_it_is_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: int | None, draws: bool
) -> None:
    monkeypatch.setattr(BoxedSource, "draws_targets", draws)
    dataset = Boxed(tmp_path, missing)
    ours = list(DALILoader(dataset, 3, transform=CHAIN, collate_fn=list, device="cpu"))
    theirs = list(DataLoader(dataset, 3, collate_fn=list))
    assert set(dataset.calls) == ({"files"} if missing is None else {"files", "target"})
    for batch, expected in zip(ours, theirs, strict=True):
        for (image, target), (other_image, other) in zip(batch, expected, strict=True):
            assert torch.equal(image, other_image)
            assert torch.equal(target["boxes"], other["boxes"])
            assert target["boxes"].canvas_size == other["boxes"].canvas_size
