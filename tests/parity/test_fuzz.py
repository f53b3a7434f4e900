"""Random chains of random transforms: what comes out is torchvision's, what fails says where, and nothing crashes."""

from __future__ import annotations

import warnings
from dataclasses import replace

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.chains import PHOTOGRAPHS, inner, make
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali import SampleError
from torchdali.pipeline.compile import compile_plan, fuse
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.fallback import to_kind
from torchdali.pipeline.plan import View
from torchdali.transforms import MultiView, SampleTransformError
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules.apply import MaskedChains
from torchdali.transforms.rules.geometry import Warp
from torchdali.transforms.spec import InputKind, Spec

pytestmark = [pytest.mark.timeout(90), pytest.mark.filterwarnings("ignore")]
CPU = torch.device("cpu")


def run(plan, images, seed=0):
    """What a plan makes of CHW images, by view and sample, and the parameters of each rule."""
    index = np.arange(len(images))
    sizes = np.array([image.shape[1:] for image in images], np.int64)
    inputs, params = plan.draw(Draws(epoch_key(seed, 0), index, index * 0), sizes)
    engine = PipelineRunner(plan, len(images), 2)
    try:
        engine.submit([image.permute(1, 2, 0).contiguous().numpy() for image in images], inputs)
        return [[image.cpu() for image in view] for view in engine.take(60).views], params
    finally:
        engine.close()


def stages(plan, images, seed):
    """For each view, each rule with the images that came to it, what it made of them, and its parameters."""
    chains = [[*plan.rules, *view.rules] for view in plan.views]
    views = [View(tuple(rules[:end]), plan.spec) for rules in chains for end in range(len(rules) + 1)]
    made, params = run(replace(plan, rules=(), views=tuple(views), container=list), images, seed)
    made, params = iter(made), iter(params)
    for rules in chains:
        drawn = []
        at = [next(made)]
        for end in range(1, len(rules) + 1):
            at.append(next(made))
            drawn = [next(params) for _ in range(end)]
        yield list(zip(rules, at, at[1:], drawn, strict=False))


JUMPS = (v2.RandomErasing, v1.RandomErasing, v2.AutoAugment, v1.AutoAugment, v2.RandAugment, v1.RandAugment)
JUMPS += (v2.TrivialAugmentWide, v1.TrivialAugmentWide, v2.AugMix, v1.AugMix, v2.GaussianNoise)
"""Where a difference of one level, or one in the place of a pixel, may become any."""
EDGES = (v2.Resize, v1.Resize, v2.RandomResizedCrop, v1.RandomResizedCrop, v2.RandomResize, v2.RandomShortestSize)
EDGES += (v2.ScaleJitter,)
"""What differs from torchvision's at the edge of the image, which of a small one is all of it."""


def bound(transform, small):
    """The share of pixels that may be off by more than 8 levels."""
    some = inner(transform)
    if len(some) > 2 or isinstance(transform, JUMPS):
        return 1.0 if small else 0.6
    nearest = "nearest" in str(getattr(transform, "interpolation", "")).lower()
    if any(isinstance(one, EDGES) for one in some) or nearest:
        return 1.0 if small else 0.25
    return 0.03


