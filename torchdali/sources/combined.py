"""Several sources as one source, for Subset and ConcatDataset of datasets that have their own sources."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset

from torchdali.errors import UnsupportedDatasetError
from torchdali.sources.headers.table import HeaderColumns, HeaderTable
from torchdali.sources.places import Places, join
from torchdali.sources.source import BoxColumns, ContentCache, Labels, ReadError, Source
from torchdali.transforms.spec import InputKind, IntArray
from torchdali.transforms.targets.stored import StoredMasks

__all__ = ["CombinedSource", "change_parts"]


def change_parts(dataset: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy of a dataset whose parts are changed; the dataset itself if none changes.

    Args:
        dataset: ``Subset`` and ``ConcatDataset`` of parts, nested, or a single part.
        change: Returns another dataset for a part, or the part itself.
    """
    kind = dataset.__class__
    if kind not in (Subset, ConcatDataset):
        return change(dataset)
    name = "dataset" if kind is Subset else "datasets"
    old: list[Any] = [dataset.dataset] if kind is Subset else dataset.datasets
    new = [change_parts(part, change) for part in old]
    if all(map(operator.is_, new, old)):
        return dataset
    whole = copy.copy(dataset)
    vars(whole)[name] = new[0] if kind is Subset else new
    return whole


class CombinedSource(Source):
    """Selected samples of several sources.

    Args:
        sources: The sources.
        which: ``(N,)`` for each sample the index of its source.
        rows: ``(N,)`` for each sample its row in that source.

    Raises:
        UnsupportedDatasetError: The sources differ in kind, in spec, or in whether they are on the GPU.
    """

    def __init__(self, sources: Sequence[Source], which: IntArray, rows: IntArray) -> None:
        self._sources = list(sources)
        self._which, self._rows = which, rows
        first = sources[0]
        self.kind, self.spec, self.transform, self.resident = first.kind, first.spec, first.transform, first.resident
        self.num_frames, self.label_spec = first.num_frames, first.label_spec
        self.is_pair = all(source.is_pair for source in sources)
        self.is_mapped = all(source.is_mapped for source in sources)
        self.has_places = all(source.has_places for source in sources)
        self.is_remote = any(source.is_remote for source in sources)
        self._are_alike = len({(type(source), source.is_pair) for source in sources}) == 1
        self.annotations = frozenset[type]().union(*(source.annotations for source in sources))
        self.is_joint = first.is_joint
        self.has_target_files = any(source.has_target_files for source in sources)
        self.draws_targets = any(source.draws_targets for source in sources)
        for other in sources[1:]:
            kind = other.kind, other.spec, other.resident, other.num_frames, other.label_spec
            if kind != (self.kind, self.spec, self.resident, self.num_frames, self.label_spec):
                raise UnsupportedDatasetError(
                    f"sources under ConcatDataset must read the same kind of images, got {self.kind} of {self.spec} "
                    f"and {other.kind} of {other.spec}"
                )

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, rows: IntArray) -> Any:
        """Return what the sources read, in the order of the rows."""
        images: list[Any] = [None] * len(rows)
        for source, positions in self._split(rows):
            try:
                part: Any = source.read(self._rows[rows[positions]])
            except ReadError as error:
                raise ReadError(int(positions[error.position]), error.error) from error.error
            if self.kind is InputKind.FILES and hasattr(part, "dtype"):  # arrays of paths differ in width
                part = [path.tobytes().rstrip(b"\0") for path in part]
            for position, image in zip(positions.tolist(), part, strict=True):
                images[position] = image
        return images

    def find(self, rows: IntArray) -> Places:
        """Return where the sources' files lie."""
        parts = ((positions, source.find(self._rows[rows[positions]])) for source, positions in self._split(rows))
        return join(len(rows), parts)

    def with_cache(self, cache: ContentCache) -> CombinedSource:
        """Return the same with sources that keep what they fetch in a cache."""
        return CombinedSource([source.with_cache(cache) for source in self._sources], self._which, self._rows)

    def target(self, row: int) -> Any:
        """Return the target of a sample."""
        return self._find_source(row).target(int(self._rows[row]))

    def labels(self, rows: IntArray) -> Labels | None:
        """Return targets; None if those of a source are no plain integers, or if some are dictionaries of others."""
        which, rows = self._which[rows], self._rows[rows]
        names: list[str] | None = None
        columns: dict[str, IntArray] = {}
        indices: list[int] = np.unique(which).tolist()
        for i in indices:
            mask: Any = which == i
            part = self._sources[i].labels(rows[mask])
            parts: dict[str, IntArray] | None = {"": part} if isinstance(part, np.ndarray) else part
            if parts is None or names not in (None, [*parts]) or ("" not in parts and not self._are_alike):
                return None
            names = [*parts]
            for name, values in parts.items():
                columns.setdefault(name, np.empty(len(rows), np.int64))[mask] = values
        return columns[""] if names == [""] else columns

    def read_parts(self, rows: IntArray) -> list[Any] | None:
        """Return for each sample a function that makes its target; None if no source reads anything ahead."""
        which, rows = self._which[rows], self._rows[rows]
        positions: list[IntArray] = [np.flatnonzero(which == i) for i in range(len(self._sources))]
        read = [source.read_parts(rows[own]) for source, own in zip(self._sources, positions, strict=True)]
        if all(parts is None for parts in read):
            return None
        makers: list[Any] = [None] * len(rows)
        for source, own, parts in zip(self._sources, positions, read, strict=True):
            if parts is None:
                made = [partial(source.target, row) for row in rows[own].tolist()]
            else:
                made = [partial(source.make_target, part) for part in parts]
            for position, maker in zip(own.tolist(), made, strict=True):
                makers[position] = maker
        return makers

    def make_target(self, parts: Any) -> Any:
        """Return the target that the source makes."""
        return parts()

    def annotated_targets(self, rows: IntArray, size: IntArray) -> list[Any]:
        """Return the targets of some samples, each as its source makes it."""
        targets: list[Any] = [None] * len(rows)
        for source, positions in self._split(rows):
            made = source.annotated_targets(self._rows[rows[positions]], size[positions])
            for position, target in zip(positions.tolist(), made, strict=True):
                targets[position] = target
        return targets

    def read_target_files(self, row: int) -> Any:
        """Read what takes time of a target, if its source has any such."""
        source = self._find_source(row)
        return source.read_target_files(int(self._rows[row])) if source.has_target_files else None

    def make_annotated_targets(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> list[Any]:
        """Return the targets of some samples, each as its source makes it of its files."""
        targets: list[Any] = [None] * len(rows)
        for source, positions in self._split(rows):
            own = [files[position] for position in positions.tolist()]
            made = source.make_annotated_targets(self._rows[rows[positions]], size[positions], own)
            for position, target in zip(positions.tolist(), made, strict=True):
                targets[position] = target
        return targets

    def box_columns(self, rows: IntArray, size: IntArray, files: Sequence[Any]) -> BoxColumns | None:
        """Return the targets of some samples; None if a source has them in no such form, or in another dtype."""
        targets: list[dict[str, Any]] = [{} for _ in rows]
        parts: list[BoxColumns] = []
        masks: dict[int, StoredMasks] = {}
        for source, positions in self._split(rows):
            own = [files[position] for position in positions.tolist()]
            part = source.box_columns(self._rows[rows[positions]], size[positions], own)
            if part is None or part.boxes.dtype != (parts or [part])[0].boxes.dtype:
                return None
            parts.append(part._replace(owners=positions[part.owners]))
            masks |= {int(positions[i]): mask for i, mask in part.masks.items()}
            for position, target in zip(positions.tolist(), part.targets, strict=True):
                targets[position] = target
        if not parts:
            return None
        boxes, labels, counts, owners = (np.concatenate(column) for column in list(zip(*parts, strict=True))[1:5])
        order = np.argsort(np.repeat(owners, counts), kind="stable")
        leaves = np.argsort(owners)
        return BoxColumns(targets, boxes[order], labels[order], counts[leaves], owners[leaves], masks)

    def _split(self, rows: IntArray) -> Iterator[tuple[Source, IntArray]]:
        """Yield each source that has some of the rows, and the positions of these."""
        which = self._which[rows]
        for i, source in enumerate(self._sources):
            if len(positions := np.flatnonzero(which == i)):
                yield source, positions

    def make_sample(self, row: int, image: Any, target: Any) -> Any:
        """Return a sample as its source makes it."""
        return self._find_source(row).make_sample(int(self._rows[row]), image, target)

    def headers(self) -> HeaderTable | None:
        """Return one table for all sources; None if one has none."""
        tables = [source.headers() for source in self._sources]
        columns = [table.columns for table in tables if table is not None]
        if self.kind is not InputKind.ENCODED or len(columns) < len(tables):
            return None
        starts = np.cumsum([0, *(len(source) for source in self._sources)])
        files = (starts[self._which] + self._rows).astype(np.min_scalar_type(starts[-1]))
        return HeaderTable(HeaderColumns(*map(np.concatenate, zip(*columns, strict=True))), files)

    def loses_bits(self, row: int) -> bool:
        """Return whether an image must not be read as RGB."""
        return self._find_source(row).loses_bits(int(self._rows[row]))

    def name(self, row: int) -> str:
        """Return the name of a sample in its source."""
        return self._find_source(row).name(int(self._rows[row]))

    def locate(self, row: int) -> tuple[Source, int]:
        """Return the source that a sample is from, and its row there."""
        return self._find_source(row).locate(int(self._rows[row]))

    def _find_source(self, row: int) -> Source:
        return self._sources[int(self._which[row])]

    def describe(self) -> str:
        """Return the number of samples and the types of their sources."""
        names = dict.fromkeys(type(source).__name__ for source in self._sources)
        return f"{len(self):,} samples of {', '.join(names)}"
