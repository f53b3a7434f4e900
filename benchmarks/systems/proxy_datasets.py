"""Map-style datasets of `(image, label)`, with several kinds of images.

* ``bytes``: the encoded file, read in `__getitem__`;
* ``pil``: a PIL image, decoded in `__getitem__`;
* ``arrays``: a uint8 array (H, W, C) from one memory-mapped file of decoded pictures;
* ``paths``: a `pathlib.Path`; nothing is read.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

SOURCES = ("bytes", "pil", "arrays", "paths")
ARRAYS = 1024
_SIZE = (500, 375)
_SEED = 0


def list_files(root: Path) -> list[Path]:
    """Return the pictures under `root` in a fixed random order."""
    paths = sorted(root.glob("*/*.*"))
    order = np.random.default_rng(_SEED).permutation(len(paths))
    return [paths[i] for i in order]


def arrays_path(root: Path) -> Path:
    """Return the path of the decoded pictures. It is outside of `root`, which has only class folders."""
    return root.with_name(f"{root.name}-decoded.npy")


def make_arrays(root: Path, count: int = ARRAYS) -> int:
    """Decode the first `count` pictures to one file, unless it exists. Return the number of pictures in it."""
    from PIL import Image

    path = arrays_path(root)
    if not path.exists():
        decoded: list[Any] = []
        for file in list_files(root)[:count]:
            with Image.open(file) as image:
                decoded.append(np.asarray(image.convert("RGB").resize(_SIZE)))
        unfinished = path.with_suffix(".unfinished.npy")
        np.save(unfinished, np.stack(decoded))
        unfinished.rename(path)
    return len(np.load(path, mmap_mode="r"))


class Pictures(Dataset[Any]):
    """Dataset of `length` samples, in which the pictures repeat.

    Args:
        root: Folder of class folders.
        source: Kind of image, one of `SOURCES`.
        length: Number of samples.
        transform: Transform of an image.
    """

    def __init__(self, root: Path, source: str, length: int, transform: Callable[[Any], Any] | None = None) -> None:
        self.files = list_files(root)
        classes = sorted({file.parent.name for file in self.files})
        self.labels = [classes.index(file.parent.name) for file in self.files]
        self.length = length
        self.transform = transform
        self.source = source
        self._arrays_path = arrays_path(root)
        self._pixels: Any = None

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Any, int]:
        index %= len(self._memory()) if self.source == "arrays" else len(self.files)
        image = self._image(index)
        return (image if self.transform is None else self.transform(image)), self.labels[index]

    def _image(self, index: int) -> Any:
        if self.source == "arrays":
            return np.asarray(self._memory()[index])
        if self.source == "paths":
            return self.files[index]
        if self.source == "bytes":
            return self.files[index].read_bytes()
        from PIL import Image

        return Image.open(self.files[index]).convert("RGB")

    def _memory(self) -> Any:
        """Return the decoded pictures. They are mapped at first use, so that the dataset pickles small."""
        if self._pixels is None:
            # Copy on write, because torch warns of read-only arrays.
            self._pixels = np.load(self._arrays_path, mmap_mode="c")
        return self._pixels
