"""One test of each kind of source and of plan, on the GPU."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
import torch
from conftest import CROP, encoded
from helpers.in_memory import maker
from helpers.proxied import EXACT, Samples, decoded, pair
from helpers.smoke import DEVICE, JPEG, assert_batches, assert_on_device
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali import DALILoader
from torchdali.datasets import Tar, pack
from torchdali.tools.parity.case import Case
from torchdali.tools.parity.compare import find_exceeded_bounds, measure
from torchdali.tools.parity.photographs import write_photographs
from torchdali.transforms import MultiView

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

FLOAT = v2.ToDtype(torch.float32, scale=True)
NORMALIZE = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
FLOAT_STEPS = 1e-6
"""Bound of the mean difference of normalized values: a few steps of float32."""


@pytest.fixture(scope="module")
def lossless(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    """Twelve PNGs of different sizes, which every decoder reads alike."""
    return write_photographs(tmp_path_factory.mktemp("lossless"))


def both(dataset: Any, **options: Any) -> tuple[list[Any], list[Any]]:
    """Return the batches of DALILoader and of DataLoader, in the same shuffled order."""
    ours = DALILoader(dataset, 5, shuffle=True, device=DEVICE, generator=torch.Generator().manual_seed(1), **options)
    options = {name: value for name, value in options.items() if name in ("num_workers", "batch_size")}
    theirs = DataLoader(dataset, 5, shuffle=True, generator=torch.Generator().manual_seed(1), **options)
    return list(ours), list(theirs)


# Sources


@pytest.mark.parametrize("label", ["cls", ("cls", "__key__")])
@pytest.mark.parametrize("mapped", [True, False])
def test_tar_shards(pictures: Path, tmp_path: Path, label: Any, mapped: bool) -> None:
    paths = pack(pictures, tmp_path, 60_000).shards.paths
    assert len(paths) > 1
    assert_batches(*both(Tar(paths, label=label, transform=EXACT, is_mapped=mapped)), mean=JPEG)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_folder_of_jpegs(dataset: ImageFolder, workers: int) -> None:
    assert_batches(*both(dataset, num_workers=workers), mean=JPEG)


def test_a_folder_of_pngs(lossless: ImageFolder) -> None:
    lossless.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(64), FLOAT, NORMALIZE])
    assert_batches(*both(lossless), mean=FLOAT_STEPS)


@pytest.mark.parametrize("name", ["CIFAR10", "MNIST"])
def test_arrays_that_are_copied_to_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    dataset = maker(tmp_path, monkeypatch)(name, v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)]))
    assert_batches(*both(dataset))
    DALILoader(dataset, 5, device=DEVICE).explain()
    assert ("copied to cuda:0" in " ".join(capsys.readouterr().out.split())) is (DEVICE == "cuda")


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["path", "bytes", "PIL", "tensor"])
def test_images_from_a_dataset_without_a_folder(pictures: Path, kind: str, workers: int) -> None:
    """Paths and encoded bytes are decoded by DALI, PIL images and tensors come packed from the workers."""
    paths = sorted(pictures.rglob("*.jpg"))[:12]
    make: dict[str, Callable[[Path], Any]] = {
        "path": lambda path: path,
        "bytes": lambda path: path.read_bytes(),
        "PIL": lambda path: decoded(path.read_bytes()),
        "tensor": lambda path: F.center_crop(F.pil_to_tensor(decoded(path.read_bytes())), [40, 40]),
    }
    samples: Any = Samples([make[kind](path) for path in paths], pair)
    true = [(EXACT(decoded(path.read_bytes())), index) for index, path in enumerate(paths)]
    ours = DALILoader(samples, 5, transform=EXACT, num_workers=workers, device=DEVICE)
    assert_batches(ours, DataLoader(true, 5), JPEG if kind in ("path", "bytes") else 0)  # pyright: ignore


class PngAndTarget(Dataset[Any]):
    """A dataset whose samples are dictionaries with an encoded image of their own kind."""

    def __init__(self, folder: ImageFolder) -> None:
        self.folder = folder

    def __len__(self) -> int:
        return len(self.folder)

    def __getitem__(self, index: int) -> dict[str, Any]:
        image, target = self.folder.loader(self.folder.samples[index][0]), self.folder.samples[index][1]
        return {"image": encoded(image, ("PNG", "BMP", "TIFF")[index % 3]), "target": {"class": target, "name": "x"}}


def test_dictionaries_of_mixed_formats(lossless: ImageFolder) -> None:
    samples = PngAndTarget(lossless)
    true = [{**sample, "image": EXACT(decoded(sample["image"]))} for sample in map(samples.__getitem__, range(12))]
    ours = DALILoader(samples, 4, transform=EXACT, num_workers=2, device=DEVICE)
    assert_batches(ours, DataLoader(true, 4))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_dataset_without_a_transform_is_dataloaders(workers: int) -> None:
    dataset = TensorDataset(torch.arange(24.0).reshape(12, 2), torch.arange(12))
    ours = DALILoader(dataset, 5, num_workers=workers, device=DEVICE)
    for batch, expected in zip(ours, DataLoader(dataset, 5), strict=True):
        assert {tensor.device.type for tensor in batch} == {DEVICE}
        assert all(torch.equal(tensor.cpu(), true) for tensor, true in zip(batch, expected, strict=True))


@pytest.mark.parametrize("cache", ["host", "device"])
def test_a_cache(dataset: ImageFolder, cache: Any) -> None:
    with DALILoader(dataset, 5, cache=cache, device=DEVICE) as loader:
        first, second = list(loader), list(loader)
    assert_batches(first, DataLoader(dataset, 5), JPEG)
    assert_batches(second, first)


# Plans


def test_a_random_chain_of_colour_and_geometry(tmp_path: Path) -> None:
    """torchvision's functionals are run with the numbers that were drawn."""
    chain = [v2.RandomResizedCrop(96), v2.RandomHorizontalFlip(), v2.ColorJitter(0.4, 0.4, 0.4, 0.2), v2.ToImage()]
    bounds = 48, 8, 0.1  # of the crop, and up to twice as much where colours are made stronger
    folder = write_photographs(tmp_path)
    assert find_exceeded_bounds(Case(chain, *bounds), measure(Case(chain, *bounds), folder, DEVICE)) == ""


