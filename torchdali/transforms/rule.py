"""Base classes of rules. A rule tells all that torchdali knows of one torchvision transform.

It answers four questions about its transform, in this order:

1. ``infer``: what comes out, given what goes in? If DALI cannot do it, raise :class:`Unsupported`.
2. ``draw``: which numbers does a batch need? The host computes them from the sizes of the images.
3. ``lower``: which DALI operators apply them?
4. ``reference``: what would torchvision do with the same numbers? The tests compare both.

A new transform is one subclass in one file in ``rules/``. ``handles`` names torchvision's classes, and makes it known.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any, ClassVar, NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali.transforms.chain import is_unmodified
from torchdali.transforms.plain_numbers import with_plain_numbers
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import Fidelity, IntArray, Params, Sample, Spec
from torchdali.transforms.spec import SampleTransformError as SampleTransformError
from torchdali.transforms.targets import Targets

Node = Any
"""A DALI ``DataNode``: an edge of the graph, with one value for each sample of the batch."""

Nodes = Mapping[str, Node]
"""The nodes of a rule's parameters, by name."""


class Unsupported(Exception):  # noqa: N818
    """Raised by ``infer``: this transform with these arguments runs in torch. The message tells why."""


class Input(NamedTuple):
    """A parameter that is fed for every sample: element type, and number of axes without the batch."""

    dtype: type[np.generic]
    ndim: int = 0


class Ops(Protocol):
    """DALI's operators, from which a rule builds its part of the graph. Rules do not import DALI."""

    fn: Any
    """``nvidia.dali.fn``"""
    types: Any
    """``nvidia.dali.types``"""
    math: Any
    """``nvidia.dali.math``"""
    device: str
    """Device of the images: ``"cpu"`` or ``"gpu"``."""
    fidelity: Fidelity

    def call(self, function: Callable[..., Any], *nodes: Node, layout: str) -> Node:
        """Return what a Python function returns for each sample, on the CPU. It is called in threads.

        Args:
            function: Takes one array of each node, and returns one.
            *nodes: Its inputs.
            layout: Layout of the array that it returns.
        """
        ...

    def apply_where(
        self,
        mask: Node,
        body: Callable[[Node, Nodes], Node],
        image: Node,
        params: Nodes,
    ) -> Node:
        """Return ``body(image, params)`` for samples whose mask is True, and the other images unchanged."""
        ...


_RULES: dict[type | str | Callable[..., Any], type[Rule]] = {}


