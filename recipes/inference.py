"""Classify every image under a folder, and write a table of file names and predictions.

What it shows: inference keeps the order of the files, and the names stay beside the predictions. ``Files`` is an
ImageFolder that needs no class folders and has each file's number as its target, so torchdali reads it without asking
it for samples, and a batch says itself which files it is of. ``Weights.transforms()`` of torchvision is understood as
it is.

The first command takes weights that torchvision downloads, the second a state dict of one's own, for the transform of
``--weights`` or else the usual one of 224 pixels; without either the network guesses::

    python recipes/inference.py FOLDER --model resnet50 --weights IMAGENET1K_V2 --out predictions.csv
    python recipes/inference.py FOLDER --model resnet18 --checkpoint model.pt --classes 14
    python recipes/inference.py FOLDER --loader torch

Without images at hand, ``torchdali demo`` writes some, ``torchdali-demo/pictures/val``.

What to expect: a CSV file with the columns ``file``, ``prediction`` and ``probability``, a line for each image in the
order of their paths, and at the end the images a second. A file that cannot be decoded ends it with an error that names
the file; ``torchdali check FOLDER`` finds all of them beforehand.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path

import torch
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.datasets.folder import IMG_EXTENSIONS
from torchvision.transforms import v2


class Files(ImageFolder):
    """All images under a folder in the order of their paths, each with its number in ``samples``."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """There are none."""
        del directory
        return [], {}

    @staticmethod
    def make_dataset(directory: str | Path, *_, **__) -> list[tuple[str, int]]:
        """The samples: each file and its number."""
        files = sorted(path for path in Path(directory).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        return [(str(path), number) for number, path in enumerate(files)]


def main() -> None:
    args = parse_args()

    # Before the first use of CUDA: torchdali sets how many hardware queues the driver gives this process.
    if args.loader == "torchdali":
        from torchdali import DALILoader as DataLoader  # the one changed line
    else:
        from torch.utils.data import DataLoader

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    weights = models.get_model_weights(args.model)[args.weights] if args.weights else None
    names = weights.meta["categories"] if weights and not args.checkpoint else None
    model = models.get_model(
        args.model, weights=None if args.checkpoint else weights, num_classes=len(names or []) or args.classes
    )
    if args.checkpoint:
        model.load_state_dict(torch.load(args.checkpoint, map_location="cpu", weights_only=True))
    model = model.to(device, memory_format=torch.channels_last).eval()
    usual = [
        v2.ToImage(),
        v2.Resize(256),
        v2.CenterCrop(224),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    dataset = Files(args.folder, transform=weights.transforms() if weights else v2.Compose(usual))
    if not len(dataset):
        raise SystemExit(f"there are no images under {args.folder}")
    loader = DataLoader(dataset, args.batch_size, num_workers=args.workers, pin_memory=device.type == "cuda")

    start, written = time.perf_counter(), 0
    with args.out.open("w", newline="") as file, torch.inference_mode():
        table = csv.writer(file)
        table.writerow(["file", "prediction", "probability"])
        for images, numbers in loader:
            images = images.to(device, memory_format=torch.channels_last, non_blocking=True)
            probabilities, classes = model(images).softmax(1).max(1)
            for number, label, probability in zip(
                numbers.tolist(), classes.tolist(), probabilities.tolist(), strict=True
            ):
                path = Path(dataset.samples[number][0]).relative_to(args.folder)
                table.writerow([path, names[label] if names else label, f"{probability:.4f}"])
                written += 1
    print(f"{written} predictions in {args.out}  {written / (time.perf_counter() - start):8,.0f} images/s")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder of images, in folders or not")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--weights", help="torchvision's name of them, such as IMAGENET1K_V1")
    parser.add_argument("--checkpoint", type=Path, help="file with a state dict")
    parser.add_argument("--classes", type=int, default=1000, help="of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--seed", type=int, default=0, help="of the network without weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
