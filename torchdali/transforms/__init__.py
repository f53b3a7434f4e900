"""torchvision's v2 transforms under their own names, with a rule for each.

``torchdali.transforms.Resize`` *is* ``torchvision.transforms.v2.Resize``, so it does the same when it is called on an
image. A rule for each class is added (see :class:`Rule`), in ``rules/``. This file imports every module there. So a new
rule needs no entry anywhere else.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from torchvision.transforms.v2 import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from torchdali.transforms.augment import BGR as BGR
from torchdali.transforms.augment import HSV as HSV
from torchdali.transforms.augment import ColorSpace as ColorSpace
from torchdali.transforms.augment import ColorTwist as ColorTwist
from torchdali.transforms.augment import GridMask as GridMask
from torchdali.transforms.augment import Jitter as Jitter
from torchdali.transforms.augment import LookupTable as LookupTable
from torchdali.transforms.augment import Paste as Paste
from torchdali.transforms.augment import SaltAndPepper as SaltAndPepper
from torchdali.transforms.augment import ShotNoise as ShotNoise
from torchdali.transforms.augment import Sphere as Sphere
from torchdali.transforms.augment import Water as Water
from torchdali.transforms.augment.copy_paste import CopyPaste as CopyPaste
from torchdali.transforms.augment.filters import CLAHE as CLAHE
from torchdali.transforms.augment.filters import Dilate as Dilate
from torchdali.transforms.augment.filters import Erode as Erode
from torchdali.transforms.augment.filters import MedianBlur as MedianBlur
from torchdali.transforms.augment.operator import Operator as Operator
from torchdali.transforms.augment.volumes import GaussianBlur3D as GaussianBlur3D
from torchdali.transforms.augment.volumes import RandomAffine3D as RandomAffine3D
from torchdali.transforms.augment.volumes import RandomCrop3D as RandomCrop3D
from torchdali.transforms.augment.volumes import RandomFlip3D as RandomFlip3D
from torchdali.transforms.augment.volumes import RandomIntensity as RandomIntensity
from torchdali.transforms.augment.volumes import RandomRotate3D as RandomRotate3D
from torchdali.transforms.batched import Batched as Batched
from torchdali.transforms.batched import is_batchable as is_batchable
from torchdali.transforms.chain import check_callable as check_callable
from torchdali.transforms.chain import flatten as flatten
from torchdali.transforms.rule import Input as Input
from torchdali.transforms.rule import Node as Node
from torchdali.transforms.rule import Ops as Ops
from torchdali.transforms.rule import Rule as Rule
from torchdali.transforms.rule import SampleTransformError as SampleTransformError
from torchdali.transforms.rule import Unsupported as Unsupported
from torchdali.transforms.rule import Views as Views
from torchdali.transforms.rule import find_rule as find_rule
from torchdali.transforms.rule import has_rule as has_rule
from torchdali.transforms.rule import infer as infer
from torchdali.transforms.rules.orientation import ExifTranspose as ExifTranspose
from torchdali.transforms.rules.views import MultiView as MultiView
from torchdali.transforms.snapshot import snapshot as snapshot

for _module in iter_modules([str(Path(__file__).parent / "rules")]):
    import_module(f"{__name__}.rules.{_module.name}")