def close(ours, theirs, most, where):
    """Fails unless two images are equal in shape and type, and in all but a share of their pixels."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), where
    if ours.numel():
        levels = (ours.double() - theirs.double()).abs() * (1 if ours.dtype == torch.uint8 else 255)
        share = float((torch.nan_to_num(levels, nan=1e6) > 8).any(0).double().mean())
        assert share <= most, f"{where}: {share:.3f} of the pixels are off by up to {float(levels.max()):.1f}"


def text(chain):
    return " ".join(repr(chain).split())


def attempt(transform, image):
    """What torchvision makes of an image, or the exception."""
    try:
        return transform(image)
    except Exception as error:  # noqa: BLE001
        return error


def is_v1(transform):
    return any(not isinstance(one, v2.Transform) for one in inner(transform))


def check_spec(out, ours, spec, where):
    """Fails unless what torchvision gives, and what is ours, are as the rule says."""
    kind = "pil" if isinstance(out, PIL.Image.Image) else "image" if isinstance(out, tv_tensors.Image) else "tensor"
    assert kind == spec.kind, where
    out = F.pil_to_tensor(out) if kind == "pil" else out
    assert out.dtype == spec.dtype == ours.dtype, where
    assert out.shape[0] == spec.channels == ours.shape[0], where
    if spec.size:
        assert tuple(out.shape[1:]) == spec.size == tuple(ours.shape[1:]), where
    if spec.unit and out.dtype.is_floating_point and out.numel():
        for values in (out, ours):
            assert -1e-6 <= values.min() <= values.max() <= 1 + 1e-6, f"{where}: not in [0, 1]"


def refused(transform, image, spec, tries=6):
    """torchvision's exception, if it comes every time."""
    outs = [attempt(transform, to_kind(image, spec.kind)) for _ in range(tries)]
    return outs[0] if all(isinstance(out, Exception) for out in outs) else None


def passing(plan, images, spec, seed):
    """The images without those that the plan refuses, of which torchvision must refuse some, too."""
    chain = v2.Compose([step.transform for step in plan.steps if step.library != "torch"] or [v2.Identity()])
    while images:
        index = np.arange(len(images))
        sizes = np.array([image.shape[1:] for image in images], np.int64)
        try:
            plan.draw(Draws(epoch_key(seed, 0), index, index * 0), sizes)
        except SampleTransformError as error:
            image = images.pop(error.row)
            reason = str(error)
            outs = [attempt(chain, to_kind(image, spec.kind)) for _ in range(40)]
            lenient = spec.kind == "pil" and "nothing of an image" in reason  # torchvision makes black of nothing
        else:
            break
        assert "(" in reason, f"{reason} names no transform"
        assert lenient or any(isinstance(out, Exception) for out in outs), f"only ours raises: {reason}"
    return images


def check(chain, seed=0, fixed=False, device="cpu"):
    """Everything that must hold for a chain, which :func:`make` describes; the number of images compared."""
    transforms, images, spec = chain
    plan = compile_plan(transforms, torch.device(device), "exact", spec, InputKind.PIXELS)
    lies = "cpu" if device == "cpu" else "gpu"
    torch.manual_seed(seed)
    if not (images := passing(plan, list(images), spec, seed)):
        return 0
    fused, _ = run(fuse(plan), images, seed)
    for view, steps in enumerate(stages(plan, images, seed)):
        at, after = spec, images
        for rule, before, after, drawn in steps:
            seen, at = at, rule.infer(replace(at, device=lies))
            for row, image in enumerate(before):
                sample = {name: values[row] for name, values in drawn.items()}
                check_stage(rule, image.contiguous(), after[row], (seen, at), sample, fixed)
        assert plan.tail or replace(at, device=lies) == plan.views[view].spec
        # One step may enlarge what differs by one level after the step before it.
        rough = any(isinstance(one, JUMPS) for one in inner(transforms)) or "nearest" in text(transforms).lower()
        for ours, other in zip(fused[view], after, strict=True):
            close(ours, other, 0.1 if rough else 0.03, f"fused, view {view}")
    return len(images)


