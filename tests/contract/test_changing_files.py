"""Files that become other files while a loader is in use, and caches that are closed while an iterator is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.cuts import CROPPED, PHOTOGRAPH, RESIZED, folder, loader_of, write
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError

pytestmark = pytest.mark.timeout(120)


SHRINKING = """
import sys
from pathlib import Path
import numpy as np
from PIL import Image
from skimage.data import astronaut
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchdali import DALILoader

root, random, photograph = Path(sys.argv[1]), np.random.default_rng(0), Image.fromarray(astronaut())
(root / "c").mkdir(parents=True)
chain = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(24)])
def write(numbers, least, most):
    for i in numbers:
        size = random.integers(least, most, 2)
        photograph.crop((0, 0, *size.tolist())).save(root / "c" / f"{i:02}.jpg", quality=60 + i % 30)
for seed in range(6):
    write(range(64), 40, 90)
    loader = DALILoader(ImageFolder(root, chain), batch_size=32, device="cpu", seed=seed, num_workers=1)
    list(loader)
    write(range(0, 64, 4), 24, 70)
    print(sum(len(images) for images, _ in loader))
    loader.close()
"""


@pytest.mark.slow
def test_a_large_batch_with_files_that_became_smaller(run_script, tmp_path):
    """A window that is not within its image is found by DALI where it reads headers, in several threads."""
    done = run_script(SHRINKING, tmp_path / "root")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["64"] * 6


def test_windows_of_images_that_are_to_be_turned(tmp_path, monkeypatch):
    """EXIF says so, and neither torchvision nor DALI does it: the window is within the image as it is stored."""
    exif = Image.Exif()
    exif[0x0112] = 6
    (tmp_path / "c").mkdir()
    for i in range(40):
        PHOTOGRAPH.crop((i, 0, i + 100, 30)).save(tmp_path / "c" / f"{i:02}.jpg", exif=exif)
    monkeypatch.setattr("torchdali.pipeline.feed.Prefetcher._run_again", lambda self, batch: pytest.fail("run twice"))
    loader = loader_of(tmp_path, v2.Compose([v2.ToImage(), v2.RandomCrop((28, 90))]), 40, device="cpu")
    ((images, _),) = loader
    assert images.shape == (40, 3, 28, 90)


class Twice:
    """Batches with sample 0 in each; before the fourth of a later epoch its file is written anew."""

    def __init__(self, path: Path, changes: bool) -> None:
        self.path, self.changes = path, changes

    def __len__(self) -> int:
        return 8

    def __iter__(self):
        for i in range(8):
            if i == 3 and self.changes:
                write(self.path, 80, 112, 90)
            yield [0, 2 * i + 1]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("cache", [None, "host", "device"])
def test_each_batch_has_the_old_file_or_the_new_one(cache, filled, device, tmp_path):
    """A batch in flight must not take its file for the one that another batch found there meanwhile."""
    paths = folder(tmp_path, 16)
    old = ImageFolder(tmp_path, CROPPED)[0][0]
    sampler = Twice(paths[0], False)
    dataset = ImageFolder(tmp_path, CROPPED)
    loader = DALILoader(dataset, batch_sampler=sampler, cache=cache, device=device, num_workers=1, prefetch_factor=2)
    if filled:
        list(loader)
    sampler.changes = True
    images = [images[0].cpu() for images, _ in loader]
    new = ImageFolder(tmp_path, CROPPED)[0][0]
    assert len(images) == 8
    assert all((one == old).all() or (one == new).all() for one in images)
    assert (images[-1] == new).all()
    loader.close()


@pytest.mark.parametrize(
    ("cache", "change"),
    [(None, "host"), ("host", "transform"), ("host", "device"), ("device", "transform"), ("device", None)],
)
def test_an_iterator_goes_on_when_the_cache_is_made_anew(cache, change, device, tmp_path):
    folder(tmp_path, 40)
    loader = loader_of(tmp_path, RESIZED, 2, num_workers=1, prefetch_factor=2, cache=cache, device=device)
    expected = [images.clone() for images, _ in loader]
    batches = iter(loader)
    first = [next(batches)[0] for _ in range(10)]
    if change == "transform":
        loader.dataset.transform = v2.Compose([v2.ToImage(), v2.Resize((16, 16))])
    else:
        loader.cache = change
    next(iter(loader))
    images = [*first, *(images for images, _ in batches)]
    assert len(images) == len(expected)
    assert all(torch.equal(one, other) for one, other in zip(images, expected, strict=True))
    loader.close()


@pytest.mark.parametrize("cache", [None, "host", "device"])
def test_a_file_that_is_gone_is_named_although_it_was_kept(cache, device, tmp_path):
    paths = folder(tmp_path, 16)
    loader = loader_of(tmp_path, CROPPED, 4, cache=cache, device=device)
    assert len(list(loader)) == 4
    paths[6].unlink()
    batches = iter(loader)
    next(batches)
    with pytest.raises(SampleError, match="there is no such file") as raised:
        next(batches)
    assert raised.value.path == str(paths[6])
    assert [len(images) for images, _ in batches] == [4, 4]
    loader.close()


def test_a_black_image_takes_no_more_of_the_cache_in_each_epoch(tmp_path, device):
    paths = folder(tmp_path, 16)
    paths[5].write_bytes(paths[5].read_bytes()[:-500])
    loader = loader_of(tmp_path, RESIZED, 8, cache="device", on_error="replace", device=device)
    used = set()
    for epoch in range(4):
        assert len(torch.cat([images for images, _ in loader])) == 16
        if epoch:
            used.add(loader._session.native_plan.cache._store.used)
    assert len(loader.errors) == 1
    assert len(used) == 1
    loader.close()
