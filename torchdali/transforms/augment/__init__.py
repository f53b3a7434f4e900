"""DALI's augmentations that torchvision lacks, as transforms that also run in a plain ``DataLoader``."""

from torchdali.transforms.augment.base import Augmentation
from torchdali.transforms.augment.color import BGR, HSV, ColorSpace, ColorTwist, LookupTable
from torchdali.transforms.augment.displace import Jitter, Sphere, Water
from torchdali.transforms.augment.mask import GridMask
from torchdali.transforms.augment.noise import SaltAndPepper, ShotNoise
from torchdali.transforms.augment.paste import Paste

__all__ = [
    "BGR",
    "HSV",
    "Augmentation",
    "ColorSpace",
    "ColorTwist",
    "GridMask",
    "Jitter",
    "LookupTable",
    "Paste",
    "SaltAndPepper",
    "ShotNoise",
    "Sphere",
    "Water",
]
