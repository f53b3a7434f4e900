"""Load what the user names: a folder of images, and objects in Python files."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from torchdali.errors import OptionError
from torchdali.transforms import check_callable, flatten

ONE_CLASS = "pictures"
"""Name of the class if a folder has no class folders."""


def count_images(folder: Path) -> tuple[bool, int]:
    """Return whether there are images in subfolders, and the number of images in the folder itself."""
    entries = list(os.scandir(folder))
    here = sum(entry.is_file() and _is_image(entry.name) for entry in entries)
    below = (names for entry in entries if entry.is_dir() for _, _, names in os.walk(entry.path, followlinks=True))
    return any(_is_image(name) for names in below for name in names), here


def _is_image(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


def make_dataset(root: Path, transform: Callable[[Any], Any] | None, tensors: bool = False) -> ImageFolder:
    """Return an ImageFolder. With ``tensors``, torchvision decodes to uint8 ``(3, H, W)`` instead of PIL images."""
    if tensors:
        return ImageFolder(root, transform, loader=partial(decode_image, mode=ImageReadMode.RGB), allow_empty=True)
    return ImageFolder(root, transform, allow_empty=True)


def _imagenet_transform() -> v2.Compose:
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def load_transform(target: str | None) -> Callable[[Any], Any]:
    """Return the transform (or list of them) that ``FILE:NAME`` is or makes, or ImageNet's training transform for None.

    Raises:
        OptionError: There is no such file or name, or it is no transform.
    """
    if target is None:
        return _imagenet_transform()
    loaded = load_object(target)
    transform = loaded() if is_factory(loaded) else loaded
    if isinstance(transform, (list, tuple)):
        transform = v2.Compose(list(cast("list[Any]", transform)))
    try:
        check_callable(*flatten(transform))
    except TypeError as error:
        file, _, name = target.rpartition(":")
        raise OptionError(f"{name!r} of {Path(file).name} is no transform: {error}") from error
    return cast("Callable[[Any], Any]", transform)


def is_factory(thing: Any) -> bool:
    """Return True for a function or class that can be called without arguments. ``def f(*images)`` is a transform."""
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return False
    parameters = inspect.signature(thing).parameters.values()
    if inspect.isfunction(thing) and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def load_object(target: str) -> Any:
    """Import the file of ``FILE:NAME``, and return the object of this name.

    Raises:
        OptionError: There is no such file or name.
    """
    file, colon, name = target.rpartition(":")
    path = Path(file).resolve()
    if not colon or not path.is_file():
        raise OptionError(f"{target!r} is not FILE:NAME with a file that exists")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script, so that worker processes find the module too
    argv, sys.argv = sys.argv, [str(path)]  # the file must not see torchdali's arguments
    try:
        module = importlib.import_module(path.stem)
    finally:
        sys.argv = argv
    if Path(module.__file__ or "").resolve() != path:
        raise OptionError(f"another module is called {path.stem!r}: rename {path.name}")
    if not hasattr(module, name):
        raise OptionError(f"{path.name} has nothing that is called {name!r}")
    return getattr(module, name)


@contextmanager
def open_class_folders(folder: Path) -> Generator[tuple[Path, int], None, None]:
    """Yield a folder of class folders, and the number of images beside them, which ImageFolder leaves out.

    If the folder has no class folders, yield a temporary folder with a link to it.
    """
    has_classes, loose = count_images(folder)
    if has_classes:
        yield folder.resolve(), loose
        return
    with tempfile.TemporaryDirectory() as temporary:
        (Path(temporary) / ONE_CLASS).symlink_to(folder.resolve(), target_is_directory=True)
        yield Path(temporary), 0
