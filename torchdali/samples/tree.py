"""Samples of any structure: walk through their parts, and put placeholders where their images are.

A structure is what ``default_collate`` walks through: mappings, sequences and named tuples, nested; dataclasses too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple, cast

import numpy as np
import PIL.Image
import torch
from torch.utils.data import _utils as data_utils  # pyright: ignore[reportPrivateUsage]
from torchvision import tv_tensors

from torchdali.samples.encoded import is_stored
from torchdali.samples.guard import unguard_collate

__all__ = [
    "Placeholder",
    "Tree",
    "build_tree",
    "collate",
    "convert",
    "describe_sample",
    "format_key_paths",
    "is_default_collate",
    "tree_leaves",
    "tree_map",
    "with_placeholders",
]

# Checked before abstract base classes, which take longer. This runs for every leaf of a batch.
_NEVER_PARTS = (str, bytes, int, float, np.ndarray, np.generic, torch.Tensor, PIL.Image.Image, PurePath)

_collate = cast("Callable[..., Any]", data_utils.collate.collate)
convert = cast("Callable[[Any], Any]", data_utils.collate.default_convert)

_IMAGES = (tv_tensors.Image, tv_tensors.Video, PIL.Image.Image, np.ndarray)
_WITH_PARTS = (Mapping, Sequence)
_KEEPERS: tuple[type[Any], ...] = (dict, list, deque)
"""Classes that keep their parts in themselves. Others keep them in attributes, which a shallow copy may share."""


def is_default_collate(collate_fn: Any, read: bool = False) -> bool:
    """Return True if it is ``default_collate``, and no other function is registered for images or their containers.

    Args:
        collate_fn: A loader's.
        read: Whether only images and numbers come to it.
    """
    if unguard_collate(collate_fn) is not data_utils.collate.default_collate:
        return False
    known = cast("dict[Any, Any]", data_utils.collate.default_collate_fn_map)
    others = [kind for kind, how in known.items() if getattr(how, "__module__", None) != data_utils.collate.__name__]
    kinds = [x for kind in others for x in (cast("tuple[Any, ...]", kind) if isinstance(kind, tuple) else (kind,))]
    leaves = (*_IMAGES, int) if read else _IMAGES
    if any(issubclass(leaf, kind) for kind in kinds for leaf in leaves):
        return False
    return read or not any(issubclass(kind, _WITH_PARTS) or dataclasses.is_dataclass(kind) for kind in kinds)


class Placeholder:
    """Marks the position of an image in a sample.

    Attributes:
        number: Which of the sample's images.
    """

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"<image {self.number}>"


_get_placeholder = functools.cache(Placeholder)
"""The samples of a batch share their placeholders, so that pickle writes each once."""

_COMMON_LEAVES = frozenset(
    {Placeholder, torch.Tensor, tv_tensors.Image, tv_tensors.BoundingBoxes, tv_tensors.Mask, str, int, float}
)
"""Exact types, which are looked up in a fraction of the time of ``isinstance``."""


def _children(node: Any) -> Sequence[tuple[str, Any]]:
    """Return the parts of a structure, each with the key to write behind it in Python."""
    kind: Any = type(cast("object", node))
    if kind is dict:
        return [(f"[{key!r}]", part) for key, part in node.items()]
    if isinstance(node, _NEVER_PARTS):
        return ()
    if isinstance(node, Mapping):
        mapping = cast("Mapping[Any, Any]", node)
        return [(f"[{key!r}]", mapping[key]) for key in mapping]
    if isinstance(node, tuple) and hasattr(cast("Any", node), "_fields"):
        return [(f".{name}", part) for name, part in zip(cast("Any", node)._fields, cast("Any", node), strict=True)]
    if _is_sequence(node):
        return [(f"[{i}]", child) for i, child in enumerate(cast("Sequence[Any]", node))]
    if _is_dataclass(node):
        instance: Any = cast("Any", node)
        return [(f".{field.name}", getattr(instance, field.name)) for field in dataclasses.fields(instance)]
    return ()


def _is_sequence(node: Any) -> bool:
    return isinstance(node, Sequence) and not isinstance(node, (str, bytes, bytearray, memoryview, range))


def _is_dataclass(node: Any) -> bool:
    return dataclasses.is_dataclass(node) and not isinstance(node, (type, Mapping, Sequence))


def tree_map(node: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] | None = None) -> Any:
    """Return a copy of a structure with changed leaves. If no leaf changes, return the structure itself.

    Args:
        node: The structure.
        change: Returns the new leaf for an old one.
        is_leaf: Returns True for something with parts that is to count as a leaf.
    """
    parts: Sequence[Any] = () if is_leaf and is_leaf(node) else _list_parts(node)
    if not parts:
        return change(node)
    done = [tree_map(part, change, is_leaf) for part in parts]
    if all(new is old for new, old in zip(done, parts, strict=True)):
        return node
    return _rebuild(node, parts, done)


def _list_parts(node: Any) -> Sequence[Any]:
    """Return the parts of a structure."""
    kind: Any = type(cast("object", node))
    if kind in _COMMON_LEAVES:
        return ()
    if kind is list or kind is tuple:
        return node
    if kind is dict:
        return list(node.values())
    return () if isinstance(node, _NEVER_PARTS) else [part for _, part in _children(node)]


def reorder_samples(node: Any, order: Sequence[int]) -> Any:
    """Reorder the samples of a collated batch. Samples may repeat.

    Args:
        node: The batch, collated by ``default_collate``.
        order: For each position the number of the sample to put there.

    Raises:
        TypeError: Something in it is no batch of samples.
    """
    if isinstance(node, torch.Tensor) and node.ndim and len(node) == len(order):
        return node[torch.tensor(list(order), device=node.device)]
    if isinstance(node, Placeholder):
        return node
    if _is_sequence(node) and len(node) == len(order) and all(isinstance(x, (str, bytes)) for x in node):
        return _rebuild(node, list(node), [node[i] for i in order])
    parts = [part for _, part in _children(node)]
    may_be_empty = isinstance(node, Mapping) or _is_sequence(node) or _is_dataclass(node)
    if not parts and not may_be_empty:
        raise TypeError(f"a {type(cast('object', node)).__name__} is no batch of {len(order)} samples")
    return _rebuild(node, parts, [reorder_samples(part, order) for part in parts])


def _rebuild(node: Any, old: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Build a structure of the same type from other parts. Return a plain one if the type does not allow it.

    Args:
        node: The structure.
        old: Its parts, as they were read.
        parts: The new parts.
    """
    kind: Any = type(cast("object", node))
    if kind is dict:
        return dict(zip(node, parts, strict=True))
    if kind is list:
        return list(parts)
    if kind is tuple:
        return tuple(parts)
    plain: Any = list(parts)
    if isinstance(node, Mapping):
        plain = dict(zip(cast("Any", node), parts, strict=True))
    try:
        twin = _copy_with(node, old, parts)
        twin = _construct(node, plain) if twin is None else twin
        if all(new is part for (_, new), part in zip(_children(twin), parts, strict=True)):
            return twin
    except Exception:  # noqa: BLE001 - whatever the methods of such a class do
        pass
    return plain


