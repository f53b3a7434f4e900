"""Source and transforms, compiled into something that can be read before it is run.

A :class:`Plan` is frozen. ``compile_plan`` makes one; ``fuse`` turns one into another that does the same in fewer
operators; ``graph.py`` builds it; its ``str`` is what ``loader.explain()`` prints.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from torchvision.transforms import v2

from torchdali.rng import Draws
from torchdali.spec import Entry, Fidelity, First, Inputs, IntArray, Kind, Params, Spec
from torchdali.transforms import Input, RowError, Rule, Unsupported, Views, find_rule, flatten
from torchdali.transforms.conversion import Identity, PILToTensor, ToImage, ToTensor
from torchdali.transforms.crop import Window

__all__ = ["Plan", "Step", "View", "compile_plan", "first_of", "fuse"]

_CONVERSIONS = (ToImage, PILToTensor, ToTensor)


@dataclass(frozen=True)
class Step:
    """One transform of the chain, as the user wrote it.

    Attributes:
        position: Its place, counted from 1.
        transform: The transform.
        where: What runs it; "nothing" where there is nothing to run.
        note: The DALI operators, or why it runs in torch.
        randomness: The random numbers drawn for each sample.
    """

    position: int
    transform: Any
    where: Literal["nothing", "DALI", "torch"]
    note: str
    randomness: str = ""

    @property
    def name(self) -> str:
        """The transform on one line."""
        text = " ".join(repr(self.transform).split())
        return text if len(text) <= 160 else f"{text[:157]}..."


@dataclass(frozen=True)
class View:
    """One of the images that a sample becomes; most samples become one.

    Attributes:
        rules: What DALI runs for it, in order, after the plan's rules.
        spec: What comes out of them.
        channels_first: Whether its last rule puts out CHW itself.
    """

    rules: tuple[Rule, ...]
    spec: Spec
    channels_first: bool = False


@dataclass(frozen=True)
class Plan:
    """What is done with the samples of a source.

    Attributes:
        steps: The chain as the user wrote it.
        rules: What DALI runs, in order, before samples become several views; after :func:`fuse`, fewer than steps.
        views: What the samples become: one view without rules of its own, or several.
        container: What holds the views of a sample; None where there is one and it stands alone.
        tail: The transforms that torch runs on whole batches, after DALI, each with what it expects to be given.
        spec: The images after ``tail``; of the first view where there are several.
        suffix: The transforms that torch runs, per sample, after ``tail``.
        suffix_step: The position that keys the random numbers of the suffix.
        device: Where DALI runs.
        fidelity: "exact" or "fast".
        entry: What is fed.
        decode_window: Whether the decoder decodes only the window of the first rule.
    """

    steps: tuple[Step, ...]
    rules: tuple[Rule, ...]
    views: tuple[View, ...]
    container: type[list[Any] | tuple[Any, ...]] | None
    tail: tuple[tuple[Kind, Any], ...]
    spec: Spec
    suffix: tuple[Any, ...]
    suffix_step: int
    device: torch.device
    fidelity: Fidelity
    entry: Entry = "files"
    decode_window: bool = False
    _blocks: dict[int, int] = field(default_factory=dict[int, int], init=False, compare=False, repr=False)

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules before the views, then each view's."""
        return (*self.rules, *(rule for view in self.views for rule in view.rules))

    @property
    def inputs(self) -> dict[str, Input]:
        """What must be fed for every sample, by the name of the graph's input."""
        return {_fed(i, name): x for i, rule in enumerate(self.all_rules) for name, x in rule.inputs.items()}

    @property
    def decodes(self) -> bool:
        """Whether what is fed are files or their contents."""
        return self.entry in ("files", "encoded")

    @property
    def random(self) -> bool:
        """Whether anything may be drawn at random, in DALI or in torch."""
        return any(step.randomness or step.where == "torch" for step in self.steps)

    @property
    def in_torch(self) -> bool:
        """Whether torch runs anything."""
        return bool(self.tail or self.suffix)

    @property
    def sample_bytes(self) -> int:
        """The memory of what a sample becomes; where its size is not known, of a large one."""
        sizes = [view.spec.size or (512, 512) for view in self.views]
        each = zip(self.views, sizes, strict=True)
        return sum(view.spec.channels * height * width * view.spec.dtype.itemsize for view, (height, width) in each)

    def params_of(self, number: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of rule ``number`` of :attr:`all_rules`, under the rule's own names."""
        return {name: inputs[_fed(number, name)] for name in self.all_rules[number].inputs}

    def numbered(self) -> tuple[list[tuple[int, Rule]], list[list[tuple[int, Rule]]]]:
        """The rules before the views, and each view's, with their numbers in :attr:`all_rules`."""
        numbers = iter(range(len(self.all_rules)))
        trunk = [(next(numbers), rule) for rule in self.rules]
        return trunk, [[(next(numbers), rule) for rule in view.rules] for view in self.views]

    def draw(self, draws: Draws, size: IntArray) -> tuple[Inputs, list[Params]]:
        """Draws a batch's parameters.

        Args:
            draws: The random numbers of the batch's samples.
            size: ``(N, 2)`` heights and widths of the files.

        Returns:
            What to feed, contiguous and of the declared types; and the same by rule, with whatever ``replay`` needs
            besides.

        Raises:
            RowError: A sample cannot be transformed; the text names the transform.
        """
        inputs: Inputs = {}
        by_rule: list[Params] = []
        draws = draws.ahead(self._blocks)

        def follow(rules: Sequence[tuple[int, Rule]], size: IntArray) -> IntArray:
            for i, rule in rules:
                try:
                    drawn = rule.draw(draws.at(rule.step), size)
                except RowError as error:
                    raise RowError(error.row, f"{self._origin(rule)}: {error}") from error
                for name, declared in rule.inputs.items():
                    inputs[_fed(i, name)] = np.ascontiguousarray(drawn[name], declared.dtype)
                size = rule.resized(size, drawn)
                by_rule.append(drawn)
            return size

        trunk, views = self.numbered()
        size = follow(trunk, size)
        for rules in views:
            follow(rules, size)
        return inputs, by_rule

    def _origin(self, rule: Rule) -> str:
        """The transform that a rule comes from, as messages name it."""
        for step in self.steps:
            if step.transform is rule.transform:
                return f"transform {step.position}, {step.name}"
        return repr(rule.transform)

    def __str__(self) -> str:
        backend = "DALI GPU" if self.device.type == "cuda" else "DALI CPU"
        where = {"nothing": "-", "DALI": backend, "torch": "torch"}
        lines: list[str] = []
        if self.entry != "pixels":
            decode = "the window of the first crop alone" if self.decode_window else "whole images"
            kept = ", into the cache" if self.entry == "packed" else ""
            lines.append(f"{'decode':<11}{backend:<10}{decode}{kept}")
        for step in self.steps:
            lines.append(f"{step.position:>9}  {where[step.where]:<10}{step.name}")
            if step.where == "torch":
                lines.append(f"{'':>21}{step.note}")
            if step.randomness:
                lines.append(f"{'':>21}draws {step.randomness}")
        lines.append(f"{'operators':<11}{self.trunk}")
        if self.container is not None:
            lines += [
                f"{f'view {i}':<11}{view.spec}: {'; '.join(self._operators(view.rules)) or 'nothing more'}"
                for i, view in enumerate(self.views, start=1)
            ]
        return "\n".join(lines)

    @property
    def trunk(self) -> str:
        """The operators before samples become several views."""
        operators = list(self._operators(self.rules))
        if self.decodes:
            operators.insert(0, "decoders.image_slice" if self.decode_window else "decoders.image")
        return "; ".join(operators)

    def _operators(self, rules: Sequence[Rule]) -> Iterator[str]:
        first = next(iter(self.all_rules), None)
        for rule in rules:
            text = rule.operators
            if self.decode_window and rule is first:
                text = text.removeprefix("slice").removeprefix(", ")
            if text:
                yield text


def _fed(rule: int, name: str) -> str:
    return f"rule{rule}_{name}"


class _Compiler:
    """Walks a chain: through DALI as far as rules go, then through torch batch by batch, then sample by sample."""

    def __init__(self, spec: Spec, device: torch.device) -> None:
        self.device = device
        self.steps: list[Step] = []
        self.rules: list[Rule] = []
        self.branches: list[tuple[list[Rule], Spec]] = [([], spec)]
        self.container: type[list[Any] | tuple[Any, ...]] | None = None
        self.tail: list[tuple[Kind, Any]] = []
        self.suffix: list[Any] = []
        self.number = 0

    def add(self, position: int, leaf: Any) -> None:
        """Takes the next transform of the chain."""
        if self.suffix:
            self._in_torch(position, leaf, "for each sample, after the one before it")
            return
        if find_rule(leaf) is None:
            self._in_torch(
                position, leaf, f"for each sample after DALI: torchdali has no rule for {type(leaf).__name__}"
            )
            return
        reason = "it comes after one that torch runs"
        if not self.tail:
            try:
                self._in_dali(position, leaf)
            except Unsupported as unsupported:
                reason = str(unsupported)
            else:
                return
        if self._on_batches(leaf):
            self.steps.append(Step(position, leaf, "torch", f"for whole batches after DALI: {reason}"))
        else:
            self._in_torch(position, leaf, f"for each sample after DALI: {reason}")

    def _in_dali(self, position: int, leaf: Any) -> None:
        # Every view has a rule of its own, because it may have a size of its own; the number is the same, and so what
        # they draw: torchvision's transforms draw once for all images of a sample.
        if self.container is not None and not _takes_several(leaf):
            raise Unsupported("it takes one image, and the sample is several")
        found = [rule for _ in self.branches if (rule := find_rule(leaf))]
        if found[0].operators and any(
            spec.dtype == torch.float16 and spec.device == "cpu" for _, spec in self.branches
        ):
            raise Unsupported("few of DALI's operators take float16 on the CPU")
        if isinstance(found[0], Views):
            if self.container is not None:
                raise Unsupported("the sample is several images already")
            rule = found[0]
            parts = rule.split(self.branches[0][1])
            self.rules, self.container = self.branches[0][0], rule.container
            self.branches = [(list(part.parts), spec) for part, spec in parts]
        else:
            specs = [rule.infer(spec) for rule, (_, spec) in zip(found, self.branches, strict=True)]
            if self.container is not None and found[0].randomness and len({spec.size for _, spec in self.branches}) > 1:
                raise Unsupported("the images of a sample differ in size")
            self.branches = [
                ([*rules, rule], spec) for rule, (rules, _), spec in zip(found, self.branches, specs, strict=True)
            ]
        ends = [rule.number(self.number) for rule in found]
        self.number = ends[0]
        first = found[0]
        where = "DALI" if first.operators else "nothing"
        self.steps.append(Step(position, leaf, where, first.operators, first.randomness))

    def _on_batches(self, leaf: Any) -> bool:
        specs: list[Spec] = []
        for _, spec in self.branches:
            rule = find_rule(leaf)
            out = rule.infer_batch(spec) if rule else None
            if out is None:
                return False
            specs.append(out)
        self.tail.append((self.branches[0][1].kind, _for_torch(leaf, self.device)))
        self.branches = [(rules, spec) for (rules, _), spec in zip(self.branches, specs, strict=True)]
        return True

    def _in_torch(self, position: int, leaf: Any, note: str) -> None:
        self.suffix.append(_for_torch(leaf, self.device))
        self.steps.append(Step(position, leaf, "torch", note))


def _takes_several(transform: Any) -> bool:
    """Whether torchvision applies it to each of several images, and not only to one."""
    return isinstance(transform, v2.Transform) and all(map(_takes_several, getattr(transform, "transforms", ())))


def _for_torch(leaf: Any, device: torch.device) -> Any:
    rule = find_rule(leaf)
    return rule.for_torch(device) if rule else leaf


def first_of(chain: Iterable[Any]) -> First:
    """What a chain begins with, but for what does nothing."""
    for leaf in chain:
        rule = find_rule(leaf)
        if not isinstance(rule, Identity):
            return "torch" if rule is None else "conversion" if isinstance(rule, _CONVERSIONS) else "rule"
    return "rule"


def compile_plan(
    transform: Any, device: torch.device, fidelity: Fidelity, spec: Spec | None = None, entry: Entry = "files"
) -> Plan:
    """Finds the rules of a chain; what has none, and all that follows it, is left to torch.

    Args:
        transform: What the dataset would call on an image: a transform, a chain of them, or None.
        device: Where DALI will run.
        fidelity: "exact" or "fast".
        spec: The images that come in; by default PIL images.
        entry: What is fed for a sample.
    """
    spec = replace(spec or Spec(), device="gpu" if device.type == "cuda" else "cpu")
    chain = list(flatten(transform))
    if spec.kind == "array" and first_of(chain) != "torch":
        spec = replace(spec, kind="pil")
    compiler = _Compiler(spec, device)
    for position, leaf in enumerate(chain, start=1):
        compiler.add(position, leaf)
    views = compiler.branches
    shared = compiler.rules
    if compiler.container is None:
        shared, views = views[0][0], [(list[Rule](), views[0][1])]
    return Plan(
        steps=tuple(compiler.steps),
        rules=tuple(shared),
        views=tuple(View(tuple(rules), spec) for rules, spec in views),
        container=compiler.container,
        tail=tuple(compiler.tail),
        spec=compiler.branches[0][1],
        suffix=tuple(compiler.suffix),
        suffix_step=compiler.number,
        device=device,
        fidelity=fidelity,
        entry=entry,
    )


def fuse(plan: Plan) -> Plan:
    """The same plan in fewer operators.

    Rules with nothing to run are left out, neighbours that can be one operator become one, a first window is
    decoded alone, and the change to CHW is given to a last rule that has it for nothing.
    """
    rules, views = _fused(plan.rules), plan.views
    if plan.container is None:
        rules, done = _channels_first(rules)
        views = (replace(views[0], channels_first=done),)
    else:
        branches = [_channels_first(_fused(view.rules)) for view in views]
        views = tuple(
            replace(view, rules=own, channels_first=done) for view, (own, done) in zip(views, branches, strict=True)
        )
    window = plan.decodes and bool(rules) and isinstance(rules[0], Window) and rules[0].inside
    return replace(plan, rules=rules, views=views, decode_window=window)


def _fused(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    done: list[Rule] = []
    for rule in rules:
        if rule.operators:
            done.append(rule)
            while len(done) > 1 and (one := done[-1].absorb(done[-2]) or done[-2].extend(done[-1])):
                done[-2:] = [one]
    return tuple(done)


def _channels_first(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], bool]:
    """The rules with CHW coming out, and True, where the last one has that for nothing."""
    last = rules[-1].channels_first() if rules else None
    return ((*rules[:-1], last), True) if last else (rules, False)
