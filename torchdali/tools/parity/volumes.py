"""Volumes in the certificate: how far torchdali's patches and labels are from the torch bodies of its transforms."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torchvision.transforms import v2 as annotated_v2

from torchdali import DALILoader
from torchdali.datasets import Volumes
from torchdali.pipeline.compile import compile_plan
from torchdali.tools.parity.case import GroupCase, GroupDifferences
from torchdali.tools.parity.compare import describe_mismatch, subtract
from torchdali.transforms import (
    GaussianBlur3D,
    RandomAffine3D,
    RandomCrop3D,
    RandomFlip3D,
    RandomIntensity,
    RandomRotate3D,
)
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.rules.volumes import VolumeRule
from torchdali.transforms.spec import InputKind, Spec

__all__ = ["VOLUMES", "measure_volumes"]

v2 = cast("Any", annotated_v2)

_SEED = 7
_PATCH = (24, 30, 28)
_SIDES = ((30, 40, 36), (26, 33, 44))
_COARSE = 5
"""Voxels along each side between the random values that a volume is interpolated from."""


_ROUNDING = ((2e-6, 0.0), "sums of float32 in another order")
_WARP = ((5e-4, 1e-3), "positions of float32, computed in another order; two voxels may be equally near")

VOLUMES: dict[str, GroupCase] = {
    "volumes RandomCrop3D": GroupCase([RandomCrop3D((12, 30, 17))]),
    "volumes RandomFlip3D": GroupCase([RandomFlip3D()]),
    "volumes RandomIntensity": GroupCase([RandomIntensity((0.5, 1.5), (-1, 1))], *_ROUNDING),
    "volumes GaussianBlur3D": GroupCase([GaussianBlur3D((0, 2))], *_ROUNDING),
    "volumes RandomRotate3D": GroupCase([RandomRotate3D((-30, 30))], *_WARP),
    "volumes RandomAffine3D": GroupCase([RandomAffine3D((-40, 40), (-4, 4), (0.7, 1.4), fill=-1.0)], *_WARP),
    "volumes of a training": GroupCase(
        [
            *(RandomFlip3D(), RandomRotate3D((-15, 15)), RandomCrop3D((20, 22, 24))),
            *(GaussianBlur3D((0.3, 1)), RandomIntensity()),
        ],
        *_WARP,
    ),
}
"""Cases of the certificate. Each rule of volumes is in one of them."""


def _write(folder: Path) -> Volumes:
    """Write smooth volumes and their labels, and open them."""
    rng = np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name).mkdir()
    for number, sides in enumerate(_SIDES):
        coarse = torch.from_numpy(rng.random((1, 1, *(side // _COARSE for side in sides)), np.float32))
        volume = torch.nn.functional.interpolate(coarse, sides, mode="trilinear")[0, 0].numpy()
        np.save(folder / "images" / f"{number}.npy", volume)
        np.save(folder / "labels" / f"{number}.npy", np.floor(volume * 4).astype(np.uint8))
    return Volumes(folder / "images", _PATCH, folder / "labels", per_volume=4, seed=_SEED)


def measure_volumes(case: GroupCase, _: object, device: str | torch.device) -> GroupDifferences:
    """Measure how far made-up patches are from those of torch, after a chain with the same random numbers.

    Args:
        case: The chain.
        device: Where the loader transforms.
    """
    values, off, total = 0.0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        dataset = _write(Path(folder))
        options: dict[str, Any] = {"transform": v2.Compose(case.chain), "seed": _SEED, "device": device}
        with DALILoader[Any](dataset, 3, collate_fn=list, **options) as loader:
            ours = [tuple(part.cpu() for part in sample) for batch in loader for sample in batch]
        for index, actual in enumerate(ours):
            expected = _replay(case.chain, index, dataset[index])
            for one, other in zip(actual, expected, strict=True):
                if mismatch := describe_mismatch(one, other):
                    return GroupDifferences(error=mismatch)
            values = max(values, float(subtract(actual[0], expected[0]).max()))
            off, total = off + int((actual[1] != expected[1]).sum()), total + actual[1].numel()
    return GroupDifferences({"values": values, "labels": off / total})


def _replay(chain: Sequence[Any], index: int, parts: Any) -> list[torch.Tensor]:
    """Return what the torch bodies make of volume and labels, with the numbers that the rules draw for the sample."""
    spec = Spec("volume", torch.float32, 1, unit=False)
    plan = compile_plan(list(chain), torch.device("cpu"), "exact", spec, InputKind.PIXELS)
    draws = Draws(epoch_key(_SEED, 0), np.array([index]), np.zeros(1, np.int64))
    size = np.array([_PATCH], np.int64)
    for rule in plan.rules:
        assert isinstance(rule, VolumeRule)
        drawn = rule.draw(draws.select_position(rule.position), size)
        size = rule.output_size(size, drawn)
        params = rule.make_params({name: array[0] for name, array in drawn.items()}, _PATCH[1:])
        parts = [rule.transform.transform(part, params) for part in parts]
    return [part.as_subclass(torch.Tensor) for part in parts]
