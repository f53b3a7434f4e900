"""Find the images of a sample: where ``images=`` says, or by what they look like."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, cast

import numpy as np
import PIL.Image
import torch
from torchvision import tv_tensors

from torchdali.errors import TransformError
from torchdali.samples.encoded import IMAGE_SUFFIXES, is_encoded, is_stored
from torchdali.samples.image import StoredURL
from torchdali.samples.tree import Tree, describe_sample, format_key_paths, tree_leaves

__all__ = ["RULE", "ImageFinder", "Images", "find_common_key_paths", "take_bad_files"]

RULE = (
    "all PIL images, tv_tensors.Image and tv_tensors.Video of a sample, else the first array (H, W, C) or tensor "
    "(C, H, W) with up to 4 channels, encoded file or pathlib.Path, or a list of such files; images= names others, for "
    "example images=0"
)
"""What is taken for images without ``images=``."""

MAX_CHANNELS = 4
"""Of plain arrays and tensors that are taken for images."""

Key = str | int
Images = Key | tuple[Key, ...] | list[Key | tuple[Key, ...]]
"""Key paths of images: a key, an index, or a tuple of them for a nested part; or a list of these."""

Leaves = list[tuple[str, Any]]


@dataclass(frozen=True)
class ImageFinder:
    """Finds the images of samples.

    Attributes:
        images: The key paths of the images. None to go by what the parts of a sample look like.
    """

    images: tuple[tuple[Key, ...], ...] | None = None

    @classmethod
    def parse(cls, images: Images | None) -> ImageFinder:
        """Return the finder for the argument ``images=``.

        Raises:
            TypeError: It is neither a key path nor a list of them.
            ValueError: It names nothing, or one part twice.
        """
        if images is None:
            return cls()
        key_paths: list[Any] = images if isinstance(images, list) else [images]
        result = tuple(cast("tuple[Any, ...]", x) if isinstance(x, tuple) else (x,) for x in key_paths)
        if not all(keys and all(type(key) in (str, int) for key in keys) for keys in result):
            raise TypeError(
                "images must be a key or an index of a sample, a tuple of them for a nested part, or a list of these, "
                f"got {images!r}"
            )
        if not result or len(set(result)) < len(result):
            raise ValueError(f"images must name one part of a sample or more, each once, got {images!r}")
        return cls(result)

    def find(self, sample: Tree) -> Leaves:
        """Return the images of a sample with their key paths.

        Without ``images``, as in torchvision's v2 transforms, these are all PIL images, ``tv_tensors.Image`` and
        ``tv_tensors.Video``. Files that ``datasets`` stores count as PIL images. If there is none, it is the first leaf
        that looks like an image. These are a tensor (C, H, W) or an array (H, W, C) with up to 4 channels, an encoded
        file (bytes, or one axis of uint8), and a ``pathlib`` path. All files of one list are taken. If there is none
        of these either, it is the first array (H, W) of uint8 or uint16, or a string that is the path of an existing
        image file.

        Raises:
            TransformError: Encoded files or paths are under several keys, or ``images`` names a part that does not
                exist or cannot be an image.
        """
        if self.images is not None:
            return [leaf for keys in self.images for leaf in _find_named(sample, keys)]
        leaves = list(tree_leaves(sample))
        certain = [(path, _unwrap_stored(leaf)) for path, leaf in leaves if _is_surely_image(leaf)]
        if certain:
            return certain
        likely = [(path, leaf) for path, leaf in leaves if _is_likely_image(leaf)]
        if likely and _is_file(likely[0][1]):
            return _find_files(sample, [(path, leaf) for path, leaf in likely if _is_file(leaf)])
        if likely:
            return likely[:1]
        grey = [(path, leaf[..., None]) for path, leaf in leaves if _is_grey(leaf)][:1]
        return grey or _find_files(sample, [(path, Path(leaf)) for path, leaf in leaves if _is_path_of_image(leaf)])

    def explain(self, sample: Tree, images: Leaves) -> str:
        """Return why :meth:`find` took these images of a sample."""
        if self.images is not None:
            return "named by images="
        if any(_is_surely_image(leaf) for _, leaf in tree_leaves(sample)):
            return "all PIL images, tv_tensors.Image and tv_tensors.Video"
        if len(images) > 1:
            return "the files of one list"
        return f"the first part that looks like an image, {type(images[0][1]).__name__}"


def _find_files(sample: Tree, files: Leaves) -> Leaves:
    """Return the only encoded file or path of a sample, or those of one list. Raise TransformError for others."""
    files = [(path, leaf) for path, leaf in files if is_encoded(leaf) or _has_image_suffix(leaf)] or files
    if len(files) < 2 or any({path for path, _ in files} == x for x in _find_key_paths_of_lists(sample)):
        return files
    at = format_key_paths([path for path, _ in files])
    raise TransformError(
        f"a sample has several encoded images or paths, at {at}, and which of them transform= is for must be said: "
        f"give DALILoader images=, such as images={_suggest(sample, files)}; the sample is {describe_sample(sample)}"
    )


def _find_key_paths_of_lists(part: Tree) -> list[set[str]]:
    """Return the key paths of the parts of each list of a sample, and of each nested tuple."""
    nested = [keys for child in part.parts for keys in _find_key_paths_of_lists(child)]
    is_list = isinstance(part.node, list) or (isinstance(part.node, tuple) and part.key_path.endswith("]"))
    return [{child.key_path for child in part.parts}, *nested] if is_list else nested


def _suggest(sample: Tree, files: Leaves) -> str:
    """Return what ``images=`` would be for all of the files."""
    paths = {path for path, _ in files}
    top = [part for part in sample.parts if any(path in paths for path, _ in tree_leaves(part))]
    keys: list[Key] = [_find_key(part, sample) for part in top]
    return repr(keys[0] if len(keys) == 1 else keys)


def _find_key(part: Tree, parent: Tree) -> Key:
    text = part.key_path[len(parent.key_path) :]
    return text[1:] if text.startswith(".") else int(text[1:-1]) if text[1:-1].isdecimal() else text[2:-2]


def _find_named(sample: Tree, keys: tuple[Key, ...]) -> Leaves:
    """Return the images at a key path. Those of a list are all of its parts."""
    part = sample
    for key in keys:
        names = (f"{part.key_path}[{key!r}]", f"{part.key_path}.{key}")
        found = [child for child in part.parts if child.key_path in names]
        if not found:
            raise TransformError(
                f"images must name parts that every sample has, got {_format(keys)}; a sample is "
                f"{describe_sample(sample)}"
            )
        part = found[0]
    return [(path, _to_image(leaf, keys)) for path, leaf in tree_leaves(part)]


def _to_image(leaf: Any, keys: tuple[Key, ...]) -> Any:
    """Return a leaf that ``images=`` names as an image: a string is a path, and what has two axes is grey."""
    leaf = _unwrap_stored(leaf)
    if isinstance(leaf, str):
        return Path(leaf)
    if isinstance(leaf, np.ndarray) and cast("Any", leaf).ndim == 2:
        return cast("Any", leaf)[..., None]
    if isinstance(leaf, torch.Tensor) and leaf.ndim == 2:
        return leaf[None]
    kinds = (PIL.Image.Image, PurePath, bytes, bytearray, memoryview, np.ndarray, torch.Tensor)
    if leaf is None or isinstance(leaf, kinds):
        return cast("Any", leaf)
    raise TransformError(
        f"images must name images, encoded files or paths, got {_format(keys)}, which is a {type(leaf).__name__}"
    )


def _format(keys: Sequence[Key]) -> str:
    return repr(keys[0] if len(keys) == 1 else tuple(keys))


def _unwrap_stored(leaf: Any) -> Any:
    """Return the bytes of a stored file, or else its path or URL. Return any other leaf as it is."""
    if not is_stored(leaf):
        return leaf
    if leaf["bytes"] is not None:
        return leaf["bytes"]
    return StoredURL(leaf["path"]) if "://" in leaf["path"] else Path(leaf["path"])


def _is_surely_image(leaf: Any) -> bool:
    return isinstance(leaf, (PIL.Image.Image, tv_tensors.Image, tv_tensors.Video)) or is_stored(leaf)


def _is_file(leaf: Any) -> bool:
    return isinstance(leaf, PurePath) or is_encoded(leaf)


def _has_image_suffix(leaf: Any) -> bool:
    return isinstance(leaf, PurePath) and leaf.suffix.lower() in IMAGE_SUFFIXES


def _is_path_of_image(leaf: Any) -> bool:
    return isinstance(leaf, str) and Path(leaf).suffix.lower() in IMAGE_SUFFIXES and os.path.isfile(leaf)  # noqa: PTH113


def _is_grey(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) and cast("Any", leaf).ndim == 2 and leaf.dtype in (np.uint8, np.uint16)


def _is_likely_image(leaf: Any) -> bool:
    if _is_file(leaf):
        return True
    if isinstance(leaf, np.ndarray):
        array: Any = cast("Any", leaf)
        return array.ndim == 3 and 0 < array.shape[2] <= MAX_CHANNELS and array.dtype.kind in "uif"
    if isinstance(leaf, torch.Tensor) and not isinstance(leaf, tv_tensors.TVTensor):
        is_dense = leaf.layout == torch.strided and not leaf.is_nested
        return is_dense and leaf.ndim == 3 and 0 < leaf.shape[0] <= MAX_CHANNELS and not leaf.is_complex()
    return False


def take_bad_files(samples: Sequence[Tree], image_lists: list[Leaves]) -> None:
    """Take strings and bytes for images that lie where such are images in other samples of a batch.

    Without it a missing or damaged file would be no image, and ``collate_fn`` would get it untransformed.

    Args:
        samples: The samples.
        image_lists: The images of each. Those of samples without an image are filled in.
    """
    if all(image_lists):
        return
    files: set[tuple[str, type[Any]]] = set()
    for sample, images in zip(samples, image_lists, strict=True):
        places = {path for path, _ in images}
        files |= {(path, type(leaf)) for path, leaf in tree_leaves(sample) if path in places}
    for i, sample in enumerate(samples):
        image_lists[i] = image_lists[i] or [
            (path, Path(leaf) if isinstance(leaf, str) else leaf)
            for path, leaf in tree_leaves(sample)
            if isinstance(leaf, (str, bytes, bytearray)) and (path, type(leaf)) in files
        ]


def find_common_key_paths(
    samples: Sequence[Tree], image_lists: Sequence[Sequence[tuple[str, Any]]]
) -> tuple[tuple[str, ...], dict[int, tuple[str, str]], dict[int, tuple[str, str]]]:
    """Return the key paths that most samples have, and the samples that have others.

    Returns:
        The most common key paths; the first sample with others, with a reason; all such samples, if none of them has an
        image.
    """
    key_path_lists = [tuple(path for path, _ in images) for images in image_lists]
    ((common, _),) = Counter(filter(None, key_path_lists)).most_common(1)
    mismatch: dict[int, tuple[str, str]] = {}
    for number, key_paths in enumerate(key_path_lists):
        if key_paths != common:
            has = f"its images are at {format_key_paths(key_paths)}" if key_paths else "no image was found in it"
            usual = format_key_paths(common)
            reason = (
                f"{has}, in other samples of the batch they are at {usual}; it is {describe_sample(samples[number])}"
            )
            mismatch[number] = (usual, reason)
    has_others = any(key_path_lists[number] for number in mismatch)
    return common, dict(list(mismatch.items())[:1]), {} if has_others else mismatch
