"""timm's transforms: what its factory makes runs in DALI, and each rule does what timm does with the same numbers."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from scipy import stats
from torchvision import transforms as v1
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali.tools.parity.bounds import BILINEAR, EDGE, EXACT
from torchdali.tools.parity.case import Case
from torchdali.tools.parity.compare import compile_chain, find_exceeded_bounds, measure, run
from torchdali.tools.parity.distributions import draw_params, p_value
from torchdali.transforms import find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Spec

timm_data = pytest.importorskip("timm.data")
timm = pytest.importorskip("timm.data.transforms")
erasing = pytest.importorskip("timm.data.random_erasing")

BOTH = tuple(max(pair) for pair in zip(BILINEAR, EDGE, strict=True))
STRETCHED = {"random_scale_prob": 0.5, "random_scale_range": (0.7, 1.2), "random_aspect_prob": 0.5}


FACTORY = {
    "train": {"is_training": True},
    "train random": {"is_training": True, "interpolation": "random"},
    "train erasing": {"is_training": True, "re_prob": 0.5, "re_mode": "pixel"},
    "train without augmentation": {"is_training": True, "no_aug": True},
    "train for the prefetcher": {"is_training": True, "use_prefetcher": True},
    "eval": {},
    "eval bicubic": {"interpolation": "bicubic", "crop_pct": 0.95},
    "eval border": {"crop_mode": "border", "crop_border_pixels": 3},
    "eval squash": {"crop_mode": "squash", "normalize": False},
    "eval oblong": {"input_size": (3, 60, 90)},
}


def named(given: object) -> str:
    """A test's name, without an address, which would differ between pytest's processes."""
    return re.sub(r"<[\w.]*?(\w+) object at 0x\w+>", r"\1", str(given))


@pytest.mark.parametrize("name", FACTORY)
def test_what_the_factory_makes_runs_in_dali(name, photographs):
    given = {"input_size": 64, **FACTORY[name]}
    chain = [timm_data.create_transform(**given)]
    assert not compile_chain(chain).suffix
    scale = 1 if given.get("use_prefetcher") or given.get("normalize") is False else 1 / (255 * 0.22)
    inside = 3 if given.get("is_training") and not given.get("no_aug") else 2
    edge = BOTH[0] + inside  # which crop_mode="border" puts in the middle
    bounds = (edge, edge if given.get("crop_mode") == "border" else inside + 1, BOTH[2] + 0.1)
    assert (
        find_exceeded_bounds(
            Case(chain, *(scale * x for x in bounds)), measure(Case(chain, 0, 0, 0), photographs, "cpu")
        )
        == ""
    )


def test_the_crop_is_decoded_alone_and_the_end_is_one_operator():
    plan = compile_chain([timm_data.create_transform(224, is_training=True)])
    assert plan.decode_window
    assert str(plan).endswith("crop_mirror_normalize")


def test_randaugment_stays_in_torch():
    chain = timm_data.create_transform(64, is_training=True, auto_augment="rand-m9-mstd0.5-inc1", re_prob=0.25)
    plan = compile_chain([chain])
    names = [type(one.transform).__name__ for one in plan.suffix]
    assert names == ["RandAugment", "MaybeToTensor", "Normalize", "RandomErasing"]
    assert [type(rule).__name__ for rule in plan.rules] == [
        "RandomResizedCropAndInterpolation",
        "RandomHorizontalFlip",
    ]


def cases():
    return {
        "RandomResizedCropAndInterpolation": Case(
            [timm.RandomResizedCropAndInterpolation((64, 72), interpolation="bicubic")], *EDGE
        ),
        "RandomResizedCropAndInterpolation random": Case(
            [timm.RandomResizedCropAndInterpolation(64, interpolation="random")], *BOTH
        ),
        "RandomResizedCropAndInterpolation random after another": Case(
            [v1.CenterCrop(110), timm.RandomResizedCropAndInterpolation(64, interpolation="random")], *BOTH
        ),
        "RandomResizedCropAndInterpolation random float": Case(
            # DALI reads the bicubic filter from a table.
            [timm.MaybeToTensor(), timm.RandomResizedCropAndInterpolation(64, interpolation="random")],
            0.1,
            3e-4,
            5e-4,
        ),
        "RandomResizedCropAndInterpolation in RandomApply": Case(
            [v1.RandomApply([timm.RandomResizedCropAndInterpolation(64, interpolation="random")])], *BOTH
        ),
        "ResizeKeepRatio": Case([timm.ResizeKeepRatio((70, 90))], *BILINEAR),
        "ResizeKeepRatio longest": Case([timm.ResizeKeepRatio((70, 90), longest=1, interpolation="bicubic")], *EDGE),
        "ResizeKeepRatio random": Case([timm.ResizeKeepRatio(70, 0.4, "random", **STRETCHED)], *BOTH),
        "CenterCropOrPad": Case([timm.CenterCropOrPad((150, 200), fill=(1, 2, 3))], *EXACT),
        "CenterCropOrPad float": Case([timm.MaybeToTensor(), timm.CenterCropOrPad((150, 200), fill=0.5)], *EXACT),
        "RandomCropOrPad": Case([timm.RandomCropOrPad((150, 200), fill=(1, 2, 3))], *EXACT),
        "RandomPad": Case([timm.RandomPad((150, 200), fill=7)], *EXACT),
        "TrimBorder": Case([timm.TrimBorder(11)], *EXACT),
        "MaybeToTensor": Case([timm.MaybeToTensor(), v1.RandomApply([timm.MaybeToTensor()])], *EXACT),
        "MaybePILToTensor": Case([timm.MaybePILToTensor(), timm.MaybePILToTensor()], *EXACT),
        "RandomErasing": Case([timm.MaybeToTensor(), erasing.RandomErasing(0.7, device="cpu")], *EXACT),
        "RandomErasing uint8": Case([timm.MaybePILToTensor(), erasing.RandomErasing(1, device="cpu")], *EXACT),
        # Logarithms and cosines differ in their last bits, here and there by a few.
        "RandomErasing pixel": Case([timm.MaybeToTensor(), erasing.RandomErasing(1, mode="pixel")], 1e-3, 1e-3, 1e-6),
        "ToTensor": Case([timm.ToTensor()], *EXACT),
        "ToTensor half": Case([timm.ToTensor(torch.float16)], *EXACT),
        "ToTensor uint8": Case([timm.ToTensor(torch.uint8)], *EXACT),
    }


@pytest.mark.parametrize("name", cases())
def test_pixels_are_torchvisions(name, photographs, device):
    case = cases()[name]
    assert find_exceeded_bounds(case, measure(case, photographs, device)) == ""


RESIZING = {
    "ResizeKeepRatio": timm.ResizeKeepRatio((60, 50), interpolation="bicubic"),
    "RandomResizedCropAndInterpolation": timm.RandomResizedCropAndInterpolation(
        60, scale=(1, 1), ratio=(1, 1), interpolation="bicubic"
    ),
}


@pytest.mark.parametrize("name", RESIZING)
def test_tensors_are_rounded_once(name, photographs, device):
    """As by torchvision's v1 functionals, which timm calls; v2's round after each axis."""
    given = [F.pil_to_tensor(image.crop((0, 0, 90, 90))) for image, _ in photographs]
    ours = torchdali.compile(RESIZING[name], device=device)(given)
    for image, one in zip(given, ours, strict=True):
        difference = (one.cpu().double() - RESIZING[name](image).double()).abs()[:, 2:-2, 2:-2]
        assert difference.mean() < 0.05


class Numbers:
    """Python's ``random``, playing given numbers from [0, 1)."""

    def __init__(self, numbers):
        self.numbers = iter(numbers)

    def random(self):
        return next(self.numbers)

    def uniform(self, low, high):
        return low + (high - low) * next(self.numbers)

    def randint(self, low, high):
        return low + int(next(self.numbers) * (high - low + 1))

    def choice(self, options):
        return options[int(next(self.numbers) * len(options))]