def _copy_with(node: Any, old: Sequence[Any], parts: Sequence[Any]) -> Any:
    """Return a copy of a structure with other parts, in its attributes too. Leave the structure itself unchanged.

    Return None for a class of which it is not known where it keeps its parts. It may make them on access.
    """
    is_keeper, is_tuple = isinstance(node, _KEEPERS), isinstance(node, tuple)
    if not is_keeper and not is_tuple and not _list_attributes(node):
        return None
    if is_tuple:
        twin = cast("Any", tuple).__new__(type(node), parts)
        getattr(twin, "__dict__", {}).update(getattr(node, "__dict__", {}))
    else:
        twin = copy.copy(node)
    if _is_dataclass(node):
        for field, part in zip(dataclasses.fields(node), parts, strict=True):
            object.__setattr__(twin, field.name, part)  # a frozen one too
        return twin
    new, found = dict(zip(map(id, old), parts, strict=True)), set[int]()
    for name in _list_attributes(twin):
        value = getattr(twin, name, None)
        if (changed := _swap(value, new, found)) is not value:
            object.__setattr__(twin, name, changed)
    if is_keeper:
        for key, part in zip(node if hasattr(node, "keys") else range(len(parts)), parts, strict=True):
            twin[key] = part
    return twin if is_keeper or is_tuple or len(found) == len(new) else None


def _construct(node: Any, plain: Any) -> Any:
    """Return an object of the same class, made of a plain structure. Return the latter if attributes would differ."""
    twin: Any = type(node)(plain)
    for name in _list_attributes(node):
        value, other = getattr(node, name, None), getattr(twin, name, None)
        if value is not other and not (type(value) in (dict, list, tuple) and type(other) is type(value)):
            return plain
    return twin


def _list_attributes(node: Any) -> list[str]:
    slots: list[Any] = [vars(kind).get("__slots__", ()) for kind in type(node).__mro__]
    return [*getattr(node, "__dict__", ()), *(name for x in slots for name in ((x,) if isinstance(x, str) else x))]


