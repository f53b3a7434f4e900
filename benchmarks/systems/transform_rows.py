"""Transforms that are measured: torchvision's call, and Kornia's if it has a similar one.

They are text, so that the tables show what was run, and every process builds its own. A transform with a probability
has p=1, to measure the cost of the transform itself.
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One transform.

    Attributes:
        call: Call in the names of ``torchvision.transforms.v2``.
        kornia: Most similar call in the names of ``kornia.augmentation``, or empty.
        differs: How Kornia's differs, beside that it runs on float32 in [0, 1].
        floats: Whether the input is float32 instead of uint8.
        short: Shorter name for the tables, or empty.
    """

    call: str
    kornia: str = ""
    differs: str = ""
    floats: bool = False
    short: str = ""

    @property
    def name(self) -> str:
        """Name in the tables."""
        return self.short or self.call

    def build_torchvision(self) -> Any:
        """Build torchvision's transform. Raise AttributeError or NameError if this torchvision does not have it."""
        import torch
        from torchvision.transforms import v2

        return _build(self.call, {"torch": torch, **vars(v2)})

    def build_kornia(self) -> Any:
        """Build Kornia's transform. Raise ImportError if Kornia is not installed."""
        from kornia import augmentation
        from kornia.augmentation import auto

        return _build(self.kornia, {"auto": auto, **vars(augmentation)})


def _build(call: str, names: dict[str, Any]) -> Any:
    return eval(call, names)  # the calls are those below


_TO_FLOAT = "ToDtype(torch.float32, scale=True), Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])"
_FIXED = "strength has other units"
_WHOLE_BATCH = "one choice for the whole batch"

ROWS = (
    Row("Identity()"),
    Row("RandomResizedCrop(224)", "RandomResizedCrop((224, 224))", "no antialias"),
    Row("Resize((192, 192))", "Resize((192, 192), antialias=True)", "blurs before instead of a wider filter"),
    Row("RandomResize(160, 256)"),
    Row("RandomShortestSize([160, 192, 224])"),
    Row("ScaleJitter((224, 224))"),
    Row("CenterCrop(192)", "CenterCrop(192)"),
    Row("RandomCrop(192, padding=4)", "RandomCrop((192, 192), padding=4)"),
    Row("FiveCrop(192)"),
    Row("TenCrop(192)"),
    Row("Pad(16)"),
    Row("RandomZoomOut(p=1)"),
    Row("RandomHorizontalFlip(p=1)", "RandomHorizontalFlip(p=1)"),
    Row("RandomVerticalFlip(p=1)", "RandomVerticalFlip(p=1)"),
    Row("RandomRotation(30)", "RandomRotation(30.0, resample='nearest', p=1)"),
    Row("RandomRotation(30, InterpolationMode.BILINEAR)", "RandomRotation(30.0, p=1)"),
    Row(
        "RandomAffine(30, (0.1, 0.1), (0.8, 1.2), 10, InterpolationMode.BILINEAR)",
        "RandomAffine(30.0, (0.1, 0.1), (0.8, 1.2), 10.0, p=1)",
    ),
    Row("RandomPerspective(p=1)", "RandomPerspective(p=1)"),
    Row("ElasticTransform()", "RandomElasticTransform((41, 41), (5.0, 5.0), (0.2, 0.2), p=1)", _FIXED),
    Row("Grayscale(3)", "RandomGrayscale(p=1)"),
    Row("RandomGrayscale(p=1)", "RandomGrayscale(p=1)"),
    Row("ColorJitter(0.4, 0.4, 0.4, 0.1)", "ColorJitter(0.4, 0.4, 0.4, 0.1)", "one order for the whole batch"),
    Row("RandomPhotometricDistort(p=1)"),
    Row("RandomChannelPermutation()", "RandomChannelShuffle(p=1)"),
    Row("RandomInvert(p=1)", "RandomInvert(p=1)"),
    Row("RandomPosterize(4, p=1)", "RandomPosterize((4.0, 4.0), p=1)"),
    Row("RandomSolarize(128, p=1)", "RandomSolarize((0.5, 0.5), (0.0, 0.0), p=1)"),
    Row("RandomAutocontrast(p=1)", "RandomAutoContrast(p=1)"),
    Row("RandomEqualize(p=1)", "RandomEqualize(p=1)"),
    Row("RandomAdjustSharpness(2, p=1)", "RandomSharpness((1.0, 1.0), p=1)", _FIXED),
    Row("GaussianBlur(5)", "RandomGaussianBlur((5, 5), (0.1, 2.0), p=1)"),
    Row("GaussianBlur(23)", "RandomGaussianBlur((23, 23), (0.1, 2.0), p=1)"),
    Row("GaussianNoise()", "RandomGaussianNoise(std=0.1, p=1)", floats=True),
    Row("RandomErasing(p=1)", "RandomErasing(p=1)"),
    Row("RandomErasing(p=1, value='random')"),
    Row("JPEG((5, 50))", "RandomJPEG((5.0, 50.0), p=1)", "differentiable, which writes no bytes"),
    Row(
        "RandomApply([ColorJitter(0.4, 0.4, 0.4, 0.1)], 0.8)",
        "ColorJitter(0.4, 0.4, 0.4, 0.1, p=0.8)",
        "one order for the whole batch",
    ),
    Row("RandomChoice([RandomHorizontalFlip(1), ColorJitter(0.4), GaussianBlur(5)])"),
    Row("RandomOrder([RandomHorizontalFlip(1), ColorJitter(0.4), GaussianBlur(5)])"),
    Row("AutoAugment()", "auto.AutoAugment()", _WHOLE_BATCH),
    Row("RandAugment()", "auto.RandAugment(2, 9)", _WHOLE_BATCH),
    Row("TrivialAugmentWide()", "auto.TrivialAugment()", _WHOLE_BATCH),
    Row("AugMix()"),
    Row(
        f"Compose([{_TO_FLOAT}])",
        "Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])",
        "its input is float already, so it does less",
        short="ToDtype(float32), Normalize",
    ),
    Row(
        f"Compose([RandomResizedCrop(224), RandomHorizontalFlip(), {_TO_FLOAT}])",
        short="RandomResizedCrop(224), RandomHorizontalFlip(), ToDtype(float32), Normalize",
    ),
)
BY_CALL = {row.call: row for row in ROWS}
