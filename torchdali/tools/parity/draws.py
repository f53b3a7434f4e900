"""Random parameters whose distributions are compared with torchvision's own sampler: one line each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torchvision.transforms import v2 as annotated_v2

from torchdali.transforms import HSV, ColorTwist, GridMask, Jitter, Paste, SaltAndPepper, ShotNoise, Water, find_rule
from torchdali.transforms.augment.operator import Operator
from torchdali.transforms.rules._noise import reference_words, to_uniform
from torchdali.transforms.rules._policy import OPERATIONS
from torchdali.transforms.rules.elastic import CROSSWISE
from torchdali.transforms.rules.noise import reference_noise
from torchdali.transforms.spec import Params

v2 = cast("Any", annotated_v2)  # which accepts more than its annotations tell


@dataclass(frozen=True)
class Draw:
    """One random parameter of a transform.

    Attributes:
        transform: The transform.
        actual: Function from the rule's parameters to the ``(N,)`` values of the samples.
        expected: Function from the result of torchvision's ``make_params`` to the value of one sample. If torchvision
            draws elsewhere: the probability of True, or the probabilities of the values 0, 1, 2 and so on.
        dtype: Element type of the images.
        noting: Copy of the transform whose ``make_params`` returns what torchvision draws elsewhere, or None.
    """

    transform: Any
    actual: Callable[[Params], Any]
    expected: Callable[[Any], Any] | float | tuple[float, ...]
    dtype: torch.dtype = torch.uint8
    noting: Any = None


def _place(name: str, transform: Any) -> dict[str, Draw]:
    """Return the draws of a random window's position. torchvision counts it from the padded image's corner."""

    def start(key: str, column: int) -> Draw:
        return Draw(transform, lambda p: p["start"][:, column], lambda p: p[key] - p.get("padding", (0, 0))[1 - column])

    return {f"{name}: top": start("top", 0), f"{name}: left": start("left", 1)}


def _window(name: str, transform: Any) -> dict[str, Draw]:
    """Return the draws of a random window's position and shape."""
    return {
        **_place(name, transform),
        f"{name}: height": Draw(transform, lambda p: p["shape"][:, 0], lambda p: p["height"]),
        f"{name}: width": Draw(transform, lambda p: p["shape"][:, 1], lambda p: p["width"]),
        f"{name}: ratio": Draw(
            transform, lambda p: p["shape"][:, 1] / p["shape"][:, 0], lambda p: p["width"] / p["height"]
        ),
    }


def _rank(orders: Any) -> Any:
    """Return one number for each of ``(..., n)`` permutations. Different permutations have different numbers."""
    order = np.asarray(orders, np.int64)
    return cast("Any", order * order.shape[-1] ** np.arange(order.shape[-1])).sum(-1)


def _affine(transform: Any) -> dict[str, Draw]:
    """Return the draws of ``RandomAffine``."""

    def part(key: str, column: int) -> Draw:
        return Draw(transform, lambda p: p[key][:, column], lambda p: p[key][column])

    return {
        "RandomAffine: angle": Draw(transform, lambda p: p["angle"], lambda p: p["angle"]),
        "RandomAffine: scale": Draw(transform, lambda p: p["scale"], lambda p: p["scale"]),
        "RandomAffine: x translation": part("translate", 0),
        "RandomAffine: y translation": part("translate", 1),
        "RandomAffine: x shear": part("shear", 0),
        "RandomAffine: y shear": part("shear", 1),
    }


def _perspective(transform: Any) -> dict[str, Draw]:
    """Return the draws of ``RandomPerspective``: the coefficients that torchvision computes from the corners."""

    def coefficient(place: int) -> Draw:
        return Draw(transform, lambda p: p["matrix"].reshape(-1, 9)[:, place], lambda p: p["coefficients"][place])

    return {f"RandomPerspective: coefficient {place}": coefficient(place) for place in range(8)}


