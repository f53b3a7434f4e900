"""torchvision's v2 transforms under their own names, with a rule for each.

``torchdali.transforms.Resize`` *is* ``torchvision.transforms.v2.Resize``: same arguments, checks, ``repr`` and
behaviour when called on an image. torchdali adds a rule for each class (see :class:`Rule`), in ``rules/``. This file
imports every module there, so a new rule needs no entry anywhere else.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from torchvision.transforms.v2 import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

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
from torchdali.transforms.rule import infer as infer
from torchdali.transforms.rules.orientation import ExifTranspose as ExifTranspose
from torchdali.transforms.rules.views import MultiView as MultiView
from torchdali.transforms.snapshot import snapshot as snapshot

for _module in iter_modules([str(Path(__file__).parent / "rules")]):
    import_module(f"{__name__}.rules.{_module.name}")
