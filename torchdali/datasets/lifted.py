"""Other libraries' datasets as they are, read without workers: of Hugging Face, torchvision and torchaudio."""

from __future__ import annotations

import io
import sys
from contextlib import suppress
from typing import Any, cast

import numpy as np
import PIL.Image
from torch.utils.data import ConcatDataset, Subset
from torchvision.datasets import LSUN
from torchvision.transforms import v2

from torchdali.datasets.base import EncodedSource
from torchdali.datasets.hugging_face import HuggingFace
from torchdali.datasets.lifted_sounds import SoundColumn, Utterances, has_utterances
from torchdali.datasets.lifted_volumes import lift_volumes
from torchdali.datasets.lsun import LSUNImages
from torchdali.datasets.volumes import Volumes
from torchdali.sources import UNREADABLE, Source
from torchdali.sources.combined import change_parts
from torchdali.transforms import flatten, snapshot
from torchdali.transforms.rules.orientation import ExifTranspose

__all__ = ["lift_rows", "rows_state"]


def lift_rows(dataset: Any, transform: Any) -> Any:
    """Return a dataset that is read without workers; the dataset itself if that is not exact.

    For ``LSUN``, ``SPEECHCOMMANDS`` and ``LIBRISPEECH`` it is. For ``Volumes`` it is if the loader has all transforms,
    and DALI runs them. For ``datasets.Dataset`` it is for one without a format, with one column
    ``Audio(decode=False)``, which the transforms get as waveforms, or one of images that are all in the Arrow file.
    Images are ``Image(decode=False)``, which the transforms get as RGB. Or they are ``Image(mode="RGB")``, or the
    transforms begin with ``v2.RGB()``: PIL would keep the mode of others.

    Args:
        dataset: A dataset, or ``Subset`` and ``ConcatDataset`` of some.
        transform: The loader's transform.
    """
    return change_parts(dataset, lambda part: _lift(part, transform) or part)


def _lift(dataset: Any, transform: Any) -> Any:
    kind = dataset.__class__
    with suppress(ValueError, OSError, ModuleNotFoundError):  # such as sounds without soundfile
        if kind is LSUN:
            return LSUNImages(dataset)
        if has_utterances(dataset):
            return Utterances(dataset)
    return lift_volumes(dataset, transform) if kind is Volumes else _lift_rows(dataset, transform)


def rows_state(dataset: Any) -> list[Any]:
    """Return what differs once such a dataset was given another format or transform."""
    if type(dataset) is Subset:
        return rows_state(cast("Any", dataset).dataset)
    if type(dataset) is ConcatDataset:
        return [state for part in cast("Any", dataset).datasets for state in rows_state(part)]
    if type(dataset) is LSUN:
        own: list[Any] = [dataset.target_transform, *(part.transform for part in cast("Any", dataset).dbs)]
        return [*map(id, own), snapshot(own[1])]
    if type(dataset) is Volumes:
        return [dataset.transform, dataset.patch, dataset.places, len(dataset)]
    if has_utterances(dataset):
        walker = dataset._walker  # noqa: SLF001 - no public name
        return [id(walker), len(walker)]
    return [dataset.format, dataset._fingerprint] if type(dataset) is _kind() else []  # noqa: SLF001 - no public name


def _kind() -> Any:
    return getattr(sys.modules.get("datasets"), "Dataset", None)


def _lift_rows(dataset: Any, transform: Any) -> Any:
    if (
        transform is None
        or type(dataset) is not _kind()
        or dataset.format["type"] is not None
        or dataset.format["output_all_columns"]
    ):
        return None
    names: list[str] = dataset.column_names
    if dataset.format["columns"] != names:
        return None
    kinds = {name: type(dataset.features[name]).__name__ for name in names}
    images, sounds = ([name for name in names if kinds[name] == kind] for kind in ("Image", "Audio"))
    if sounds and not images:
        return _lift_sounds(dataset, sounds)
    others = [name for name in names if name not in images]
    if len(images) != 1 or "image" in others or not all(_is_plain(dataset.features[name]) for name in others):
        return None
    feature = dataset.features[images[0]]
    chain = flatten(transform)
    is_rgb = feature.mode == "RGB" or (bool(chain) and type(chain[0]) is v2.RGB)
    if feature.decode and not is_rgb:
        return None
    try:
        rows = _Rows(dataset, images[0], others)
    except (ValueError, TypeError):  # rows without bytes
        return None
    return None if any(map(rows.is_deep, {0, len(rows) // 2, len(rows) - 1})) else rows


def _lift_sounds(dataset: Any, sounds: list[str]) -> Any:
    feature = dataset.features[sounds[0]]
    others = [name for name in dataset.column_names if name not in sounds]
    if (
        len(sounds) > 1
        or feature.decode
        or getattr(feature, "num_channels", None) not in (None, 1)
        or not all(_is_plain(dataset.features[name]) for name in others)
    ):
        return None
    with suppress(OSError, ModuleNotFoundError):
        return SoundColumn(dataset, sounds[0])
    return None


def _is_plain(feature: Any) -> bool:
    """Return whether the values of a column are numbers or texts, or lists of such, which no one takes for images."""
    if type(feature).__name__ == "Value":
        return "binary" not in feature.dtype
    if type(feature).__name__ in ("List", "Sequence", "LargeList"):
        return _is_plain(feature.feature)
    return type(feature).__name__ == "ClassLabel"


class _Rows(HuggingFace):
    """Whole rows, with the image in the place of its column."""

    def __init__(self, dataset: Any, image: str, others: list[str]) -> None:
        super().__init__(dataset, image, tuple(others) or None)
        self.names: list[str] = dataset.column_names
        # datasets turns images by their EXIF orientation when it decodes them.
        self.transform = ExifTranspose() if dataset.features[image].decode else None

    def is_deep(self, row: int) -> bool:
        """Return whether workers would keep more than 8 bits of an image, which DALI does not."""
        if row not in range(len(self)) or self.transform is not None:
            return False
        (data,) = self.read(np.array([row]))
        if data[:2].tobytes() == b"\xff\xd8":  # a JPEG
            return False
        with suppress(*UNREADABLE), cast("Any", PIL.Image).open(io.BytesIO(cast("Any", data))) as image:
            return image.mode.startswith(("I", "F"))
        return False

    def name(self, row: int) -> str:
        return f"[{self.image!r}]"

    def torchdali_source(self) -> Source:
        """Return the source that ``DALILoader`` reads."""
        return _RowSource(self)

    def __repr__(self) -> str:
        return f"datasets.Dataset of {len(self):,} rows, column {self.image!r}"


class _RowSource(EncodedSource):
    """The rows. Images of more than 8 bits would lose bits, and are refused."""

    def __init__(self, rows: _Rows) -> None:
        super().__init__(rows)
        self._rows, self.is_pair = rows, False

    def loses_bits(self, row: int) -> bool:
        return self._rows.is_deep(row)

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        values: dict[str, Any] = {self._rows.image: image, **(target or {})}
        return {name: values[name] for name in self._rows.names}
