"""Samples of any class keep their class and attributes when their images are replaced, and are not changed."""

from __future__ import annotations

import dataclasses
from collections import ChainMap, OrderedDict, UserDict, UserList, namedtuple
from collections.abc import Callable, Iterator, Mapping, MutableMapping, MutableSequence, Sequence
from typing import Any

import pytest
import torch

from torchdali.samples.tree import Placeholder, build_tree, describe_sample, tree_map, with_placeholders

IMAGE = torch.zeros(3, 2, 2)


@dataclasses.dataclass(frozen=True)
class Fields(Sequence[Any]):
    """A sequence of its own fields."""

    image: Any
    label: int

    def __len__(self) -> int:
        return 2

    def __getitem__(self, place: Any) -> Any:
        return (self.image, self.label)[place]


@dataclasses.dataclass(frozen=True, slots=True)
class Slots(Fields):
    """The same without a dictionary of its own."""

    image: Any
    label: int


@dataclasses.dataclass
class Named(Mapping[str, Any]):
    """A mapping of its own fields."""

    image: Any
    label: int

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(("image", "label"))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Inner(Mapping[str, Any]):
    """Has its parts in a dictionary, and something beside them."""

    def __init__(self, parts: Mapping[str, Any], name: str = "none") -> None:
        self.parts, self.name = dict(parts), name

    def __len__(self) -> int:
        return len(self.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __getitem__(self, name: str) -> Any:
        return self.parts[name]


class Changeable(Inner, MutableMapping[str, Any]):
    """The same, of which a shallow copy shares the parts."""

    def __setitem__(self, name: str, part: Any) -> None:
        self.parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self.parts[name]


class Rows(MutableSequence[Any]):
    """A list in an attribute."""

    def __init__(self, rows: Any) -> None:
        self.rows = list(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: Any) -> Any:
        return self.rows[i]

    def __setitem__(self, i: Any, part: Any) -> None:
        self.rows[i] = part

    def __delitem__(self, i: Any) -> None:
        del self.rows[i]

    def insert(self, index: int, value: Any) -> None:
        self.rows.insert(index, value)


class AttributeDict(dict[str, Any]):
    """Its entries are its attributes."""

    def __init__(self, **parts: Any) -> None:
        super().__init__(**parts)
        self.__dict__ = self


class Titled(namedtuple("Titled", "image label")):
    """A named tuple with one attribute more."""

    title = "none"


class Labelled(list[Any]):
    """A list that names its image, too."""


def labelled(kind: Callable[..., Any], *arguments: Any, **attributes: Any) -> Any:
    sample = kind(*arguments)
    vars(sample).update(attributes)
    return sample


class Opaque:
    """Holds the parts where nobody looks for them."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts


class Hidden(Inner, MutableMapping[str, Any]):
    """A mapping whose shallow copy cannot be told from it."""

    def __init__(self, parts: Any) -> None:
        self.parts: Any = {}
        self.store = Opaque(dict(parts))

    def __len__(self) -> int:
        return len(self.store.parts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.store.parts)

    def __getitem__(self, name: str) -> Any:
        return self.store.parts[name]

    def __setitem__(self, name: str, part: Any) -> None:
        self.store.parts[name] = part

    def __delitem__(self, name: str) -> None:
        del self.store.parts[name]


PAIR = {"image": IMAGE, "label": 1}
SAMPLES: dict[str, Any] = {
    "sequence of its fields": Fields(IMAGE, 1),
    "with slots": Slots(IMAGE, 1),
    "mapping of its fields": Named(IMAGE, 1),
    "mapping with a name": Inner(PAIR, "a"),
    "mapping that can be changed": Changeable(PAIR, "a"),
    "list in an attribute": Rows([IMAGE, 1]),
    "dictionary of attributes": AttributeDict(**PAIR),
    "named tuple": labelled(Titled, IMAGE, 1, title="a"),
    "list with an attribute": labelled(Labelled, [IMAGE, 1], image=IMAGE),
    "ordered": OrderedDict(PAIR),
    "user dictionary": UserDict(PAIR),
    "user list": UserList([IMAGE, 1]),
    "chain": ChainMap({"image": IMAGE}, {"label": 1}),
    "nested": [Fields(IMAGE, 1), (labelled(Titled, IMAGE, 1, title="b"),)],
}


def mentions(node: Any) -> set[int]:
    """Return the ids of all tensors and placeholders of a sample, also of those in attributes."""
    if isinstance(node, (torch.Tensor, Placeholder)):
        return {id(node)}
    parts = [*node.values()] if isinstance(node, Mapping) else [*node] if isinstance(node, Sequence) else []
    parts += [*getattr(node, "__dict__", {}).values()]
    return set().union(*(mentions(part) for part in parts if not isinstance(part, (str, int))))


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES.keys())
def test_a_sample_keeps_its_class_and_attributes(sample: Any) -> None:
    tree = build_tree(sample)
    paths = [(x.key_path, x.node) for x in _leaves(tree) if x.node is IMAGE]
    stripped = with_placeholders(tree, paths)
    changed = torch.ones(3, 2, 2)
    filled = tree_map(stripped, lambda leaf: changed if isinstance(leaf, Placeholder) else leaf)
    assert type(filled) is type(sample)
    assert mentions(filled) == {id(changed)}
    assert mentions(sample) == {id(IMAGE)}
    for name in ("name", "title"):
        assert getattr(filled, name, None) == getattr(sample, name, None)


def _leaves(tree: Any) -> list[Any]:
    return [leaf for part in tree.parts for leaf in _leaves(part)] or [tree]


def test_a_sample_that_cannot_be_copied_becomes_a_plain_one_and_is_not_changed() -> None:
    sample = Hidden(PAIR)
    stripped = with_placeholders(build_tree(sample), [("['image']", IMAGE)])
    assert type(stripped) is dict
    assert sample["image"] is IMAGE


class Circle:
    """Has a shape that is no tuple, and raises another error than AttributeError."""

    shape = "round"

    def __getattr__(self, name: str) -> Any:
        raise KeyError(name)


def test_any_sample_is_described() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
    text = describe_sample(build_tree([Circle(), nested, IMAGE]))
    assert text.startswith("[0] Circle; [1] NestedTensor; [2] Tensor (3, 2, 2) torch.float32")
