"""A transform that is changed after its loader was made is followed, and one that is not costs nothing anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import Numbered
from torch import nn
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(60)

SIZE = 8


class Times(nn.Module):
    """Says the same of itself whatever it does."""

    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor, self.calls = factor, 0

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return image * self.factor

    def __repr__(self) -> str:
        return "Times()"


def replace(chain: Any, place: int, other: Any) -> None:
    chain.transforms[place] = other


def floats(*more: Any) -> Any:
    return v2.Compose([v2.ToImage(), v2.Resize((SIZE, SIZE)), v2.ToDtype(torch.float32, scale=True), *more])


def whitening() -> tuple[torch.Tensor, torch.Tensor]:
    size = 3 * SIZE * SIZE
    return torch.eye(size), torch.zeros(size)


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "another type": (floats, lambda chain: replace(chain, 2, v2.ToDtype(torch.float16, scale=True))),
    "its attribute": (floats, lambda chain: setattr(chain.transforms[2], "scale", False)),
    "a list in it": (
        lambda: floats(v2.Normalize([0.5] * 3, [0.5] * 3)),
        lambda chain: chain.transforms[3].mean.__setitem__(0, 0.1),
    ),
    "another module": (lambda: floats(Times(1)), lambda chain: replace(chain, 3, Times(0))),
    "another lambda": (
        lambda: floats(v2.Lambda(lambda image: image)),
        lambda chain: replace(chain, 3, v2.Lambda(lambda image: image * 0)),
    ),
    "below": (
        lambda: floats(v2.RandomApply([v2.ColorJitter(brightness=(1, 1))], p=1.0)),
        lambda chain: setattr(chain.transforms[3].transforms[0], "brightness", (0.5, 0.5)),
    ),
    "below, a module list": (
        lambda: floats(v1.RandomApply(nn.ModuleList([v1.Grayscale(3)]), 1)),
        lambda chain: chain.transforms[3].transforms.__setitem__(0, v1.RandomInvert(1)),
    ),
    "a tensor": (
        lambda: floats(v2.LinearTransformation(*whitening())),
        lambda chain: chain.transforms[3].transformation_matrix.mul_(0),
    ),
    "a tensor of which DALI has the numbers": (
        lambda: floats(v1.Normalize(torch.full((3,), 0.5), torch.full((3,), 0.5))),
        lambda chain: chain.transforms[3].mean.fill_(0.1),
    ),
}


def first(loader: Any) -> torch.Tensor:
    return next(iter(loader))[0]


@pytest.mark.parametrize("asked", [False, True], ids=["read", "asked"])
@pytest.mark.parametrize(("make", "change"), CHANGES.values(), ids=CHANGES)
def test_what_is_changed_in_place_is_followed(
    pictures: Any, numbered: Numbered, make: Callable[[], Any], change: Callable[[Any], object], asked: bool
) -> None:
    chain = make()
    if asked:
        pixels = v2.Compose([v2.ToImage(), v2.CenterCrop(24)])
        samples = numbered(pictures, pixels)
        loader = DALILoader([samples[i] for i in range(4)], 4, transform=chain, device="cpu")
    else:
        loader = DALILoader(numbered(pictures, chain), 4, device="cpu")
    before = first(loader)
    change(chain)
    after = first(loader)
    assert after.dtype != before.dtype or not torch.equal(after, before)
    other = DALILoader(loader.dataset, 4, transform=loader.transform, device="cpu")
    assert torch.equal(after, first(other))


def test_what_is_not_changed_is_not_built_anew(pictures: Any, numbered: Numbered) -> None:
    def chain() -> Any:
        return floats(v2.RandomApply([v2.RandomInvert()]), v2.Normalize([0.5] * 3, [0.5] * 3), Times(1))

    dataset = numbered(pictures, chain())
    assert isinstance(dataset, ImageFolder)
    loader = DALILoader(dataset, 4, device="cpu")
    first(loader)
    pool = loader._session.native_plan.pool
    assert dataset.transform.transforms[-1].calls
    dataset.transform.eval()
    first(loader)
    assert loader._session.native_plan.pool is pool
