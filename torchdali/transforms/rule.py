"""What a rule is: all that torchdali knows of one torchvision transform.

A rule answers four questions about its transform, in the order in which they come up:

1. ``infer``: what comes out, given what goes in? Or is this beyond DALI (raise :class:`Unsupported`)?
2. ``draw``: which numbers does a batch need? They are computed on the host, from the sizes of its images.
3. ``lower``: which DALI operators apply them?
4. ``reference``: what would torchvision have done with the same numbers? The tests compare the two.

A new transform is one subclass in one file of this package. Naming torchvision's classes in ``handles`` is what
makes it known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch

from torchdali.transforms.chain import is_unmodified
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import Fidelity, IntArray, Params, Sample, Spec

__all__ = [
    "Chain",
    "Composite",
    "Input",
    "Node",
    "Ops",
    "Rule",
    "SampleTransformError",
    "Unsupported",
    "Views",
    "check_ranges",
    "check_whole_pixels",
    "find_rule",
    "first_faulty_row",
    "has_rule",
    "infer",
]

Node = Any
"""A DALI ``DataNode``: an edge of the graph, that is one value for each sample of the batch."""


class Unsupported(Exception):  # noqa: N818
    """Raised by ``infer``: this transform, or these arguments, run in torch instead. The text says why."""


class SampleTransformError(Exception):
    """Raised by ``draw``: one sample of the batch cannot be transformed.

    Attributes:
        row: The sample's place in the batch.
    """

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row = row


class Input(NamedTuple):
    """A parameter that is fed for every sample: element type and number of axes, the batch's not counted."""

    dtype: type[np.generic]
    ndim: int = 0


class Ops(Protocol):
    """What a rule builds with: DALI's operators, without importing DALI."""

    fn: Any
    """``nvidia.dali.fn``"""
    types: Any
    """``nvidia.dali.types``"""
    math: Any
    """``nvidia.dali.math``"""
    device: str
    """Where images are: ``"cpu"`` or ``"gpu"``."""
    fidelity: Fidelity

    def when(
        self,
        mask: Node,
        body: Callable[[Node, Mapping[str, Node]], Node],
        image: Node,
        params: Mapping[str, Node],
    ) -> Node:
        """``body(image, params)`` for the samples whose mask is true; the other images as they are."""
        ...


_RULES: dict[type | str, type[Rule]] = {}


class Rule(ABC):
    """All that torchdali knows of one transform. Images are HWC in the graph and CHW in ``reference``.

    Args:
        transform: The torchvision transform, which is read and never changed.
    """

    handles: ClassVar[tuple[type | str, ...]] = ()
    """The classes this rule is for, those of packages that may be missing by their full name. A subclass of theirs
    may do anything, so it has no rule."""

    randomness: str = ""
    """The random numbers that ``draw`` draws for a sample, in words; empty where there are none."""

    operators: str = ""
    """The DALI operators that ``lower`` emits, in words; empty where there is nothing to do."""

    unsupported_when: ClassVar[str] = ""
    """Where the transform runs in torch although it has a rule, in words."""

    position: int = 0
    """The transform's position in the chain, which keys its random numbers."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for handled in cls.__dict__.get("handles", ()):
            if handled in _RULES:
                raise TypeError(f"{handled} has two rules: {_RULES[handled]} and {cls}")
            _RULES[handled] = cls

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @abstractmethod
    def infer(self, spec: Spec) -> Spec:
        """What comes out when ``spec`` goes in.

        Raises:
            Unsupported: This transform with these arguments runs in torch.
        """

    def infer_batch(self, spec: Spec) -> Spec | None:
        """What comes out where torch calls the transform on a whole batch (NCHW), or None.

        It is asked where ``infer`` raised, and may answer where the transform does to a batch what it does to each
        image.
        """
        return None

    @property
    def inputs(self) -> dict[str, Input]:
        """The parameters that ``draw`` gives, by name."""
        return {}

    def assign_positions(self, start: int) -> int:
        """Takes positions in the chain from ``start`` on; returns the first one left."""
        self.position = start
        return start + 1

    def draw(self, draws: Draws, size: IntArray) -> Params:
        """The parameters of one batch.

        Args:
            draws: This transform's random numbers for the batch's samples.
            size: ``(N, 2)`` heights and widths of the images that come in.

        Raises:
            SampleTransformError: A sample cannot be transformed.
        """
        del draws, size
        return {}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        """``(N, 2)`` heights and widths of the images that come out."""
        return size

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        """Emits the operators for ``image`` (HWC) and returns the result (HWC)."""
        return image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        """torchvision's functionals on one image (CHW) with the numbers drawn for it: the oracle of the tests."""
        return image

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        """One rule that does what ``previous`` and then this one do, in fewer operators, or None."""
        return None

    def fuse_with_next(self, later: Rule) -> Rule | None:
        """Return one rule for this and then ``later``, or None. Called if the other method returned None."""
        return None

    def channels_first(self) -> Rule | None:
        """A rule that does the same and puts out CHW at no cost, or None."""
        return None


