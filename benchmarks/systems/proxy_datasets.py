"""Datasets that are no image folder: map-style, `(image, label)`, one for each thing that an image may be.

* ``bytes``: the encoded file, read in `__getitem__`;
* ``pil``: a PIL image, decoded in `__getitem__`;
* ``arrays``: a uint8 array (H, W, C) that is in memory already: one memory-mapped file of decoded pictures;
* ``paths``: a `pathlib.Path`, and nothing is read.
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


def files(root: Path) -> list[Path]:
    """The pictures under `root`, classes mixed, in the same order every time."""
    found = sorted(root.glob("*/*.*"))
    order = np.random.default_rng(_SEED).permutation(len(found))
    return [found[place] for place in order]


def arrays_path(root: Path) -> Path:
    """Where the decoded pictures of `root` are: beside it, so that the folder stays one of classes."""
    return root.with_name(f"{root.name}-decoded.npy")


def make_arrays(root: Path, count: int = ARRAYS) -> int:
    """Decodes the first `count` pictures into one file, all of one size, unless it is there; how many it holds."""
    from PIL import Image

    path = arrays_path(root)
    if not path.exists():
        decoded: list[Any] = []
        for file in files(root)[:count]:
            with Image.open(file) as image:
                decoded.append(np.asarray(image.convert("RGB").resize(_SIZE)))
        unfinished = path.with_suffix(".unfinished.npy")
        np.save(unfinished, np.stack(decoded))
        unfinished.rename(path)
    return len(np.load(path, mmap_mode="r"))


class Pictures(Dataset[Any]):
    """`length` samples of what `source` names; where there are fewer pictures they come again.

    Args:
        root: the folder of class folders.
        source: one of `SOURCES`.
        length: the number of samples.
        transform: called with the image, as torchvision's datasets do.
    """

    def __init__(self, root: Path, source: str, length: int, transform: Callable[[Any], Any] | None = None) -> None:
        self.files = files(root)
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
        """The decoded pictures; mapped by whoever first needs them, so that a dataset pickles as a few names."""
        if self._pixels is None:
            # copy on write, because torch warns of arrays that cannot be written
            self._pixels = np.load(self._arrays_path, mmap_mode="c")
        return self._pixels
