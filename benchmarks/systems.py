"""The systems under measurement: one function each, the same work from the same folder of JPEGs.

A system is built with `(root, batch_size, threads)` and gives back a function that starts one epoch. An epoch
is an iterator of `[images, labels]` on the GPU: images float32 (N, 3, 224, 224), after a random resized crop,
a flip and ImageNet's normalization; labels (N,). All shuffle and drop the last incomplete batch. Without a
GPU the same systems run on the CPU, so that the harness can be tried anywhere; such numbers mean nothing.

Modules are imported where they are used, so that a measured process loads only what its system needs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch

MEAN = (0.485, 0.456, 0.406)
STD = (0.229, 0.224, 0.225)
SIZE = 224
RANGES = {"random_area": [0.08, 1.0], "random_aspect_ratio": [3 / 4, 4 / 3]}

Epoch = Callable[[], Iterator[Any]]


@dataclass(frozen=True)
class System:
    """How one system is called, what it imports and how it is built.

    Attributes:
        title: what the tables call it.
        imports: the modules to import before the clock starts, each timed by itself, in this order.
        build: `(root, batch_size, threads)` to a function that starts one epoch.
        normalized: whether the images are normalized floats (the decode limit gives uint8, channels last).
        threads: one for each core, the best of a few that are tried, or whatever it chooses by itself.
        every_core_count: whether it is measured for every number of cores, or for the largest only.
    """

    title: str
    imports: tuple[str, ...]
    build: Callable[[Path, int, int], Epoch]
    normalized: bool = True
    threads: Literal["a core", "tried", "its own"] = "a core"
    every_core_count: bool = True


def torchdali(root: Path, batch_size: int, threads: int) -> Epoch:  # noqa: ARG001 - defaults only is the point
    """A training script after the one changed import: no option of torchdali's own."""
    from torchvision.datasets import ImageFolder

    from torchdali import DALILoader as DataLoader

    dataset = ImageFolder(root, transform=transforms())
    loader = DataLoader(dataset, batch_size=batch_size, shuffle=True, drop_last=True)
    return lambda: iter(loader)


def dataloader_v2(root: Path, batch_size: int, threads: int) -> Epoch:
    """DataLoader as the fastest plain PyTorch: torchvision's decoder and v2 transforms on tensors."""
    from torchvision.datasets import ImageFolder

    return dataloader(ImageFolder(root, transforms(), loader=_decode), batch_size, threads)


def dataloader_pil(root: Path, batch_size: int, threads: int) -> Epoch:
    """DataLoader as most scripts write it: ImageFolder's own PIL loader, one worker a core."""
    from torchvision.datasets import ImageFolder

    return dataloader(ImageFolder(root, transforms()), batch_size, threads)


def dali_documented(root: Path, batch_size: int, threads: int) -> Epoch:
    """DALI by hand, as its ImageNet example for PyTorch writes it: same operators, hints and defaults.

    Only the crop's ranges differ from the example (0.1 to 1 and 0.8 to 1.25): they are RandomResizedCrop's.
    """
    biggest_of_imagenet = {"preallocate_width_hint": 5980, "preallocate_height_hint": 6430}
    return _dali(root, batch_size, threads, 2, biggest_of_imagenet if has_gpu() else {})


def dali_tuned(root: Path, batch_size: int, threads: int) -> Epoch:
    """DALI by hand, tuned: all JPEGs to the card's engine, eight batches in flight, the best thread count."""
    return _dali(root, batch_size, threads, 8, {"hw_decoder_load": 1.0} if has_gpu() else {})


def dali_decode_only(root: Path, batch_size: int, threads: int) -> Epoch:
    """Decode and crop, nothing else, tuned: what the JPEG engine can give at most."""
    from nvidia.dali import fn, pipeline_def

    gpu = has_gpu()

    @pipeline_def(**_pipeline_options(batch_size, threads, 8))
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(root), random_shuffle=True, name="Reader")
        options = {"device": "mixed", "hw_decoder_load": 1.0} if gpu else {"device": "cpu"}
        images = fn.crop(fn.decoders.image(files, **options), crop=(SIZE, SIZE))
        return images, labels.gpu() if gpu else labels

    return _dali_epochs(pipeline())