def check_stage(rule, image, ours, specs, sample, fixed):
    """One transform against torchvision's kernels with the same numbers, and against torchvision's own call."""
    seen, at = specs
    transform = rule.transform
    where = f"{text(transform)} on {tuple(image.shape)} of {image.dtype}"
    most = bound(transform, min(*image.shape[1:], *ours.shape[1:]) < 24)
    try:
        close(ours, rule.reference(image, sample), most, where)
    except RuntimeError as error:
        # Torch does not resize all images of one row or column.
        assert "report a bug to PyTorch" in str(error), where  # noqa: PT017
        return
    if isinstance(transform, (v1.FiveCrop, v2.FiveCrop, v1.TenCrop, v2.TenCrop)):
        return
    outs = [attempt(transform, to_kind(image, seen.kind)) for _ in range(6)]
    failed = [isinstance(out, Exception) for out in outs]
    assert not all(failed), f"{where}: only torchvision raises {outs[0]!r}"
    if any(failed):
        return
    if not (is_v1(transform) and seen.kind == "image"):  # which makes plain tensors of some
        check_spec(outs[0], ours, at, where)
    if fixed and not any(isinstance(one, v2.RandomPhotometricDistort) for one in inner(transform)):
        out = F.pil_to_tensor(outs[0]) if at.kind == "pil" else outs[0]
        most = 1.0 if seen.kind == "pil" and isinstance(rule, (Warp, MaskedChains)) else most
        close(ours, out.as_subclass(torch.Tensor), most, f"eager: {where}")


REFUSED = {15: False, 40: False, 127: True}
"""Seeds of chains that torchvision refuses for every one of their images, and whether they are fixed."""


@pytest.mark.parametrize("seed", REFUSED)
def test_what_torchvision_refuses_is_refused(seed):
    assert check(make(seed, fixed=REFUSED[seed]), seed, fixed=REFUSED[seed]) == 0


def seeds(first, end):
    """Every sixth seed of those that are not refused; ``make quick`` leaves the others out."""
    return [
        seed if number % 6 == 0 else pytest.param(seed, marks=pytest.mark.slow)
        for number, seed in enumerate(sorted({*range(first, end)} - {*REFUSED}))
    ]


@pytest.mark.parametrize("seed", seeds(0, 50))
def test_random_chains(seed, device):
    assert check(make(seed), seed, device=device) > 0


@pytest.mark.parametrize("seed", seeds(100, 130))
def test_chains_without_randomness_are_torchvisions_calls(seed, device):
    assert check(make(seed, fixed=True), seed, fixed=True, device=device) > 0


def test_chains_are_of_all_kinds():
    """What the seeds above make: every family of transforms, every kind of image, and nearly everything in DALI."""
    chains = [make(seed) for seed in range(50)]
    names = {type(one).__name__ for chain in chains for one in inner(chain.transforms)}
    assert len(names) > 45
    assert {(chain.spec.kind, chain.spec.dtype) for chain in chains} >= {
        ("pil", torch.uint8),
        ("image", torch.float32),
        ("tensor", torch.uint8),
    }
    plans = [compile_plan(chain.transforms, CPU, "exact", chain.spec, InputKind.PIXELS) for chain in chains]
    assert sum(len(plan.steps) for plan in plans) < 2 * sum(step.library != "torch" for p in plans for step in p.steps)


