"""Source and transforms, compiled into something that can be read before it is run.

A :class:`Plan` is frozen. ``compile_plan`` makes one; ``fuse`` turns one into another that does the same in fewer
operators; ``graph.py`` builds it; its ``str`` is what ``loader.explain()`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from torchdali.rng import Draws
from torchdali.spec import Fidelity, Inputs, IntArray, Params, Spec
from torchdali.transforms import Input, RowError, Rule, Unsupported, find_rule, flatten
from torchdali.transforms.crop import Window

__all__ = ["Plan", "Step", "compile_plan", "fuse"]


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
class Plan:
    """What is done with the samples of a source.

    Attributes:
        steps: The chain as the user wrote it.
        rules: What DALI runs, in order; after :func:`fuse`, fewer than steps.
        suffix: The transforms that torch runs, per sample, after DALI.
        suffix_step: The position that keys the random numbers of the suffix.
        spec: The images between ``rules`` and ``suffix``.
        device: Where DALI runs.
        fidelity: "exact" or "fast".
        decode_window: Whether the decoder decodes only the window of the first rule.
        channels_first: Whether the last rule puts out CHW itself.
    """

    steps: tuple[Step, ...]
    rules: tuple[Rule, ...]
    suffix: tuple[Any, ...]
    suffix_step: int
    spec: Spec
    device: torch.device
    fidelity: Fidelity
    decode_window: bool = False
    channels_first: bool = False

    @property
    def inputs(self) -> dict[str, Input]:
        """What must be fed for every sample, by the name of the graph's input."""
        return {_fed(i, name): x for i, rule in enumerate(self.rules) for name, x in rule.inputs.items()}

    def params_of(self, number: int, inputs: dict[str, Any]) -> dict[str, Any]:
        """The inputs of rule ``number``, under the rule's own names."""
        return {name: inputs[_fed(number, name)] for name in self.rules[number].inputs}

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
        for i, rule in enumerate(self.rules):
            try:
                drawn = rule.draw(draws.at(rule.step), size)
            except RowError as error:
                step = next(step for step in self.steps if step.transform is rule.transform)
                raise RowError(error.row, f"transform {step.position}, {step.name}: {error}") from error
            for name, declared in rule.inputs.items():
                inputs[_fed(i, name)] = np.ascontiguousarray(drawn[name], declared.dtype)
            size = rule.resized(size, drawn)
            by_rule.append(drawn)
        return inputs, by_rule

    def __str__(self) -> str:
        backend = "DALI GPU" if self.device.type == "cuda" else "DALI CPU"
        where = {"nothing": "-", "DALI": backend, "torch": "torch"}
        decode = "the window of the first crop alone" if self.decode_window else "whole images"
        lines = [f"{'decode':<11}{backend:<10}{decode}"]
        for step in self.steps:
            lines.append(f"{step.position:>9}  {where[step.where]:<10}{step.name}")
            if step.where == "torch":
                lines.append(f"{'':>21}{step.note}")
            if step.randomness:
                lines.append(f"{'':>21}draws {step.randomness}")
        operators = [rule.operators for rule in self.rules if rule.operators]
        if self.decode_window:
            operators[0] = operators[0].removeprefix("slice").removeprefix(", ")
        operators.insert(0, "decoders.image_slice" if self.decode_window else "decoders.image")
        lines.append(f"{'operators':<11}{'; '.join(filter(None, operators))}")
        return "\n".join(lines)


def _fed(rule: int, name: str) -> str:
    return f"rule{rule}_{name}"


def compile_plan(transform: Any, device: torch.device, fidelity: Fidelity) -> Plan:
    """Finds the rules of a chain; what has none, and all that follows it, is left to torch.

    Args:
        transform: What the dataset would call on a PIL image: a transform, a chain of them, or None.
        device: Where DALI will run.
        fidelity: "exact" or "fast".
    """
    spec = Spec()
    chain = flatten(transform)
    steps: list[Step] = []
    rules: list[Rule] = []
    number = 0
    for position, leaf in enumerate(chain, start=1):
        rule = find_rule(leaf)
        if rule is None:
            reason = f"torchdali has no rule for {type(leaf).__name__}"
        else:
            try:
                spec = rule.infer(spec)
            except Unsupported as unsupported:
                reason = str(unsupported)
            else:
                number = rule.number(number)
                rules.append(rule)
                where = "DALI" if rule.operators else "nothing"
                steps.append(Step(position, leaf, where, rule.operators, rule.randomness))
                continue
        steps.append(Step(position, leaf, "torch", f"for each sample after DALI: {reason}"))
        steps += [
            Step(i, later, "torch", "for each sample, after the one before it")
            for i, later in enumerate(chain[position:], start=position + 1)
        ]
        return Plan(tuple(steps), tuple(rules), tuple(chain[position - 1 :]), number, spec, device, fidelity)
    return Plan(tuple(steps), tuple(rules), (), number, spec, device, fidelity)


def fuse(plan: Plan) -> Plan:
    """The same plan in fewer operators.

    Rules with nothing to run are left out, neighbours that can be one operator become one, a first window is
    decoded alone, and the change to CHW is given to a last rule that has it for nothing.
    """
    rules: list[Rule] = []
    for rule in plan.rules:
        if rule.operators:
            rules.append(rule)
            _absorb(rules)
    channels_first = rules[-1].channels_first() if rules else None
    if channels_first:
        rules[-1] = channels_first
    window = bool(rules) and isinstance(rules[0], Window) and rules[0].inside
    return replace(plan, rules=tuple(rules), decode_window=window, channels_first=channels_first is not None)


def _absorb(rules: list[Rule]) -> None:
    """Lets the last rule take in the ones before it, as long as it can."""
    while len(rules) > 1 and (one := rules[-1].absorb(rules[-2])):
        rules[-2:] = [one]
