"""Cases of the parity certificate for augmentations of DALI."""

from __future__ import annotations

import torch

from torchdali.tools.parity.bounds import EXACT, F32, IMAGENET, LINEAR, NEIGHBOUR, NORMALIZED, ROUNDED, TWIST, v2
from torchdali.tools.parity.case import Case
from torchdali.transforms import (
    BGR,
    CLAHE,
    HSV,
    ColorSpace,
    ColorTwist,
    Dilate,
    Erode,
    GridMask,
    Jitter,
    LookupTable,
    MedianBlur,
    Operator,
    Paste,
    SaltAndPepper,
    ShotNoise,
    Sphere,
    Water,
)

AUGMENTATIONS: dict[str, Case] = {
    "ColorTwist": Case([ColorTwist((0.7, 1.3), (0.6, 1.4), (0, 2), (-180, 180))], *ROUNDED),
    "ColorTwist float": Case([*F32, ColorTwist(1.2, 0.7, (0, 2), (-90, 90))], 2e-6, 2e-6, 3e-7, TWIST),
    "HSV": Case([HSV((-180, 180), (0, 2), (0.5, 1.5))], *ROUNDED),
    "ColorSpace": Case([ColorSpace("YCbCr")], *ROUNDED),
    "BGR": Case([BGR()], *EXACT),
    "LookupTable": Case([LookupTable(torch.arange(255, -1, -1, dtype=torch.uint8))], *EXACT),
    "LookupTable float": Case([v2.ToImage(), LookupTable((torch.arange(256) / 255) ** 0.5)], *EXACT),
    "GridMask": Case([GridMask((20, 60), (0.3, 0.7), (-45, 45))], 255, 255, 0.02, NEIGHBOUR[3]),
    "SaltAndPepper": Case([SaltAndPepper((0, 0.3), (0.2, 0.8))], *EXACT),
    "SaltAndPepper float": Case([*F32, SaltAndPepper(0.2)], *EXACT),
    "CLAHE": Case([CLAHE((3, 4), 3.0)], *EXACT, devices=("cpu",)),
    "CLAHE grey": Case([v2.Grayscale(), CLAHE()], *EXACT, devices=("cpu",)),
    # A normal number that is rounded differently is another count.
    "ShotNoise": Case([ShotNoise((5, 40))], 40, 40, 1e-3),
    "ShotNoise float": Case([*F32, ShotNoise(0.05)], 0.06, 0.06, 1e-5),
    "MedianBlur": Case([MedianBlur()], *EXACT),
    "MedianBlur of 5 x 7": Case([MedianBlur((5, 7))], *EXACT),
    "MedianBlur float": Case([*F32, MedianBlur(5)], *EXACT),
    "Dilate": Case([Dilate((3, 7))], *EXACT),
    "Dilate grey": Case([v2.Grayscale(), v2.ToImage(), Dilate(5)], *EXACT),
    "Dilate float": Case([*F32, v2.Normalize(**IMAGENET), Dilate((5, 3))], *NORMALIZED),
    "Erode": Case([Erode((3, 7))], *EXACT),
    "Erode float": Case([*F32, v2.Normalize(**IMAGENET), Erode(5)], *NORMALIZED),
    "Jitter": Case([Jitter(6, fill=77)], *EXACT),
    "Jitter grey": Case([v2.Grayscale(), v2.ToImage(), Jitter(3)], *EXACT),
    "Jitter float": Case([*F32, Jitter(4, fill=0.3)], 1e-6, 1e-6, 1e-7, TWIST),
    "Jitter and windows in RandomApply": Case(
        [
            v2.RandomApply([Jitter(4), MedianBlur()], p=0.4),
            v2.RandomApply([Dilate(), Erode(5)], p=0.4),
            v2.RandomApply([Water(phase=(0, 6)), ShotNoise(10)], p=0.4),
        ],
        255,
        255,
        0.02,
        NEIGHBOUR[3],
    ),
    "Operator": Case([Operator("hue", hue=(-40.0, 40.0))], 1, 1, 1e-5, "halves are rounded to the other side on a GPU"),
    "Water": Case([Water(phase=1.0)], 255, 255, 0.02, NEIGHBOUR[3]),
    "Water bilinear": Case([Water((6, 4), phase=0.5, interpolation=LINEAR, fill=9)], *ROUNDED),
    "Water in phases": Case([Water(phase=(0, 6.3))], 255, 255, 0.02, NEIGHBOUR[3]),
    "Water in phases bilinear": Case(
        [*F32, Water((6, 4), phase=(0, 6), interpolation=LINEAR, fill=0.3)], 1e-3, 1e-3, 1e-5, TWIST
    ),
    "Sphere": Case([Sphere()], 255, 255, 0.02, NEIGHBOUR[3]),
    "Sphere float": Case([*F32, Sphere(LINEAR)], 1e-4, 1e-4, 1e-6, TWIST),
    "Paste": Case([Paste()], *EXACT),
    "Paste channels": Case([Paste((1.2, 2), 0.3, (0.5, 1), fill=(1, 2, 255), min_size=200)], *EXACT),
    "Paste float": Case([*F32, Paste(fill=0.3)], *EXACT),
    "Paste then crop in RandomApply": Case([v2.RandomApply([Paste(2), v2.RandomCrop(60)])], *EXACT),
}
