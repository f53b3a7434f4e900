"""Masks that are stored smaller than a tensor become the same tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import skimage.data
import torch

from torchdali.sources.run_lengths import parse_run_lengths, read_runs
from torchdali.transforms.targets.stored import BitMasks, StoredMasks

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

SIZE = (61, 83)


def make_masks(count: int) -> torch.Tensor:
    """Return shapes of a photograph: its brightness above rising levels."""
    picture = skimage.data.camera()[100 : 100 + SIZE[0], 200 : 200 + SIZE[1]]
    return torch.from_numpy(np.stack([picture > 9 * i for i in range(count)]).astype(np.uint8))


def move(stored: StoredMasks, function: Callable[[torch.Tensor], torch.Tensor], has_fill: bool = False) -> torch.Tensor:
    """Return masks after a move."""
    return stored.finish(function(stored.prepare(stored.to_tensor(), has_fill)), has_fill)


def flip(masks: torch.Tensor) -> torch.Tensor:
    return masks.flip(-1)


@pytest.mark.parametrize("count", [2, 7, 8, 20])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool])
def test_bits(count: int, dtype: torch.dtype) -> None:
    masks = make_masks(count).to(dtype)
    packed = BitMasks.pack(masks)
    assert packed is not None
    assert packed.data.nbytes <= masks.numel() / 8 + SIZE[0] * SIZE[1]
    for has_fill in (False, True):
        made = move(packed, flip, has_fill)
        assert made.dtype == dtype
        assert torch.equal(made, masks.flip(-1))
    rows = np.arange(1, count, 3)
    assert torch.equal(move(packed.select(rows), flip), masks[rows].flip(-1))


def test_a_fill_comes_after_the_bits() -> None:
    masks = make_masks(9)
    packed = BitMasks.pack(masks)

    def fill(planes: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(planes, (2, 2), value=7)

    assert torch.equal(move(packed, fill, has_fill=True), fill(masks))


@pytest.mark.parametrize(
    "masks", [make_masks(1), make_masks(4) * 2, make_masks(4).long(), make_masks(2)[0], torch.zeros(0, 5, 5).byte()]
)
def test_others_are_not_packed(masks: torch.Tensor) -> None:
    assert BitMasks.pack(masks) is None


def decode(segmentations: list[Any]) -> torch.Tensor:
    """Return pycocotools' masks, as torchvision's wrapper makes them."""
    from pycocotools import mask

    rles = [
        x
        if isinstance(x, dict) and isinstance(x["counts"], str)
        else mask.merge(mask.frPyObjects(x, *SIZE))
        if isinstance(x, list)
        else mask.frPyObjects(x, *SIZE)
        for x in segmentations
    ]
    return torch.stack([torch.from_numpy(mask.decode(rle)) for rle in rles])


def make_segmentations() -> list[Any]:
    from pycocotools import mask

    rng = np.random.default_rng(3)
    polygons: list[Any] = [
        [(rng.uniform(-0.1, 1.1, (5 + i, 2)) * SIZE[::-1]).flatten().tolist() for _ in range(1 + i % 3)]
        for i in range(12)
    ]
    compressed = [mask.encode(np.asfortranarray(x.numpy())) for x in make_masks(20)]
    compressed = [{"size": list(SIZE), "counts": x["counts"].decode()} for x in compressed]
    area = SIZE[0] * SIZE[1]
    plain = [[area], [0, area], [5, 0, 3, area - 8], [1, 1] * (area // 2) + [area % 2]]
    return [*polygons, *compressed, *({"size": list(SIZE), "counts": counts} for counts in plain)]


def test_run_lengths_equal_pycocotools() -> None:
    segmentations = make_segmentations()
    expected, runs = decode(segmentations), read_runs(segmentations, SIZE)
    assert runs is not None
    assert len(expected.unique()) == 2
    rows = np.array([2, 17, 30, 34, 35])
    for part, masks in ((runs, expected), (runs.select(rows), expected[rows]), (runs.select(rows[:0]), expected[:0])):
        assert torch.equal(move(part, flip), masks.flip(-1))
        assert torch.equal(part.expand_on_device(part.to_tensor()), masks)
    assert runs.data.nbytes < expected.nbytes / 2


@pytest.mark.parametrize(
    "segmentation",
    [
        None,
        {"size": [9, 9], "counts": [81]},
        {"size": list(SIZE), "counts": [7, 7]},
        {"size": list(SIZE), "counts": ""},
    ],
)
def test_others_are_left_to_pycocotools(segmentation: Any) -> None:
    assert read_runs([make_segmentations()[0], segmentation], SIZE) is None


def test_a_string_that_does_not_end_is_left_to_pycocotools() -> None:
    assert read_runs([{"size": list(SIZE), "counts": "PP"}], SIZE) is None


def test_negative_numbers_and_differences_are_read() -> None:
    from pycocotools import mask

    for counts in ([3, 40, 7, 2, 90, 1, 4921 - 3 - 40 - 7 - 2 - 90 - 1], [4921], [0, 1, 4920]):
        rle = mask.frPyObjects({"size": [7, 703], "counts": counts}, 7, 703)
        runs, lengths = parse_run_lengths([rle["counts"]] * 2)
        assert (runs.tolist(), lengths.tolist()) == (counts * 2, [len(counts)] * 2)