def infer(rule: Rule, spec: Spec) -> Spec:
    """What comes out of a rule.

    Raises:
        Unsupported: It runs in torch for such images.
    """
    out = rule.infer(spec)
    if rule.operators and spec.dtype == torch.float16:
        raise Unsupported("few of DALI's operators take float16")
    return out


def check_whole_pixels(size: Any) -> None:
    """Raises Unsupported where a size, a number or several, is not of whole pixels, which torchvision may refuse."""
    if not all(isinstance(side, (int, np.integer)) for side in np.atleast_1d(np.array(size, object))):
        raise Unsupported(f"size={size} is not of whole pixels")


def check_ranges(**ranges: Sequence[float] | None) -> None:
    """Raises Unsupported unless every range is one that torch's ``uniform_`` draws from: (least, most)."""
    for name, ends in ranges.items():
        if ends is not None and not ends[0] <= ends[1]:
            raise Unsupported(f"{name}={tuple(ends[:2])} is no range (least, most)")


def first_faulty_row(faults: npt.NDArray[np.bool_] | IntArray) -> int | None:
    """The sample to blame: the first row of ``(N,)`` or ``(N, 2)`` that is not all False, or 0; None where all are."""
    return int(np.nonzero(faults)[0][0]) if faults.any() else None


def _find_rule_class(transform: Any) -> type[Rule] | None:
    kind = type(cast("object", transform))
    found = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    return found if found and is_unmodified(transform) else None


def has_rule(transform: Any) -> bool:
    """Whether there is a rule for the transform's class."""
    return _find_rule_class(transform) is not None


def find_rule(transform: Any) -> Rule | None:
    """A rule for the transform, or None where its class has none."""
    found = _find_rule_class(transform)
    return found(transform) if found else None


class Composite(Rule):
    """A rule made of others, whose parameters it passes on under names of their own."""

    parts: Sequence[Rule]

    def infer(self, spec: Spec) -> Spec:
        for part in self.parts:
            spec = infer(part, spec)
        return spec

    @property
    def inputs(self) -> dict[str, Input]:
        return {f"{i}_{name}": x for i, part in enumerate(self.parts) for name, x in part.inputs.items()}

    def assign_positions(self, start: int) -> int:
        self.position = start
        start += 1
        for part in self.parts:
            start = part.assign_positions(start)
        return start

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params: Params = {}
        for i, part in enumerate(self.parts):
            drawn = part.draw(draws.select_position(part.position), size)
            size = part.output_size(size, drawn)
            params |= {f"{i}_{name}": value for name, value in drawn.items()}
        return params

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        for i, part in enumerate(self.parts):
            size = part.output_size(size, dict(self.select_params(i, params)))
        return size

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        for i, part in enumerate(self.parts):
            image = part.reference(image, self.select_params(i, sample))
        return image

    def lower(self, ops: Ops, image: Node, params: Mapping[str, Node]) -> Node:
        for i, part in enumerate(self.parts):
            image = part.lower(ops, image, self.select_params(i, params))
        return image

    @staticmethod
    def select_params(i: int, params: Mapping[str, Any]) -> dict[str, Any]:
        """The parameters of part ``i``, under the names it gave them."""
        prefix = f"{i}_"
        return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


class Chain(Composite):
    """Transforms inside another one, one after another.

    Args:
        transform: The transform that holds the others.
        inner: Those that it holds, in the order in which they run.

    Attributes:
        missing: The names of the classes of those that have no rule.
    """

    def __init__(self, transform: Any, inner: Sequence[Any]) -> None:
        super().__init__(transform)
        found = [find_rule(one) for one in inner]
        self.parts = [rule for rule in found if rule]
        self.missing = [type(one).__name__ for one, rule in zip(inner, found, strict=True) if rule is None]

    def infer(self, spec: Spec) -> Spec:
        if self.missing:
            raise Unsupported(f"no rule for {', '.join(self.missing)} in it")
        spec = super().infer(spec)
        self.operators = ", ".join(filter(None, (part.operators for part in self.parts)))
        self.randomness = "; ".join(filter(None, (part.randomness for part in self.parts)))
        return spec


class Views(Rule):
    """A transform that makes several images of one.

    Attributes:
        container: What torchvision holds them in.
    """

    container: type[list[Any] | tuple[Any, ...]] = list

    @abstractmethod
    def split(self, spec: Spec) -> list[tuple[Chain, Spec]]:
        """The chain of each image, and what comes out of it.

        Raises:
            Unsupported: This transform with these arguments runs in torch.
        """

    def infer(self, spec: Spec) -> Spec:
        raise Unsupported(f"{type(self.transform).__name__} makes several images of one")
