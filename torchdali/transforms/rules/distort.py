"""Rules of channels in random order, alone and with random colours."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.transforms.rng import Draws
from torchdali.transforms.rule import Input, Node, Nodes, Ops, Rule, Unsupported
from torchdali.transforms.rules.color import blend, blend_weights, check_image, check_unit_range, hue_offsets, shift_hue
from torchdali.transforms.spec import IntArray, Params, Sample, Spec


def permute(ops: Ops, image: Node, matrix: Node, spec: Spec) -> Node:
    """Permute the image's channels by a permutation matrix."""
    dtype = ops.types.UINT8 if spec.dtype == torch.uint8 else ops.types.FLOAT
    return ops.fn.coord_transform(image, M=matrix, dtype=dtype)


def permutation_matrices(order: IntArray) -> npt.NDArray[np.float32]:
    """Return ``(N, C, C)`` matrices for :func:`permute`. Channel i of the result is channel ``order[:, i]``."""
    return np.eye(order.shape[1], dtype=np.float32)[order]


class RandomChannelPermutation(Rule):
    """Rule of RandomChannelPermutation: the channels in random order."""

    handles = (v2.RandomChannelPermutation,)
    unsupported_when = "not uint8 or float32"
    feeds: ClassVar = {"matrix": Input(np.float32, 2)}

    def infer(self, spec: Spec) -> Spec:
        check_image(spec)
        self.spec = spec
        self.operators = "coord_transform" if spec.channels > 1 else ""
        self.randomness = "order of the channels"
        return spec

    def draw(self, draws: Draws, size: IntArray) -> Params:
        order = draws.permutation(self.spec.channels)
        return {"matrix": permutation_matrices(order), "order": order}

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        return permute(ops, image, params["matrix"], self.spec)

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return F.permute_channels(image, sample["order"].tolist())


class RandomPhotometricDistort(Rule):
    """Rule of RandomPhotometricDistort: random colours and order of channels, each with probability p.

    Contrast comes before saturation and hue, or after them, at random.
    """

    handles = (v2.RandomPhotometricDistort,)
    unsupported_when = "not uint8 or float32; factors that torchvision refuses"
    names = ("brightness", "contrast", "saturation", "hue")

    def infer(self, spec: Spec) -> Spec:
        check_image(spec)
        check_unit_range(spec)
        for name in self.names:
            low, high = getattr(self.transform, name)
            least, most = (-0.5, 0.5) if name == "hue" else (0.0, np.inf)
            if not least <= low <= high <= most:
                raise Unsupported(f"torchvision refuses {name}={(low, high)}")
        self.spec = spec
        self.operators = "coord_transform, reduce, arithmetic, split, merge"
        coins = ", ".join([*self.names, "order of the channels"])
        self.randomness = f"{coins}, each with probability {self.transform.p:g}; whether contrast comes first"
        return spec

    @property
    def _is_coloured(self) -> bool:
        return self.spec.channels == 3

    @property
    def inputs(self) -> dict[str, Input]:
        coins = ["first", "last", "saturate", "turn"][: 4 if self._is_coloured else 2]
        factors = ["brightness_keep", "contrast_keep", "contrast_mean", "saturation_keep", "saturation_grey"]
        fed = {name: Input(np.bool_) for name in coins}
        fed |= {name: Input(np.float32) for name in factors[: 5 if self._is_coloured else 3]}
        return fed | ({"hue": Input(np.float32, 1), "matrix": Input(np.float32, 2)} if self._is_coloured else {})

    def draw(self, draws: Draws, size: IntArray) -> Params:
        coins = draws.uniform(6) < [float(self.transform.p)] * 5 + [0.5]
        factors = {name: draws.uniform_range(*getattr(self.transform, name)).astype(np.float32) for name in self.names}
        identity = np.broadcast_to(np.arange(self.spec.channels), (len(draws), self.spec.channels))
        order = np.where(coins[:, 4:5], draws.permutation(self.spec.channels), identity)
        params: Params = {
            "first": coins[:, 1] & coins[:, 5],
            "last": coins[:, 1] & ~coins[:, 5],
            "saturate": coins[:, 2],
            "turn": coins[:, 3],
            "hue": hue_offsets(factors["hue"]),
            "matrix": permutation_matrices(order),
            "order": order,
            "factors": np.where(coins[:, :4], np.stack([factors[name] for name in self.names], axis=1), np.nan),
        }
        brightness = np.where(coins[:, 0], factors["brightness"], np.float32(1))
        for kind, factor in enumerate((brightness, factors["contrast"], factors["saturation"])):
            each = blend_weights(np.full(len(draws), kind), factor)
            params |= {f"{self.names[kind]}_{name}": values for name, values in each.items()}
        return params

    def lower(self, ops: Ops, image: Node, params: Nodes) -> Node:
        def change(image: Node, mask: str, name: str, term: str) -> Node:
            weight = {key: params[f"{name}_{key}"] for key in ("keep", term)}
            return ops.apply_where(params[mask], lambda x, p: blend(ops, x, p, self.spec), image, weight)

        image = blend(ops, image, {"keep": params["brightness_keep"]}, self.spec)
        image = change(image, "first", "contrast", "mean")
        if self._is_coloured:
            image = change(image, "saturate", "saturation", "grey")
            turn = {"hue": params["hue"]}
            image = ops.apply_where(params["turn"], lambda x, p: shift_hue(ops, x, p["hue"], self.spec), image, turn)
        image = change(image, "last", "contrast", "mean")
        return permute(ops, image, params["matrix"], self.spec) if self._is_coloured else image

    def reference(self, image: torch.Tensor, sample: Sample) -> torch.Tensor:
        return self.transform.transform(image, self.make_params(sample, (0, 0)))

    def make_params(self, sample: Sample, size: tuple[int, int]) -> dict[str, Any] | None:
        factors = (None if np.isnan(x) else float(x) for x in sample["factors"])
        return {
            **{f"{name}_factor": factor for name, factor in zip(self.names, factors, strict=True)},
            "contrast_before": bool(sample["first"]),
            "channel_permutation": sample["order"].tolist(),
        }
