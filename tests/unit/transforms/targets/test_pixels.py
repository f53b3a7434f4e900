"""Masks against torchvision's functionals: not one pixel may differ."""

from __future__ import annotations

import tracemalloc
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.coordinates import MAPS
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.targets import Targets
from torchdali.transforms.targets import pixels as pixels_module
from torchdali.transforms.targets.pixels import Pixels, find_mask_fill, find_nearest
from torchdali.transforms.targets.stored import EncodedMask, RunMasks

COUNT = len(MAPS.angle)
RANDOM = np.random.default_rng(7)
SIZE = RANDOM.integers(30, 120, (COUNT, 2))
BEFORE, AFTER = RANDOM.integers(0, 25, (COUNT, 2)), RANDOM.integers(0, 25, (COUNT, 2))
NEW = RANDOM.integers(30, 200, (COUNT, 2))
START, SHAPE = RANDOM.integers(-9, 30, (COUNT, 2)), RANDOM.integers(30, 90, (COUNT, 2))
FAR = np.array([[0, 0], [1, 0], [1, 1], [0, 1]])
ON = np.arange(COUNT) % 3 > 0

Move = tuple[Callable[[Targets], None], Callable[[torch.Tensor, int], torch.Tensor]]


def make_corners(size: np.ndarray) -> np.ndarray:
    inwards = np.random.default_rng(8).integers(0, 9, (COUNT, 4, 2))
    return np.where(FAR > 0, size[:, None, ::-1] - 1 - inwards, inwards)


def perspective(mask: torch.Tensor, i: int) -> torch.Tensor:
    height, width = mask.shape[-2:]
    start = [[0, 0], [width - 1, 0], [width - 1, height - 1], [0, height - 1]]
    size = np.broadcast_to(np.array([height, width]), (COUNT, 2))
    return F.perspective(mask, start, make_corners(size)[i].tolist(), fill=9)


def crop_center(targets: Targets) -> None:
    spare = targets.size - 64
    start = np.where(spare >= 0, np.rint(spare / 2).astype(np.int64), -(-spare // 2))
    targets.crop_center(start, np.full_like(spare, 64))


def pad(mode: str, fill: float) -> Move:
    def theirs(mask: torch.Tensor, i: int) -> torch.Tensor:
        # torch refuses to repeat the border of no masks.
        padding = [*BEFORE[i, ::-1].tolist(), *AFTER[i, ::-1].tolist()]
        return F.pad(mask, padding, fill, mode if mask.numel() else "constant")

    return lambda t: t.pad(BEFORE, AFTER, fill, mode), theirs


MOVES: dict[str, Move] = {
    "hflip": (lambda t: t.flip(0), lambda x, i: F.horizontal_flip(x)),
    "vflip": (lambda t: t.flip(1), lambda x, i: F.vertical_flip(x)),
    "crop": (lambda t: t.crop(START, SHAPE), lambda x, i: F.crop(x, *START[i].tolist(), *SHAPE[i].tolist())),
    "center": (crop_center, lambda x, i: F.center_crop(x, [64, 64])),
    "resize": (lambda t: t.resize(NEW), lambda x, i: F.resize(x, NEW[i].tolist())),
    "exact": (
        lambda t: t.resize(NEW, "nearest-exact"),
        lambda x, i: F.resize(x, NEW[i].tolist(), interpolation=InterpolationMode.NEAREST_EXACT),
    ),
    "pad": pad("constant", 7),
    "edge": pad("edge", 0),
    "symmetric": pad("symmetric", 0),
    "affine": (lambda t: t.affine(MAPS, 3), lambda x, i: F.affine(x, *MAPS.row(i)[:4], fill=3)),
    "rotate": (
        lambda t: t.rotate(MAPS.angle, t.size, center=[9.0, 4.0], fill=5),
        lambda x, i: F.rotate(x, float(MAPS.angle[i]), center=[9.0, 4.0], fill=5),
    ),
    "perspective": (lambda t: t.perspective(make_corners(t.size), 9), perspective),
}


def make_masks(dtype: torch.dtype = torch.uint8) -> list[list[torch.Tensor]]:
    """Instance masks of 0 to 3 instances and a semantic mask; one sample has none."""
    random, samples = np.random.default_rng(1), []
    for i, (height, width) in enumerate(SIZE.tolist()):
        values = [random.integers(0, 2, (i % 4, height, width)), random.integers(0, 200, (height, width))]
        samples.append([tv_tensors.Mask(torch.from_numpy(x).to(dtype)) for x in values] if i != 5 else [])
    return samples


def assert_gathered_together(pixels: Pixels, samples: list[list[torch.Tensor]]) -> None:
    """Compare what several samples give together with what each gives alone."""
    masks = [(i, mask.as_subclass(torch.Tensor)) for i, sample in enumerate(samples) for mask in sample]
    alone = [pixels.gather(i, mask) for i, mask in masks]
    groups: defaultdict[torch.Size, list[int]] = defaultdict(list)
    for number, (mask, (_, before)) in enumerate(zip(alone, masks, strict=True)):
        if mask is not before:
            groups[mask.shape[-2:]].append(number)
    for numbers in groups.values():
        together = pixels.gather_together([masks[k][0] for k in numbers], [masks[k][1] for k in numbers])
        if together is None:
            assert pixels._planes
            continue
        for k, mask in zip(numbers, together, strict=True):
            assert mask.dtype == alone[k].dtype
            assert torch.equal(mask, alone[k])


def assert_equals_torchvision(samples: list[list[torch.Tensor]], *moves: Move) -> None:
    targets = Targets.collect(samples, SIZE)
    for ours, _ in moves:
        ours(targets)
    assert targets.pixels is not None
    assert_gathered_together(targets.pixels, samples)
    for i, (sample, taken) in enumerate(zip(samples, targets.leaves(), strict=True)):
        for mask, ours in zip(sample, taken, strict=True):
            expected = mask
            for _, theirs in moves:
                expected = theirs(expected, i)
            assert type(ours) is tv_tensors.Mask
            assert ours.dtype == expected.dtype
            assert torch.equal(ours, expected)
            assert torch.equal(targets.pixels.gather(i, mask.as_subclass(torch.Tensor)), expected)


@pytest.mark.parametrize("name", MOVES)
def test_masks_equal_torchvisions(name: str) -> None:
    assert_equals_torchvision(make_masks(), MOVES[name])


def test_lines_are_resized_to_torchvisions_pixels() -> None:
    sides = [1, 2, 3, 7, 300, 333, 427, 480, 500, 612, 640, 1024, 1333, 2048]
    for old in sides:
        line = torch.arange(old, dtype=torch.float32).expand(1, 1, old)
        for new in (*sides, *np.random.default_rng(old).integers(1, 3000, 60).tolist()):
            if new != old:
                expected = F.resize_mask(line, [1, new])[0, 0]
                assert np.array_equal(find_nearest(old, new, "nearest"), expected.numpy())


def test_masks_equal_torchvisions_after_any_two_moves() -> None:
    samples = [*make_masks()[:4], *[[]] * (COUNT - 4)]
    for first in MOVES.values():
        for second in MOVES.values():
            assert_equals_torchvision(samples, first, second)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.int64, torch.float32, torch.int16])
