"""Whole recipes as users write them, end to end: what runs in DALI, the batches, the pixels, the distributions.

Pixels are compared with what torchvision's functionals make of the numbers that were drawn for each image, all along
the chain. Distributions are compared with those of the recipe's own random calls, on many draws of one photograph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torchvision
from scipy import stats
from torch.utils.data import ConcatDataset, DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader
from torchdali.tools.parity.bounds import FLOATING
from torchdali.tools.parity.compare import compare_chain, compile_chain, run
from torchdali.tools.parity.photographs import write_photographs
from torchdali.transforms import MultiView

pytestmark = pytest.mark.timeout(240)

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BILINEAR, BICUBIC = v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC
REPEATS = 3
"""How often each image is drawn when pixels are compared: policies draw one of many operations."""
DRAWS = 600
"""Of one photograph, when distributions are compared."""


class Bound(NamedTuple):
    """How far a recipe's images may be from torchvision's, in grey levels.

    A resize may be off by 1, and by more in a border of 4 pixels. What comes after it may make more of it: a threshold
    or a histogram turns one level into many, so the number of pixels that are far off is bounded, not how far.

    Attributes:
        mean_abs: Bound of the mean difference, over all images.
        far: A difference above it is far.
        share: Bound of the share of values that are far.
    """

    mean_abs: float
    far: float
    share: float


ROUNDED = 0.2 if FLOATING else 0.0
RESIZED = Bound(0.04 + ROUNDED, 2.01, 1e-3)
JITTERED = Bound(0.06 + ROUNDED, 6.01, 5e-4)
AUGMENTED = Bound(0.3 + 2 * ROUNDED, 8.01, 3e-3)
UNRESIZED = Bound(0.005, 3.01, 1e-4)
# Of the 25 pairs of AutoAugment's policy "imagenet", 20 equalize, posterize, solarize or stretch the contrast, which
# makes many levels of the one by which images differ that torchvision has resized as float32.
BY_POLICY = {None: RESIZED, **dict.fromkeys(("ra", "ta_wide", "augmix", "imagenet"), AUGMENTED)}
if FLOATING:
    BY_POLICY["imagenet"] = AUGMENTED._replace(share=0.01)


class Recipe(NamedTuple):
    """A transform, and what comes out of it.

    Attributes:
        transform: As a user gives it to the dataset.
        bound: Of its pixels.
        normalized: Whether it ends in Normalize.
    """

    transform: Any
    bound: Bound
    normalized: bool = True


def classification_train(
    size: int = 112,
    policy: str | None = None,
    erase: float = 0.0,
    backend: str = "pil",
    T: Any = v2,  # noqa: N803 - as in torchvision's references
    interpolation: Any = BILINEAR,
) -> Any:
    """As ``ClassificationPresetTrain`` of torchvision's references composes it."""
    chain = [T.PILToTensor()] if backend == "tensor" else []
    chain += [T.RandomResizedCrop(size, interpolation=interpolation, antialias=True), T.RandomHorizontalFlip(0.5)]
    if policy == "ra":
        chain.append(T.RandAugment(interpolation=interpolation, magnitude=9))
    elif policy == "ta_wide":
        chain.append(T.TrivialAugmentWide(interpolation=interpolation))
    elif policy == "augmix":
        chain.append(T.AugMix(interpolation=interpolation, severity=3))
    elif policy:
        chain.append(T.AutoAugment(policy=T.AutoAugmentPolicy(policy), interpolation=interpolation))
    return T.Compose([*chain, *ending(T, backend == "pil", erase)])