def _get_erasing_draws(name: str, transform: Any) -> dict[str, Draw]:
    """Return the draws of ``RandomErasing``'s box. Height and width are 0 if nothing is erased."""

    def part(key: str, column: int, letter: str) -> Draw:
        return Draw(transform, lambda p: p[key][:, column], lambda p: 0 if p["v"] is None else p[letter])

    return {
        f"{name}: top": Draw(transform, lambda p: p["start"][:, 0] * p["erase"], lambda p: p["i"]),
        f"{name}: left": Draw(transform, lambda p: p["start"][:, 1] * p["erase"], lambda p: p["j"]),
        f"{name}: height": part("shape", 0, "h"),
        f"{name}: width": part("shape", 1, "w"),
    }


def _distort(transform: Any) -> dict[str, Draw]:
    """Return the draws of ``RandomPhotometricDistort``. A factor that is left out is -1."""

    def factor(column: int, key: str) -> Draw:
        return Draw(
            transform,
            lambda p: np.nan_to_num(p["factors"][:, column], nan=-1),
            lambda p: -1 if p[key] is None else p[key],
        )

    names = ("brightness", "contrast", "saturation", "hue")
    return {
        **{f"RandomPhotometricDistort: {x}": factor(i, f"{x}_factor") for i, x in enumerate(names) if x != "contrast"},
        "RandomPhotometricDistort: contrast": Draw(
            transform,
            lambda p: np.nan_to_num(p["factors"][:, 1], nan=0) * np.where(p["last"], -1, 1),
            lambda p: (p["contrast_factor"] or 0) * (1 if p["contrast_before"] else -1),
        ),
        "RandomPhotometricDistort: channels": Draw(
            transform,
            lambda p: _rank(p["order"]),
            lambda p: _rank([0, 1, 2] if p["channel_permutation"] is None else p["channel_permutation"]),
        ),
    }


def _policy(name: str, transform: Any, places: tuple[int, ...]) -> dict[str, Draw]:
    """Return the draws of a policy: its operations, in the order in which they are applied, and their magnitudes.

    torchvision draws them while it applies them. So its own code runs with operations that only record their calls.
    """

    def notes(image: list[Any]) -> list[tuple[int, float]]:
        made: list[tuple[int, float]] = []

        def note(image: Any, operation: str, magnitude: float, **_: Any) -> Any:
            made.append((OPERATIONS.index(operation), magnitude))
            return image

        noting._apply_image_or_video_transform = note  # noqa: SLF001
        noting(image[0].to("meta"))
        del noting._apply_image_or_video_transform  # noqa: SLF001
        # Identity is left out on both sides, because the rule has it in slots that are not used.
        return [*filter(lambda pair: pair[0], made), *[(0, 0.0)] * (max(places) + 1)]

    def actual(params: Params, place: int) -> tuple[Any, Any]:
        order = np.argsort(params["operation"] == 0, axis=1, kind="stable")[:, place]
        rows = np.arange(len(order))
        operation: Any = params["operation"][rows, order]
        return operation, params["magnitude"][rows, order] * (operation > 0)

    def combine(operation: Any, magnitude: Any) -> Any:
        """Return one number for an operation and its magnitude."""
        return np.fmod(operation * 2**0.5 + magnitude * 3**0.5, 1)

    noting = copy.copy(transform)
    noting.make_params = notes
    noting._sample_dirichlet = torch.zeros_like  # noqa: SLF001
    draws: dict[str, Draw] = {}
    for i in places:
        draws[f"{name}: operation {i}"] = Draw(
            transform, lambda p, i=i: actual(p, i)[0], lambda p, i=i: p[i][0], noting=noting
        )
        draws[f"{name}: operation and magnitude {i}"] = Draw(
            transform, lambda p, i=i: combine(*actual(p, i)), lambda p, i=i: combine(*p[i]), noting=noting
        )
    return draws