def _dali(root: Path, batch_size: int, threads: int, depth: int, decoder: dict[str, Any]) -> Epoch:
    from nvidia.dali import fn, pipeline_def

    gpu = has_gpu()

    @pipeline_def(**_pipeline_options(batch_size, threads, depth))
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(root), random_shuffle=True, pad_last_batch=True, name="Reader")
        images = fn.resize(decoded_crop(files, decoder), resize_x=SIZE, resize_y=SIZE)
        images = mirrored_normalized(images)
        return images, labels.gpu() if gpu else labels

    return _dali_epochs(pipeline())


def decoded_crop(files: Any, decoder: dict[str, Any]) -> Any:
    """DALI's operator for encoded files, with the ranges of RandomResizedCrop."""
    from nvidia.dali import fn, types

    return fn.decoders.image_random_crop(
        files,
        device="mixed" if has_gpu() else "cpu",
        output_type=types.DALIImageType.RGB,
        **RANGES,
        **decoder,
    )


def mirrored_normalized(images: Any) -> Any:
    """DALI's operator for what follows the resized crop."""
    from nvidia.dali import fn, types

    return fn.crop_mirror_normalize(
        images,
        dtype=types.DALIDataType.FLOAT,
        output_layout="CHW",
        crop=(SIZE, SIZE),
        mean=[255 * value for value in MEAN],
        std=[255 * value for value in STD],
        mirror=fn.random.coin_flip(probability=0.5),
    )


def _pipeline_options(batch_size: int, threads: int, depth: int) -> dict[str, Any]:
    return {
        "batch_size": batch_size,
        "num_threads": threads,
        "device_id": 0 if has_gpu() else None,
        "prefetch_queue_depth": depth,
        "seed": 12,
    }


def _dali_epochs(pipeline: Any) -> Epoch:
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy
    from nvidia.dali.plugin.pytorch import DALIClassificationIterator

    iterator = DALIClassificationIterator(
        pipeline, reader_name="Reader", last_batch_policy=LastBatchPolicy.DROP, auto_reset=True
    )

    def epoch() -> Iterator[Any]:
        for (batch,) in iterator:
            yield [batch["data"], batch["label"].squeeze(-1).long()]

    return epoch


def dataloader(dataset: Any, batch_size: int, threads: int, persistent: bool = True) -> Epoch:
    """DataLoader with `threads` workers, its batches moved to the GPU."""
    import torch

    device = torch.device("cuda" if has_gpu() else "cpu")
    loader: torch.utils.data.DataLoader[Any] = torch.utils.data.DataLoader(
        dataset,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=threads,
        pin_memory=device.type == "cuda",
        persistent_workers=persistent,
    )

    def epoch() -> Iterator[Any]:
        for images, labels in loader:
            yield [images.to(device, non_blocking=True), labels.to(device, non_blocking=True)]

    return epoch


def transforms() -> Any:
    """What all do, in torchvision's words."""
    import torch
    from torchvision.transforms import v2

    return v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(SIZE, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )


def _decode(path: str) -> "torch.Tensor":
    """A loader for ImageFolder that gives a uint8 tensor; a function, so that workers can pickle it."""
    from torchvision.io import ImageReadMode, decode_image, read_file

    return decode_image(read_file(path), mode=ImageReadMode.RGB)


def has_gpu() -> bool:
    """Whether torch sees one."""
    import torch

    return torch.cuda.is_available()


_TORCH = ("torch", "torchvision.transforms.v2", "torchvision.datasets")
_DALI = ("torch", "nvidia.dali", "nvidia.dali.plugin.pytorch")

SYSTEMS = {
    "torchdali": System("**torchdali**, defaults", (*_TORCH, "torchdali", "nvidia.dali"), torchdali, threads="its own"),
    "dali_documented": System("DALI as documented", _DALI, dali_documented),
    "dali_tuned": System("DALI tuned by hand", _DALI, dali_tuned, threads="tried"),
    "dali_decode_only": System("DALI, decode and crop only", _DALI, dali_decode_only, normalized=False),
    "dataloader_v2": System("DataLoader, torchvision v2 on tensors", _TORCH, dataloader_v2),
    "dataloader_pil": System("DataLoader, PIL", _TORCH, dataloader_pil, every_core_count=False),
}
DEFAULT_SYSTEMS = ("torchdali", "dali_documented", "dali_tuned", "dataloader_v2", "dataloader_pil")
