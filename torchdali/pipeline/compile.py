"""Transforms, compiled into a plan: what runs in DALI, what in torch for whole batches, what for each sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torchvision.transforms import v2

from torchdali.pipeline.plan import Plan, Step, View
from torchdali.pipeline.torch_transform import TorchTransform
from torchdali.runtime.exceptions import add_note
from torchdali.transforms import Rule, Unsupported, Views, find_rule, flatten, infer
from torchdali.transforms.rules.conversion import Identity, PILToTensor, ToImage, ToTensor
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.spec import Fidelity, First, InputKind, Kind, Spec

__all__ = ["compile_plan", "find_first", "fuse"]

_CONVERSIONS = (ToImage, PILToTensor, ToTensor)
_WITH_ALPHA = (2, 4)
_RESAMPLING = ("resize", "warp", "remap")


class _Compiler:
    """Walks a chain: through DALI as far as rules go, then through torch batch by batch, then sample by sample."""

    def __init__(self, spec: Spec, device: torch.device, until: int | None) -> None:
        self.device, self.until = device, until
        self.steps: list[Step] = []
        self.rules: list[Rule] = []
        self.branches: list[tuple[list[Rule], Spec]] = [([], spec)]
        self.container: type[list[Any] | tuple[Any, ...]] | None = None
        self.tail: list[tuple[Kind, TorchTransform]] = []
        self.suffix: list[TorchTransform] = []
        self.number = 0

    def add(self, position: int, leaf: Any) -> None:
        """Takes the next transform of the chain."""
        if self.suffix:
            self._in_torch(position, leaf, "for each sample, after the one before it")
            return
        if position == self.until:
            self._in_torch(position, leaf, "for each sample after DALI: for another image of the sample it must be so")
            return
        try:
            self._with_rule(position, leaf)
        except TypeError as error:
            # What its class makes of an argument, and a script may set in its place later: torchvision may put up with
            # it, or says what is wrong.
            self._in_torch(position, leaf, f"for each sample after DALI: it has an argument of another type ({error})")

    def _with_rule(self, position: int, leaf: Any) -> None:
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
        if isinstance(found[0], Views):
            if self.container is not None:
                raise Unsupported("the sample is several images already")
            rule = found[0]
            parts = rule.split(self.branches[0][1])
            self._refuse_alpha(one for part, _ in parts for one in part.parts)
            self.rules, self.container = self.branches[0][0], rule.container
            self.branches = [(list(part.parts), spec) for part, spec in parts]
        else:
            specs = [infer(rule, spec) for rule, (_, spec) in zip(found, self.branches, strict=True)]
            self._refuse_alpha(found)
            if self.container is not None and found[0].randomness and len({spec.size for _, spec in self.branches}) > 1:
                raise Unsupported("the images of a sample differ in size")
            self.branches = [
                ([*rules, rule], spec) for rule, (rules, _), spec in zip(found, self.branches, specs, strict=True)
            ]
        ends = [rule.assign_positions(self.number) for rule in found]
        self.number = ends[0]
        first = found[0]
        where = "DALI" if first.operators else "nothing"
        self.steps.append(Step(position, leaf, where, first.operators, first.randomness))

    def _refuse_alpha(self, rules: Iterable[Rule]) -> None:
        if any(spec.kind == "pil" and spec.channels in _WITH_ALPHA for _, spec in self.branches) and any(
            name in rule.operators for rule in rules for name in _RESAMPLING
        ):
            raise Unsupported("PIL multiplies the colours of an image with its alpha channel while it resamples them")

    def _on_batches(self, leaf: Any) -> bool:
        specs: list[Spec] = []
        for _, spec in self.branches:
            rule = find_rule(leaf)
            out = rule.infer_batch(spec) if rule else None
            if out is None:
                return False
            specs.append(out)
        self.tail.append((self.branches[0][1].kind, TorchTransform(leaf, self.device)))
        self.branches = [(rules, spec) for (rules, _), spec in zip(self.branches, specs, strict=True)]
        return True

    def _in_torch(self, position: int, leaf: Any, why: str) -> None:
        self.suffix.append(TorchTransform(leaf, self.device))
        self.steps.append(Step(position, leaf, "torch", why))


def _takes_several(transform: Any) -> bool:
    """Whether torchvision applies it to each of several images, and not only to one."""
    return isinstance(transform, v2.Transform) and all(map(_takes_several, getattr(transform, "transforms", ())))


def find_first(chain: Iterable[Any]) -> First:
    """What a chain begins with, but for what does nothing."""
    for leaf in chain:
        rule = find_rule(leaf)
        if not isinstance(rule, Identity):
            return "torch" if rule is None else "conversion" if isinstance(rule, _CONVERSIONS) else "rule"
    return "rule"


def compile_plan(
    transform: Any,
    device: torch.device,
    fidelity: Fidelity,
    spec: Spec | None = None,
    input_kind: InputKind = InputKind.FILES,
    until: int | None = None,
) -> Plan:
    """Finds the rules of a chain; what has none, and all that follows it, is left to torch.

    Args:
        transform: What the dataset would call on an image: a transform, a chain of them, or None.
        device: Where DALI will run.
        fidelity: "exact" or "fast".
        spec: The images that come in; by default PIL images.
        input_kind: What is fed for a sample.
        until: The position, from 1, of the first transform that torch is to run even if there is a rule for it.
    """
    spec = replace(spec or Spec(), device="gpu" if device.type == "cuda" else "cpu")
    chain = list(flatten(transform))
    given, first = spec.kind, find_first(chain)
    if given == "array" and first != "torch":
        spec = replace(spec, kind="pil")
    compiler = _Compiler(spec, device, until)
    for position, leaf in enumerate(chain, start=1):
        try:
            compiler.add(position, leaf)
        except Exception as error:
            add_note(error, f"while the arguments of transform {position}, {type(leaf).__name__}, were looked at")
            raise
    views = compiler.branches
    shared = compiler.rules
    out = views[0][1]
    if first == "conversion" and out.kind == "pil":  # torch runs it, and it may treat an array as no PIL image
        out = replace(out, kind=given)
    if compiler.container is None:
        shared, views = views[0][0], [(list[Rule](), views[0][1])]
    return Plan(
        steps=tuple(compiler.steps),
        rules=tuple(shared),
        views=tuple(View(tuple(rules), spec) for rules, spec in views),
        container=compiler.container,
        tail=tuple(compiler.tail),
        spec=out,
        suffix=tuple(compiler.suffix),
        suffix_position=compiler.number,
        device=device,
        fidelity=fidelity,
        input_kind=input_kind,
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
    window = plan.decodes and bool(rules) and isinstance(rules[0], Window) and rules[0].stays_inside
    return replace(plan, rules=rules, views=views, decode_window=window)


def _fused(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    done: list[Rule] = []
    for rule in rules:
        if rule.operators:
            done.append(rule)
            while len(done) > 1 and (one := done[-1].fuse_with_previous(done[-2]) or done[-2].fuse_with_next(done[-1])):
                done[-2:] = [one]
    return tuple(done)


def _channels_first(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], bool]:
    """The rules with CHW coming out, and True, where the last one has that for nothing."""
    last = rules[-1].channels_first() if rules else None
    return ((*rules[:-1], last), True) if last else (rules, False)
