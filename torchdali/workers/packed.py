"""A batch as a worker sends it: the collated samples, and where the images are in shared memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from torchdali.samples.image import ImageInput
from torchdali.samples.pil import PILHeader
from torchdali.samples.tree import tree_map
from torchdali.sources import Header
from torchdali.transforms.rng import Draws
from torchdali.transforms.spec import InputKind, Inputs, IntArray, Spec
from torchdali.workers.packed_targets import PackedTargets
from torchdali.workers.shared_memory import SharedBuffer, SharedBufferHandle, align

__all__ = ["Packed", "PackedImages", "lay_out_images"]


@dataclass
class PackedImages:
    """The images of a batch that have one spec and input kind.

    Attributes:
        spec: Their spec.
        input_kind: Their form as input of DALI.
        sample: ``(N,)`` the number of each image's sample in the batch.
        slot: ``(N,)`` the number of each image within its sample. Images come slot by slot. The frames of a video are
            images of one slot.
        frame: ``(N,)`` the number of each image in its video; 0 for others.
        size: ``(N, 2)`` heights and widths in pixels.
        start: ``(N,)`` offset of each image in the block, in bytes. Not used without a block.
        length: ``(N,)`` bytes of each image.
        headers: The headers of the files, if the images are paths.
        pil: The attributes of PIL images besides their pixels, if transforms or ``collate_fn`` get PIL images.
        arrays: The images themselves, if there is no block.
    """

    spec: Spec
    input_kind: InputKind
    sample: IntArray
    slot: IntArray
    frame: IntArray
    size: IntArray
    start: IntArray
    length: IntArray
    headers: list[Header]
    pil: list[PILHeader | None] = field(default_factory=list["PILHeader | None"])
    arrays: list[npt.NDArray[Any]] = field(default_factory=list[npt.NDArray[Any]])

    @property
    def firsts(self) -> IntArray:
        """The positions of the images that are no later frames of a video."""
        return np.flatnonzero(self.frame == 0)

    def select_draws(self, draws: Draws) -> Draws:
        """Return the random numbers of each image, from those of the samples."""
        is_video = self.spec.kind == "video"
        return draws.select_frames(self.sample, self.frame) if is_video else draws.select_rows(self.sample)

    def choose_frames(self, choose: Callable[[int], IntArray]) -> PackedImages:
        """Return some frames of each video, or all images.

        Args:
            choose: Returns the numbers of the frames, by the number of all frames of a video.
        """
        if self.spec.kind != "video":
            return self
        firsts = self.firsts
        counts = np.diff([*firsts, len(self.frame)])
        chosen = [choose(int(count)) for count in counts]
        if all(np.array_equal(numbers, np.arange(count)) for numbers, count in zip(chosen, counts, strict=True)):
            return self
        rows = np.concatenate([first + numbers for first, numbers in zip(firsts, chosen, strict=True)])
        return replace(
            self,
            sample=self.sample[rows],
            slot=self.slot[rows],
            frame=np.concatenate([np.arange(len(numbers)) for numbers in chosen]),
            size=self.size[rows],
            start=self.start[rows],
            length=self.length[rows],
            arrays=[self.arrays[row] for row in rows] if self.arrays else [],
        )


@dataclass
class Packed:
    """A batch as a worker sends it.

    Attributes:
        data: The collated samples, or a list of them, with placeholders for the images.
        count: Number of samples.
        key_paths: The key paths of the images, if they are the same in all samples.
        groups: The images, grouped by spec and input kind.
        block: The memory of the images. None if there is no worker.
        worker: The number of the worker.
        refused: By the number of a sample, the name of an image that cannot be packed and the reason.
        replaced: The same for samples that were replaced by a substitute or a black image.
        structure: The key paths of the first sample's parts, if all samples have the same structure.
        outline: The parts of the first sample in words, if it has no image.
        targets: The boxes, masks and key points, if there are any. Then the samples are not collated.
        drawn: The parameters to feed, if the worker drew them. Then it has moved the targets, too.
        task: torch's number of the batch.
    """

    data: Any
    count: int
    key_paths: tuple[str, ...] = ()
    groups: list[PackedImages] = field(default_factory=list[PackedImages])
    block: SharedBufferHandle | SharedBuffer | None = None
    worker: int = 0
    refused: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    replaced: dict[int, tuple[str, str]] = field(default_factory=dict[int, tuple[str, str]])
    structure: tuple[str, ...] = ()
    outline: str = ""
    targets: PackedTargets | None = None
    drawn: Inputs | None = None
    task: int = 0

    @property
    def annotation_kinds(self) -> frozenset[type]:
        """Types of the boxes, masks and key points, from torchvision."""
        return self.targets.kinds if self.targets is not None else frozenset()

    def pin_memory(self) -> Packed:
        """Pin the collated samples. DataLoader calls this, with workers in its pin_memory thread."""
        self.data = tree_map(self.data, _pin, is_leaf=_is_pinnable)
        return self


def _is_pinnable(node: Any) -> bool:
    return callable(getattr(cast("object", node), "pin_memory", None))


def _pin(leaf: Any) -> Any:
    """Pin a leaf as DataLoader does, unless it is a tensor that cannot be pinned."""
    if isinstance(leaf, torch.Tensor) and (leaf.device.type != "cpu" or leaf.layout != torch.strided):
        return leaf
    return leaf.pin_memory() if _is_pinnable(leaf) else leaf


def lay_out_images(
    spec: Spec, input_kind: InputKind, members: Sequence[tuple[int, int, ImageInput]], offset: int
) -> tuple[PackedImages, int]:
    """Lay out images from an offset on. Return them, and the offset of the next group.

    There are no gaps between them, so images of equal shape can be read as one array.
    """
    counts = np.array([image.num_frames for _, _, image in members], np.int64)
    length = np.array([image.data.nbytes for _, _, image in members], np.int64) // counts
    length = np.repeat(length, counts)
    start = offset + np.concatenate(([0], np.cumsum(length)[:-1]))
    group = PackedImages(
        spec,
        input_kind,
        np.repeat(np.array([sample for sample, _, _ in members], np.int64), counts),
        np.repeat(np.array([slot for _, slot, _ in members], np.int64), counts),
        np.arange(len(length)) - np.repeat(np.cumsum(counts) - counts, counts),
        np.repeat(np.array([image.size for _, _, image in members], np.int64), counts, axis=0),
        start,
        length,
        [image.header for _, _, image in members if image.header],
    )
    return group, align(offset + int(length.sum()))