def test_masks_of_other_types_equal_torchvisions(dtype: torch.dtype) -> None:
    assert_equals_torchvision(
        make_masks(dtype), *[MOVES[name] for name in ("resize", "pad", "rotate", "hflip", "crop")]
    )


@pytest.mark.parametrize("name", ["pad", "rotate"])
@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_types_that_torch_hardly_knows_are_gathered(name: str, dtype: torch.dtype) -> None:
    """CUDA does not index them, and no device fills them by a mask."""
    samples = make_masks(torch.int32)
    targets = Targets.collect(samples, SIZE)
    MOVES[name][0](targets)
    assert targets.pixels is not None
    for i, sample in enumerate(samples):
        for mask in sample:
            masks = [mask.as_subclass(torch.Tensor).to(dtype)] * 2
            assert targets.pixels.gather_together([i, i], masks) is None
            ours = targets.pixels.gather(i, masks[0])
            assert ours.dtype == dtype
            assert torch.equal(ours.int(), targets.pixels.gather(i, mask.as_subclass(torch.Tensor)))


def test_the_latest_border_lies_over_the_earlier_ones() -> None:
    assert_equals_torchvision(
        make_masks(), *[move for fill in (1, 2, 1) for move in (pad("constant", fill), MOVES["hflip"], MOVES["crop"])]
    )


def test_pixels_of_large_masks_are_counted_by_rows_and_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels_module, "_EXACT_IN_FLOAT32", 0)
    assert_equals_torchvision(make_masks(), *[MOVES[name] for name in ("pad", "affine", "perspective")])


def test_a_rotation_that_expands_by_quarters_equals_torchvisions() -> None:
    angle = np.array([0.0, 90, 180, 270] * 3)
    size = np.where((angle % 180 == 90)[:, None], SIZE[:, ::-1], SIZE)
    assert_equals_torchvision(
        make_masks(),
        (lambda t: t.rotate(angle, size, True), lambda x, i: F.rotate(x, float(angle[i]), expand=True)),
    )


