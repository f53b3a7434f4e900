"""RandomIoUCrop is drawn as torchvision draws it, and boxes follow."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.transforms import SampleTransformError
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules import iou_crop
from torchdali.transforms.spec import Spec
from torchdali.transforms.targets import Targets

SIZE = (480, 640)
BOXES = [[50.0, 60, 200, 300], [300, 100, 620, 400], [10, 400, 60, 470]]


def make_rule(**arguments: Any) -> iou_crop.RandomIoUCrop:
    rule = iou_crop.RandomIoUCrop(v2.RandomIoUCrop(**arguments))
    rule.infer(Spec())
    return rule


def make_boxes(values: Any, size: tuple[int, int] = SIZE) -> tv_tensors.BoundingBoxes:
    return tv_tensors.BoundingBoxes(torch.tensor(values).reshape(-1, 4), format="XYXY", canvas_size=size)


def draw(rule: iou_crop.RandomIoUCrop, boxes: list[Any], seed: int = 0) -> tuple[dict[str, Any], Targets]:
    size = np.array([each.canvas_size for each in boxes])
    draws = Draws(epoch_key(seed, 0), np.arange(len(boxes)), np.zeros(len(boxes), np.int64)).keep_params()
    targets = Targets.collect([[each] for each in boxes], size)
    return rule.draw_and_move(draws, size, targets), targets


@pytest.mark.parametrize("count", [400, pytest.param(1500, marks=pytest.mark.slow)])
def test_windows_are_distributed_as_torchvisions(count: int) -> None:
    ours, _ = draw(make_rule(), [make_boxes(BOXES)] * count)
    torch.manual_seed(0)
    transform, image = v2.RandomIoUCrop(), tv_tensors.Image(torch.empty(3, *SIZE, device="meta"))
    theirs = [transform.make_params([image, make_boxes(BOXES)]) for _ in range(count)]
    cropped = ours["found"]
    counts = [[cropped.sum(), count - cropped.sum()], [sum(map(bool, theirs)), count - sum(map(bool, theirs))]]
    assert stats.chi2_contingency(counts).pvalue > 0.001
    theirs = [params for params in theirs if params]
    for column, names in ((0, ("top", "height")), (1, ("left", "width"))):
        for name, array in zip(names, (ours["start"], ours["shape"]), strict=True):
            assert stats.ks_2samp(array[cropped, column], [params[name] for params in theirs]).pvalue > 0.001, name
    kept = [[np.sum(rows.sum(1) == n) for n in (1, 2, 3)] for rows in (
        ours["within"][cropped], np.array([params["is_within_crop_area"].numpy() for params in theirs])
    )]  # fmt: skip
    assert stats.chi2_contingency(kept).pvalue > 0.001


def test_boxes_are_cropped_as_torchvision_crops_them_by_the_same_window() -> None:
    random = np.random.default_rng(4)
    samples = []
    for count in [0, 1, 3, 9] * 8:
        height, width = (int(side) for side in random.integers(60, 400, 2))
        corner = random.uniform(0, 0.8, (count, 2)) * (width, height)
        values = np.concatenate((corner, corner + random.uniform(5, 90, (count, 2))), 1).astype(np.float32)
        samples.append(make_boxes(values, (height, width)))
    rule = make_rule()
    params, targets = draw(rule, samples)
    assert 0 < params["found"].sum() < len(samples)
    for i, (boxes, (moved,)) in enumerate(zip(samples, targets.leaves(), strict=True)):
        drawn = rule.make_params({name: values[i] for name, values in params.items()}, boxes.canvas_size)
        if drawn:
            left, top = drawn["left"], drawn["top"]
            assert 0 <= left <= left + drawn["width"] <= boxes.canvas_size[1]
            assert 0 <= top <= top + drawn["height"] <= boxes.canvas_size[0]
            assert 0.5 <= drawn["width"] / drawn["height"] <= 2
        expected = v2.RandomIoUCrop().transform(boxes, drawn)
        assert torch.equal(moved, expected)
        assert moved.canvas_size == expected.canvas_size


def test_a_sample_draws_the_same_alone_and_among_others() -> None:
    samples = [make_boxes(BOXES[: 1 + i % 3]) for i in range(9)]
    whole, _ = draw(make_rule(), samples)
    size = np.array([SIZE])
    for i, boxes in enumerate(samples):
        draws = Draws(epoch_key(0, 0), np.array([i]), np.zeros(1, np.int64)).keep_params()
        alone = make_rule().draw_and_move(draws, size, Targets.collect([[boxes]], size))
        for name in ("start", "shape", "found"):
            assert alone[name].tolist() == whole[name][i : i + 1].tolist()


def test_a_sample_that_torchvision_would_try_for_ever_is_an_error() -> None:
    samples = [make_boxes(BOXES), make_boxes(np.zeros((0, 4), np.float32))]
    with pytest.raises(SampleTransformError, match="none of 200 x 4 windows shows enough of a box") as error:
        draw(make_rule(sampler_options=[0.1], trials=4), samples)
    assert error.value.row == 1


def test_boxes_of_all_formats_and_types_are_asked() -> None:
    for box_format, dtype in (("XYWH", torch.int64), ("CXCYWH", torch.float16), ("XYXY", torch.float64)):
        boxes = v2.ConvertBoundingBoxFormat(box_format)(make_boxes(BOXES))
        boxes = tv_tensors.wrap(boxes.to(dtype), like=boxes)
        params, _ = draw(make_rule(), [boxes] * 20)
        assert params["found"].any()
    rotated = tv_tensors.BoundingBoxes(torch.ones(1, 5), format="XYWHR", canvas_size=SIZE)
    with pytest.raises(ValueError, match="rotated"):
        draw(make_rule(), [rotated])


def test_the_window_is_decoded_alone_and_needs_boxes() -> None:
    chain = [v2.ToImage(), v2.RandomIoUCrop(), v2.RandomHorizontalFlip()]
    plan = fuse(compile_plan(chain, torch.device("cpu"), "exact"))
    assert plan.decode_window
    assert not plan.suffix
    size = np.array([SIZE])
    draws = Draws(epoch_key(0, 0), np.arange(1), np.zeros(1, np.int64))
    with pytest.raises(SampleTransformError, match=r"RandomIoUCrop\(\) requires input sample to contain"):
        plan.draw(draws, size)
    inputs, _ = plan.draw(draws, size, Targets.collect([[make_boxes(BOXES)]], size))
    assert inputs
