"""What a loader with transforms shows as its ``collate_fn`` has the attributes of the user's, and can be wrapped."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate
from torchvision.transforms import v2

from torchdali import DALILoader, TransformError

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")


class Scaled:
    """A collate_fn with a number."""

    def __init__(self, factor: int) -> None:
        self.factor = factor

    def __call__(self, samples: Any) -> Any:
        return default_collate(samples)[0] * self.factor

    def __deepcopy__(self, memo: Any) -> Scaled:
        return Scaled(self.factor)


def loader(collate_fn: Any = None, **options: Any) -> DALILoader[Any]:
    samples: Any = [(torch.ones(3, 4, 4), i) for i in range(2)]
    return DALILoader(samples, 2, collate_fn=collate_fn, transform=v2.CenterCrop(2), device="cpu", **options)


@pytest.mark.parametrize("workers", [0, 1])
def test_attributes_are_read_and_set(workers: int) -> None:
    ours = loader(Scaled(2), num_workers=workers)
    assert ours.collate_fn.factor == 2  # pyright: ignore[reportFunctionMemberAccess]
    ours.collate_fn.factor = 3  # pyright: ignore[reportFunctionMemberAccess]
    assert torch.equal(next(iter(ours)), torch.full((2, 3, 2, 2), 3.0))
    for twin in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        twin.collate_fn.factor = 7
        assert torch.equal(next(iter(twin)), torch.full((2, 3, 2, 2), 7.0))
        with pytest.raises(TransformError, match="would lose its transform="):
            twin.collate_fn([])
    assert torch.equal(next(iter(ours)), torch.full((2, 3, 2, 2), 3.0))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("images", [True, False])
def test_it_may_be_wrapped(workers: int, images: bool) -> None:
    ours = loader(num_workers=workers)
    if not images:
        ours.transform, ours.batch_transform = None, lambda *parts: parts
    old = ours.collate_fn
    ours.collate_fn = lambda samples: [*old(samples), "more"]
    pictures, labels, more = next(iter(ours))
    assert pictures.shape == ((2, 3, 2, 2) if images else (2, 3, 4, 4))
    assert (labels.tolist(), more) == ([0, 1], "more")