def test_some_samples_are_moved_alone() -> None:
    samples = make_masks()
    targets = Targets.collect(samples, SIZE)
    targets.resize(NEW, on=ON)
    rows = np.flatnonzero(ON)
    part = targets.select_rows(rows)
    part.pad(BEFORE[rows], AFTER[rows], 7)
    part.affine(MAPS._replace(**{name: getattr(MAPS, name)[rows] for name in MAPS._fields[:4]}), 3)
    targets.put_rows(rows, part)
    targets.flip(0, ~ON)
    for i, (sample, taken) in enumerate(zip(samples, targets.leaves(), strict=True)):
        for mask, ours in zip(sample, taken, strict=True):
            moves = [MOVES[name][1] for name in (("resize", "pad", "affine") if ON[i] else ("hflip",))]
            expected: Any = mask
            for move in moves:
                expected = move(expected, i)
            assert torch.equal(ours, expected)


def test_masks_of_boxes_that_are_dropped_are_dropped() -> None:
    for i, (count, kept) in enumerate([(4, [0, 2]), (3, [])]):
        boxes = torch.zeros(count, 4)
        boxes[kept] = torch.tensor([1.0, 1, 9, 9])
        canvas = tuple(SIZE[i].tolist())
        masks = [tv_tensors.Mask(torch.rand(n, *canvas).mul(99).byte()) for n in (count, count + 1)]
        sample = [tv_tensors.BoundingBoxes(boxes, format="XYXY", canvas_size=canvas), *masks]
        targets = Targets.collect([sample], SIZE[i : i + 1])
        targets.flip(1)
        targets.sanitize_boxes(1, 1)
        expected = v2.Compose([v2.RandomVerticalFlip(1), v2.SanitizeBoundingBoxes(labels_getter=None)])(sample)
        for ours, theirs in zip(targets.leaves()[0], expected, strict=True):
            assert torch.equal(ours, theirs)


def test_fill_is_found_as_torchvision_finds_it() -> None:
    default: defaultdict[Any, int] = defaultdict(lambda: 3, {tv_tensors.Image: 5})
    fills = [4, None, {tv_tensors.Mask: 255, "others": 2}, {"others": 2}, {tv_tensors.Image: 5}, default]
    mask = tv_tensors.Mask(torch.ones(1, 2, 2, dtype=torch.uint8))
    for fill in fills:
        assert find_mask_fill(v2.Pad(1, fill)) == v2.Pad(1, fill)(mask)[0, 0, 0], fill
    with pytest.raises(ValueError, match="the fill of masks must be one number"):
        find_mask_fill(v2.Pad(1, (1, 2, 3)))


def test_a_mask_of_another_size_is_refused() -> None:
    targets = Targets.collect([[tv_tensors.Mask(torch.zeros(1, 4, 6))]], np.array([[6, 4]]))
    with pytest.raises(ValueError, match=r"must have the size 6 x 4 of their image, got a shape of \(1, 4, 6\)"):
        targets.leaves()


def test_masks_are_expanded_one_after_the_other() -> None:
    """Before they are cut, the masks of a batch may be far larger than after it."""
    runs = np.tile(np.array([3, 2**20 - 3], np.int32), 4)
    stored = RunMasks(runs, np.full(4, 2), (1024, 1024))
    targets = Targets.collect([[stored]] * 9, np.full((9, 2), 1024))
    targets.crop(np.zeros((9, 2), np.int64), np.full((9, 2), 8))
    tracemalloc.start()
    leaves = targets.leaves()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [leaf.shape for (leaf,) in leaves] == [(4, 8, 8)] * 9
    assert 4 * 2**20 < peak < 12 * 2**20


def test_masks_of_one_batch_may_be_on_two_devices() -> None:
    """PIL decodes mask files on the host if DALI fails. Masks that were tensors are on the GPU then."""
    values = torch.arange(24, dtype=torch.uint8).view(1, 4, 6)
    encoded = EncodedMask(np.empty(0, np.uint8), (1, 4, 6))
    for samples in ([[encoded, tv_tensors.Mask(values)]], [[tv_tensors.Mask(values), encoded]]):
        targets = Targets.collect(samples, np.array([[4, 6]]))
        targets.flip(0)
        targets.decoded[0, samples[0].index(encoded)] = values
        leaves = targets.leaves([values.to("meta")])[0]
        assert sorted(leaf.device.type for leaf in leaves) == ["cpu", "meta"]
        assert torch.equal(leaves[samples[0].index(encoded)], values.flip(-1))
