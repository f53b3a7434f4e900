"""Compile transforms into a plan: what runs in DALI, in torch on whole batches, and in torch on each sample."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torchvision.transforms import v2

from torchdali.errors import TransformError
from torchdali.pipeline.plan import Cut, Plan, Step, View, has_frame_choice
from torchdali.pipeline.torch_transform import TorchTransform
from torchdali.runtime.exceptions import add_note
from torchdali.transforms import Batched, Rule, Unsupported, Views, find_rule, flatten, infer, is_batchable
from torchdali.transforms.rules.conversion import Identity, PILToTensor, ToImage, ToTensor
from torchdali.transforms.rules.crop import Window
from torchdali.transforms.rules.orientation import ExifTransposeRule
from torchdali.transforms.rules.photometric import RGB
from torchdali.transforms.rules.volumes import LoadLabels, label_rules
from torchdali.transforms.spec import Fidelity, First, InputKind, Kind, Spec

__all__ = ["compile_plan", "find_first", "fuse", "has_exif_transpose"]

_CONVERSIONS = (ToImage, PILToTensor, ToTensor)
_WITH_ALPHA = (2, 4)
_RESAMPLING = ("resize", "warp", "remap")


class _Compiler:
    """Walks a chain. Its beginning runs in DALI, as far as there are rules; then torch runs batches, then samples."""

    def __init__(self, spec: Spec, device: torch.device, until: int | None, number: int) -> None:
        self.device, self.until = device, until
        self.steps: list[Step] = []
        self.rules: list[Rule] = []
        self.branches: list[tuple[list[Rule], Spec]] = [([], spec)]
        self.container: type[list[Any] | tuple[Any, ...]] | None = None
        self.tail: list[tuple[Kind, TorchTransform]] = []
        self.suffix: list[TorchTransform] = []
        self.moves: list[Rule] = []
        self.number = number
        self.adjust_orientation = False

    def add(self, position: int, leaf: Any) -> None:
        """Add the next transform of the chain."""
        if type(leaf).__module__.partition(".")[0] == "albumentations":
            raise TransformError(
                f"transform {position}, {type(leaf).__name__}, is of albumentations, which is called by name with "
                "arrays: call it in the dataset's __getitem__, and give transform= what comes after it"
            )
        if self.suffix:
            self._add_to_suffix(position, leaf, "for each sample, after the one before it")
            return
        if position == self.until:
            self._add_to_suffix(
                position, leaf, "for each sample after DALI: for another image of the sample it must be so"
            )
            return
        try:
            self._add(position, leaf)
        except TypeError as error:
            # A script may have set an attribute to another type than its class does. torchvision may accept it, or says
            # what is wrong.
            self._add_to_suffix(
                position, leaf, f"for each sample after DALI: it has an argument of another type ({error})"
            )

    def is_cuttable(self, position: int, leaf: Any) -> bool:
        """Return whether torch can run a transform on the whole batch, so that DALI can go on after it."""
        is_tensor = self.branches[0][1].kind in ("image", "tensor", "waveform")
        return (
            is_batchable(leaf) and is_tensor and self.container is None and not self.suffix and position != self.until
        )

    def _add(self, position: int, leaf: Any) -> None:
        if has_frame_choice(leaf) and self.branches[0][1].kind not in ("tensor", "waveform"):
            self.steps.append(Step(position, leaf, "nothing", ""))
            return
        if find_rule(leaf) is None:
            why = f"for each sample after DALI: torchdali has no rule for {type(leaf).__name__}"
            self._add_to_suffix(position, leaf, why)
            return
        reason = "it comes after one that torch runs"
        if not self.tail:
            try:
                self._add_to_dali(position, leaf)
            except Unsupported as unsupported:
                reason = str(unsupported)
            else:
                return
        if self._add_to_tail(leaf):
            self.steps.append(Step(position, leaf, "torch", f"for whole batches after DALI: {reason}"))
        else:
            self._add_to_suffix(position, leaf, f"for each sample after DALI: {reason}")

    def _add_to_dali(self, position: int, leaf: Any) -> None:
        # Every view has its own rule, because its size may differ. The rules have the same position and so draw the
        # same numbers: torchvision's transforms draw once for all images of a sample.
        if self.container is not None and not _is_for_several(leaf):
            raise Unsupported("it takes one image, and the sample is several")
        copies = [rule for _ in self.branches if (rule := find_rule(leaf))]
        first = copies[0]
        if self.branches[0][1].kind == "waveform" and not first.takes_sounds:
            raise Unsupported("it is for images, and this is a sound")
        if isinstance(first, ExifTransposeRule):
            first.is_first = self.container is None and all(isinstance(rule, Identity) for rule in self.branches[0][0])
        if isinstance(first, Views):
            if self.container is not None:
                raise Unsupported("the sample is several images already")
            parts = first.split(self.branches[0][1])
            self._refuse_alpha(rule for part, _ in parts for rule in part.parts)
            self.rules, self.container = self.branches[0][0], first.container
            self.branches = [(list(part.parts), spec) for part, spec in parts]
        else:
            specs = [infer(rule, spec) for rule, (_, spec) in zip(copies, self.branches, strict=True)]
            self._refuse_alpha(copies)
            if self.container is not None and first.randomness and len({spec.size for _, spec in self.branches}) > 1:
                raise Unsupported("the images of a sample differ in size")
            self.branches = [
                ([*rules, rule], spec) for rule, (rules, _), spec in zip(copies, self.branches, specs, strict=True)
            ]
        self.moves += [first] if first.moves else []
        ends = [rule.assign_positions(self.number) for rule in copies]
        self.number = ends[0]
        turns = isinstance(first, ExifTransposeRule) and first.is_first and self.branches[0][1].kind == "pil"
        self.adjust_orientation = self.adjust_orientation or turns
        where = "DALI" if first.operators or turns else "nothing"
        self.steps.append(Step(position, leaf, where, first.operators, first.randomness))

    def _refuse_alpha(self, rules: Iterable[Rule]) -> None:
        if any(spec.kind == "pil" and spec.channels in _WITH_ALPHA for _, spec in self.branches) and any(
            name in rule.operators for rule in rules for name in _RESAMPLING
        ):
            raise Unsupported("PIL multiplies the colours of an image with its alpha channel while it resamples them")

    def _add_to_tail(self, leaf: Any) -> bool:
        """Let torch run a transform on whole batches. Return False if the result would be another one."""
        specs: list[Spec] = []
        for _, spec in self.branches:
            rule = find_rule(leaf)
            if spec.kind == "waveform" and not (rule and rule.takes_sounds):
                return False
            out = rule.infer_batch(spec) if rule else None
            if out is None:
                return False
            specs.append(out)
        self.tail.append((self.branches[0][1].kind, TorchTransform(leaf, self.device)))
        self.moves += [rule for rule in (find_rule(leaf),) if rule and rule.moves]
        self.branches = [(rules, spec) for (rules, _), spec in zip(self.branches, specs, strict=True)]
        return True

    def _add_to_suffix(self, position: int, leaf: Any, why: str) -> None:
        self.suffix.append(TorchTransform(leaf, self.device))
        self.steps.append(Step(position, leaf, "torch", why))


def _is_for_several(transform: Any) -> bool:
    """Return whether torchvision applies a transform to each of several images, and not only to one."""
    return isinstance(transform, v2.Transform) and all(map(_is_for_several, getattr(transform, "transforms", ())))


def find_first(chain: Iterable[Any]) -> First:
    """Return the kind of the first transform of a chain that does something to pixels where they are."""
    for leaf in chain:
        rule = find_rule(leaf)
        if not isinstance(rule, (Identity, ExifTransposeRule)):
            if rule is None:
                return "torch"
            return "RGB" if isinstance(rule, RGB) else "conversion" if isinstance(rule, _CONVERSIONS) else "rule"
    return "rule"


def has_exif_transpose(chain: Iterable[Any]) -> bool:
    """Return whether a chain begins with ExifTranspose, so that images are turned while they are decoded."""
    rules = (find_rule(leaf) for leaf in chain)
    return isinstance(next((rule for rule in rules if not isinstance(rule, Identity)), None), ExifTransposeRule)


def compile_plan(
    transform: Any,
    device: torch.device,
    fidelity: Fidelity,
    spec: Spec | None = None,
    input_kind: InputKind = InputKind.FILES,
    until: int | None = None,
    *,
    start: int = 0,
    number: int = 0,
    labels: Spec | None = None,
) -> Plan:
    """Compile a chain. torch runs the first transform without a rule, and all that follow it.

    Args:
        transform: The transform that the dataset would call on an image, a chain of them, or None.
        device: Where DALI will run.
        fidelity: "exact" or "fast".
        spec: The type of the images; by default PIL images.
        input_kind: How samples are fed.
        until: The position, from 1, of the first transform that torch must run even if it has a rule.
        start: Number of transforms before this chain, which is the rest of a longer one.
        number: The first position that keys random numbers.
        labels: The type of the labels that each volume has, if they are volumes. They become a second view.
    """
    spec = replace(spec or Spec(), device="gpu" if device.type == "cuda" else "cpu")
    chain = list(flatten(transform))
    kind, first = spec.kind, find_first(chain)
    if kind == "array" and first != "torch":
        spec = replace(spec, kind="pil")
    compiler = _Compiler(spec, device, until, number)
    for position, leaf in enumerate(chain, start=start + 1):
        try:
            if compiler.is_cuttable(position, leaf):
                return _cut(compiler, position, leaf, chain[position - start :], fidelity, input_kind)
            compiler.add(position, leaf)
        except Exception as error:
            add_note(error, f"while the arguments of transform {position}, {type(leaf).__name__}, were looked at")
            raise
    plan = _make_plan(compiler, fidelity, input_kind, kind, first)
    if labels is None:
        return plan
    rules = (LoadLabels(labels.dtype), *label_rules(plan.rules))
    return replace(plan, rules=(), views=(View(plan.rules, plan.spec), View(rules, labels)), container=tuple)


def _make_plan(compiler: _Compiler, fidelity: Fidelity, input_kind: InputKind, kind: Kind, first: First) -> Plan:
    """Return the plan of a chain that was walked. It begins with images of a kind, and a kind of transform."""
    views = compiler.branches
    shared = compiler.rules
    out = views[0][1]
    if first == "conversion" and out.kind == "pil":  # torch runs it, and may not treat an array as a PIL image
        out = replace(out, kind=kind)
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
        device=compiler.device,
        fidelity=fidelity,
        moves=tuple(compiler.moves),
        input_kind=input_kind,
        adjust_orientation=compiler.adjust_orientation,
        needs_pil_metadata=kind == "pil" and out.kind == "pil",
    )


def _cut(
    compiler: _Compiler, position: int, leaf: Any, chain: Sequence[Any], fidelity: Fidelity, input_kind: InputKind
) -> Plan:
    """Return the plan of a chain that torch interrupts: it runs a transform on the whole batch."""
    spec = compiler.branches[0][1]
    device, until = compiler.device, compiler.until
    transform = TorchTransform(leaf.module if isinstance(leaf, Batched) else leaf, device)
    after_spec = replace(spec, unit=not spec.dtype.is_floating_point)
    after = compile_plan(
        list(chain), device, fidelity, after_spec, InputKind.PIXELS, until, start=position, number=compiler.number + 1
    )
    why = "on the whole batch, then DALI runs the rest; this plans for images of the type that it gets"
    compiler.steps += [Step(position, leaf, "batch", why), *after.steps]
    plan = _make_plan(compiler, fidelity, input_kind, spec.kind, "rule")
    cut = Cut(position, spec.kind, transform, compiler.number, tuple(chain), until, after)
    return replace(plan, cut=cut, suffix_position=after.suffix_position)


def fuse(plan: Plan) -> Plan:
    """Return the same plan in fewer operators.

    It has no rules without an operator. Neighbours that one operator can run become one. The decoder decodes a first
    window alone. A last rule puts out CHW itself if that costs nothing.
    """
    rules, views = _fuse_neighbours(plan.rules), plan.views
    if plan.container is None:
        rules, is_chw = _put_channels_first(rules)
        views = (replace(views[0], channels_first=is_chw),)
    else:
        branches = [_put_channels_first(_fuse_neighbours(view.rules)) for view in views]
        views = tuple(
            replace(view, rules=fused, channels_first=is_chw)
            for view, (fused, is_chw) in zip(views, branches, strict=True)
        )
    window = plan.needs_decoding and bool(rules) and isinstance(rules[0], Window) and rules[0].stays_inside
    cut = plan.cut and replace(plan.cut, after=fuse(plan.cut.after))
    return replace(plan, rules=rules, views=views, decode_window=window, cut=cut)


def _fuse_neighbours(rules: Sequence[Rule]) -> tuple[Rule, ...]:
    fused: list[Rule] = []
    for rule in rules:
        if rule.operators:
            fused.append(rule)
            while len(fused) > 1 and (
                both := fused[-1].fuse_with_previous(fused[-2]) or fused[-2].fuse_with_next(fused[-1])
            ):
                fused[-2:] = [both]
    return tuple(fused)


def _put_channels_first(rules: tuple[Rule, ...]) -> tuple[tuple[Rule, ...], bool]:
    """Return the rules, and whether the last one puts out CHW. It does if that costs nothing."""
    last = rules[-1].channels_first() if rules else None
    return ((*rules[:-1], last), True) if last else (rules, False)
