"""Replace the ``__iter__`` of loaders, in a script that ``torchdali explain`` runs and in the processes it starts.

Python imports this module when it starts, from the folder on PYTHONPATH. It must not import torch: most processes that
a script starts do not need it.
"""

from __future__ import annotations

import os
import sys
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).parent
_CLASSES = {"torch.utils.data.dataloader": "DataLoader", "torchdali.loader.loader": "DALILoader"}


class _Finder:
    """Finds the modules of loaders, and replaces ``__iter__`` after their import."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _CLASSES else None
        if spec is not None and spec.loader is not None:
            spec.loader = _PatchingLoader(spec.loader)
        return spec


class _PatchingLoader(Loader):
    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        kind = getattr(module, _CLASSES[module.__name__])
        original = kind.__iter__

        def explain_and_stop(self: Any) -> Any:
            sys.path.append(str(_HERE.parents[3]))  # where torchdali is, if it is not installed
            from torchdali.tools.commands.explain import stop_at_loader

            stop_at_loader(self)
            return original(self)  # the explanation itself iterates

        kind.__iter__ = explain_and_stop


def _run_shadowed() -> None:
    """Run the ``sitecustomize`` that this one hides, if there is one."""
    sys.path[:] = [path for path in sys.path if path != str(_HERE)]
    spec = PathFinder.find_spec(__name__)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(module_from_spec(spec))


_run_shadowed()
os.environ.setdefault("TORCHDALI_EXPLAIN_GROUP", str(os.getpgid(0)))  # the script's own; children inherit it
sys.meta_path.insert(0, _Finder)