def streams(name, numbers):
    """The order in which timm takes the numbers that the rule took."""
    if name == "RandomResizedCropAndInterpolation":
        boxes = np.stack((numbers[:10], numbers[10:20]), axis=1).ravel()
        fit = [np.concatenate((boxes[: 2 * tries], numbers[20:22], numbers[24:25])) for tries in range(1, 11)]
        return [*fit, np.concatenate((boxes, numbers[24:25]))]
    if name == "ResizeKeepRatio":
        scale, aspect = (numbers[i : i + 2] if numbers[i] < 0.5 else numbers[i : i + 1] for i in (0, 2))
        return [[*scale, *aspect, numbers[4]]]
    return [numbers[[1, 0]]] if name == "RandomPad" else [numbers]


@pytest.mark.parametrize(
    "transform",
    [
        timm.RandomResizedCropAndInterpolation(32, (0.4, 1.4), (0.4, 3.0), interpolation="random"),
        timm.ResizeKeepRatio((60, 50), 0.3, "random", **STRETCHED, random_scale_area=True),
        timm.ResizeKeepRatio((60, 50), 1),
        timm.CenterCropOrPad((70, 61), fill=(1, 2, 3)),
        timm.RandomCropOrPad((70, 61), fill=(1, 2, 3)),
        timm.RandomPad((70, 61), fill=9),
        timm.TrimBorder(3),
    ],
    ids=named,
)
@pytest.mark.slow
def test_timm_does_the_same_with_the_same_numbers(transform, monkeypatch):
    """timm's own call on a PIL image, playing the numbers that the rule drew."""
    sizes = np.random.default_rng(0).integers(20, 120, (80, 2))
    rule = find_rule(transform)
    rule.infer(compile_chain([]).spec)
    index = np.arange(len(sizes))
    params = rule.draw(Draws(epoch_key(3, 1), index, index * 0), sizes)
    numbers = Draws(epoch_key(3, 1), index, index * 0).uniform(28)
    for row, (height, width) in enumerate(sizes.tolist()):
        image = skimage.data.astronaut()[60 : 60 + height, 150 : 150 + width]
        ours = rule.reference(torch.from_numpy(image).permute(2, 0, 1), {key: x[row] for key, x in params.items()})
        closest = 255
        for stream in streams(type(transform).__name__, numbers[row]):
            monkeypatch.setattr(timm, "random", Numbers([*stream]))
            try:
                theirs = np.asarray(transform(Image.fromarray(image)))
            except StopIteration:  # it needs more attempts than this stream has
                continue
            if theirs.shape == tuple(ours.permute(1, 2, 0).shape):
                difference = np.abs(ours.permute(1, 2, 0).numpy().astype(int) - theirs)
                closest = min(closest, difference.max())
        assert closest <= 2  # torch's bicubic kernel is not quite PIL's


