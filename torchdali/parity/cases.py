"""The cases of the parity certificate, which are also the tests of the rules: for each rule, at least one line."""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

__all__ = ["CASES", "Case"]


class Case(NamedTuple):
    """A chain, the largest difference anywhere and inside a border of 4 pixels, and the mean difference."""

    chain: list[Any]
    anywhere: float
    inside: float
    mean: float


FLOAT = v2.ToDtype(torch.float32, scale=True)
SMALL = v2.Resize((90, 120), interpolation="nearest-exact")
IMAGENET: dict[str, Any] = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}
EXACT = (0, 0, 0)
# At an image's edge torchvision gives the part of a filter that lies outside to the part inside; DALI repeats the edge.
EDGE = (24, 2, 0.06)
# Before 0.24 torchvision resizes uint8 as float32 on processors with AVX-512, which rounds once instead of twice.
FLOATING = not cast("Any", F)._geometry._do_native_uint8_resize_on_cpu(v2.InterpolationMode.BILINEAR)  # noqa: SLF001
BILINEAR = (24, 2, 0.2) if FLOATING else EDGE

CASES: dict[str, Case] = {
    "Identity": Case([v2.Identity(), v2.ToImage(), v2.ToPureTensor()], *EXACT),
    "PILToTensor": Case([v2.PILToTensor()], *EXACT),
    "ToTensor v1": Case([v1.ToTensor()], *EXACT),
    "ToDtype scaled": Case([v2.ToImage(), FLOAT], *EXACT),
    "ToDtype": Case([v2.ToImage(), v2.ToDtype(torch.float32)], *EXACT),
    "ToDtype dict": Case([v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None})], *EXACT),
    "ToDtype half": Case([v2.ToImage(), v2.ToDtype(torch.float16, scale=True)], *EXACT),
    "ConvertImageDtype": Case([v2.PILToTensor(), v1.ConvertImageDtype(torch.float32)], *EXACT),
    "Normalize": Case([v2.ToImage(), FLOAT, v2.Normalize(**IMAGENET)], 1e-6, 1e-6, 3e-7),
    "Normalize flipped": Case(
        [v2.RandomHorizontalFlip(), v2.ToImage(), FLOAT, v2.Normalize(**IMAGENET)], 1e-6, 1e-6, 3e-7
    ),
    "Normalize v1": Case([v1.ToTensor(), v1.Normalize(**IMAGENET)], 1e-6, 1e-6, 3e-7),
    "Normalize one channel": Case([v2.Grayscale(), v2.ToImage(), FLOAT, v2.Normalize([0.5], [0.2])], 0.02, 0.02, 1e-5),
    "Normalize then crop": Case([v2.ToImage(), FLOAT, v2.Normalize(**IMAGENET), v2.RandomCrop(60)], 1e-6, 1e-6, 3e-7),
    "Resize": Case([v2.Resize((100, 120))], *BILINEAR),
    "Resize shorter": Case([v2.Resize(64)], *BILINEAR),
    "Resize up": Case([v2.Resize((400, 380))], *BILINEAR),
    "Resize max_size": Case([v2.Resize(100, max_size=120)], *BILINEAR),
    "Resize longer": Case([v2.Resize(None, max_size=110)], *BILINEAR),
    "Resize bicubic": Case([v2.Resize((100, 120), interpolation=Image.Resampling.BICUBIC)], *EDGE),
    "Resize without antialias": Case([v2.ToImage(), v2.Resize((100, 120), antialias=False)], 1, 1, 0.2),
    "Resize nearest": Case([v2.ToImage(), v2.Resize((100, 120), interpolation="nearest")], *EXACT),
    "Resize nearest-exact": Case([v2.ToImage(), v2.Resize((100, 120), interpolation="nearest-exact")], *EXACT),
    "Resize float": Case([v2.ToImage(), FLOAT, v2.Resize((100, 120))], 0.1, 1e-5, 4e-4),
    "Resize v1": Case([v1.Resize(64), v1.ToTensor()], *(x / 255 for x in BILINEAR)),
    "CenterCrop": Case([v2.CenterCrop((101, 90))], *EXACT),
    "CenterCrop larger": Case([v2.CenterCrop((401, 380))], *EXACT),
    "CenterCrop v1": Case([v1.CenterCrop(75), v1.PILToTensor()], *EXACT),
    "RandomCrop": Case([v2.RandomCrop((70, 60))], *EXACT),
    "RandomCrop padded": Case([v2.RandomCrop((110, 120), padding=(3, 40, 5, 6), fill=(9, 8, 7))], *EXACT),
    "RandomCrop v1 padded": Case([v1.RandomCrop((110, 120), padding=(3, 40), fill=3), v1.PILToTensor()], *EXACT),
    "RandomCrop pad_if_needed": Case([v2.RandomCrop(300, pad_if_needed=True, fill={"others": 5})], *EXACT),
    "RandomCrop reflect": Case([v2.RandomCrop((110, 120), padding=(3, 40, 5, 6), padding_mode="reflect")], *EXACT),
    "RandomResizedCrop": Case([v2.RandomResizedCrop(96)], *BILINEAR),
    "RandomResizedCrop bicubic": Case([v2.RandomResizedCrop((80, 96), interpolation="bicubic")], *EDGE),
    "RandomResizedCrop v1": Case([v1.RandomResizedCrop(96), v1.PILToTensor()], *BILINEAR),
    # torch rounds some of its float32 indices just below a whole number, and then takes the pixel before.
    "RandomResizedCrop nearest": Case(
        [v2.ToImage(), v2.RandomResizedCrop(96, interpolation="nearest")], 255, 255, 0.05
    ),
    "RandomHorizontalFlip": Case([v2.RandomHorizontalFlip()], *EXACT),
    "RandomVerticalFlip v1": Case([v1.RandomVerticalFlip(), v1.PILToTensor()], *EXACT),
    "Pad": Case([v2.Pad((3, 4, 5, 6), fill=(1, 2, 3))], *EXACT),
    "Pad negative": Case([v2.ToImage(), v2.Pad(-7)], *EXACT),
    "Pad edge": Case([v2.Pad((3, 4, 5, 6), padding_mode="edge")], *EXACT),
    "Pad reflect": Case([v2.Pad((3, 0, 5, 6), padding_mode="reflect")], *EXACT),
    "Pad symmetric": Case([v2.Pad(7, padding_mode="symmetric")], *EXACT),
    "Grayscale": Case([v2.Grayscale()], 1, 1, 1e-5),
    "Grayscale 3": Case([v2.Grayscale(3)], 1, 1, 1e-5),
    "ColorJitter brightness": Case([SMALL, v2.ColorJitter(0.6)], *EXACT),
    "ColorJitter contrast": Case([SMALL, v2.ColorJitter(contrast=0.6)], 1, 1, 0.02),
    "ColorJitter saturation": Case([SMALL, v2.ColorJitter(saturation=0.6)], 1, 1, 2e-3),
    "ColorJitter hue": Case([SMALL, v2.ColorJitter(hue=0.5)], 1, 1, 1e-4),
    "ColorJitter": Case([SMALL, v2.ColorJitter(0.4, 0.4, 0.4, 0.2)], 3, 3, 0.03),
    "ColorJitter nothing": Case([SMALL, v2.ColorJitter()], *EXACT),
    "RandomApply": Case([SMALL, v2.RandomApply([v2.ColorJitter(0.4, 0, 0.4), v2.RandomVerticalFlip()])], 3, 3, 0.03),
    "RandomApply v1": Case([v1.RandomApply([v1.CenterCrop(60)], p=0.4), v1.PILToTensor()], *EXACT),
}
