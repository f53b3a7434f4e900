"""The targets of a batch of a native dataset, whose boxes, masks and key points move with the images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from contextlib import suppress
from typing import Any, cast

import numpy as np
import torch

from torchdali.loader.native_plan import NativePlan
from torchdali.pipeline.fallback import fork_generators
from torchdali.pipeline.feed import Batch
from torchdali.pipeline.readers import Scan
from torchdali.samples.on_error import TargetError
from torchdali.samples.tree import Placeholder, build_tree, tree_leaves, tree_map, with_placeholders
from torchdali.sources import is_system_fault
from torchdali.sources.source import BoxColumns
from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets import Boxes, Targets
from torchdali.transforms.targets.pixels import Pixels
from torchdali.workers.packed_targets import Move, PackedTargets, pack_targets

__all__ = ["TargetCollector"]

_IMAGE = Placeholder(0)
_CHUNK = 4
"""Number of samples whose files a thread reads in a row."""


class TargetCollector:
    """Makes the targets of one batch before its images run, and puts what was moved into them after that.

    Args:
        native: The plan.
    """

    def __init__(self, native: NativePlan) -> None:
        self._native = native
        self._samples: list[Any] = []
        self._packed: PackedTargets | None = None
        self._columns: BoxColumns | None = None
        self._files: dict[int, list[Any]] = {}

    def read_ahead(self, rows: IntArray, scan: Scan, pool: Callable[[], Executor]) -> None:
        """Let the threads of ``pool()`` read the files of the targets, as a part of a scan."""
        if self._native.source.has_target_files:
            scan.add(rows.tolist(), self._read_files, pool, _CHUNK)

    def _read_files(self, rows: Sequence[int]) -> None:
        for row in rows:
            with suppress(Exception):  # it is read again when it is due, and raises then
                # A sample that comes twice has two targets, which the user may change.
                self._files.setdefault(row, []).append(self._native.source.read_target_files(row))

    def __call__(self, batch: Batch) -> Targets | None:
        """Make the targets. Return their boxes, masks and key points, or None if there are none.

        Raises:
            TargetError: A target cannot be made.
            SampleError: A target does not fit its image.
        """
        self._packed = self._columns = None
        self._samples = []
        if not len(batch.rows):
            return None
        files = self._take_files(batch.rows)
        try:
            # The transforms look for labels where torchvision's own datasets have them.
            if all(argument == "default" for _, argument in self._native.labels_getters):
                self._columns = self._native.source.box_columns(
                    batch.rows, batch.size, files or [None] * len(batch.rows)
                )
            if self._columns is not None:
                return _collect_columns(self._columns, batch.size)
            targets = self._make_targets(batch, files)
        except Exception:
            self._blame(batch)
            raise
        return self._pack(batch, targets)

    def _take_files(self, rows: IntArray) -> list[Any] | None:
        """Return what was read ahead for each sample, or None if something is missing."""
        known, self._files = self._files, {}  # they are read again if the batch runs again
        try:
            return [known[row].pop() for row in rows.tolist()]
        except (KeyError, IndexError):
            return None

    def _make_targets(self, batch: Batch, files: list[Any] | None) -> list[Any]:
        source = self._native.source

        def make(part: slice) -> list[Any]:
            if files is None:
                return source.annotated_targets(batch.rows[part], batch.size[part])
            return source.make_annotated_targets(batch.rows[part], batch.size[part], files[part])

        if not source.draws_targets:
            return make(slice(None))
        seeds = batch.draws.select_position(self._native.plan.suffix_position).seeds()
        targets: list[Any] = []
        with fork_generators(self._native.device) as seed:
            for i, number in enumerate(seeds.tolist()):
                seed(number)
                targets += make(slice(i, i + 1))
        return targets

    def _blame(self, batch: Batch) -> None:
        """Raise SampleError for the sample whose target cannot be made; nothing if there is none."""
        with fork_generators(self._native.device):
            for i, row in enumerate(batch.rows.tolist()):
                try:
                    self._native.source.annotated_targets(batch.rows[i : i + 1], batch.size[i : i + 1])
                except Exception as error:
                    if is_system_fault(error):
                        raise
                    name = batch.reader.source.name(row)
                    raise TargetError(row, name, f"the dataset raised {_describe(error)}") from error

    def _pack(self, batch: Batch, targets: list[Any]) -> Targets | None:
        rows = batch.rows.tolist()
        trees = [build_tree(sample) for sample in self._make_samples(rows, targets)]
        images = [[pair for pair in tree_leaves(tree) if pair[1] is _IMAGE] for tree in trees]
        packed, annotations, reasons = pack_targets(trees, images, self._native.labels_getters)
        for i, (name, reason) in reasons.items():
            raise batch.reader.error(rows[i], f"{name}: {reason}")
        self._samples = [
            with_placeholders(tree, [*found, *each.leaves])
            for tree, found, each in zip(trees, images, annotations, strict=True)
        ]
        self._packed = packed
        if packed is None:
            return None
        numbers = np.arange(len(rows))
        if self._native.plan.moves and (mismatch := packed.find_mismatch(numbers, batch.size)):
            raise batch.reader.error(rows[mismatch[0]], mismatch[1])
        return packed.targets.take(numbers, batch.size)

    def finish(self, batch: Batch, move: Move) -> list[Any]:
        """Return the samples of a batch after all moves, with a placeholder for each image.

        Args:
            batch: The batch.
            move: Copies tensors to the device of the images.
        """
        if self._columns is not None and batch.targets is not None:
            return self._make_samples(batch.rows.tolist(), _fill_columns(self._columns, batch.targets, move))
        if self._packed is None or batch.targets is None:
            return self._samples
        parts = self._packed.unpack(batch.targets, np.arange(len(batch.rows)), move)
        return [
            tree_map(sample, lambda leaf, i=i: parts[i, leaf.number] if _is_part(leaf) else leaf)
            for i, sample in enumerate(self._samples)
        ]

    def _make_samples(self, rows: list[int], targets: list[Any]) -> list[Any]:
        make = self._native.source.make_sample
        return [make(row, _IMAGE, target) for row, target in zip(rows, targets, strict=True)]


def _is_part(leaf: Any) -> bool:
    return isinstance(leaf, Placeholder) and leaf.number > _IMAGE.number


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}({error})" if isinstance(error, OSError) else repr(error)  # names the file


def _collect_columns(columns: BoxColumns, size: IntArray) -> Targets:
    """Return the boxes and masks of a batch."""
    has_masks = np.isin(np.arange(len(size)), [*columns.masks])
    boxes = Boxes(columns.boxes, columns.counts, columns.owners)
    targets = Targets(size, [boxes], Pixels(size, has_masks) if columns.masks else None)
    targets.places = [[] for _ in size]
    for number, i in enumerate(columns.owners.tolist()):
        targets.places[i] = [(0, number), *([columns.masks[i]] if i in columns.masks else [])]
    return targets


def _fill_columns(columns: BoxColumns, moved: Targets, move: Move) -> list[Any]:
    """Return the targets with boxes and masks after all moves, and without the labels of boxes that were dropped."""
    (boxes,) = moved.boxes
    *tensors, labels = move([*moved.to_tensors(), torch.from_numpy(columns.labels[boxes.kept])])
    leaves = moved.leaves(tensors)
    parts = cast("tuple[torch.Tensor, ...]", labels.split(boxes.counts.tolist()))  # pyright: ignore
    for i, label in enumerate(parts):
        owner = int(boxes.owners[i])
        columns.targets[owner].update(zip(("boxes", "masks"), leaves[owner], strict=False), labels=label)
    return columns.targets
