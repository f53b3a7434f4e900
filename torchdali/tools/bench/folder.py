"""What is measured: a folder of the user's own pictures, and their own transform."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from torchdali.errors import OptionError
from torchdali.transforms import check_callable, flatten

__all__ = ["ONE_CLASS", "as_classes", "as_tensor", "class_folders", "dataset", "loaded", "named_object", "standard"]

ONE_CLASS = "pictures"
"""The name of the class where a folder has none."""


def class_folders(folder: Path) -> tuple[bool, int]:
    """Whether there are pictures in folders under this one, and how many lie in it itself."""
    entries = list(os.scandir(folder))
    here = sum(entry.is_file() and _is_picture(entry.name) for entry in entries)
    below = (names for entry in entries if entry.is_dir() for _, _, names in os.walk(entry.path, followlinks=True))
    return any(_is_picture(name) for names in below for name in names), here


def _is_picture(name: str) -> bool:
    return name.lower().endswith(IMG_EXTENSIONS)


def dataset(root: Path, transform: Callable[[Any], Any] | None, tensors: bool = False) -> ImageFolder:
    """The pictures as training scripts have them.

    Args:
        root: the folder of class folders.
        transform: of the images.
        tensors: whether images are decoded by torchvision, to uint8 tensors (C, H, W), and not by PIL.
    """
    if tensors:
        return ImageFolder(root, transform, loader=as_tensor, allow_empty=True)
    return ImageFolder(root, transform, allow_empty=True)


def as_tensor(path: str) -> torch.Tensor:
    """Decodes a file to a uint8 tensor (3, H, W)."""
    return decode_image(path, mode=ImageReadMode.RGB)


def standard() -> v2.Compose:
    """What is measured where nothing is said: the training transform of ImageNet."""
    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(224, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )


def loaded(named: str | None) -> Callable[[Any], Any]:
    """The transform, or the list of them, that ``FILE:NAME`` names or makes; the standard one for None.

    Raises:
        OptionError: there is no such file or name, or it is no transform.
    """
    if named is None:
        return standard()
    found = named_object(named)
    transform = found() if is_maker(found) else found
    if isinstance(transform, (list, tuple)):
        transform = v2.Compose(list(cast("list[Any]", transform)))
    try:
        check_callable(*flatten(transform))
    except TypeError as error:
        file, _, name = named.rpartition(":")
        raise OptionError(f"{name!r} of {Path(file).name} is no transform: {error}") from error
    return cast("Callable[[Any], Any]", transform)


def is_maker(thing: Any) -> bool:
    """Whether it is a function or class that can be called with nothing; a function of any images is a transform."""
    if not (inspect.isfunction(thing) or inspect.isclass(thing)):
        return False
    parameters = inspect.signature(thing).parameters.values()
    if inspect.isfunction(thing) and any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


def named_object(named: str) -> Any:
    """What ``FILE:NAME`` names, of a file that is imported.

    Raises:
        OptionError: there is no such file or name.
    """
    file, colon, name = named.rpartition(":")
    path = Path(file).resolve()
    if not colon or not path.is_file():
        raise OptionError(f"{named!r} is not FILE:NAME with a file that exists")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as for a script, so that worker processes find the module too
    argv, sys.argv = sys.argv, [str(path)]  # a file that reads its arguments finds none of torchdali's
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
def as_classes(folder: Path) -> Generator[tuple[Path, int], None, None]:
    """A folder of class folders: the one that is given, or one with a link to it, for as long as it is used.

    Yields:
        the folder; and how many images lie beside the class folders, which ImageFolder leaves out.
    """
    classes, loose = class_folders(folder)
    if classes:
        yield folder.resolve(), loose
        return
    with tempfile.TemporaryDirectory() as temporary:
        # a class folder of that name, with nothing copied
        (Path(temporary) / ONE_CLASS).symlink_to(folder.resolve(), target_is_directory=True)
        yield Path(temporary), 0