def same_distribution(ours, theirs):
    return p_value(ours, theirs).p > 1e-3


def sampled(call, count=3000):
    random.seed(5)
    return np.array([call() for _ in range(count)], float)


@pytest.mark.parametrize("scale", [(0.08, 1.0), (0.5, 1.5)])
def test_boxes_and_filters_are_drawn_as_timm_draws_them(scale):
    transform = timm.RandomResizedCropAndInterpolation(32, scale, interpolation="random")
    ours = draw_params(transform)
    image = Image.new("RGB", (240, 180))
    theirs = sampled(lambda: transform.get_params(image, transform.scale, transform.ratio))
    for column, value in enumerate(np.concatenate((ours["start"], ours["shape"]), axis=1).T):
        assert same_distribution(value, theirs[:, column])
    assert stats.binomtest(int((ours["mode"] == 2).sum()), len(ours["mode"])).pvalue > 1e-3


def test_sizes_are_drawn_as_timm_draws_them():
    transform = timm.ResizeKeepRatio((60, 50), 0.3, **STRETCHED)
    ours = draw_params(transform)
    image = Image.new("RGB", (240, 180))
    given = [transform.random_scale_prob, transform.random_scale_range, False]
    given += [transform.random_aspect_prob, transform.random_aspect_range]
    theirs = sampled(lambda: transform.get_params(image, transform.size, transform.longest, *given))
    assert same_distribution(ours["height"], theirs[:, 0])
    assert same_distribution(ours["width"], theirs[:, 1])
    assert same_distribution(ours["width"] / ours["height"], theirs[:, 1] / theirs[:, 0])