def _swap(value: Any, new: Mapping[int, Any], found: set[int], depth: int = 2) -> Any:
    """Return an attribute with new parts, by the ``id`` of the old ones, also inside containers of no other parts."""
    if id(value) in new:
        found.add(id(value))
        return new[id(value)]
    if not depth or type(value) not in (dict, list, tuple) or len(value) > len(new):
        return value
    inner = _list_parts(value)
    changed = [_swap(part, new, found, depth - 1) for part in inner]
    if all(x is y for x, y in zip(changed, inner, strict=True)):
        return value
    return _rebuild(value, inner, changed)


class Tree(NamedTuple):
    """A sample whose parts were read once, because some samples make their parts on access.

    Attributes:
        node: The sample, or the part.
        key_path: Its position in the sample, as written in Python.
        parts: What it is made of.
    """

    node: Any
    key_path: str
    parts: Sequence[Tree]


def build_tree(node: Any, key_path: str = "") -> Tree:
    """Read the parts of a sample.

    A stored file is a leaf. A whole sample that looks like one is not: its path may be the image.
    """
    children = () if key_path and is_stored(node) else _children(node)
    return Tree(node, key_path, [build_tree(child, key_path + key) for key, child in children])


def tree_leaves(sample: Tree) -> Iterator[tuple[str, Any]]:
    """Yield all leaves of a sample with their key paths."""
    if not sample.parts:
        yield sample.key_path, sample.node
    for part in sample.parts:
        yield from tree_leaves(part)


def format_key_paths(key_paths: Sequence[str]) -> str:
    """Return key paths in words."""
    return ", ".join(key_path or "the sample itself" for key_path in key_paths) or "none"


def _has_shape(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray) or (isinstance(leaf, torch.Tensor) and not leaf.is_nested)


def describe_sample(sample: Tree) -> str:
    """Return the parts of a sample in words: key path, type, shape, the first bytes of a file, the end of a text."""
    parts: list[str] = []
    for path, leaf in tree_leaves(sample):
        about = ""
        if isinstance(leaf, (bytes, bytearray)):
            about = repr(bytes(leaf[:8]))
        elif isinstance(leaf, str):
            about = repr(leaf if len(leaf) <= 40 else f"...{leaf[-37:]}")
        elif _has_shape(leaf):
            about = f"{tuple(leaf.shape)} {leaf.dtype}"
        parts.append(" ".join(filter(None, (path, type(leaf).__name__, about))))
    text = "; ".join(parts)
    return text if len(text) <= 300 else f"{text[:297]}..."


def with_placeholders(sample: Tree, images: Sequence[tuple[str, Any]]) -> Any:
    """Return a copy of a sample with a :class:`Placeholder` for each of its images."""
    places = {path: _get_placeholder(number) for number, (path, _) in enumerate(images)}

    def walk(part: Tree) -> Any:
        if part.key_path in places:
            return places[part.key_path]
        done = [walk(child) for child in part.parts]
        kept = all(new is old.node for new, old in zip(done, part.parts, strict=True))
        # A mapping may return new values at each access, so build a plain copy of the values that were read.
        node = cast("object", part.node)
        made = bool(done) and type(node) is not dict and isinstance(node, Mapping)
        return part.node if kept and not made else _rebuild(part.node, [child.node for child in part.parts], done)

    return walk(sample)


def _collate_placeholders(batch: Sequence[Any], *, collate_fn_map: Any) -> Placeholder:  # noqa: ARG001 - torch passes it
    first = batch[0]
    if not all(isinstance(x, Placeholder) and x.number == first.number for x in batch):
        raise TypeError("the samples of a batch have their images in different places")
    return first


def _collate_dataclasses(batch: Sequence[Any], *, collate_fn_map: Any) -> Any:
    rows = [[part for _, part in _children(x)] for x in batch]
    columns = [_collate(list(column), collate_fn_map=collate_fn_map) for column in zip(*rows, strict=True)]
    return _rebuild(batch[0], rows[0], columns)


class _AnyDataclass(type):
    def __instancecheck__(cls, instance: Any) -> bool:
        return _is_dataclass(instance)


class _Dataclass(metaclass=_AnyDataclass):
    """Type whose instances are all dataclass instances."""


def collate(samples: Sequence[Any]) -> Any:
    """Collate as ``default_collate`` does, dataclasses too. A batch of placeholders becomes a single one."""
    how: dict[Any, Any] = {
        Placeholder: _collate_placeholders,
        **data_utils.collate.default_collate_fn_map,
        _Dataclass: _collate_dataclasses,
    }
    return _collate(samples, collate_fn_map=how)
