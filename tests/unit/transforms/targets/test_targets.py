"""The targets of a batch: formats, what is dropped, and some samples alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.coordinates import (
    AXIS_ALIGNED,
    BEFORE,
    COUNT,
    DTYPES,
    NEW,
    ROTATED,
    SIZE,
    assert_same,
    make_boxes,
    make_points,
)
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F
from torchvision.tv_tensors import BoundingBoxFormat

from torchdali.transforms import SampleTransformError
from torchdali.transforms.targets import Targets


@pytest.mark.parametrize("formats", [AXIS_ALIGNED, ROTATED])
def test_formats_are_converted_as_torchvision_converts_them(formats: list[str]) -> None:
    off = 0 if formats is AXIS_ALIGNED else 1e-3
    for old in formats:
        for new in formats:
            for dtype in DTYPES if formats is AXIS_ALIGNED else [torch.float32, torch.float64]:
                samples = make_boxes(old, dtype)
                targets = Targets.collect(samples, SIZE)
                targets.boxes[0].convert(BoundingBoxFormat[new])
                for ours, theirs in zip(targets.leaves(), samples, strict=True):
                    assert_same(ours[0], F.convert_bounding_box_format(theirs[0], new_format=new), off)


def test_rotated_boxes_are_not_converted_to_others() -> None:
    with pytest.raises(ValueError, match="Cannot convert between rotated and unrotated"):
        Targets.collect(make_boxes("XYWHR", torch.float32), SIZE).boxes[0].convert(BoundingBoxFormat.XYXY)


@pytest.mark.parametrize("box_format", [*AXIS_ALIGNED, *ROTATED])
def test_the_same_boxes_are_dropped(box_format: str) -> None:
    samples = make_boxes(box_format, torch.float32, None)
    targets = Targets.collect(samples, SIZE)
    targets.sanitize_boxes(20, 900)
    sanitize = v2.SanitizeBoundingBoxes(20, 900)
    dropped = 0
    for ours, chosen, theirs in zip(targets.leaves(), targets.boxes[0].split_kept_rows(), samples, strict=True):
        expected = sanitize({"boxes": theirs[0], "labels": torch.arange(len(theirs[0]))})
        assert_same(ours[0], expected["boxes"])
        assert chosen.tolist() == expected["labels"].tolist()
        dropped += len(theirs[0]) - len(chosen)
    assert 0 < dropped < len(targets.boxes[0].values) + dropped


@pytest.mark.parametrize("shape", [(), (3,)])
def test_the_same_points_are_dropped(shape: tuple[int, ...]) -> None:
    samples = make_points(torch.float32, shape)
    targets = Targets.collect(samples, SIZE)
    targets.sanitize_points()
    for ours, theirs in zip(targets.leaves(), samples, strict=True):
        assert_same(ours[0], v2.SanitizeKeyPoints()(theirs[0]))


def test_samples_may_differ_in_kind_and_number_of_leaves() -> None:
    boxes = [make_boxes(box_format, dtype) for box_format, dtype in [("XYXY", torch.float32), ("XYWH", torch.int64)]]
    points = make_points(torch.float32)
    samples = [[*boxes[i % 2][i], *points[i], *boxes[1][i]] if i % 3 else [] for i in range(COUNT)]
    targets = Targets.collect(samples, SIZE)
    targets.resize(NEW)
    targets.flip(0)
    for i, ours in enumerate(targets.leaves()):
        assert len(ours) == len(samples[i])
        for leaf, theirs in zip(ours, samples[i], strict=True):
            assert_same(leaf, F.horizontal_flip(F.resize(theirs, NEW[i].tolist())))


@pytest.mark.parametrize("box_format", ["XYXY", "XYWHR"])
def test_a_move_of_some_samples_leaves_the_others_as_they_are(box_format: str) -> None:
    samples = [[*x, *y] for x, y in zip(make_boxes(box_format, torch.float32), make_points(torch.float32), strict=True)]
    on = np.arange(COUNT) % 2 == 1
    targets, parts = Targets.collect(samples, SIZE), Targets.collect(samples, SIZE)
    targets.pad(BEFORE, BEFORE, on=on)
    part = parts.select_rows(np.flatnonzero(on))
    part.pad(BEFORE[on], BEFORE[on])
    part.sanitize_points()
    parts.put_rows(np.flatnonzero(on), part)
    for i, (ours, ours_by_parts) in enumerate(zip(targets.leaves(), parts.leaves(), strict=True)):
        for leaf, leaf_by_parts, theirs in zip(ours, ours_by_parts, samples[i], strict=True):
            padding = BEFORE[i, ::-1].tolist()
            expected = F.pad(theirs, padding * 2) if on[i] else theirs
            assert_same(leaf, expected, 1e-3 if box_format == "XYWHR" else 0)
            if on[i] and isinstance(expected, tv_tensors.KeyPoints):
                expected = F.sanitize_keypoints(expected)[0]
            assert_same(leaf_by_parts, expected, 1e-3 if box_format == "XYWHR" else 0)


def test_parts_that_changed_their_kind_are_refused() -> None:
    targets = Targets.collect(make_boxes("XYXY", torch.float32), SIZE)
    rows = np.arange(3)
    part = targets.select_rows(rows)
    part.boxes[0].convert(BoundingBoxFormat.XYWH)
    with pytest.raises(ValueError, match="one format and clamping mode"):
        targets.put_rows(rows, part)
    part = targets.select_rows(rows)
    part.groups[0].values = part.groups[0].values.astype(np.float64)
    with pytest.raises(ValueError, match="one dtype"):
        targets.put_rows(rows, part)


def test_a_border_that_repeats_the_image_is_refused_by_torchvisions_sentence() -> None:
    for samples, what in (
        (make_boxes("XYXY", torch.float32), "bounding boxes"),
        (make_points(torch.int64), "KeyPoints"),
    ):
        with pytest.raises(ValueError, match=f"Padding mode 'edge' is not supported with {what}"):
            F.pad(samples[0][0], [1], padding_mode="edge")
        with pytest.raises(SampleTransformError, match=f"Padding mode 'edge' is not supported with {what}"):
            Targets.collect(samples, SIZE).pad(BEFORE, BEFORE, mode="edge")


def test_sanitize_needs_one_tensor_of_boxes() -> None:
    samples = make_boxes("XYXY", torch.float32)
    samples[4] = []
    with pytest.raises(SampleTransformError, match="one tensor of bounding boxes, got 0") as error:
        Targets.collect(samples, SIZE).sanitize_boxes(1, 1)
    assert error.value.row == 4