def _weights(name: str, transform: Any) -> dict[str, Draw]:
    """Return the draws of the weights of the image and the chains in ``AugMix``."""

    def notes(_: Any) -> list[float]:
        sample = transform._sample_dirichlet  # noqa: SLF001
        image, rest = sample(torch.full((1, 2), transform.alpha))[0].tolist()
        chains = sample(torch.full((1, transform.mixture_width), transform.alpha))[0]
        return [image, *(rest * chains).tolist()]

    noting = copy.copy(transform)
    noting.make_params = notes
    return {
        f"{name}: weight {i}": Draw(transform, lambda p, i=i: p[f"weight{i}"], lambda p, i=i: p[i], noting=noting)
        for i in range(transform.mixture_width + 1)
    }


def _noise(transform: Any) -> Draw:
    """Return the draw of one value of the noise in each image. torchvision draws it while it adds it."""

    def actual(params: Params) -> Any:
        rows = range(len(next(iter(params.values()))))
        return [
            reference_noise({key: values[i] for key, values in params.items()}, 5, 7, 3)[2, 3, 4].item() for i in rows
        ]

    def notes(_: Any) -> float:
        return torch.randn(1).item()

    noting = copy.copy(transform)
    noting.make_params = notes
    # torchvision before 0.24 refuses uint8: https://github.com/pytorch/vision/pull/9169
    return Draw(transform, actual, lambda value: value, torch.float32, noting)


def _displacement(params: Params) -> Any:
    """Return how far a pixel moves to the right, as a share of alpha."""
    rows = ({key: values[i] for key, values in params.items()} for i in range(len(params["noise_start"])))
    return [2 * to_uniform(reference_words(row, 6, 6, 2))[3, 5, 0] - 1 for row in rows]


JITTER = v2.ColorJitter(0.4, (0.5, 0.9), 0.2, 0.1)
FLIPS = [v2.RandomHorizontalFlip(1), v2.RandomVerticalFlip(1), v2.Identity()]


def _ranges(transform: Any) -> dict[str, Draw]:
    """Return the draws of an augmentation's ranges."""

    def number(name: str) -> Draw:
        # The side of a tile is cut to whole pixels after it is drawn.
        return Draw(transform, lambda p: p[name], lambda p: np.floor(p[name]) if name == "tile" else p[name])

    return {f"{type(transform).__name__}: {name}": number(name) for name in transform.drawn}


def _jitter(transform: Jitter) -> dict[str, Draw]:
    """Return the draws of how far a pixel is taken from."""

    def move(axis: int) -> Draw:
        def actual(params: Params) -> Any:
            rule: Any = find_rule(transform)
            rows = ({key: values[i] for key, values in params.items()} for i in range(len(params["noise_start"])))
            return [rule.make_params(row, (6, 7))["moves"][axis, 3, 5].item() for row in rows]

        return Draw(transform, actual, lambda p: p["moves"][axis, 3, 5].item())

    return {"Jitter: move down": move(0), "Jitter: move to the right": move(1)}


def _photons(mean: float) -> Draw:
    """Return the draw of the number of photons of one value of an image."""

    def actual(params: Params) -> Any:
        rule: Any = find_rule(ShotNoise(1.0))
        image = torch.full((3, 5, 7), mean)
        rows = ({key: values[i] for key, values in params.items()} for i in range(len(params["noise_start"])))
        return [rule.reference(image, row)[2, 3, 4].item() for row in rows]

    return Draw(ShotNoise(1.0), actual, lambda p: p["count"](torch.tensor(mean)).item())


def _operator(transform: Operator) -> dict[str, Draw]:
    """Return the draws of an operator's ranges. In torch they are those of ``randint`` and ``uniform_``."""

    def notes(_: Any) -> dict[str, float]:
        return {
            name: torch.randint(low, high + 1, ()).item()
            if isinstance(low, int)
            else torch.empty(()).uniform_(low, high).item()
            for name, (low, high) in cast("dict[str, tuple[Any, Any]]", transform.ranges).items()
        }

    noting: Any = copy.copy(transform)
    noting.make_params = notes
    return {
        f"Operator: {name}": Draw(transform, lambda p, name=name: p[name], lambda p, name=name: p[name], noting=noting)
        for name in transform.ranges
    }


