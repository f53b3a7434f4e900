"""``Volumes``: patches of .npy files, in both loaders."""

from __future__ import annotations

import pickle
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import Volumes
from torchdali.transforms import GaussianBlur3D, RandomFlip3D, RandomIntensity

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
SIDES = [(12, 20, 16), (9, 16, 24), (10, 17, 15)]
PATCH = (8, 12, 10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three volumes whose values tell their places, and labels: the same values, halved."""
    root = tmp_path_factory.mktemp("volumes")
    for name in ("images", "labels"):
        (root / name).mkdir()
    for number, sides in enumerate(SIDES):
        places = np.arange(np.prod(sides)).reshape(sides) + 10_000 * number
        np.save(root / "images" / f"{number}.npy", places.astype(">f4" if number else "<f4"))
        np.save(root / "labels" / f"{number}.npy", places // 2)
    return root


def of(folder: Path, **options: Any) -> Volumes:
    return Volumes(folder / "images", PATCH, folder / "labels", **options)


def test_image_and_label_are_cut_alike_from_the_file(folder: Path) -> None:
    dataset = of(folder, per_volume=20)
    assert len(dataset) == 60
    starts = set()
    for i in range(60):
        image, label = dataset[i]
        assert image.dtype == torch.float32
        assert image.shape == label.shape == (1, *PATCH)
        assert isinstance(label, tv_tensors.Mask)
        assert torch.equal(image.long() // 2, label)
        sides = SIDES[i // 20]
        start = np.unravel_index(int(image[0, 0, 0, 0]) - 10_000 * (i // 20), sides)
        window = tuple(slice(a, a + n) for a, n in zip(start, PATCH, strict=True))
        assert (image[0].numpy() == np.load(folder / "images" / f"{i // 20}.npy")[window]).all()
        starts.add((i // 20, *map(int, start)))
    assert {start[1] for start in starts if start[0] == 1} == {0, 1}  # first and last place, of 9 - 8 + 1
    assert len(starts) > 40


def test_a_grid_covers_each_voxel(folder: Path) -> None:
    dataset = Volumes(folder / "images", PATCH, places="grid")
    covered = torch.cat([image.flatten() for image in dataset]).unique()
    assert len(covered) == sum(np.prod(sides) for sides in SIDES)
    assert len(dataset) == 2 * 2 * 2 + 2 * 2 * 3 + 2 * 2 * 2
    dense = Volumes(folder / "images", PATCH, places="grid", stride=(1, 4, 100))
    assert len(dense) == 5 * 3 * 2 + 2 * 2 * 2 + 3 * 3 * 2
    assert Volumes(folder / "images", None)[1].shape == (1, *SIDES[1])


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_follow_from_the_seed_in_both_loaders(folder: Path, workers: int) -> None:
    transform = v2.Compose([RandomFlip3D(), GaussianBlur3D((0.5, 1.0)), RandomIntensity()])
    dataset = of(folder, per_volume=3, seed=7, transform=transform)
    dataset.set_epoch(2)
    order = [8, 1, 4, 0, 3, 3]
    expected = [dataset[i] for i in order]
    assert torch.equal(expected[4][0], expected[5][0])
    for kind in (DataLoader, DALILoader):
        options = {"device": "cpu"} if kind is DALILoader else {}
        torch.manual_seed(workers)
        loader = kind(dataset, batch_sampler=[order[:2], order[2:4], order[4:]], num_workers=workers, **options)
        images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
        assert torch.equal(images, torch.stack([image for image, _ in expected]))
        assert torch.equal(
            labels.as_subclass(torch.Tensor), torch.stack([x.as_subclass(torch.Tensor) for _, x in expected])
        )
    state = torch.get_rng_state()
    other = [dataset[i] for i in order[:2]]
    assert torch.equal(state, torch.get_rng_state())
    dataset.set_epoch(3)
    assert not torch.equal(other[0][0], dataset[order[0]][0])


def test_without_a_seed_torch_draws(folder: Path) -> None:
    dataset = of(folder)
    torch.manual_seed(0)
    first = dataset[0][0]
    assert not torch.equal(first, dataset[0][0])
    torch.manual_seed(0)
    assert torch.equal(first, pickle.loads(pickle.dumps(dataset))[0][0])


def test_axes_of_channels_and_many_files(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdali.datasets.volumes._OPEN", 2)
    paths = [tmp_path / f"{i}.npy" for i in range(4)]
    for i, path in enumerate(paths):
        np.save(path, np.full((2, 3, 4, 5), i, np.int16))
    dataset = Volumes(paths, (2, 2, 2))
    assert [int(dataset[i].unique()) for i in (0, 1, 2, 3, 0)] == [0, 1, 2, 3, 0]
    assert dataset[0].shape == (2, 2, 2, 2)
    assert len(dataset._maps) == 2


def test_nifti_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    plain = rng.integers(-1000, 3000, SIDES[0]).astype(np.int16)
    several = rng.random((*SIDES[0], 2)).astype(">f4")
    scaled = nibabel.Nifti1Image(plain, np.eye(4))
    scaled.header.set_slope_inter(0.5, -3)
    nibabel.save(nibabel.Nifti1Image(plain, np.eye(4)), tmp_path / "a.nii")
    nibabel.save(nibabel.Nifti1Image(several, np.eye(4)), tmp_path / "b.nii.gz")
    nibabel.save(scaled, tmp_path / "c.nii.gz")
    np.save(tmp_path / "d.npy", plain)
    dataset = Volumes(tmp_path, PATCH, places="grid")
    assert [Path(path).name for path in dataset.files] == ["a.nii", "b.nii.gz", "c.nii.gz", "d.npy"]
    patches = [[dataset[8 * number + i] for i in range(8)] for number in range(4)]
    assert [(patch[0].dtype, len(patch[0])) for patch in patches] == [
        *((torch.int16, 1), (torch.float32, 2), (torch.float32, 1), (torch.int16, 1))
    ]
    for i in (0, 5, 7):
        assert torch.equal(patches[0][i], patches[3][i])
        window = tuple(slice(start, start + n) for start, n in zip(dataset._grid[i][1], PATCH, strict=True))
        assert (patches[1][i].numpy() == np.moveaxis(several[window], 3, 0)).all()
        expected = nibabel.load(tmp_path / "c.nii.gz").get_fdata(dtype="float32")[window]
        assert (patches[2][i][0].numpy() == expected).all()
    assert torch.equal(pickle.loads(pickle.dumps(Volumes([tmp_path / "a.nii"], None)))[0][0], torch.from_numpy(plain))
    whole = (tmp_path / "c.nii.gz").read_bytes()
    (tmp_path / "c.nii.gz").write_bytes(whole[:-2000])
    with pytest.raises(OSError, match=r"c.nii.gz cannot be read: "):
        Volumes([tmp_path / "c.nii.gz"], None)[0]
    (tmp_path / "a.nii").write_text("no volume")
    with pytest.raises(ValueError, match=r"a.nii must be a NIfTI file: "):
        Volumes([tmp_path / "a.nii"])[0]
    nibabel.save(nibabel.Nifti1Image(plain[0], np.eye(4)), tmp_path / "a.nii")
    with pytest.raises(ValueError, match=r"a.nii must have three axes, or four with the channels last, got \(20, 16\)"):
        Volumes([tmp_path / "a.nii"])[0]
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'torchdali\[medical\]', or pip install nibabel"):
        Volumes([tmp_path / "a.nii"])[0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda root: Volumes(root / "none"), "there are no .npy, .nii or .nii.gz files in "),
        (lambda root: Volumes(root / "images", (4, 4)), "patch must be three numbers of voxels (depth, height, width)"),
        (lambda root: Volumes(root / "images", stride=(0, 1, 1)), "stride must be three numbers of voxels"),
        (lambda root: Volumes(root / "images", places="all"), "places must be 'random' or 'grid', got 'all'"),
        (
            lambda root: Volumes(root / "images", PATCH, [root / "labels" / "0.npy"]),
            "label_files must be one for each of the 3 volumes, got 1",
        ),
        (lambda root: Volumes(root / "images")[0], "0.npy must be at least as large as a patch, (96, 96, 96), got (12"),
        (
            lambda root: Volumes(root / "images", PATCH, sorted((root / "labels").glob("*"))[::-1])[0],
            "2.npy must have the size of ",
        ),
    ],
)
def test_errors_name_the_file(folder: Path, make: Callable[[Path], Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        make(folder)


def test_files_that_are_no_volumes(tmp_path: Path) -> None:
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"text.npy must be a .npy file of numbers: "):
        Volumes([tmp_path / "text.npy"])[0]
    np.save(tmp_path / "flat.npy", np.zeros((4, 4)))
    with pytest.raises(ValueError, match=r"flat.npy must be \(D, H, W\) or \(C, D, H, W\), got \(4, 4\)"):
        Volumes([tmp_path / "flat.npy"])[0]


@pytest.mark.parametrize("seed", [None, 0])
def test_a_patch_takes_at_most_2_3_ms_of_a_core(tmp_path: Path, seed: int | None) -> None:
    """A patch of 96^3 with labels, from the page cache. It took 0.6 to 1.2 ms."""
    for name, dtype in (("image", np.float32), ("label", np.uint8)):
        np.save(tmp_path / f"{name}.npy", np.ones((128, 256, 256), dtype))
    dataset = Volumes([tmp_path / "image.npy"], label_files=[tmp_path / "label.npy"], per_volume=40, seed=seed)
    seconds = []
    for i in range(len(dataset)):
        begin = time.thread_time()
        dataset[i]
        seconds.append(time.thread_time() - begin)
    assert min(seconds) < 2.3e-3
