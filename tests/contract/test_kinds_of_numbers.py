"""Arguments of transforms may be numbers of any kind that torchvision takes: tensors, arrays, NumPy's scalars."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from helpers.proxied import difference
from PIL import Image
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.transforms import Paste

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:.*__array_wrap__:DeprecationWarning")]

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 255, (30, 40, 3), dtype=np.uint8))
KINDS: list[Callable[[Any], Any]] = [
    torch.tensor,
    np.array,
    lambda x: np.array(x)[()],
    lambda x: (np.float32 if isinstance(x, float) else np.int32)(x),
]
FLOAT = v2.ToDtype(torch.float32, scale=True)

CASES: dict[str, Callable[[Any], Any]] = {
    "ColorJitter": lambda n: v2.ColorJitter(n(0.5), n(0.25), (n(0.5), n(1.5)), n(0.125)),
    "RandomApply": lambda n: v2.RandomApply([v2.RandomPerspective(n(0.5), 1.0)], p=1.0),
    "RandomRotation": lambda n: v2.RandomRotation((n(-30.0), n(30.0))),
    "RandomAffine": lambda n: v2.RandomAffine(n(10.0), (n(0.125), n(0.25)), (n(0.75), n(1.25)), n(5.0)),
    "RandomPerspective": lambda n: v2.RandomPerspective(n(0.5), 1.0),
    "RandomAdjustSharpness": lambda n: v2.RandomAdjustSharpness(n(2.0), 1.0),
    "RandomSolarize": lambda n: v2.RandomSolarize(n(100.0), 1.0),
    "Normalize": lambda n: v2.Compose([FLOAT, v2.Normalize([n(0.5)] * 3, [n(0.25)] * 3)]),
    "GaussianNoise": lambda n: v2.Compose([FLOAT, v2.GaussianNoise(n(0.0), n(0.125))]),
    "Resize": lambda n: v2.Resize((n(20), n(22))),
    "RandomResize": lambda n: v2.Compose([v2.RandomResize(n(16), n(24)), v2.CenterCrop(16)]),
    "ScaleJitter": lambda n: v2.Compose([v2.ScaleJitter((n(20), n(20)), (n(0.5), n(1.5))), v2.CenterCrop(8)]),
    "RandomCrop": lambda n: v2.RandomCrop((n(20), n(22)), padding=4),
    "RandomResizedCrop": lambda n: v2.RandomResizedCrop(n(20), (n(0.25), n(1.0)), (n(0.75), n(1.25))),
    "GaussianBlur": lambda n: v2.GaussianBlur(n(3), (n(0.125), n(2.0))),
    "RandomErasing": lambda n: v2.RandomErasing(1.0, (n(0.125), n(0.25)), (n(0.25), n(3.0))),
    "RandomZoomOut": lambda n: v2.Compose([v2.RandomZoomOut(5, (n(1.0), n(2.0)), 1.0), v2.CenterCrop(40)]),
    "Paste": lambda n: v2.Compose([Paste((n(1.0), n(2.0)), n(0.5), (n(0.0), n(1.0))), v2.CenterCrop(40)]),
    "ElasticTransform": lambda n: v2.ElasticTransform(n(50.0), n(5.0)),
    "TrivialAugmentWide": lambda n: v2.TrivialAugmentWide(n(31)),
    "AugMix": lambda n: v2.AugMix(n(3)),
}


def load(transform: Any) -> list[Any]:
    samples: Any = [(PICTURE, 1)] * 4
    chain = v2.Compose([v2.ToImage(), transform])
    return list(DALILoader(samples, 2, transform=chain, device="cpu", seed=1))


def unchanged(number: Any) -> Any:
    return number


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "AugMix")) for name in CASES])
def test_a_number_of_any_kind_is_that_number(name: str) -> None:
    make = CASES[name]
    expected = load(make(unchanged))
    count = 0
    for kind in KINDS:
        try:
            transform = make(kind)
            transform(v2.functional.to_image(PICTURE))
        except (TypeError, ValueError, RuntimeError):
            continue  # torchvision does not take them
        assert not difference(load(transform), expected)
        count += 1
    assert count


def test_a_tensor_that_a_script_writes_to_counts_from_the_next_epoch() -> None:
    level = torch.tensor(0.0)
    samples: Any = [(PICTURE, 1)] * 2
    transform = v2.RandomInvert(level)  # pyright: ignore[reportArgumentType]
    loader = DALILoader(samples, 2, transform=v2.Compose([v2.ToImage(), transform]), device="cpu")
    before = next(iter(loader))[0]
    level.fill_(1.0)
    assert torch.equal(next(iter(loader))[0], 255 - before)
    assert transform.p is level
