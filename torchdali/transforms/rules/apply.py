"""Rules of chains that apply to some samples only, or in a random order for each sample."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali.transforms.chain import flatten
from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Chain, Composite, Input, Node, Nodes, Ops, SampleTransformError, Unsupported
from torchdali.transforms.rules.conversion import TYPES
from torchdali.transforms.spec import IntArray, Params, Sample, Spec
from torchdali.transforms.targets import Targets

Mask = npt.NDArray[np.bool_]


class MaskedChains(Composite):
    """Rule of several chains. Each is applied to the samples whose mask is True, one chain after another."""

    unsupported_when = "one of its transforms runs in torch; samples would differ in type, dtype or channels"
    stages: Sequence[tuple[str, int]]
    """Names of the masks, in order, each with the number of its chain."""

    def __init__(self, transform: Any, chains: Sequence[Any]) -> None:
        super().__init__(transform)
        self.parts = [Chain(transform, flatten(chain)) for chain in chains]
        self.stages = [(f"chain{i}", i) for i in range(len(chains))]

    @abstractmethod
    def draw_masks(self, draws: Draws) -> Mapping[str, Mask]:
        """Return ``(N,)`` booleans for each stage, by its name."""

    @property
    def is_for_every_sample(self) -> bool:
        """Whether every sample takes one of the chains, so that none stays as it is."""
        return False

    def infer(self, spec: Spec) -> Spec:
        outs = [part.infer(spec) for part in self.parts]
        self.inherit_moves()
        if not self.is_for_every_sample:
            outs.append(spec)
        if len({replace(out, size=None, unit=True) for out in outs}) > 1:
            kinds = dict.fromkeys(map(str, outs))
            if len(kinds) == 1:
                kinds = dict.fromkeys(TYPES[out.kind].__name__ for out in outs)
            raise Unsupported(f"some samples would be {', others '.join(kinds)}")
        inner = [part.operators for part in self.parts if part.operators]
        self.operators = ", ".join(["split", *inner, "merge"])
        self.randomness = "; ".join([self.own_randomness, *filter(None, (part.randomness for part in self.parts))])
        size = outs[0].size if len({out.size for out in outs}) == 1 else None
        return replace(outs[0], size=size, unit=all(out.unit for out in outs))

    own_randomness: str = ""
    """Random numbers that ``masks`` draws, in words."""

    @property
    def inputs(self) -> dict[str, Input]:
        return {**{name: Input(np.bool_) for name, _ in self.stages}, **super().inputs}

    def draw(self, draws: Draws, size: IntArray) -> Params:
        return self._draw(draws, size, None)

    def draw_and_move(self, draws: Draws, size: IntArray, targets: Targets) -> Params:
        return self._draw(draws, size, targets)

    def _draw(self, draws: Draws, size: IntArray, targets: Targets | None) -> Params:
        params: Params = dict(self.draw_masks(draws))
        for name, i in self.stages:
            rows = np.flatnonzero(params[name])
            part = self.parts[i]
            part_draws = draws.select_rows(rows).select_position(part.position)
            try:
                if targets is None or not part.moves:
                    drawn = part.draw(part_draws, size[rows])
                else:
                    chosen = targets.select_rows(rows)
                    drawn = part.draw_and_move(part_draws, size[rows], chosen)
                    targets.put_rows(rows, chosen)
            except SampleTransformError as error:
                raise SampleTransformError(int(rows[error.row]), str(error)) from error
            size = np.array(size)
            size[rows] = part.output_size(size[rows], drawn)
            for key, values in drawn.items():
                full = f"{i}_{key}"
                whole = params.get(full, np.zeros((len(draws), *values.shape[1:]), values.dtype))
                # If a chain has more than one stage, some stages may need longer parameters than others.
                more = [max(b - a, 0) for a, b in zip(whole.shape[1:], values.shape[1:], strict=True)]
                whole = np.pad(whole, [(0, 0), *((0, x) for x in more)]) if any(more) else whole
                whole[(rows, *map(slice, values.shape[1:]))] = values
                params[full] = whole
        return params

    def output_size(self, size: IntArray, params: Params) -> IntArray:
        size = np.array(size)
        for name, i in self.stages:
            rows = np.flatnonzero(params[name])
            own = {key: values[rows] for key, values in self.select_params(i, params).items()}
            size[rows] = self.parts[i].output_size(size[rows], own)
        return size

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        for name, i in self.stages:
            image = ops.apply_where(
                params[name], partial(self.parts[i].lower, ops), image, self.select_params(i, params)
            )
        return image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        for name, i in self.stages:
            if sample[name]:
                image = self.parts[i].reference(image, self.select_params(i, sample))
        return image


class RandomApply(MaskedChains):
    """Rule of RandomApply: all of its transforms with probability p, else none."""

    handles = (v2.RandomApply, v1.RandomApply)

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, [list(transform.transforms)])
        self.own_randomness = f"apply with probability {transform.p:g}"

    def draw_masks(self, draws: Draws) -> Mapping[str, Mask]:
        return {"chain0": draws.bernoulli(self.transform.p)}


class RandomChoice(MaskedChains):
    """Rule of RandomChoice: one of its transforms."""

    handles = (v2.RandomChoice, v1.RandomChoice)
    own_randomness = "which one"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, list(transform.transforms))
        self.weights = np.ones(len(self.parts)) if transform.p is None else np.asarray(transform.p, np.float64)

    def infer(self, spec: Spec) -> Spec:
        if len(self.weights) != len(self.parts) or not self.weights.sum() > 0 or self.weights.min() < 0:
            raise Unsupported(f"p={self.transform.p} for {len(self.parts)} transforms")
        return super().infer(spec)

    @property
    def is_for_every_sample(self) -> bool:
        return True

    def draw_masks(self, draws: Draws) -> Mapping[str, Mask]:
        choice = draws.choice(self.weights / self.weights.sum())
        return {name: choice == i for name, i in self.stages}


class RandomOrder(MaskedChains):
    """Rule of RandomOrder: all of its transforms, in random order."""

    handles = (v2.RandomOrder, v1.RandomOrder)
    own_randomness = "order"

    def __init__(self, transform: Any) -> None:
        super().__init__(transform, list(transform.transforms))
        count = range(len(self.parts))
        self.stages = [(f"place{place}_chain{i}", i) for place in count for i in count]

    def infer(self, spec: Spec) -> Spec:
        # Each of them may follow any other, so each must accept what the others return.
        out = super().infer(spec)
        return out if out == spec else super().infer(replace(spec, size=None, unit=out.unit))

    def draw_masks(self, draws: Draws) -> Mapping[str, Mask]:
        count = len(self.parts)
        order = draws.permutation(count)
        return {f"place{place}_chain{i}": order[:, place] == i for place in range(count) for i in range(count)}
