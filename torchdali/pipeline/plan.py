"""The plan of what runs on the samples of a source.

A :class:`Plan` is frozen. ``compile.py`` makes it and fuses its operators, ``graph.py`` builds a pipeline of it, and
``loader.explain()`` prints its ``str``.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torchvision.transforms import v2

from torchdali.pipeline.torch_transform import TorchTransform
from torchdali.transforms import Input, Rule, SampleTransformError, find_rule
from torchdali.transforms.chain import is_unmodified
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import Fidelity, InputKind, Inputs, IntArray, Kind, Params, Spec
from torchdali.transforms.targets import Targets

__all__ = ["Cut", "Plan", "Step", "View", "has_frame_choice", "input_name", "summarize_plans"]


@dataclass(frozen=True)
class Step:
    """One transform of the chain, as the user wrote it.

    Attributes:
        position: Its position in the chain, counted from 1.
        transform: The transform.
        library: What runs it; "nothing" if there is nothing to run; "batch" for torch between two parts of DALI.
        note: The DALI operators, or why torch runs it.
        randomness: The random numbers that are drawn for each sample.
    """

    position: int
    transform: Any
    library: Literal["nothing", "DALI", "batch", "torch"]
    note: str
    randomness: str = ""

    @property
    def name(self) -> str:
        """The transform on one line."""
        text = " ".join(repr(self.transform).split()).replace("( ", "(").replace(" )", ")")
        return text if len(text) <= 160 else f"{text[:157]}..."


@dataclass(frozen=True)
class View:
    """One of the images that a sample becomes. Most samples become one image.

    Attributes:
        rules: The rules that DALI runs for it, in order, after the plan's rules.
        spec: The type of the image after these rules.
        channels_first: Whether the last rule puts out CHW itself.
    """

    rules: tuple[Rule, ...]
    spec: Spec
    channels_first: bool = False


@dataclass(frozen=True)
class Cut:
    """A transform that torch runs on whole batches, after which DALI runs the rest of the chain.

    Attributes:
        position: Its position in the chain, counted from 1.
        kind: The type of image that it expects.
        transform: The transform.
        number: The position that keys its random numbers.
        chain: The transforms after it.
        until: As for ``compile_plan``.
        after: The plan of these, if it returns images of the type that it gets.
    """

    position: int
    kind: Kind
    transform: TorchTransform
    number: int
    chain: tuple[Any, ...]
    until: int | None
    after: Plan


@dataclass(frozen=True)
class Plan:
    """Everything that runs on the samples of a source.

    Attributes:
        steps: The chain as the user wrote it.
        rules: The rules that DALI runs, in order, before samples become several views.
        views: One view without its own rules, or several.
        container: The type that holds the views of a sample; None if a sample is a single image.
        tail: The transforms that torch runs on whole batches after DALI, each with the type of image that it expects.
        spec: The type of the images after ``tail``; with several views, of the first.
        cut: What follows ``tail``, if DALI runs again after it. There is one view then, and no suffix.
        suffix: The transforms that torch runs on each sample after ``tail``.
        suffix_position: The position that keys the random numbers of the suffix.
        device: Where DALI runs.
        fidelity: "exact" or "fast".
        moves: The rules as the user wrote them, before the suffix, that move or change boxes, masks and key points.
        input_kind: How samples are fed.
        decode_window: Whether the decoder decodes only the window of the first rule.
        headers_validated: Whether the reader leaves files to PIL whose header DALI's decoder refuses. If not, operators
            of the pipeline read each header before the decoder.
        adjust_orientation: Whether images are turned by their EXIF orientation while they are decoded.
        num_frames: Number of frames that DALI gets of each sample, if samples are videos of one length; else 0.
        needs_pil_metadata: Whether the images after DALI are PIL images that no transform has converted. They keep
            metadata.
        grey: Whether files are decoded to one channel of the dtype of ``spec``, and not to RGB.
    """

    steps: tuple[Step, ...]
    rules: tuple[Rule, ...]
    views: tuple[View, ...]
    container: type[list[Any] | tuple[Any, ...]] | None
    tail: tuple[tuple[Kind, TorchTransform], ...]
    spec: Spec
    suffix: tuple[TorchTransform, ...]
    suffix_position: int
    device: torch.device
    fidelity: Fidelity
    moves: tuple[Rule, ...] = ()
    input_kind: InputKind = InputKind.FILES
    decode_window: bool = False
    headers_validated: bool = False
    adjust_orientation: bool = False
    needs_pil_metadata: bool = False
    cut: Cut | None = None
    grey: bool = False
    num_frames: int = 0
    # A hint of `Draws.precompute` for the next batch. It changes no number.
    _blocks: dict[int, int] = field(default_factory=dict[int, int], init=False, compare=False, repr=False)

    @property
    def all_rules(self) -> tuple[Rule, ...]:
        """The rules before the views, then each view's."""
        return (*self.rules, *(rule for view in self.views for rule in view.rules))

    @property
    def inputs(self) -> dict[str, Input]:
        """The inputs to feed for every sample, by their names in the graph."""
        return {input_name(i, name): x for i, rule in enumerate(self.all_rules) for name, x in rule.inputs.items()}

    @property
    def layout(self) -> str:
        """The axes of an image in the graph."""
        return "DHWC" if self.spec.kind == "volume" else "HWC"

    @property
    def channels_first(self) -> list[int]:
        """The axes of :attr:`layout` in the order of torch: the last one, then the others."""
        return [len(self.layout) - 1, *range(len(self.layout) - 1)]

    @property
    def needs_decoding(self) -> bool:
        """Whether files or their contents are fed."""
        return self.input_kind.is_encoded

    @property
    def is_random(self) -> bool:
        """Whether anything may be drawn at random, in DALI or in torch."""
        return any(step.randomness or step.library in ("batch", "torch") for step in self.steps)

    @property
    def end_with_annotations(self) -> int | None:
        """Position, from 1, of the first transform that torch runs only if samples have boxes, masks or key points."""
        transforms = [rule.transform for rule in self.moves if rule.moves_in_torch]
        ends = (step for step in self.steps if step.library == "batch" or any(step.transform is x for x in transforms))
        return next((step.position for step in ends), None)

    @property
    def needs_torch(self) -> bool:
        """Whether torch runs anything."""
        return bool(self.tail or self.suffix or self.cut)

    @property
    def last(self) -> Plan:
        """The plan of the last part of the chain, if the transforms at the cuts return the type that they get."""
        return self.cut.after.last if self.cut else self

    @property
    def num_images(self) -> int:
        """Number of images that DALI gets for a sample."""
        return max(self.num_frames, 1)

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample's images. If their size is not known, 512 x 512 is assumed."""
        sizes = [view.spec.size or (512, 512) for view in self.views]
        each = zip(self.views, sizes, strict=True)
        size = sum(view.spec.channels * height * width * view.spec.dtype.itemsize for view, (height, width) in each)
        return size * self.num_images

    def choose_frames(self, count: int) -> IntArray:
        """Return the numbers of the frames that transforms leave of a video of ``count``. DALI gets only these."""
        chosen = np.arange(count)
        for step in self.steps:
            if step.library == "nothing" and has_frame_choice(step.transform):
                chosen = chosen[torch.linspace(0, len(chosen) - 1, step.transform.num_samples).long().numpy()]
        return chosen

    def expand_frames(self, draws: Draws, size: IntArray) -> tuple[Draws, IntArray]:
        """Return random numbers and sizes of all frames, from those of ``(N,)`` samples."""
        if not self.num_frames:
            return draws, size
        frame = np.arange(len(size) * self.num_frames)
        draws = draws.select_frames(frame // self.num_frames, frame % self.num_frames)
        return draws, np.repeat(size, self.num_frames, axis=0)

    def select_params(self, index: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """Return the inputs of the rule at ``index`` in :attr:`all_rules`, under the rule's own names."""
        return {name: inputs[input_name(index, name)] for name in self.all_rules[index].inputs}

    def enumerate_rules(self) -> tuple[list[tuple[int, Rule]], list[list[tuple[int, Rule]]]]:
        """Return the rules before the views, and those of each view, with their indices in :attr:`all_rules`."""
        index = itertools.count()
        trunk = [(next(index), rule) for rule in self.rules]
        return trunk, [[(next(index), rule) for rule in view.rules] for view in self.views]

    def draw(self, draws: Draws, size: IntArray, targets: Targets | None = None) -> tuple[Inputs, list[Params]]:
        """Draw a batch's parameters, and move its boxes, masks and key points.

        Args:
            draws: The random numbers of the batch's samples.
            size: ``(N, 2)`` heights and widths of the files.
            targets: The boxes, masks and key points of the batch. They are changed.

        Returns:
            The inputs to feed, contiguous and of the declared types; and the parameters of each rule, also those that
            only ``reference`` needs.

        Raises:
            SampleTransformError: A sample cannot be transformed. The message names the transform.
        """
        inputs: Inputs = {}
        by_rule: list[Params] = []
        draws = draws.precompute(self._blocks)
        if targets is None:
            self._check_needs(self.moves)
        else:
            draws = draws.keep_params()
            self._move(draws, size, targets)

        def draw_rules(rules: Sequence[tuple[int, Rule]], size: IntArray) -> IntArray:
            for i, rule in rules:
                with self._name_in_errors(rule):
                    params = rule.draw(draws.select_position(rule.position), size)
                for name, declared in rule.inputs.items():
                    inputs[input_name(i, name)] = np.ascontiguousarray(params[name], declared.dtype)
                size = rule.output_size(size, params)
                by_rule.append(params)
            return size

        trunk, views = self.enumerate_rules()
        size = draw_rules(trunk, size)
        for rules in views:
            draw_rules(rules, size)
        return inputs, by_rule

    def _move(self, draws: Draws, size: IntArray, targets: Targets) -> None:
        """Move boxes, masks and key points by what the rules draw. The images' operators draw the same numbers again.

        What a rule draws from the boxes is stored in ``draws``.
        """
        for i, rule in enumerate(self.moves):
            if targets.is_pure:  # after ToPureTensor there are plain tensors, which torchvision leaves alone
                self._check_needs(self.moves[i:])
                return
            with self._name_in_errors(rule):
                params = rule.draw_and_move(draws.select_position(rule.position), size, targets)
            size = rule.output_size(size, params)

    def _check_needs(self, rules: Sequence[Rule]) -> None:
        """Raise SampleTransformError if a rule needs boxes or key points, for samples that have none."""
        for rule in rules:
            if rule.needs:
                raise SampleTransformError(0, f"{self._origin(rule)}: {rule.needs}")

    @contextmanager
    def _name_in_errors(self, rule: Rule) -> Generator[None, None, None]:
        try:
            yield
        except SampleTransformError as error:
            raise SampleTransformError(error.row, f"{self._origin(rule)}: {error}") from error

    def _origin(self, rule: Rule) -> str:
        """Return the transform that a rule comes from, as messages name it."""
        for step in self.steps:
            if step.transform is rule.transform:
                return f"transform {step.position}, {step.name}"
        return repr(rule.transform)

    def __str__(self) -> str:
        backend = "DALI GPU" if self.device.type == "cuda" else "DALI CPU"
        libraries = {"nothing": "-", "DALI": backend, "batch": "torch", "torch": "torch"}
        lines: list[str] = []
        if self.input_kind is not InputKind.PIXELS:
            decode = "the window of the first crop alone" if self.decode_window else "whole images"
            decode += ", turned by EXIF" if self.adjust_orientation else ""
            target = ", into the cache" if self.input_kind is InputKind.PACKED else ""
            lines.append(f"{'decode':<11}{backend:<10}{decode}{target}")
        for step in self.steps:
            lines.append(f"{step.position:>9}  {libraries[step.library]:<10}{step.name}")
            if step.library in ("batch", "torch"):
                lines.append(f"{'':>21}{step.note}")
            if step.randomness:
                lines.append(f"{'':>21}draws {step.randomness}")
        return "\n".join([*lines, *self.describe_operators()])

    def describe_operators(self) -> list[str]:
        """Return lines with the operators of each part of the chain."""
        lines = [f"{'operators':<11}{self.trunk}"] if self.trunk else []
        if self.container is not None:
            lines += [
                f"{f'view {i}':<11}{view.spec}: {'; '.join(self._operators(view.rules)) or 'nothing more'}"
                for i, view in enumerate(self.views, start=1)
            ]
        if self.cut:
            lines.append(f"{'then':<11}{'torch':<10}transform {self.cut.position}, on the whole batch")
            lines += self.cut.after.describe_operators()
        return lines

    @property
    def trunk(self) -> str:
        """The operators before samples become several views."""
        operators = list(self._operators(self.rules))
        if self.needs_decoding:
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


def summarize_plans(plans: Sequence[Plan]) -> tuple[str, str]:
    """Return how many transforms of a chain run in DALI, and what to change so that more do; empty if nothing.

    Args:
        plans: The plans of the chain, for one or several kinds of images.
    """
    device = plans[0].device
    plan = min(plans, key=_count_in_dali)
    total, counts = len(plan.steps), sorted({_count_in_dali(plan) for plan in plans})
    if not total:
        copied = "Sounds are copied" if plan.spec.kind == "waveform" else "Images are copied"
        return f"{'DALI decodes' if plan.needs_decoding else copied} on {device}: there are no transforms", ""
    verb = "transform runs" if total == 1 else "transforms run"
    answer = f"{' to '.join(map(str, counts[:: len(counts) - 1 or 1]))} of {total} {verb} in DALI on {device}"
    first = next((step for step in plan.steps if step.library == "torch"), None)
    if first is None:
        return answer, ""
    name = f"transform {first.position}, {type(first.transform).__name__},"
    blocked = sum(find_rule(step.transform) is not None for step in plan.steps[first.position :])
    if blocked:
        return answer, f"place {name} last if you can: then {blocked} more could run in DALI"
    return answer, f"replace {name} if it is slow: torch runs it, for the reason below it"


def has_frame_choice(transform: Any) -> bool:
    """Return whether a transform leaves some frames of a video and changes none."""
    return type(transform) is v2.UniformTemporalSubsample and is_unmodified(transform)


def _count_in_dali(plan: Plan) -> int:
    """Return the number of transforms that torch does not run. Some of them need no operator."""
    return sum(step.library not in ("batch", "torch") for step in plan.steps)


def input_name(rule: int, name: str) -> str:
    """Return the name in the graph of a parameter of the rule at an index in :attr:`Plan.all_rules`."""
    return f"rule{rule}_{name}"