def quietly(kind, *args, **options):
    """A transform whose constructor warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(*args, **options)


PIL_SPEC, IMAGE = Spec(), Spec("image")
TENSOR, FLOATS = Spec("tensor"), Spec("tensor", torch.float32)
PADS = [v1.Pad(1), v1.Pad(2)]
HUE = v2.ColorJitter(hue=0.2)


@pytest.mark.parametrize(
    ("chain", "spec"),
    [
        # Ranges that torch's uniform_ refuses.
        ([v2.RandomRotation((20, 10))], TENSOR),
        ([v2.RandomAffine((20, 10))], TENSOR),
        ([v2.RandomAffine(9, scale=(2, 1))], TENSOR),
        ([v2.RandomAffine(9, shear=(1, 2, 5, 2))], TENSOR),
        ([quietly(v2.RandomResizedCrop, 10, scale=(1, 0.5))], TENSOR),
        ([quietly(v1.RandomResizedCrop, 10, ratio=(2, 1))], TENSOR),
        ([v2.RandomResizedCrop(10, ratio=(0, 1))], TENSOR),
        ([v2.RandomResizedCrop(10, scale=(-0.5, 1.0))], TENSOR),
        ([v1.RandomPerspective(-0.5, 1.0)], TENSOR),
        ([v2.RandomPhotometricDistort(brightness=(-0.5, 1.0))], TENSOR),
        ([v2.RandomPhotometricDistort(hue=(0.2, 0.7))], TENSOR),
        ([v2.RandomAdjustSharpness(-1)], TENSOR),
        # Weights of nothing, choices of nothing.
        ([v1.RandomChoice(PADS, p=[0, 0])], PIL_SPEC),
        ([v1.RandomChoice(PADS, p=[1])], PIL_SPEC),
        ([v2.RandomChoice([v2.Pad(1), v2.Pad(2)], p=[-1, 3])], PIL_SPEC),
        ([v1.RandomChoice([])], PIL_SPEC),
        ([v2.RandomShortestSize([])], TENSOR),
        ([v2.AugMix(3.5)], TENSOR),
        ([v2.AugMix(alpha=0.0)], TENSOR),
        ([v2.RandAugment(magnitude=31)], TENSOR),
        # Fills that torchvision refuses, and those that a uint8 cannot hold.
        ([v1.Pad(2, fill=(9, 80, 7))], TENSOR),
        ([v1.RandomCrop(99, pad_if_needed=True, fill=(9, 80, 7))], TENSOR),
        ([v2.Pad(2, fill=[1, 2, 3], padding_mode="symmetric")], TENSOR),
        ([v2.Pad(2, fill={"others": [1, 2, 3]}, padding_mode="edge")], TENSOR),
        ([v2.Pad(2, fill=300)], TENSOR),
        ([v2.Pad(2, fill=(300, 0, -3))], TENSOR),
        ([v1.RandomCrop(9, padding=2, fill="red")], PIL_SPEC),
        ([v1.RandomCrop(9, padding=(1, 2, 3))], PIL_SPEC),
        # Others.
        ([v2.CenterCrop(0)], TENSOR),
        ([v1.FiveCrop(0)], TENSOR),
        ([v2.RandomCrop((3, 0))], TENSOR),
        ([v2.Resize(10, interpolation="foo")], TENSOR),
        ([v2.Resize((10.7, 20))], TENSOR),
        ([v2.CenterCrop((3.7, 5))], PIL_SPEC),
        ([v2.Resize((10, 20), max_size=30)], TENSOR),
        ([v2.Pad((1, 1, -2, 1), padding_mode="reflect")], TENSOR),
        ([v1.RandomRotation((90, 90), expand=True)], TENSOR),
        ([v2.RandomPosterize(0, 1)], PIL_SPEC),
        ([v2.RandomSolarize(-1, 1)], TENSOR),
        ([v2.ColorJitter(0.3)], Spec("tensor", channels=4)),
        ([v1.Grayscale(3)], Spec("tensor", channels=1)),
        ([v1.RandomPosterize(4)], FLOATS),
        ([v1.RandomEqualize()], FLOATS),
        ([v1.RandAugment()], FLOATS),
        ([v2.RandomApply([v2.ToImage()])], PIL_SPEC),
        ([v1.ConvertImageDtype(torch.float32)], PIL_SPEC),
        ([v2.ToDtype({})], TENSOR),
        ([v2.ToDtype({tv_tensors.Mask: torch.float32})], IMAGE),
        # Floats beyond [0, 1], which come of a fill.
        ([v2.Pad(3, fill=7), v2.RandomEqualize(1)], FLOATS),
        ([v2.Pad(3, fill=7), v2.RandomPhotometricDistort()], FLOATS),
        ([v2.GaussianNoise(clip=False), HUE], FLOATS),
        ([v2.RandomCrop(9, padding=3, fill=7), HUE], FLOATS),
        ([v2.RandomZoomOut(7), HUE], FLOATS),
        ([v2.RandomRotation(9, fill=7), HUE], FLOATS),
        ([v2.RandomErasing(value=7), HUE], FLOATS),
        ([v2.RandomErasing(value="random"), HUE], FLOATS),
        ([v2.TrivialAugmentWide(fill=7), HUE], FLOATS),
        ([v2.AugMix(fill=7)], FLOATS),
        ([v2.RandomOrder([v2.RandomErasing(value="random"), v2.RandomEqualize()])], FLOATS),
        # Several images come to one that takes one.
        ([v2.FiveCrop(9), v2.RandomApply([v1.Pad(3)])], PIL_SPEC),
        ([v2.FiveCrop(20), v2.FiveCrop(9)], IMAGE),
        # Several images of different sizes, for all of which torchvision would draw at once.
        ([MultiView([v2.CenterCrop(9), v2.CenterCrop(20)]), v2.RandomCrop(5)], IMAGE),
        # PIL resamples colours that it has multiplied with alpha.
        ([v2.Resize(9)], Spec("pil", channels=2)),
        ([v2.RandomRotation(9)], Spec("pil", channels=4)),
    ],
    ids=lambda value: text(value)[:70] if isinstance(value, list) else value.kind,
)
def test_what_only_torch_does_as_torch_does_is_left_to_it(chain, spec):
    plan = compile_plan(chain, CPU, "exact", spec, InputKind.PIXELS)
    assert [step.library for step in plan.steps] == ["DALI"] * (len(chain) - 1) + ["torch"]
    assert [type(one.transform) for one in plan.suffix] == [type(chain[-1])]


@pytest.mark.parametrize(
    ("transform", "size"),
    [
        (v2.Pad(-2), (3, 9)),
        (v2.Pad((1, 1, 9, 1), padding_mode="reflect"), (9, 9)),
        (v2.Pad(8, padding_mode="reflect"), (8, 20)),
        (v2.RandomCrop(5, padding=9, padding_mode="symmetric"), (8, 20)),
        (v2.RandomResizedCrop(7, scale=(0.8, 1), ratio=(2.1, 2.5)), (3, 1)),
        (v2.RandomPerspective(0.5, 1), (1, 9)),
        (v2.RandomPerspective(0.5, 1), (9, 1)),
        (v2.Resize(None, max_size=3), (1, 9)),
        (v2.RandomApply([v2.RandomCrop(8)], p=1), (7, 9)),
        (v2.GaussianBlur(9), (4, 9)),
    ],
    ids=text,
)
def test_what_cannot_be_done_to_an_image_is_said_of_it(transform, size):
    small, usual = torch.zeros(3, *size, dtype=torch.uint8), torch.zeros(3, 40, 50, dtype=torch.uint8)
    assert isinstance(attempt(transform, small), Exception)
    with pytest.raises(SampleError, match=type(transform).__name__) as raised:
        torchdali.compile(transform, device="cpu")([usual, small])
    assert raised.value.index == 1


def test_noise_on_larger_images_after_noise_on_smaller_ones():
    """Some samples get their noise before the border, others after it."""
    images = [torch.from_numpy(photograph[:40, :50] / np.float32(255)).permute(2, 0, 1) for photograph in PHOTOGRAPHS]
    assert check(([v2.RandomOrder([v2.Pad(9), v2.GaussianNoise()])], images * 3, replace(FLOATS, kind="image"))) > 6


def test_an_image_that_is_too_small_for_one_of_several_is_said_by_its_place():
    compiled = torchdali.compile(v2.RandomChoice([v2.RandomCrop(8), v2.Identity()]), device="cpu")
    images = [torch.zeros(3, 40, 50, dtype=torch.uint8)] * 5 + [torch.zeros(3, 7, 9, dtype=torch.uint8)]
    places = []
    for seed in range(8):
        torch.manual_seed(seed)
        try:
            compiled(images)
        except SampleError as error:
            places.append(error.index)
    assert set(places) == {5}
    assert len(places) < 8
