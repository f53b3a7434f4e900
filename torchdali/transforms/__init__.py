"""torchvision's v2 transforms under their own names, and what torchdali knows of each.

``torchdali.transforms.Resize`` *is* ``torchvision.transforms.v2.Resize``: same arguments, checks, ``repr`` and
behaviour when called on an image. What is added is a rule for each class (see :class:`Rule`), in the modules
beside this file; every module here is imported, so a new rule needs no entry anywhere else.
"""

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from torchvision.transforms.v2 import *  # noqa: F403  # pyright: ignore[reportWildcardImportFromLibrary]

from torchdali.transforms._containers import check_callable as check_callable
from torchdali.transforms._containers import flatten as flatten
from torchdali.transforms._rule import Input as Input
from torchdali.transforms._rule import Node as Node
from torchdali.transforms._rule import Ops as Ops
from torchdali.transforms._rule import RowError as RowError
from torchdali.transforms._rule import Rule as Rule
from torchdali.transforms._rule import Unsupported as Unsupported
from torchdali.transforms._rule import Views as Views
from torchdali.transforms._rule import find_rule as find_rule
from torchdali.transforms._rule import infer as infer
from torchdali.transforms._snapshot import snapshot as snapshot
from torchdali.transforms.views import MultiView as MultiView

for _module in iter_modules([str(Path(__file__).parent)]):
    import_module(f"{__name__}.{_module.name}")