class Rule(ABC):
    """Rule of one transform. Images are HWC in the graph and CHW in ``reference``.

    Args:
        transform: The torchvision transform. It is never changed.
    """

    handles: ClassVar[tuple[type | str, ...]] = ()
    """Classes of transforms. A class of a package that may be missing is given by its full name.

    Their subclasses may do anything, so they have no rule."""

    functions: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """Functions that do what the rule does. Each is in a chain as it is, or in a ``Lambda``."""

    randomness: str = ""
    """Random numbers that ``draw`` draws for a sample, in words. Empty if there are none."""

    operators: str = ""
    """DALI operators that ``lower`` emits, in words. Empty if there is nothing to do."""

    feeds: ClassVar[Mapping[str, Input]] = {}
    """Parameters that DALI is fed, by name. Override :attr:`inputs` if they depend on the arguments."""

    unsupported_when: ClassVar[str] = ""
    """Arguments and images with which the transform runs in torch, in words."""

    position: int = 0
    """Position of the transform in the chain. It is a part of the key of its random numbers."""

    needs: str = ""
    """torchvision's message if a sample lacks the boxes or key points that it must have. Empty if it needs none."""

    moves_in_torch: bool = False
    """Whether torch must run the transform if a sample has boxes, masks or key points, because ``move`` cannot."""

    takes_sounds: bool = False
    """Whether the transform is one for sounds. ``infer`` sees only those that it names."""

    moves: bool = False
    """Whether ``move`` or ``output_size`` does anything: boxes, masks and key points depend on the parameters."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for handled in (*cls.__dict__.get("handles", ()), *cls.__dict__.get("functions", ())):
            if handled in _RULES:
                raise TypeError(f"{handled} has two rules: {_RULES[handled]} and {cls}")
            _RULES[handled] = cls

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    @abstractmethod
    def infer(self, spec: Spec) -> Spec:
        """Return what comes out when ``spec`` goes in.

        Raises:
            Unsupported: This transform with these arguments runs in torch.
        """

    def infer_batch(self, spec: Spec) -> Spec | None:
        """Return what comes out if torch calls the transform on a whole batch (NCHW), or None.

        Called if ``infer`` raised. Return a spec only if the transform does to a batch what it does to each image.
        """
        return None

    @property
    def inputs(self) -> dict[str, Input]:
        """Parameters that DALI is fed, by name. ``draw`` returns their values."""
        return dict(self.feeds)

    def assign_positions(self, start: int) -> int:
        """Take positions in the chain from ``start`` on, and return the first one that is free."""
        self.position = start
        return start + 1

    def draw(self, draws: Draws, size: IntArray) -> Params:
        """Draw the parameters of one batch.

        Args:
            draws: This transform's random numbers for the batch's samples.
            size: ``(N, 2)`` heights and widths of the input images, in pixels.

        Raises:
            SampleTransformError: A sample cannot be transformed.
        """
        return {}

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        """Return ``(N, 2)`` heights and widths of the output images, in pixels."""
        return size

    def draw_and_move(self, draws: Draws, size: IntArray, targets: Targets) -> Params:
        """Draw the parameters of a batch that has boxes, masks or key points, and move these.

        Args:
            draws: As for ``draw``.
            size: As for ``draw``.
            targets: The boxes, masks and key points of the batch.

        Raises:
            SampleTransformError: A sample cannot be transformed.
        """
        params = self.draw(draws, size)
        if self.moves:
            self.move(targets, params)
        return params

    def move(self, targets: Targets, params: Params) -> None:  # noqa: B027 - most rules move nothing
        """Move the boxes, masks and key points of a batch as the images move. Set :attr:`moves` too."""

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        """Return what torchvision's ``make_params`` would return if it had drawn the same numbers. Tests use it.

        Args:
            sample: The parameters that were drawn for a sample.
            size: Height and width of the sample's images before the transform.

        Returns:
            The parameters. None if the transform is not applied to the sample.
        """
        return {}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        """Emit the operators for ``image`` (HWC), and return the result (HWC)."""
        return image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        """Apply torchvision's functionals to one image (CHW) with the numbers drawn for it. Tests compare with it."""
        return image

    def fuse_with_previous(self, previous: Rule) -> Rule | None:
        """Return one rule for ``previous`` and then this one, with fewer operators, or None."""
        return None

    def fuse_with_next(self, later: Rule) -> Rule | None:
        """Return one rule for this and then ``later``, or None. Called if the other method returned None."""
        return None

    def channels_first(self) -> Rule | None:
        """Return a rule that does the same and outputs CHW at no cost, or None."""
        return None


def infer(rule: Rule, spec: Spec) -> Spec:
    """Return what comes out of a rule.

    Raises:
        Unsupported: The transform runs in torch for such images.
    """
    out = rule.infer(spec)
    if rule.operators and spec.dtype == torch.float16:
        raise Unsupported("few of DALI's operators take float16")
    return out


def check_whole_pixels(size: Any) -> None:
    """Raise Unsupported unless a size, one number or several, is in whole pixels. torchvision may refuse others."""
    if not all(isinstance(side, (int, np.integer)) for side in np.atleast_1d(np.array(size, object))):
        raise Unsupported(f"size={size} is not of whole pixels")


def check_ranges(**ranges: Sequence[float] | None) -> None:
    """Raise Unsupported unless torch's ``uniform_`` can draw from every range: (least, most)."""
    for name, ends in ranges.items():
        if ends is not None and not ends[0] <= ends[1]:
            raise Unsupported(f"{name}={tuple(ends[:2])} is no range (least, most)")


