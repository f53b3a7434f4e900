"""Images that are objects of an object store, each on its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torchvision.datasets.folder import IMG_EXTENSIONS

from torchdali.datasets.base import EncodedDataset
from torchdali.datasets.shards import Bytes
from torchdali.sources import ImageIndex
from torchdali.sources.paths import Table, read_samples
from torchdali.sources.remote import Client, Range, is_uri
from torchdali.sources.source import Targets
from torchdali.transforms.spec import IntArray

__all__ = ["RemoteImages"]


class RemoteImages(EncodedDataset):
    """Images that are objects of an object store: ``s3://``, ``gs://``, ``az://``, ``https://``.

    An object is read once for each of its samples in an epoch, unless the loader has a cache. Many small objects cost
    more than shards of the same images, in time and in money: see :class:`torchdali.datasets.Tar`.

    Args:
        samples: A folder of class folders, such as ``s3://bucket/train/``; pairs of an object and its target; or the
            file of an index, which ``ImageIndex.write`` made of such pairs. A folder is listed now, in
            ``ImageFolder``'s order.
        transform: Called with each image, as in ``ImageFolder``.
        target_transform: Called with each target.
        remote: A store of the package obstore, for its credentials and time-outs. None: the environment describes it.

    Attributes:
        classes: The names of the classes, by label; empty if they have none.
        class_to_idx: The label of each class name.
        uris: ``(N,)`` the objects, as bytes.

    Raises:
        ValueError: A sample is no object, or a folder has no images in class folders.
        OSError: The folder cannot be listed, or the index cannot be read.
        ModuleNotFoundError: The package obstore is not installed.
    """

    def __init__(
        self,
        samples: str | os.PathLike[str] | Iterable[tuple[str, Any]],
        transform: Callable[[Any], Any] | None = None,
        target_transform: Callable[[Any], Any] | None = None,
        remote: Any = None,
    ) -> None:
        super().__init__("label", transform, target_transform)
        self.client: Client | None = Client(remote)
        self.classes: list[str] = []
        self.uris: Table
        targets: Any
        if is_uri(samples):
            self._name = str(samples).rstrip("/") + "/"
            self.classes, pairs = _list_folder(self.client, self._name)
            self.uris, targets = read_samples(pairs)
        elif isinstance(samples, (str, os.PathLike)):
            index = ImageIndex(samples)
            self._name, self.classes = str(samples), index.classes
            self.uris, targets = index.paths, index.targets
        else:
            self.uris, targets = read_samples(samples)
            self._name = "a list"
        if len(self.uris) and not is_uri(self._uri(0)):
            raise ValueError(f"samples must be objects such as s3://bucket/name, got {self._uri(0)!r}")
        self._targets = Targets(targets)
        self.class_to_idx: dict[str, int] = {name: label for label, name in enumerate(self.classes)}

    def _uri(self, row: int) -> str:
        return os.fsdecode(self.uris[row])

    def __len__(self) -> int:
        return len(self.uris)

    def locate(self, rows: IntArray) -> list[Range]:
        return [Range(self._uri(row)) for row in rows.tolist()]

    def read(self, rows: IntArray) -> list[Bytes]:
        assert self.client is not None
        return self.client.read(self.locate(rows))

    def labels(self, rows: IntArray) -> IntArray | None:
        return self._targets.labels(rows)

    def read_parts(self, row: int) -> Any:
        return self._targets[row]

    def name(self, row: int) -> str:
        return self._uri(row)

    def __repr__(self) -> str:
        return f"{type(self).__name__} of {self._name}"


def _list_folder(client: Client, folder: str) -> tuple[list[str], Sequence[tuple[str, int]]]:
    """Return the names of the class folders in a folder, and the images in them with their labels."""
    images: list[tuple[list[str], str]] = []
    for uri in client.list(folder):
        parts = uri[len(folder) :].split("/")
        if len(parts) > 1 and parts[-1].lower().endswith(IMG_EXTENSIONS):
            images.append((parts, uri))
    if not images:
        raise ValueError(f"{folder} has no images in class folders")
    classes = sorted({parts[0] for parts, _ in images})
    label_of = {name: label for label, name in enumerate(classes)}
    # ImageFolder's order: by class, then by folder, then by name.
    images.sort(key=lambda image: (image[0][0], "/".join(image[0][:-1]), image[0][-1]))
    return classes, [(uri, label_of[parts[0]]) for parts, uri in images]