def test_random_numbers_follow_from_the_seed(dataset: ImageFolder) -> None:
    dataset.transform = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(CROP), v2.RandomRotation(20), v2.JPEG((40, 90))])
    first, again, other = (list(DALILoader(dataset, 5, seed=seed, device=DEVICE)) for seed in (3, 3, 4))
    assert_batches(first, again)
    assert not torch.equal(first[0][0], other[0][0])


def test_a_transform_that_torch_runs(lossless: ImageFolder) -> None:
    seen: list[str] = []

    def invert(image: torch.Tensor) -> torch.Tensor:
        seen.append(image.device.type)
        return 255 - image

    lossless.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(64), v2.Lambda(invert)])
    ours, theirs = both(lossless)
    assert_batches(ours, theirs)
    assert DEVICE in seen


def test_views(lossless: ImageFolder) -> None:
    lossless.transform = v2.Compose([v2.ToImage(), v2.FiveCrop(48), FLOAT])
    assert_batches(*both(lossless), mean=FLOAT_STEPS)


def test_views_that_draw_their_own_numbers(lossless: ImageFolder) -> None:
    large, small = (v2.Compose([v2.RandomResizedCrop(size), v2.ToImage(), FLOAT]) for size in (64, 32))
    lossless.transform = MultiView([large, large, small])
    for (first, second, third), labels in DALILoader(lossless, 4, device=DEVICE):
        assert_on_device((first, second, third, labels))
        assert first.shape == second.shape == (4, 3, 64, 64)
        assert third.shape == (4, 3, 32, 32)
        assert not torch.equal(first, second)


def test_a_batch_transform_runs_on_the_device(lossless: ImageFolder) -> None:
    lossless.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(64), FLOAT])
    seen: list[str] = []

    def halve(images: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(images.device.type)
        return images / 2, labels

    halved, whole = list(DALILoader(lossless, 5, device=DEVICE, batch_transform=halve)), DataLoader(lossless, 5)
    assert_batches(halved, [(images / 2, labels) for images, labels in whole], FLOAT_STEPS)
    assert set(seen) == {DEVICE}


@pytest.mark.parametrize("kind", ["paths", "PIL", "bytes", "tensors"])
def test_a_compiled_transform(lossless: ImageFolder, kind: str) -> None:
    transform = v2.Compose([v2.ToImage(), v2.CenterCrop(64), FLOAT, NORMALIZE])
    paths = [Path(path) for path, _ in lossless.samples[:6]]
    images: list[PIL.Image.Image] = [decoded(path.read_bytes()) for path in paths]
    given: dict[str, list[Any]] = {
        "paths": paths,
        "PIL": images,
        "bytes": [path.read_bytes() for path in paths],
        "tensors": [F.pil_to_tensor(image) for image in images],
    }
    compiled = torchdali.compile(transform, device=DEVICE)
    for run in (compiled, pickle.loads(pickle.dumps(compiled))):
        batch = run(given[kind])
        assert_on_device(batch)
        assert torch.allclose(batch.cpu(), torch.stack([transform(image) for image in images]), atol=2e-6)