def find_faulty_row(faults: npt.NDArray[np.bool_] | IntArray) -> int | None:
    """Return the first row of ``(N,)`` or ``(N, 2)`` that has an entry other than False or 0, or None."""
    return int(np.nonzero(faults)[0][0]) if faults.any() else None


def _find_rule_class(transform: Any) -> type[Rule] | None:
    kind = type(cast("object", transform))
    if kind is FunctionType:
        return _RULES.get(transform)
    if kind in (v1.Lambda, v2.Lambda) and type(transform.lambd) is FunctionType:
        has_all_types = kind is v1.Lambda or transform.types == (object,)
        return _RULES.get(transform.lambd) if has_all_types and is_unmodified(transform) else None
    rule = _RULES.get(kind) or _RULES.get(f"{kind.__module__}.{kind.__qualname__}")
    return rule if rule and is_unmodified(transform) else None


def has_rule(transform: Any) -> bool:
    """Return True if there is a rule for the transform's class."""
    return _find_rule_class(transform) is not None


def find_rule(transform: Any) -> Rule | None:
    """Return a rule for the transform, with Python's numbers, or None if its class has none."""
    rule = _find_rule_class(transform)
    return rule(with_plain_numbers(transform)) if rule else None


class Composite(Rule):
    """Rule made of others. It prefixes the names of their parameters with their number."""

    parts: Sequence[Rule]

    def infer(self, spec: Spec) -> Spec:
        for part in self.parts:
            spec = infer(part, spec)
        self.inherit_moves()
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

    def inherit_moves(self) -> None:
        """Take over from the parts whether they move boxes, masks and key points."""
        self.moves = any(part.moves for part in self.parts)
        self.moves_in_torch = any(part.moves_in_torch for part in self.parts)

    def draw(self, draws: Draws, size: IntArray) -> Params:
        params: Params = {}
        for i, part in enumerate(self.parts):
            drawn = part.draw(draws.select_position(part.position), size)
            size = part.output_size(size, drawn)
            params |= {f"{i}_{name}": value for name, value in drawn.items()}
        return params

    def draw_and_move(self, draws: Draws, size: IntArray, targets: Targets) -> Params:
        params: Params = {}
        for i, part in enumerate(self.parts):
            drawn = part.draw_and_move(draws.select_position(part.position), size, targets)
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

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        for i, part in enumerate(self.parts):
            image = part.lower(ops, image, self.select_params(i, params))
        return image

    @staticmethod
    def select_params(i: int, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return the parameters of part ``i``, under their own names."""
        prefix = f"{i}_"
        return {name[len(prefix) :]: value for name, value in params.items() if name.startswith(prefix)}


class Chain(Composite):
    """Rule of transforms inside another one, applied one after another.

    Args:
        transform: The transform that holds the others.
        inner: The transforms that it holds, in order.

    Attributes:
        missing: Names of the classes without a rule.
    """

    def __init__(self, transform: Any, inner: Sequence[Any]) -> None:
        super().__init__(transform)
        rules = [find_rule(part) for part in inner]
        self.parts = [rule for rule in rules if rule]
        self.missing = [type(part).__name__ for part, rule in zip(inner, rules, strict=True) if rule is None]

    def infer(self, spec: Spec) -> Spec:
        if self.missing:
            raise Unsupported(f"no rule for {', '.join(self.missing)} in it")
        spec = super().infer(spec)
        self.operators = ", ".join(filter(None, (part.operators for part in self.parts)))
        self.randomness = "; ".join(filter(None, (part.randomness for part in self.parts)))
        return spec


class Views(Rule):
    """Rule of a transform that makes several images of one.

    Attributes:
        container: Type in which torchvision returns them.
    """

    container: type[list[Any] | tuple[Any, ...]] = list

    @abstractmethod
    def split(self, spec: Spec) -> list[tuple[Chain, Spec]]:
        """Return the chain of each image, and what comes out of it.

        Raises:
            Unsupported: This transform with these arguments runs in torch.
        """

    def infer(self, spec: Spec) -> Spec:
        raise Unsupported(f"{type(self.transform).__name__} makes several images of one")