@pytest.mark.parametrize("size", [(100, 100), (200, 300), (100, 300)])
def test_places_are_drawn_as_timm_draws_them(size):
    transform = timm.RandomCropOrPad(size)
    ours = draw_params(transform)
    image = Image.new("RGB", (240, 180))
    theirs = sampled(lambda: transform.get_params(image, transform.size))
    assert same_distribution(ours["start"][:, 0], theirs[:, 0])
    assert same_distribution(ours["start"][:, 1], theirs[:, 1])


@pytest.mark.parametrize("given", [{}, {"min_area": 0.1, "max_area": 2, "min_aspect": 0.2, "max_aspect": 3}], ids=str)
def test_boxes_are_erased_as_timm_erases_them(given):
    transform = erasing.RandomErasing(0.7, **given, device="cpu")
    rule = find_rule(transform)
    rule.infer(Spec(kind="tensor", dtype=torch.float32))
    index = np.arange(3000)
    params = rule.draw(Draws(epoch_key(3, 1), index, index * 0), np.tile([36, 48], (3000, 1)))
    start, shape = params["0_start"], params["0_shape"]
    random.seed(5)
    theirs = np.zeros((3000, 4))
    for row in theirs:
        erased = (transform(torch.ones(1, 36, 48))[0] == 0).nonzero()
        if len(erased):
            row[:2] = erased.min(0).values
            row[2:] = erased.max(0).values + 1 - erased.min(0).values
    ours = np.concatenate((start * params["0_erase"][:, None], shape), axis=1)
    for column in range(4):
        assert same_distribution(ours[:, column], theirs[:, column])
    row = int(params["0_erase"].argmax())
    erased = rule.reference(torch.ones(3, 36, 48), {name: value[row] for name, value in params.items()})
    assert sorted(erased.unique().tolist()) == [0, 1]


@pytest.mark.parametrize(
    ("chain", "reason"),
    [
        ([timm.CenterCropOrPad(20, padding_mode="reflect")], "padding_mode='reflect'"),
        ([timm.MaybeToTensor(), timm.RandomCropOrPad(20, fill=(1, 2, 3))], "one number only"),
        ([timm.RandomResizedCropAndInterpolation((20,))], r"not \(height, width\)"),
        ([timm.RandomResizedCropAndInterpolation(20, interpolation="box")], "box"),
        ([timm.MaybeToTensor(), timm.ToTensor()], "PIL images only"),
        ([timm.TrimBorder(-1)], "negative"),
        ([erasing.RandomErasing()], "tensors only"),
        ([timm.MaybeToTensor(), erasing.RandomErasing(max_count=2)], "several boxes"),
        ([timm.MaybeToTensor(), erasing.RandomErasing(min_count=0, max_count=1)], "several boxes"),
        ([timm.MaybeToTensor(), erasing.RandomErasing(mode="rand")], "one random colour"),
        ([timm.MaybePILToTensor(), erasing.RandomErasing(mode="pixel")], "floating point"),
    ],
    ids=named,
)
def test_what_has_no_equal_runs_in_torch(chain, reason):
    plan = compile_chain(chain)
    assert [one.transform for one in plan.suffix] == chain[-1:]
    assert re.search(reason, str(plan))


def test_the_size_within_a_border_is_known():
    chain = [v1.Resize((40, 50)), timm.TrimBorder(3)]
    assert compile_chain(chain).spec.size == v1.Compose(chain)(Image.new("RGB", (90, 70))).size[::-1]


def test_a_border_that_leaves_nothing_names_the_transform(photographs):
    with pytest.raises(Exception, match=r"TrimBorder.*nothing of an image of .* would be left"):
        list(run(photographs, compile_chain([timm.TrimBorder(90)]), [[0, 1]]))