DRAWS: dict[str, Draw] = {
    **_ranges(ColorTwist((0.7, 1.3), (0.6, 1.4), (0, 2), (-180, 180))),
    **_ranges(HSV((-180, 180), (0, 2), (0.5, 1.5))),
    **_ranges(GridMask((20, 60), (0.3, 0.7), (-45, 45))),
    **_ranges(SaltAndPepper((0, 0.3), (0.2, 0.8))),
    **_ranges(Water(phase=(0, 6.3))),
    **_jitter(Jitter(6)),
    **_ranges(Paste((1, 3), (0, 0.8), (0.2, 1))),
    **_ranges(ShotNoise((5, 40))),
    "ShotNoise: few photons": _photons(3.0),
    "ShotNoise: many photons": _photons(12.0),
    **_operator(Operator("gaussian_blur", sigma=(0.5, 2.0), window_size=(3, 9))),
    **_window("RandomResizedCrop", v2.RandomResizedCrop(64)),
    # Most of the ten attempts fail.
    **_window("RandomResizedCrop beyond the image", v2.RandomResizedCrop(64, scale=(0.5, 1.5), ratio=(0.3, 4.0))),
    **_place("RandomCrop padded", v2.RandomCrop((100, 200), padding=(5, 9))),
    **_place("RandomCrop pad_if_needed", v2.RandomCrop((300, 200), pad_if_needed=True)),
    "ColorJitter: brightness": Draw(JITTER, lambda p: p["factors"][:, 0], lambda p: p["brightness_factor"]),
    "ColorJitter: contrast": Draw(JITTER, lambda p: p["factors"][:, 1], lambda p: p["contrast_factor"]),
    "ColorJitter: saturation": Draw(JITTER, lambda p: p["factors"][:, 2], lambda p: p["saturation_factor"]),
    "ColorJitter: hue": Draw(JITTER, lambda p: p["factors"][:, 3], lambda p: p["hue_factor"]),
    "ColorJitter: order": Draw(JITTER, lambda p: _rank(p["order"]), lambda p: _rank(p["fn_idx"])),
    "RandomGrayscale: apply": Draw(v2.RandomGrayscale(0.3), lambda p: p["apply"], 0.3),
    "RandomInvert: apply": Draw(v2.RandomInvert(0.6), lambda p: p["value"] == 255, 0.6),
    "RandomPosterize: apply": Draw(v2.RandomPosterize(3, 0.3), lambda p: p["value"] == 0b11100000, 0.3),
    "RandomSolarize: apply": Draw(v2.RandomSolarize(99, 0.7), lambda p: p["value"] == 99, 0.7),
    "RandomAutocontrast: apply": Draw(v2.RandomAutocontrast(0.2), lambda p: p["apply"], 0.2),
    "RandomEqualize: apply": Draw(v2.RandomEqualize(0.4), lambda p: p["apply"], 0.4),
    "RandomAdjustSharpness: apply": Draw(v2.RandomAdjustSharpness(2, 0.4), lambda p: p["apply"], 0.4),
    "RandomChannelPermutation: order": Draw(
        v2.RandomChannelPermutation(), lambda p: _rank(p["order"]), lambda p: _rank(p["permutation"])
    ),
    **_distort(v2.RandomPhotometricDistort((0.6, 1.2), (0.3, 0.9), (1.1, 3), (-0.4, 0.1), 0.4)),
    **_policy("TrivialAugmentWide", v2.TrivialAugmentWide(7), (0,)),
    **_policy("RandAugment", v2.RandAugment(3, 5, 9), (0, 2)),
    **_policy("AutoAugment", v2.AutoAugment(), (0, 1)),
    **_policy("AutoAugment CIFAR10", v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10), (0, 1)),
    **_policy("AutoAugment SVHN", v2.AutoAugment(v2.AutoAugmentPolicy.SVHN), (0, 1)),
    **_policy("AugMix", v2.AugMix(4), (0, 5)),
    **_weights("AugMix", v2.AugMix()),
    **_weights("AugMix of alpha below 1", v2.AugMix(mixture_width=4, alpha=0.3)),
    **_weights("AugMix of alpha above 1", v2.AugMix(mixture_width=2, alpha=2.5)),
    "RandomHorizontalFlip: flip": Draw(v2.RandomHorizontalFlip(0.3), lambda p: p["flip"], 0.3),
    "RandomRotation: angle": Draw(v2.RandomRotation((-20, 70)), lambda p: p["angle"], lambda p: p["angle"]),
    **_affine(v2.RandomAffine((5, 60), (0.1, 0.02), (0.5, 1.7), (-9, 30, 4, 8))),
    "RandomPerspective: apply": Draw(v2.RandomPerspective(p=0.3), lambda p: p["apply"], 0.3),
    **_perspective(v2.RandomPerspective(0.05, p=1)),
    "GaussianBlur: sigma": Draw(v2.GaussianBlur(5, (0.3, 2.5)), lambda p: p["sigma"], lambda p: p["sigma"][0]),
    "JPEG: quality": Draw(v2.JPEG((40, 46)), lambda p: p["quality"], lambda p: p["quality"]),
    "RandomErasing: erase": Draw(v2.RandomErasing(0.3), lambda p: p["erase"], 0.3),
    **_get_erasing_draws("RandomErasing", v2.RandomErasing(1)),
    # Many of the ten attempts fail.
    **_get_erasing_draws("RandomErasing beyond the image", v2.RandomErasing(1, (0.5, 1.0), (4.0, 8.0))),
    "ElasticTransform: a place, not blurred": Draw(
        v2.ElasticTransform(1.0, 0.0),
        _displacement,
        lambda p: p["displacement"][0, 3, 5, 0].item() * p["displacement"].shape[1 if CROSSWISE else 2],
    ),
    "GaussianNoise: a value": _noise(v2.GaussianNoise()),
    "RandomApply: apply": Draw(v2.RandomApply([v2.ColorJitter(0.1)], p=0.3), lambda p: p["chain0"], 0.3),
    "RandomVerticalFlip: flip": Draw(v2.RandomVerticalFlip(0.8), lambda p: p["flip"], 0.8),
    "RandomChoice: which": Draw(
        v2.RandomChoice(FLIPS, p=[2, 1, 1]), lambda p: p["chain1"] + 2 * p["chain2"], (0.5, 0.25, 0.25)
    ),
    "RandomOrder: the first": Draw(
        v2.RandomOrder(FLIPS), lambda p: p["place0_chain1"] + 2 * p["place0_chain2"], (1 / 3, 1 / 3, 1 / 3)
    ),
    "RandomOrder: the last": Draw(
        v2.RandomOrder(FLIPS), lambda p: p["place2_chain1"] + 2 * p["place2_chain2"], (1 / 3, 1 / 3, 1 / 3)
    ),
    "RandomResize: shorter side": Draw(v2.RandomResize(60, 64), lambda p: p["height"], lambda p: p["size"][0]),
    "RandomShortestSize: height": Draw(
        v2.RandomShortestSize([60, 90, 120, 150], 180), lambda p: p["height"], lambda p: p["size"][0]
    ),
    "ScaleJitter: height": Draw(v2.ScaleJitter((100, 200)), lambda p: p["height"], lambda p: p["size"][0]),
    "ScaleJitter: width": Draw(v2.ScaleJitter((100, 200)), lambda p: p["width"], lambda p: p["size"][1]),
    "RandomZoomOut: apply": Draw(v2.RandomZoomOut(side_range=(2, 2), p=0.3), lambda p: p["shape"][:, 0] > 180, 0.3),
    "RandomZoomOut: top": Draw(v2.RandomZoomOut(p=1), lambda p: -p["start"][:, 0], lambda p: p["padding"][1]),
    "RandomZoomOut: left": Draw(v2.RandomZoomOut(p=1), lambda p: -p["start"][:, 1], lambda p: p["padding"][0]),
    "RandomZoomOut: bottom": Draw(
        v2.RandomZoomOut(p=1), lambda p: p["shape"][:, 0] - 180 + p["start"][:, 0], lambda p: p["padding"][3]
    ),
}
