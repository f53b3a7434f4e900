"""Functions that go through torch.compile with the loop over the loader within, or a transform of torchdali.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Numbered
from torch.utils.data import Dataset, IterableDataset
from torchvision.datasets.folder import default_loader
from torchvision.transforms import v2
from torchvision.transforms.v2.functional import pil_to_tensor

import torchdali
from torchdali import DALILoader

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"),  # torch 2.11's own
]
CROP = v2.Compose([v2.RandomResizedCrop(16), v2.ToDtype(torch.float32, scale=True)])


class Asked(Dataset[Any]):
    def __init__(self, root: Path) -> None:
        self.files = sorted(map(str, root.rglob("*.jpg")))

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        return pil_to_tensor(default_loader(self.files[index])), index


class Streamed(IterableDataset[Any]):
    def __init__(self, root: Path) -> None:
        self.asked = Asked(root)

    def __iter__(self) -> Iterator[Any]:
        return (self.asked[i] for i in range(len(self.asked)))


@pytest.fixture(params=["read", "asked", "streamed"])
def loader(request: pytest.FixtureRequest, pictures: Path, numbered: Numbered, device: str) -> Iterator[Any]:
    if request.param == "read":
        made = DALILoader(numbered(pictures, v2.Compose([v2.ToImage(), CROP])), batch_size=5, device=device, seed=0)
    else:
        dataset = Asked(pictures) if request.param == "asked" else Streamed(pictures)
        workers = 2 if request.param == "asked" else 0
        made = DALILoader(dataset, batch_size=5, num_workers=workers, transform=CROP, device=device, seed=0)
    with made:
        yield made


def compiled(function: Callable[[], Any]) -> Any:
    torch.compiler.reset()
    return torch.compile(function, backend="eager")()


def test_a_loop_in_a_compiled_function(loader: Any) -> None:
    model = torch.nn.Conv2d(3, 1, 3).to(loader.device)

    def epoch() -> torch.Tensor:
        total = torch.zeros((), device=loader.device)
        for images, labels in loader:
            total = total + (model(images).mean((1, 2, 3)) * labels).sum()
        return total

    state = loader.state_dict()
    expected = epoch()
    loader.load_state_dict(state)
    assert torch.equal(compiled(epoch), expected)


def test_one_batch_and_where_the_loader_is_in_a_compiled_function(loader: Any) -> None:
    def first() -> Any:
        images, labels = next(iter(loader))
        return images * 2, labels, loader.state_dict()

    state = loader.state_dict()
    images, labels, place = first()
    loader.load_state_dict(state)
    again, again_labels, again_place = compiled(first)
    assert torch.equal(again, images)
    assert torch.equal(again_labels, labels)
    del place["asked"], again_place["asked"]  # how far ahead depends on the workers
    assert again_place == place


def test_a_transform_in_a_compiled_function(pictures: Path, device: str) -> None:
    transform = torchdali.compile(CROP, device=device)
    image, _ = Asked(pictures)[0]
    torch.manual_seed(0)
    expected = transform([image]) * 2
    torch.manual_seed(0)
    assert torch.equal(compiled(lambda: transform([image]) * 2), expected)
