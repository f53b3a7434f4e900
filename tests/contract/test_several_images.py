"""Images of one sample are drawn for once, whatever kinds they are of."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import BatchShapeError, DALILoader

pytestmark = [
    pytest.mark.timeout(100),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]
COUNT, SIDE = 16, 64
RAMP = np.add.outer(np.arange(SIDE), 3 * np.arange(SIDE)).astype(np.uint8)
GREY = torch.from_numpy(RAMP)[None]
FLOAT = v2.ToDtype(torch.float32, scale=True)
KINDS: dict[str, Any] = {
    "RGB": PIL.Image.fromarray(np.repeat(RAMP[..., None], 3, 2)),
    "RGBA": PIL.Image.fromarray(np.dstack([RAMP, RAMP, RAMP, np.full_like(RAMP, 255)])),
    "I;16": PIL.Image.fromarray(RAMP.astype(np.uint16)),
    "uint8": tv_tensors.Image(GREY.expand(3, -1, -1)),
    "int32": tv_tensors.Image(GREY.int()),
    "float": tv_tensors.Image(GREY.expand(3, -1, -1) / 255),
}
CASES = {
    "crop": ("RGB", "I;16", [v2.ToImage(), v2.RandomResizedCrop(32)]),
    "crop of tensors": ("uint8", "int32", [v2.RandomResizedCrop(32)]),
    "flip after what alpha is not for": (
        "RGB",
        "RGBA",
        [v2.ToImage(), v2.RandomSolarize(255.0, p=0), v2.RandomHorizontalFlip()],
    ),
    "crop after what floats are not for": ("uint8", "float", [v2.RandomPhotometricDistort(p=0), v2.RandomCrop(40)]),
    "flip before, and after": (
        "uint8",
        "int32",
        [v2.RandomVerticalFlip(), v2.RandomResizedCrop(32), v2.RandomHorizontalFlip()],
    ),
}


class Pairs(Dataset[Any]):
    """Samples of two images with the same content."""

    def __init__(self, one: str, other: str) -> None:
        self.pair = {"one": KINDS[one], "other": KINDS[other]}

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {**self.pair, "index": index}


def level(images: torch.Tensor) -> torch.Tensor:
    """The first channel in grey levels."""
    return images[:, 0].double().cpu() * (255 if images.is_floating_point() else 1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", CASES)
def test_images_of_a_sample_are_drawn_for_once(name: str, workers: int, device: str) -> None:
    one, other, chain = CASES[name]
    loader = DALILoader(Pairs(one, other), COUNT, transform=v2.Compose(chain), num_workers=workers, device=device)
    (batch,) = loader
    assert (level(batch["one"]) - level(batch["other"])).abs().max() <= 3
    assert len({tuple(image.flatten().tolist()) for image in level(batch["one"])}) > 1


def test_unequal_shapes_are_named_by_their_files(tmp_path: Path) -> None:
    """Of which a sample has several where they are stored as Hugging Face's datasets do."""
    samples: list[Any] = [{}, {}]
    for i, name in product(range(2), ("one", "other")):
        path = tmp_path / f"{name} {i}.jpg"
        KINDS["RGB"].resize((30, 20 + i if name == "other" else 20)).save(path)
        samples[i][name] = {"bytes": None, "path": str(path)}
    with pytest.raises(BatchShapeError) as caught:
        next(iter(DALILoader(samples, 2, transform=v2.ToImage(), device="cpu")))  # pyright: ignore[reportArgumentType]
    first, second = (f"(sample {i}, {tmp_path}/other {i}.jpg)" for i in range(2))
    assert f"(3, 20, 30) {first} and (3, 21, 30) {second}" in str(caught.value)


def test_samples_of_one_image_each_stay_in_dali(device: str) -> None:
    class Mixed(Dataset[Any]):
        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            return KINDS["int32" if index % 2 else "uint8"][:1]

    transform = v2.Compose([v2.RandomResizedCrop(32), FLOAT])
    loader = DALILoader(Mixed(), COUNT, transform=transform, device=device)
    (batch,) = loader
    assert batch.shape == (COUNT, 1, 32, 32)
    routes = loader._session.proxy_plan.pipelines
    assert routes is not None
    assert [until for _, until in routes._pools] == [None, None]
