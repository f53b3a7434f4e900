"""Cases of the parity certificate, which are also the tests of the rules. Each rule has at least one line."""

from __future__ import annotations

import torch
from PIL import Image
from torchvision import tv_tensors

from torchdali.tools.parity.augmentations import AUGMENTATIONS
from torchdali.tools.parity.bounds import (
    BILINEAR,
    BLURRED,
    EDGE,
    ELASTIC,
    EXACT,
    F32,
    FLOAT,
    FLOAT_EDGE,
    GREY,
    IMAGENET,
    INDEX,
    LINEAR,
    NEAREST,
    NEIGHBOUR,
    NORMALIZED,
    SMALL,
    STEP,
    TWICE,
    UINT8_NOISE,
    V1_BILINEAR,
    v1,
    v2,
)
from torchdali.tools.parity.case import Case
from torchdali.transforms.rules.views import MultiView

CASES: dict[str, Case] = {
    "Identity": Case([v2.Identity(), v2.ToImage(), v2.ToPureTensor()], *EXACT),
    "Annotations": Case([v2.ToImage(), v2.ConvertBoundingBoxFormat("XYXY"), v2.ClampBoundingBoxes()], *EXACT),
    "Key points": Case([v2.ToImage(), v2.SetClampingMode("hard"), v2.ClampKeyPoints()], *EXACT),
    "PILToTensor": Case([v2.PILToTensor()], *EXACT),
    "ToTensor v1": Case([v1.ToTensor()], *EXACT),
    "ToDtype scaled": Case([*F32], *EXACT),
    "ToDtype": Case([v2.ToImage(), v2.ToDtype(torch.float32)], *EXACT),
    "ToDtype dict": Case([v2.ToImage(), v2.ToDtype({tv_tensors.Image: torch.float32, "others": None})], *EXACT),
    "ToDtype half": Case([v2.ToImage(), v2.ToDtype(torch.float16, scale=True)], *EXACT),
    "ConvertImageDtype": Case([v2.PILToTensor(), v1.ConvertImageDtype(torch.float32)], *EXACT),
    "Normalize": Case([*F32, v2.Normalize(**IMAGENET)], *NORMALIZED),
    "Normalize flipped": Case([v2.RandomHorizontalFlip(), *F32, v2.Normalize(**IMAGENET)], *NORMALIZED),
    "Normalize v1": Case([v1.ToTensor(), v1.Normalize(**IMAGENET)], *NORMALIZED),
    "Normalize one channel": Case([v2.Grayscale(), *F32, v2.Normalize([0.5], [0.2])], 0.02, 0.02, 1e-5, GREY[3]),
    "Normalize then crop": Case([*F32, v2.Normalize(**IMAGENET), v2.RandomCrop(60)], *NORMALIZED),
    "Resize": Case([v2.Resize((100, 120))], *BILINEAR),
    "Resize shorter": Case([v2.Resize(64)], *BILINEAR),
    "Resize up": Case([v2.Resize((400, 380))], *BILINEAR),
    "Resize max_size": Case([v2.Resize(100, max_size=120)], *BILINEAR),
    "Resize longer": Case([v2.Resize(None, max_size=110)], *BILINEAR),
    "Resize bicubic": Case([v2.Resize((100, 120), interpolation=Image.Resampling.BICUBIC)], *EDGE),
    "Resize without antialias": Case([v2.ToImage(), v2.Resize((100, 120), antialias=False)], 1, 1, 0.17),
    "Resize nearest": Case([v2.ToImage(), v2.Resize((100, 120), interpolation="nearest")], *EXACT),
    "Resize nearest-exact": Case([v2.ToImage(), v2.Resize((100, 120), interpolation="nearest-exact")], *EXACT),
    "Resize float": Case([*F32, v2.Resize((100, 120))], *FLOAT_EDGE),
    "Resize v1": Case([v1.Resize(64), v1.ToTensor()], *V1_BILINEAR),
    "RandomResize": Case([v2.RandomResize(60, 140)], *BILINEAR),
    "RandomResize bicubic": Case([v2.RandomResize(60, 140, interpolation="bicubic")], *EDGE),
    "RandomResize float": Case([*F32, v2.RandomResize(60, 140)], *FLOAT_EDGE),
    "RandomShortestSize": Case([v2.RandomShortestSize([64, 80, 96], max_size=110)], *BILINEAR),
    # As with RandomResizedCrop.
    "RandomShortestSize nearest": Case(
        [v2.ToImage(), v2.RandomShortestSize(64, interpolation="nearest-exact")], *INDEX
    ),
    "RandomShortestSize without antialias": Case(
        [v2.ToImage(), v2.RandomShortestSize([64, 300], antialias=False)], 1, 1, 0.17
    ),
    "ScaleJitter": Case([v2.ScaleJitter((130, 150), (0.4, 1.5))], *BILINEAR),
    "ScaleJitter float": Case([*F32, v2.ScaleJitter((130, 150), (0.4, 1.5))], *FLOAT_EDGE),
    "ScaleJitter in RandomApply": Case([v2.RandomApply([v2.ScaleJitter((90, 90))])], *BILINEAR),
    "RandomZoomOut": Case([v2.RandomZoomOut()], *EXACT),
    "RandomZoomOut p=1": Case([v2.RandomZoomOut(fill=77, side_range=(1.5, 2), p=1)], *EXACT),
    "RandomZoomOut channels": Case([v2.RandomZoomOut(fill=(1, 2, 255), p=1)], *EXACT),
    "RandomZoomOut dict": Case([v2.ToImage(), v2.RandomZoomOut(fill={tv_tensors.Image: 9, "others": 1}, p=1)], *EXACT),
    "RandomZoomOut float": Case([*F32, v2.RandomZoomOut(fill=(0.1, 0.2, 0.3), p=1)], *EXACT),
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
    "RandomResizedCrop nearest": Case([v2.ToImage(), v2.RandomResizedCrop(96, interpolation="nearest")], *INDEX),
    "RandomHorizontalFlip": Case([v2.RandomHorizontalFlip()], *EXACT),
    "RandomVerticalFlip v1": Case([v1.RandomVerticalFlip(), v1.PILToTensor()], *EXACT),
    "Pad": Case([v2.Pad((3, 4, 5, 6), fill=(1, 2, 3))], *EXACT),
    "Pad negative": Case([v2.ToImage(), v2.Pad(-7)], *EXACT),
    "Pad edge": Case([v2.Pad((3, 4, 5, 6), padding_mode="edge")], *EXACT),
    "Pad reflect": Case([v2.Pad((3, 0, 5, 6), padding_mode="reflect")], *EXACT),
    "Pad symmetric": Case([v2.Pad(7, padding_mode="symmetric")], *EXACT),
    "Grayscale": Case([v2.Grayscale()], *GREY),
    "Grayscale 3": Case([v2.Grayscale(3)], *GREY),
    "Grayscale float": Case([*F32, v2.Grayscale(3)], 2e-7, 2e-7, 1e-7),
    "Grayscale of grey": Case([v2.Grayscale(), v2.Grayscale(3), v2.Grayscale(), v1.Grayscale(1)], *GREY),
    "Grayscale v1": Case([v1.Grayscale(3), v1.PILToTensor()], *GREY),
    "ColorJitter brightness": Case([SMALL, v2.ColorJitter(0.6)], *EXACT),
    "ColorJitter contrast": Case([SMALL, v2.ColorJitter(contrast=0.6)], 1, 1, 0.02),
    "ColorJitter saturation": Case([SMALL, v2.ColorJitter(saturation=0.6)], 1, 1, 2e-3),
    "ColorJitter hue": Case([SMALL, v2.ColorJitter(hue=0.5)], 1, 1, 1e-4),
    "ColorJitter": Case([SMALL, v2.ColorJitter(0.4, 0.4, 0.4, 0.2)], 3, 3, 0.03),
    "ColorJitter nothing": Case([SMALL, v2.ColorJitter()], *EXACT),
    "ColorJitter of grey": Case([SMALL, v2.Grayscale(), v2.ColorJitter(0.4, 0.4, 0.4, 0.2)], 1, 1, 1e-3),
    "ColorJitter float brightness": Case([SMALL, *F32, v2.ColorJitter(0.6)], 2e-7, 2e-7, 1e-7),
    "ColorJitter float contrast": Case([SMALL, *F32, v2.ColorJitter(contrast=0.6)], 1e-6, 1e-6, 2e-7),
    "ColorJitter float saturation": Case([SMALL, *F32, v2.ColorJitter(saturation=0.6)], 5e-7, 5e-7, 1e-7),
    "ColorJitter float hue": Case([SMALL, *F32, v2.ColorJitter(hue=0.5)], 5e-6, 5e-6, 3e-7),
    "ColorJitter float": Case([SMALL, *F32, v2.ColorJitter(0.4, 0.4, 0.4, 0.2)], 2e-5, 2e-5, 1e-6),
    "ColorJitter float of grey": Case(
        [SMALL, *F32, v2.Grayscale(), v2.ColorJitter(0.4, 0.4, 0.4, 0.2)], 1e-6, 1e-6, 2e-7
    ),
    "RandomGrayscale": Case([v2.RandomGrayscale(0.6)], *GREY),
    "RandomGrayscale always": Case([v2.RandomGrayscale(1)], *GREY),
    "RandomGrayscale float": Case([*F32, v2.RandomGrayscale(0.6)], 2e-7, 2e-7, 1e-7),
    "RandomGrayscale of grey": Case([v2.Grayscale(), v2.RandomGrayscale(0.6)], *GREY),
    "RandomGrayscale v1": Case([v1.RandomGrayscale(0.6), v1.PILToTensor()], *GREY),
    "RGB": Case([v2.RGB(), v2.Grayscale(), v2.RGB()], *GREY),
    "RandomInvert": Case([v2.RandomInvert()], *EXACT),
    "RandomInvert always": Case([v2.RandomInvert(1)], *EXACT),
    "RandomInvert float": Case([*F32, v2.RandomInvert()], *EXACT),
    "RandomInvert v1": Case([v1.RandomInvert(), v1.PILToTensor()], *EXACT),
    "RandomPosterize": Case([v2.RandomPosterize(3)], *EXACT),
    "RandomPosterize to nothing": Case([v2.ToImage(), v2.RandomPosterize(0, 1)], *EXACT),
    "RandomPosterize to all": Case([v2.RandomPosterize(8, 1)], *EXACT),
    "RandomPosterize float": Case([*F32, v2.RandomPosterize(3)], *EXACT),
    "RandomPosterize float always": Case([*F32, v2.RandomPosterize(5, 1)], *EXACT),
    "RandomPosterize v1": Case([v1.RandomPosterize(4), v1.PILToTensor()], *EXACT),
    "RandomSolarize": Case([v2.RandomSolarize(100)], *EXACT),
    "RandomSolarize always": Case([v2.RandomSolarize(128.5, 1)], *EXACT),
    "RandomSolarize float": Case([*F32, v2.RandomSolarize(0.4)], *EXACT),
    "RandomSolarize v1": Case([v1.RandomSolarize(192.0), v1.PILToTensor()], *EXACT),
    "RandomAutocontrast": Case([v2.RandomAutocontrast()], *EXACT),
    "RandomAutocontrast always": Case([SMALL, v2.RandomAutocontrast(1)], *EXACT),
    "RandomAutocontrast flat": Case([v2.ToImage(), v2.RandomPosterize(0, 0.6), v2.RandomAutocontrast(1)], *EXACT),
    "RandomAutocontrast float": Case([SMALL, *F32, v2.RandomAutocontrast()], 2e-7, 2e-7, 1e-7),
    "RandomAutocontrast v1": Case([v1.RandomAutocontrast(), v1.PILToTensor()], *EXACT),
    "RandomEqualize": Case([v2.RandomEqualize()], 1, 1, 0.2, STEP),
    "RandomEqualize always": Case([v2.RandomEqualize(1)], 1, 1, 0.3, STEP),
    "RandomEqualize small": Case([v2.CenterCrop((32, 31)), v2.RandomEqualize(1)], 1, 1, 0.3, STEP),
    "RandomEqualize tiny": Case([v2.CenterCrop((15, 16)), v2.RandomEqualize(1)], *EXACT),
    "RandomEqualize flat": Case(
        [v2.ToImage(), v2.RandomPosterize(1), v2.RandomPosterize(0, 0.6), v2.RandomEqualize(1)], 1, 1, 0.3, STEP
    ),
    "RandomEqualize of grey": Case([v2.Grayscale(), v2.RandomEqualize()], 1, 1, 0.2, STEP),
    "RandomEqualize float": Case([*F32, v2.RandomEqualize()], 1.01 / 255, 1.01 / 255, 8e-4, STEP),
    "RandomEqualize v1": Case([v1.RandomEqualize(), v1.PILToTensor()], 1, 1, 0.2, STEP),
    "RandomAdjustSharpness": Case([v2.RandomAdjustSharpness(1.7)], 1, 1, 4e-4),
    "RandomAdjustSharpness softer": Case([v2.RandomAdjustSharpness(0.2, 1)], 1, 1, 4e-4),
    "RandomAdjustSharpness narrow": Case([v2.CenterCrop((20, 2)), v2.RandomAdjustSharpness(2, 1)], *EXACT),
    "RandomAdjustSharpness of grey": Case([v2.Grayscale(), v2.RandomAdjustSharpness(2)], 1, 1, 4e-4),
    "RandomAdjustSharpness float": Case([*F32, v2.RandomAdjustSharpness(3)], 1e-6, 1e-6, 2e-7),
    "RandomAdjustSharpness v1": Case([v1.RandomAdjustSharpness(2), v1.PILToTensor()], 1, 1, 4e-4),
    "RandomChannelPermutation": Case([v2.RandomChannelPermutation()], *EXACT),
    "RandomChannelPermutation float": Case([*F32, v2.RandomChannelPermutation()], *EXACT),
    "RandomChannelPermutation of grey": Case([v2.Grayscale(), v2.RandomChannelPermutation()], *GREY),
    "RandomPhotometricDistort": Case([SMALL, v2.RandomPhotometricDistort()], 3, 3, 0.03),
    "RandomPhotometricDistort always": Case([SMALL, v2.RandomPhotometricDistort(p=1)], 3, 3, 0.03),
    "RandomPhotometricDistort float": Case([SMALL, *F32, v2.RandomPhotometricDistort()], 5e-6, 5e-6, 3e-7),
    "RandomPhotometricDistort of grey": Case([SMALL, v2.Grayscale(), v2.RandomPhotometricDistort()], 1, 1, 1e-3),
    "RandomApply of colours": Case(
        [
            v2.RandomApply(
                [
                    v2.RandomGrayscale(),
                    v2.RandomSolarize(100),
                    v2.RandomAutocontrast(),
                    v2.RandomEqualize(),
                    v2.RandomAdjustSharpness(2),
                    v2.RandomChannelPermutation(),
                    v2.RandomPhotometricDistort(),
                ]
            )
        ],
        8,
        8,
        0.1,
        "sharpening and contrast enlarge the one level by which equalised images differ",
    ),
    "RandomEqualize after others": Case(
        [v2.RandomChannelPermutation(), v2.RandomAdjustSharpness(2, 1), v2.RandomEqualize(1)], 1, 1, 0.3, STEP
    ),
    "TrivialAugmentWide": Case([SMALL, v2.TrivialAugmentWide()], 255, 255, 0.1, NEAREST),
    "TrivialAugmentWide bilinear": Case(
        [SMALL, v2.TrivialAugmentWide(5, interpolation=LINEAR, fill=(9, 80, 7))], 1, 1, 0.1
    ),
    "TrivialAugmentWide float": Case(
        [SMALL, *F32, v2.TrivialAugmentWide(interpolation=LINEAR)], 1.01 / 255, 1.01 / 255, 4e-4
    ),
    "TrivialAugmentWide of grey": Case([SMALL, v2.Grayscale(), v2.TrivialAugmentWide()], 255, 255, 0.1, NEAREST),
    "TrivialAugmentWide v1": Case([SMALL, v1.TrivialAugmentWide(), v1.PILToTensor()], 255, 255, 0.1, NEAREST),
    "RandAugment": Case([SMALL, v2.RandAugment()], 255, 255, 0.15, NEAREST),
    "RandAugment strong": Case([SMALL, v2.RandAugment(5, 14, 15, LINEAR, fill=99)], 255, 255, 0.3, TWICE),
    "RandAugment nothing": Case([SMALL, v2.RandAugment(0)], *EXACT),
    "RandAugment float": Case([SMALL, *F32, v2.RandAugment(3, interpolation=LINEAR)], 1, 1, 1e-3, TWICE),
    "RandAugment v1": Case([SMALL, v1.RandAugment(fill=[3, 4, 5]), v1.PILToTensor()], 255, 255, 0.15, NEAREST),
    "RandAugment in RandomApply": Case(
        [SMALL, v2.RandomApply([v2.RandAugment(2, interpolation=LINEAR)])], 255, 255, 0.15, TWICE
    ),
    "AutoAugment": Case([SMALL, v2.AutoAugment()], 255, 255, 0.3, NEAREST),
    "AutoAugment CIFAR10": Case([SMALL, v2.AutoAugment(v2.AutoAugmentPolicy.CIFAR10, LINEAR)], 255, 255, 0.1, TWICE),
    "AutoAugment SVHN": Case(
        [SMALL, v2.ToImage(), v2.AutoAugment(v2.AutoAugmentPolicy.SVHN, LINEAR, fill=128)], 255, 255, 0.3, TWICE
    ),
    "AutoAugment v1": Case([SMALL, v1.AutoAugment(), v1.PILToTensor()], 255, 255, 0.3, NEAREST),
    "AugMix": Case([SMALL, v2.AugMix()], 255, 255, 0.1, TWICE),
    "AugMix all arguments": Case(
        [SMALL, v2.ToImage(), v2.AugMix(9, 2, 2, 0.4, False, v2.InterpolationMode.NEAREST, fill=99)],
        255,
        255,
        0.3,
        NEAREST,
    ),
    "AugMix float": Case([SMALL, *F32, v2.AugMix(10, 2, alpha=3.0)], 1, 1, 1e-3, TWICE),
    "AugMix v1": Case([SMALL, v1.AugMix(), v1.PILToTensor()], 255, 255, 0.1, TWICE),
    "ColorJitter v1": Case([SMALL, v1.ColorJitter(0.4, 0.4, 0.4, 0.2), v1.ToTensor()], 3 / 255, 3 / 255, 1.2e-4),
    "RandomRotation": Case([v2.RandomRotation(180)], *NEIGHBOUR),
    "RandomRotation float": Case([*F32, v2.RandomRotation(180, fill=0.5)], 1, 1, 1e-5, NEIGHBOUR[3]),
    "RandomRotation fill": Case([v2.ToImage(), v2.RandomRotation(180, fill=(9, 200.6, 7))], *NEIGHBOUR),
    "RandomRotation bilinear": Case([v2.RandomRotation(180, interpolation="bilinear")], 1, 1, 2e-4),
    "RandomRotation bilinear fill": Case(
        [v2.RandomRotation(180, interpolation=Image.Resampling.BILINEAR, fill=(255, 8, 90))], 1, 1, 2e-4
    ),
    "RandomRotation bilinear fill dict": Case(
        [v2.ToImage(), v2.RandomRotation(180, "bilinear", fill={tv_tensors.Image: 99.5, "others": 1})], 1, 1, 2e-4
    ),
    "RandomRotation bilinear no fill": Case([v2.RandomRotation(180, "bilinear", fill=None)], 1, 1, 2e-4),
    "RandomRotation bilinear float": Case(
        [*F32, v2.RandomRotation(180, "bilinear", fill=(0.9, 0.0, 0.1))], 2e-4, 2e-4, 2e-6
    ),
    "RandomRotation bilinear one channel": Case(
        [v2.Grayscale(), v2.RandomRotation(40, "bilinear", fill=7)], 1, 1, 2e-4
    ),
    "RandomRotation expand": Case([v2.RandomRotation(180, "bilinear", expand=True, fill=3)], 1, 1, 2e-4),
    "RandomRotation expand, center": Case([v2.RandomRotation(50, expand=True, center=(10, 70))], *NEIGHBOUR),
    "RandomRotation center": Case([v2.RandomRotation((20, 70), "bilinear", center=(0, 50.5))], 1, 1, 2e-4),
    "RandomRotation by 90": Case([v2.RandomRotation((90, 90), expand=True)], *EXACT),
    "RandomRotation by 180": Case([v2.RandomRotation((-180, -180), "bilinear", fill=50)], *EXACT),
    "RandomRotation v1": Case([v1.RandomRotation(30, LINEAR), v1.ToTensor()], 0.003922, 0.003922, 2e-6),
    "RandomRotation twice, resized": Case(
        [v2.RandomRotation(30, expand=True), v2.RandomRotation(30, expand=True), v2.CenterCrop(90)], *NEIGHBOUR
    ),
    "RandomAffine": Case([v2.RandomAffine(30, (0.2, 0.1), (0.6, 1.7), 20)], *NEIGHBOUR),
    "RandomAffine translation": Case([v2.RandomAffine(0, (0.2, 0.1), fill=(4, 5, 6))], *EXACT),
    "RandomAffine bilinear": Case(
        [v2.ToImage(), v2.RandomAffine(0, None, (0.5, 2.0), (-9, 9, -20, 30), "bilinear", fill=120)], 1, 1, 2e-4
    ),
    "RandomAffine bilinear float": Case(
        [*F32, v2.RandomAffine((5, 9), (0.3, 0.3), None, (3, 9), "bilinear", 0, (0, 0))], 2e-4, 2e-4, 2e-6
    ),
    "RandomAffine v1": Case([v1.RandomAffine(40, fill=(1, 2, 3)), v1.PILToTensor()], *NEIGHBOUR),
    "RandomPerspective": Case([v2.RandomPerspective()], 1, 1, 2e-4),
    "RandomPerspective always": Case([v2.ToImage(), v2.RandomPerspective(0.8, 1, fill=(9, 8, 7))], 1, 1, 2e-4),
    "RandomPerspective nearest": Case([v2.RandomPerspective(0.3, 1, "nearest", fill=66)], *NEIGHBOUR),
    "RandomPerspective float": Case([*F32, v2.RandomPerspective(0.6, 1, fill=0.25)], 4e-4, 4e-4, 2e-6),
    "RandomPerspective v1": Case([v1.RandomPerspective(p=0.6), v1.PILToTensor()], 1, 1, 2e-4),
    "RandomRotation in RandomApply": Case(
        [v2.RandomApply([v2.RandomRotation(30, "bilinear", fill=(3, 4, 5)), v2.RandomPerspective(p=0.6)])], 1, 1, 2e-4
    ),
    "RandomRotation flipped": Case(
        [v2.RandomVerticalFlip(), v2.RandomHorizontalFlip(), v2.RandomRotation(30, "bilinear", fill=200)], 1, 1, 2e-4
    ),
    "RandomPerspective flipped": Case([v2.RandomHorizontalFlip(), v2.RandomPerspective()], 1, 1, 2e-4),
    "GaussianBlur": Case([v2.GaussianBlur(5)], 1, 1, 1e-4),
    "GaussianBlur pair": Case([v2.ToImage(), v2.GaussianBlur((3, 9), sigma=(0.5, 3.0))], 1, 1, 1e-4),
    **{
        f"ElasticTransform{name}": Case([*chain, v2.ElasticTransform(**how)], *bounds, devices=("cuda",))
        for name, chain, how, bounds in (
            ("", [], {}, ELASTIC),
            (" strong, filled", [], {"alpha": 300.0, "sigma": 4.0, "fill": (255, 9, 70)}, ELASTIC),
            (" two alphas", [v2.ToImage()], {"alpha": [90.0, 30.0], "sigma": [3.0, 6.0], "fill": 44}, ELASTIC),
            (" no blur", [v2.ToImage()], {"alpha": 8.0, "sigma": 0.0, "fill": None}, ELASTIC),
            (" float", [*F32], {"alpha": 200.0, "fill": 0.5}, (2e-3, 2e-3, 1e-5, BLURRED)),
            (" nearest", [], {"alpha": 200.0, "interpolation": "nearest", "fill": 200}, (255, 255, 0.02, BLURRED)),
            (
                " nearest float",
                [*F32],
                {"alpha": 200.0, "interpolation": "nearest", "fill": 0.5},
                (1, 1, 1e-4, BLURRED),
            ),
        )
    },
    "GaussianBlur wide": Case([SMALL, v2.GaussianBlur(23)], 1, 1, 1e-4),
    "GaussianBlur fixed": Case([v2.GaussianBlur((1, 7), sigma=1.5)], 1, 1, 1e-4),
    "GaussianBlur grey": Case([v2.Grayscale(), v2.GaussianBlur(5)], 1, 1, 1e-4),
    "GaussianBlur float": Case([*F32, v2.GaussianBlur((3, 9), sigma=(0.5, 3.0))], 1e-6, 1e-6, 1e-7),
    "GaussianBlur v1": Case([v1.GaussianBlur((3, 9)), v1.PILToTensor()], 1, 1, 1e-4),
    "JPEG": Case([v2.JPEG((1, 100))], *EXACT),
    "JPEG fixed": Case([v2.ToImage(), v2.JPEG(50)], *EXACT),
    # A normal number that is rounded differently is truncated to another level.
    "GaussianNoise": Case([v2.ToImage(), v2.GaussianNoise()], 1, 1, 1e-5, refused=UINT8_NOISE),
    "GaussianNoise darker": Case([v2.PILToTensor(), v2.GaussianNoise(-0.1, 0.3)], 1, 1, 1e-5, refused=UINT8_NOISE),
    "GaussianNoise float": Case([*F32, v2.GaussianNoise(0.1, 0.2)], 1e-6, 1e-6, 1e-7),
    "GaussianNoise float beyond": Case([*F32, v2.GaussianNoise(sigma=0.3, clip=False)], 2e-6, 2e-6, 1e-7),
    "GaussianNoise grey": Case([v2.Grayscale(), v2.ToImage(), v2.GaussianNoise()], 1, 1, 1e-5, refused=UINT8_NOISE),
    # Values outside of 0 to 255 wrap around.
    "GaussianNoise modulo 256": Case(
        [v2.ToImage(), v2.GaussianNoise(0.1, 0.2, clip=False)], 255, 255, 1e-4, refused=UINT8_NOISE
    ),
    "GaussianNoise and GaussianBlur in RandomApply": Case(
        [v2.ToImage(), v2.RandomApply([v2.GaussianNoise(), v2.GaussianBlur(5)], p=0.6)], 1, 1, 1e-4, refused=UINT8_NOISE
    ),
    "GaussianNoise in RandomOrder": Case(
        [*F32, v2.RandomOrder([v2.GaussianNoise(), v2.Pad(2), v2.RandomErasing(value="random")])], 1e-6, 1e-6, 1e-7
    ),
    "RandomErasing": Case([v2.ToImage(), v2.RandomErasing()], *EXACT),
    "RandomErasing colour": Case([v2.RandomErasing(1, (0.3, 0.6), (0.1, 5.0), (9, 8, 7))], *EXACT),
    "RandomErasing modulo 256": Case([v2.ToImage(), v2.RandomErasing(1, value=(300.5, -3.7, 0))], *EXACT),
    "RandomErasing grey": Case([v2.Grayscale(), v2.ToImage(), v2.RandomErasing(1, value=77)], *EXACT),
    "RandomErasing float": Case([*F32, v2.RandomErasing(1, value=(0.1, 0.2, 0.3))], *EXACT),
    # A normal number that rounds across -1 gives 255 instead of 0.
    "RandomErasing random": Case([v2.ToImage(), v2.RandomErasing(1, value="random")], 255, 255, 1e-3),
    "RandomErasing random float": Case(
        [*F32, v2.Normalize(**IMAGENET), v2.RandomErasing(value="random")], 2e-6, 2e-6, 3e-7
    ),
    "RandomErasing v1": Case([v1.ToTensor(), v1.RandomErasing(1, value=0.4)], *EXACT),
    "RandomErasing v1 random": Case([v1.PILToTensor(), FLOAT, v1.RandomErasing(value="random")], 2e-6, 2e-6, 1e-7),
    "RandomErasing in RandomApply": Case(
        [v2.ToImage(), v2.RandomApply([v2.RandomErasing(value=(1, 2, 3)), v2.RandomErasing(0.7)])], *EXACT
    ),
    "RandomApply": Case([SMALL, v2.RandomApply([v2.ColorJitter(0.4, 0, 0.4), v2.RandomVerticalFlip()])], 3, 3, 0.03),
    "RandomChoice": Case([SMALL, v2.RandomChoice([v2.Pad(0), v2.ColorJitter(0.6), v2.RandomVerticalFlip()])], *EXACT),
    "RandomChoice of sizes": Case([v2.RandomChoice([v2.CenterCrop(60), v2.RandomCrop(70)], p=[0.2, 0.8])], *EXACT),
    "RandomChoice v1": Case([v1.RandomChoice([v1.CenterCrop(60), v1.RandomCrop(60)]), v1.PILToTensor()], *EXACT),
    "RandomOrder": Case([v2.RandomOrder([v2.RandomCrop(100), v2.ColorJitter(0.6), v2.RandomVerticalFlip()])], *EXACT),
    "RandomOrder of sizes": Case([v2.RandomOrder([v2.RandomCrop(100), v2.Pad(9, fill=70)])], *EXACT),
    "RandomOrder v1": Case([v1.RandomOrder([v1.RandomCrop(100), v1.Pad(9)]), v1.PILToTensor()], *EXACT),
    "FiveCrop": Case([v2.FiveCrop(64)], *EXACT),
    "FiveCrop jittered": Case([v2.FiveCrop((50, 64)), v2.ColorJitter(0.6), v2.RandomVerticalFlip()], *EXACT),
    "TenCrop": Case([v2.TenCrop((60, 51), vertical_flip=True), *F32], *EXACT),
    "TenCrop v1": Case([v1.TenCrop(60)], *EXACT),
    "MultiView": Case(
        [MultiView([v2.RandomCrop(60), v2.Compose([v2.RandomVerticalFlip(), v2.ColorJitter(0.6)])])], *EXACT
    ),
    "MultiView float": Case([MultiView([v2.RandomResizedCrop(64), v2.Resize(90)]), *F32], *V1_BILINEAR),
    "RandomApply v1": Case([v1.RandomApply([v1.CenterCrop(60)], p=0.4), v1.PILToTensor()], *EXACT),
    **AUGMENTATIONS,
}
