"""Random chains of random transforms, and photographs for them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import PIL.Image
import torch
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.tools.parity.photographs import photographs
from torchdali.transforms import MultiView
from torchdali.transforms.spec import Spec

FLOAT = v2.ToDtype(torch.float32, scale=True)
PHOTOGRAPHS = list(photographs().values())


class Maker:
    """Random transforms with random arguments.

    Args:
        seed: Of everything that it makes.
        fixed: Whether transforms have no randomness left: probabilities are 0 or 1, ranges a single number.
    """

    def __init__(self, seed, fixed=False):
        self.rng = np.random.default_rng(seed)
        self.fixed = fixed
        self.views = 0

    def pick(self, *options):
        return options[int(self.rng.integers(len(options)))]

    def whole(self, low, high):
        return int(self.rng.integers(low, high + 1))

    def real(self, low, high):
        return round(float(self.rng.uniform(low, high)), 3)

    def p(self):
        return self.pick(0.0, 1.0, 1) if self.fixed else self.pick(0.0, 0.3, 0.5, 0.7, 1.0)

    def range(self, low, high):
        one, other = sorted((self.real(low, high), self.real(low, high)))
        return (one, one) if self.fixed else (one, other)

    def side(self):
        return self.pick(self.whole(1, 8), self.whole(8, 40), self.whole(20, 90), self.whole(60, 150))

    def sides(self):
        return self.pick(self.side(), (self.side(), self.side()), [self.side(), self.side()])

    def fill(self):
        level = lambda: self.pick(0, 7, 255, 0.5, 99.6, 300, -3)  # noqa: E731
        one = self.pick(0, level(), level(), tuple(level() for _ in range(3)), [level(), level(), level()], None, [9])
        by_type = {tv_tensors.Image: 3, PIL.Image.Image: 5, torch.Tensor: 200, "others": 60}
        return self.pick(one, one, one, by_type)

    def fill_v1(self):
        return self.pick(0, 7, (9, 80, 7))

    def interpolation(self):
        # Before 0.28 torchvision takes no names as text.
        modes = [v2.InterpolationMode(x) for x in ("bilinear", "bilinear", "nearest", "nearest-exact", "bicubic")]
        return self.pick(*modes, PIL.Image.Resampling.BILINEAR)

    def warp_interpolation(self):
        return self.pick(*(v2.InterpolationMode(x) for x in ("bilinear", "nearest")), PIL.Image.Resampling.BILINEAR)

    def mode_v1(self):
        return self.pick(*(v1.InterpolationMode(x) for x in ("nearest", "bilinear")))

    def crops(self):
        pad = lambda: self.pick(0, self.whole(0, 9), (self.whole(0, 5), self.whole(0, 12)))  # noqa: E731
        four = tuple(self.whole(0, 9) for _ in range(4))
        mode = self.pick("constant", "constant", "edge", "reflect", "symmetric")
        padding = self.pick(pad(), pad(), four, list(four))
        negative = self.pick(padding, padding, -self.whole(1, 5), (-2, 3, 1, -1))
        size = self.sides()
        return (
            lambda: v2.CenterCrop(self.sides()),
            lambda: v1.CenterCrop(self.sides()),
            lambda: v2.Pad(negative if mode == "constant" else padding, fill=self.fill(), padding_mode=mode),
            lambda: v1.Pad(padding, fill=self.fill_v1(), padding_mode=mode),
            lambda: self.random(
                v2.RandomCrop(
                    size,
                    padding=self.pick(None, padding),
                    pad_if_needed=self.pick(True, True, False),
                    fill=self.fill(),
                    padding_mode=self.pick("constant", mode),
                )
            ),
            lambda: self.random(v1.RandomCrop(size, self.pick(None, padding), True, self.fill_v1(), "constant")),
            lambda: self.random(v2.RandomZoomOut(self.fill(), (1.0, self.real(1, 3)), self.p())),
            lambda: self.random(
                v2.RandomResizedCrop(
                    size,
                    scale=self.range(0.05, 1.2),
                    ratio=self.range(0.3, 3),
                    interpolation=self.interpolation(),
                    antialias=self.pick(True, True, False),
                )
            ),
            lambda: self.random(v1.RandomResizedCrop(size, self.range(0.05, 1.2), self.range(0.3, 3))),
        )

    def resizes(self):
        low = self.whole(1, 60)
        how = {"interpolation": self.interpolation(), "antialias": self.pick(True, True, False)}
        return (
            lambda: v2.Resize(self.sides(), **how),
            lambda: v2.Resize(low, max_size=low + self.whole(1, 50), **how),
            lambda: v2.Resize(None, max_size=self.side(), **how),
            lambda: v2.Resize([self.side()], **how),
            lambda: v1.Resize(self.sides(), self.mode_v1()),
            lambda: v2.RandomResize(low, low + (1 if self.fixed else self.whole(1, 50)), **how),
            lambda: v2.RandomShortestSize(low if self.fixed else [low, self.side()], self.pick(None, 70), **how),
            lambda: self.random(v2.ScaleJitter((self.side(), self.side()), self.range(0.3, 1.6), **how)),
        )

    def colours(self):
        factor = lambda: self.pick(0, self.range(0.3, 1.7), self.range(0.3, 1.7))  # noqa: E731
        hue = self.pick(0, 0, self.range(-0.5, 0.5))
        jitter = [factor(), factor(), factor(), hue]
        if self.fixed:  # their order is random
            one = self.whole(0, 3)
            jitter = [x if i == one else 0 for i, x in enumerate(jitter)]
        distort = {"brightness": self.range(0.8, 1.2), "contrast": self.range(0.5, 1.5), "hue": self.range(-0.1, 0.1)}
        return (
            lambda: self.pick(v1, v2).ColorJitter(*jitter),
            lambda: v2.ColorJitter(*jitter),
            lambda: self.pick(v1, v2).Grayscale(self.pick(1, 3)),
            lambda: v2.Grayscale(),
            lambda: v2.RGB(),
            lambda: self.pick(v1, v2).RandomGrayscale(self.p()),
            lambda: self.pick(v1, v2).RandomInvert(self.p()),
            lambda: self.pick(v1, v2).RandomPosterize(self.whole(0, 8), self.p()),
            lambda: self.pick(v1, v2).RandomSolarize(self.pick(0, 0.4, 1.0, 128, 200.5, 255), self.p()),
            lambda: self.pick(v1, v2).RandomAutocontrast(self.p()),
            lambda: self.pick(v1, v2).RandomEqualize(self.p()),
            lambda: self.pick(v1, v2).RandomAdjustSharpness(self.real(0, 4), self.p()),
            lambda: self.random(v2.RandomChannelPermutation()),
            lambda: self.random(v2.RandomPhotometricDistort(**distort, p=self.p())),
        )

    def policies(self):
        fill = self.pick(None, 0, 99, [3, 4, 5], {tv_tensors.Image: 9, "others": 3})
        mode, kind = self.mode_v1(), self.pick(*v2.AutoAugmentPolicy)
        of_v1 = self.pick(None, [3, 4, 5])
        made = (
            lambda: v2.TrivialAugmentWide(self.whole(2, 31), mode, fill),
            lambda: v1.TrivialAugmentWide(self.whole(2, 31), mode, of_v1),
            lambda: v2.RandAugment(self.whole(0, 3), self.whole(0, 9), self.whole(10, 31), mode, fill),
            lambda: v1.RandAugment(self.whole(0, 3), self.whole(0, 9), self.whole(10, 31), mode, of_v1),
            lambda: v2.AutoAugment(kind, mode, fill),
            lambda: v2.AugMix(
                self.whole(1, 10), self.whole(1, 3), self.pick(-1, 1, 2), 0.7, self.pick(True, False), mode, fill
            ),
            lambda: v1.AugMix(self.whole(1, 10), 2, self.pick(-1, 2), 1.0, True, mode, of_v1),
        )
        return tuple(lambda make=make: self.random(make()) for make in made)

    def geometry(self):
        angle = self.pick(self.range(-180, 180), self.range(-180, 180), (90, 90), (0, 0))
        center = self.pick(None, None, (0, 0), (self.whole(0, 50), 7.5))
        mode, fill = self.warp_interpolation(), self.fill()
        p, scale = self.p(), self.range(0.4, 2)
        shear = self.pick(None, self.range(-30, 30), (*self.range(-30, 30), *self.range(-30, 30)))
        move = None if self.fixed else self.pick(None, (0.2, 0.4), (1.0, 0.0))
        return (
            lambda: self.pick(v1, v2).RandomHorizontalFlip(p),
            lambda: self.pick(v1, v2).RandomVerticalFlip(p),
            lambda: v2.RandomRotation(angle, mode, self.pick(True, False), center, fill),
            lambda: v1.RandomRotation(angle, self.mode_v1(), self.pick(True, False), center, self.fill_v1()),
            lambda: v2.RandomAffine(angle, move, self.pick(None, scale), shear, mode, fill, center),
            lambda: v1.RandomAffine(angle, move, scale, shear, self.mode_v1(), self.fill_v1(), center),
            lambda: self.random(v2.RandomPerspective(self.real(0, 1), p, mode, fill)),
            lambda: self.random(v1.RandomPerspective(self.real(0, 1), p, self.mode_v1(), self.fill_v1())),
        )

    def others(self):
        odd = lambda: 2 * self.whole(0, 6) + 1  # noqa: E731
        kernel = self.pick(odd(), (odd(), odd()))
        sigma = self.pick(0.8, self.range(0.01, 5))
        low = self.whole(1, 100)
        mean, std = self.pick(([0.5, 0.4, 0.3], [0.2, 0.3, 0.1]), ([0.5], [0.2]))
        erase = self.pick(0, 0.5, (0.1, 0.2, 0.3), (3, 300, -2), *(() if self.fixed else ("random",)))
        return (
            lambda: self.pick(v1, v2).GaussianBlur(kernel, (sigma, sigma) if self.fixed and sigma == 0.8 else sigma),
            lambda: v2.JPEG(low if self.fixed else (low, self.whole(low, 100))),
            lambda: v2.Identity(),
            lambda: v2.ToImage(),
            lambda: v2.Compose([v2.ToImage(), FLOAT]),
            lambda: v2.Compose([v2.ToImage(), FLOAT, v2.Normalize(mean, std)]),
            lambda: self.pick(v1, v2).Normalize(mean, std),
            lambda: self.pick(v1.PILToTensor, v2.PILToTensor, v1.ToTensor, v2.ToTensor)(),
            lambda: v2.ToPureTensor(),
            lambda: v2.ToDtype(self.pick(torch.uint8, torch.float32, torch.float16), self.pick(True, False)),
            lambda: self.pick(v1, v2).ConvertImageDtype(torch.float32),
            lambda: self.random(self.pick(v1, v2).RandomErasing(self.p(), (0.02, 0.5), (0.3, 3.3), erase)),
            lambda: self.random(v2.GaussianNoise(self.real(-0.1, 0.1), self.real(0, 0.1), self.pick(True, False))),
        )

    def nested(self, depth):
        inner = lambda most: [self.one(depth + 1) for _ in range(self.whole(1, most))]  # noqa: E731
        some = inner(3)
        weights = self.pick(None, [self.real(0.1, 1) for _ in some])
        made = [
            lambda: self.pick(v1, v2).Compose(inner(3)),
            lambda: self.random(self.pick(v1, v2).RandomApply(inner(3), self.p())),
            lambda: self.random(self.pick(v1, v2).RandomChoice(some, p=weights)),
            lambda: self.random(self.pick(v1, v2).RandomOrder(some)),
        ]
        if depth == 0 and not self.views and not self.fixed:
            made += [lambda: MultiView([v2.Compose(inner(2)) for _ in range(2)])]
            made += [lambda: self.pick(v1.FiveCrop, v2.FiveCrop, v2.TenCrop)(self.sides())]
        return made

    def random(self, transform):
        """The transform, or nothing where none may be random; what has p=0 or p=1 alone may stay."""
        if not self.fixed:
            return transform
        certain = (v2.RandomInvert, v2.RandomPhotometricDistort, v2.RandomApply, v1.RandomApply)
        return transform if isinstance(transform, certain) and getattr(transform, "p", 0.5) in (0, 1) else v2.Identity()

    def one(self, depth=0):
        families = [self.crops, self.resizes, self.colours, self.colours, self.geometry, self.others, self.policies]
        if depth < 2:
            families.append(lambda: self.nested(depth))
        one = self.pick(*self.pick(*families)())()
        self.views += isinstance(one, (MultiView, v1.FiveCrop, v2.FiveCrop, v2.TenCrop))
        return one

    def chain(self):
        chain = []
        for _ in range(self.whole(1, 5)):
            try:
                chain.append(self.one())
            except (ValueError, TypeError):  # arguments that its constructor refuses
                continue
        return chain

    def images(self, count=4):
        """CHW uint8 crops of photographs, all of usual sizes or some of them tiny."""
        ranges = self.pick([(40, 120)], [(40, 120)], [(40, 120)], [(1, 8), (9, 60)], [(1, 8)])
        found = []
        for _ in range(count):
            picture = self.pick(*PHOTOGRAPHS)
            low, high = self.pick(*ranges)
            height, width = self.whole(low, high), self.whole(low, high)
            top, left = self.whole(0, picture.shape[0] - height), self.whole(0, picture.shape[1] - width)
            found.append(torch.from_numpy(picture[top : top + height, left : left + width].copy()).permute(2, 0, 1))
        return found


class Chain(NamedTuple):
    """A chain, images for it, and what they are."""

    transforms: list
    images: list
    spec: Spec


def make(seed, fixed=False):
    maker = Maker(seed, fixed)
    transforms, images = maker.chain(), maker.images()
    kind = maker.pick("pil", "pil", "image", "tensor")
    dtype = torch.uint8 if kind == "pil" else maker.pick(torch.uint8, torch.float32)
    channels = 3 if kind == "pil" else maker.pick(3, 3, 1)
    images = [F.to_dtype(image[:channels], dtype, scale=True) for image in images]
    return Chain(transforms, images, Spec(kind, dtype, channels))


def inner(transform):
    """A transform and all that are in it."""
    held = transform if isinstance(transform, list) else getattr(transform, "transforms", ())
    return [transform, *(one for some in held for one in inner(some))]