def classification_eval(size: int = 112, backend: str = "pil", T: Any = v2, interpolation: Any = BILINEAR) -> Any:  # noqa: N803
    """As ``ClassificationPresetEval`` composes it."""
    chain = [T.PILToTensor()] if backend == "tensor" else []
    chain += [T.Resize(size * 8 // 7, interpolation=interpolation, antialias=True), T.CenterCrop(size)]
    return T.Compose([*chain, *ending(T, backend == "pil")])


def ending(T: Any, from_pil: bool, erase: float = 0.0) -> list[Any]:  # noqa: N803
    chain = [T.PILToTensor()] if from_pil else []
    chain += [T.ToDtype(torch.float, scale=True) if T is v2 else T.ConvertImageDtype(torch.float)]
    chain += [T.Normalize(MEAN, STD)]
    if erase:
        chain.append(T.RandomErasing(p=erase))
    return [*chain, v2.ToPureTensor()] if T is v2 else chain


def detection_train(policy: str, backend: str = "tv_tensor") -> Any:
    """The parts of ``DetectionPresetTrain`` that take an image alone: without RandomIoUCrop, which needs boxes."""
    chain: list[Any] = {"tv_tensor": [v2.ToImage()], "tensor": [v2.PILToTensor()], "pil": []}[backend]
    fill = (123.0, 117.0, 104.0)
    if policy == "lsj":
        chain += [v2.ScaleJitter((160, 160), antialias=True), v2.RandomCrop(160, pad_if_needed=True, fill=fill)]
    elif policy == "multiscale":
        chain += [v2.RandomShortestSize([96, 104, 112, 120], max_size=200), v2.CenterCrop(128)]
    elif policy == "ssd":
        fills = {tv_tensors.Image: fill, "others": fill}
        chain += [v2.RandomPhotometricDistort(), v2.RandomZoomOut(fill=fills)]
        chain += [v2.CenterCrop(128)]  # in the place of RandomIoUCrop, so that images can be stacked
    else:
        chain += [v2.CenterCrop(128)]
    chain += [v2.RandomHorizontalFlip(0.5)]
    if backend == "pil":
        chain += [v2.ToImage()]
    return v2.Compose([*chain, v2.ToDtype(torch.float, scale=True), v2.ToPureTensor()])


def simclr_view(size: int = 96, strength: float = 1.0, T: Any = v2) -> Any:  # noqa: N803
    """One view, as in the paper's appendix A."""
    jitter = T.ColorJitter(0.8 * strength, 0.8 * strength, 0.8 * strength, 0.2 * strength)
    blur = T.GaussianBlur(int(0.1 * size) // 2 * 2 + 1, (0.1, 2.0))
    chain = [T.RandomResizedCrop(size), T.RandomHorizontalFlip(), T.RandomApply([jitter], p=0.8)]
    chain += [T.RandomGrayscale(p=0.2), T.RandomApply([blur], p=0.5)]
    return T.Compose([*chain, *([T.ToTensor()] if T is v1 else [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])])


def dino(locals_: int = 6, large: int = 224, small: int = 96) -> Any:
    """As DINO's ``DataAugmentationDINO`` composes it, with torchvision's blur and solarize in the place of PIL's."""
    jitter = v1.RandomApply([v1.ColorJitter(0.4, 0.4, 0.2, 0.1)], p=0.8)
    colours = [v1.RandomHorizontalFlip(p=0.5), jitter, v1.RandomGrayscale(p=0.2)]
    normalize = v1.Compose([v1.ToTensor(), v1.Normalize(MEAN, STD)])

    def view(size: int, scale: tuple[float, float], blur: float, *more: Any) -> Any:
        crop = v1.RandomResizedCrop(size, scale=scale, interpolation=BICUBIC)
        blurred = v1.RandomApply([v1.GaussianBlur(9, (0.1, 2.0))], p=blur)
        return v1.Compose([crop, v1.Compose(colours), blurred, *more, normalize])

    first = view(large, (0.4, 1.0), 1.0)
    second = view(large, (0.4, 1.0), 0.1, v1.RandomSolarize(128, p=0.2))
    return MultiView([first, second, *[view(small, (0.05, 0.4), 0.5)] * locals_])


def timms(**options: Any) -> Callable[[], Any]:
    return lambda: pytest.importorskip("timm.data").create_transform(112, **options)


RECIPES: dict[str, Callable[[], Recipe]] = {
    **{
        f"classification eval {backend} {version}": (
            lambda backend=backend, T=T: Recipe(classification_eval(backend=backend, T=T), RESIZED)  # noqa: N803
        )
        for backend, version, T in (("pil", "v1", v1), ("tensor", "v2", v2))
    },
    "classification eval bicubic": lambda: Recipe(classification_eval(interpolation=BICUBIC), RESIZED),
    "classification eval of a model's weights": lambda: Recipe(
        torchvision.models.EfficientNet_B1_Weights.DEFAULT.transforms(), RESIZED
    ),
    **{
        f"classification train {policy} {backend}": (
            lambda policy=policy, backend=backend: Recipe(
                classification_train(policy=policy, backend=backend, erase=0.1), BY_POLICY[policy]
            )
        )
        for policy, backend in (*((one, "pil") for one in BY_POLICY), ("ra", "tensor"))
    },
    **{
        f"classification train {policy} v1": (
            lambda policy=policy: Recipe(classification_train(policy=policy, T=v1, erase=0.5), BY_POLICY[policy])
        )
        for policy in ("ta_wide", "imagenet")
    },
    "classification train ra nearest": lambda: Recipe(
        classification_train(policy="ra", interpolation=v2.InterpolationMode.NEAREST), AUGMENTED
    ),
    "cifar10": lambda: Recipe(
        v2.Compose(
            [
                v2.ToImage(),
                v2.RandomCrop(96, padding=4, pad_if_needed=True),
                v2.RandomHorizontalFlip(),
                v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
                v2.RandomErasing(0.25, value="random"),
            ]
        ),
        AUGMENTED,
    ),
    "timm train": lambda: Recipe(timms(is_training=True)(), JITTERED),
    "timm eval": lambda: Recipe(timms()(), RESIZED),
    **{
        f"detection {policy} {backend}": (
            lambda policy=policy, backend=backend: Recipe(
                detection_train(policy, backend),
                RESIZED if policy in ("lsj", "multiscale") else UNRESIZED,
                normalized=False,
            )
        )
        for policy, backend in (
            *((one, "tv_tensor") for one in ("hflip", "lsj", "multiscale", "ssd")),
            *(("ssd", "pil"), ("lsj", "tensor")),
        )
    },
    "simclr": lambda: Recipe(MultiView([simclr_view()] * 2), JITTERED, normalized=False),
    "simclr v1": lambda: Recipe(MultiView([simclr_view(T=v1)] * 2), JITTERED, normalized=False),
    "dino": lambda: Recipe(dino(), JITTERED),
}


def mark_slow(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters, of which the longest are slow."""
    slow = {"dino", "simclr v1", "classification train augmix pil"}
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in slow)) for name in names]


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_is_left_to_torch(name, device):
    plan = compile_chain([RECIPES[name]().transform], device)
    assert (plan.suffix, plan.tail) == ((), ()), str(plan)
    assert {step.library for step in plan.steps} <= {"DALI", "nothing"}


# Each kind of batch: of PIL and tensors, v1 and v2, one view and several.
BATCHES = [
    *("classification eval pil v1", "classification eval tensor v2", "classification train ra pil", "cifar10"),
    *("classification eval of a model's weights", "timm train", "detection ssd pil", "detection lsj tv_tensor"),
    *("simclr", "simclr v1", "dino"),
]


@pytest.mark.parametrize("name", mark_slow(BATCHES))
def test_batches_are_torchvisions(name, photographs, device):
    dataset = ImageFolder(photographs.root, RECIPES[name]().transform)
    ours = DALILoader(dataset, 5, shuffle=False, device=device, seed=0)
    for (images, labels), (expected, classes) in zip(ours, DataLoader(dataset, 5), strict=True):
        assert torch.equal(labels.cpu(), classes)
        assert type(images) is type(expected)
        views, wanted = (one if isinstance(one, list) else [one] for one in (images, expected))
        assert [(view.shape, view.dtype, type(view)) for view in views] == [
            (view.shape, view.dtype, type(view)) for view in wanted
        ]
        assert all(view.device.type == device and view.is_contiguous() for view in views)


FIRST = {*{name.split()[0]: name for name in reversed(RECIPES)}.values()}
"""The first recipe of each task."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in FIRST - {"dino"} else [pytest.mark.slow]) for name in RECIPES]
)
def test_pixels_are_torchvisions(name, photographs, device):
    recipe = RECIPES[name]()
    step = torch.tensor([255 * std for std in STD] if recipe.normalized else [255.0] * 3)[:, None, None]
    means, shares = [], []
    for ours, theirs in compare_chain(ConcatDataset([photographs] * REPEATS), [recipe.transform], device):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        difference = ((ours.double() - theirs.double()) * step).abs()
        means.append(difference.mean().item())
        shares.append((~(difference <= recipe.bound.far)).double().mean().item())
    mean, share = np.mean(means), np.mean(shares)
    worst = int(np.argmax(means))
    said = f"mean {mean:.3g}, {share:.2%} off by more than {recipe.bound.far:g}; worst is {worst}: {means[worst]:.3g}"
    assert mean <= recipe.bound.mean_abs, said
    assert share <= recipe.bound.share, said


# Distributions


def photograph(root) -> ImageFolder:
    """A folder of one small photograph, in colour and with edges."""
    dataset = write_photographs(root / "pictures")
    image = dataset[0][0].resize((96, 80))
    (root / "one" / "all").mkdir(parents=True)
    image.save(root / "one" / "all" / "0.png")
    return ImageFolder(root / "one")


def features(image: torch.Tensor) -> np.ndarray:
    """Mean and deviation of each channel, and a map of 6x6 mean values of each."""
    image = image.double()
    small = torch.nn.functional.adaptive_avg_pool2d(image[None], 6)
    return torch.cat([image.mean((1, 2)), image.std((1, 2)), small.flatten()]).numpy()


def ours_of(dataset: ImageFolder, transform: Any, seed: int = 0) -> np.ndarray:
    """Features of many draws by DALI: ``(DRAWS, features)``."""
    plan = compile_chain([transform])
    assert not plan.suffix, str(plan)
    batches = run(dataset, plan, [[0] * 50] * (DRAWS // 50), seed)
    return np.array([features(image) for batch in batches for image in batch.images])


def theirs_of(dataset: ImageFolder, transform: Any) -> np.ndarray:
    """The same of torchvision's random calls.

    They are made on a tensor: what torchvision does to PIL images is another rounding, and torchdali follows its
    tensor kernels.
    """
    image = F.to_image(dataset[0][0])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return np.array([features(transform(image).as_subclass(torch.Tensor)) for _ in range(DRAWS)])


def p_of(ours: np.ndarray, theirs: np.ndarray) -> float:
    """How likely samples that are so far apart are, if both come from one distribution.

    A permutation test of the distance of the mean features, one of that of their mean squares about the common mean,
    and a Kolmogorov-Smirnov test of each channel's mean and deviation; the least p, times the number of tests.
    """
    both = np.concatenate([ours, theirs])
    both = (both - both.mean(0)) / (both.std(0) + 1e-9)
    signs, found = assignments(len(ours), len(theirs)), []
    for values in (both, np.minimum(both**2, 25)):
        distance = ((signs @ values) ** 2).sum(1)
        found.append((distance >= distance[0]).mean())
    # Rounded, as means that differ by less than a grey level differ by how a resize rounds.
    rounded = np.round(both[:, :6], 2)
    found += [stats.ks_2samp(*np.split(rounded[:, i], [len(ours)])).pvalue for i in range(6)]
    return min(1.0, min(found) * len(found))


@cache
def assignments(ours: int, theirs: int) -> np.ndarray:
    """The true assignment of samples to both sides, 1 and -1, and 9,999 others at random."""
    signs = np.tile(np.repeat([1.0, -1.0], [ours, theirs]), (10_000, 1))
    signs[1:] = np.random.default_rng(0).permuted(signs[1:], axis=1)
    return signs


def uint8(*chain: Any) -> Any:
    return v2.Compose([v2.PILToTensor(), *chain])


def plain(*chain: Any) -> Any:
    """A chain without what takes PIL images, which torchvision here gets none of."""
    return v2.Compose([one for one in chain if type(one) not in (v2.PILToTensor, v2.ToImage)])


DISTRIBUTED = {
    "classification": lambda: classification_train(48, "imagenet", erase=0.5, backend="tensor").transforms,
    "simclr": lambda: [v2.PILToTensor(), *simclr_view(48).transforms[:-2]],
    "ssd": lambda: [*detection_train("ssd").transforms[:-1], v2.Resize((48, 48))],
    "lsj": lambda: detection_train("lsj").transforms,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DISTRIBUTED)
def test_distributions_are_torchvisions(name, tmp_path):
    chain, dataset = DISTRIBUTED[name](), photograph(tmp_path)
    assert p_of(ours_of(dataset, chain), theirs_of(dataset, plain(*chain))) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ([v2.ColorJitter(0.4)], [v2.ColorJitter(0.55)]),
        ([v2.TrivialAugmentWide()], [v2.RandAugment()]),
    ],
    ids=str,
)
def test_other_distributions_are_told_apart(ours, theirs, tmp_path):
    dataset = photograph(tmp_path)
    drawn = ours_of(dataset, uint8(*ours))
    assert p_of(drawn, theirs_of(dataset, plain(*theirs))) < 1e-3
    assert p_of(drawn, theirs_of(dataset, plain(*ours))) > 1e-3
