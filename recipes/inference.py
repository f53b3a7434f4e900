"""Classify every image under a folder, and write a table of file names and predictions.

What it shows: inference keeps the order of the files, and each prediction its file name. ``Files`` is an ImageFolder
without class folders, and each file's number is its target. So torchdali reads it natively, and a batch has the
numbers of its files. torchdali supports torchvision's ``Weights.transforms()``.

The first command uses weights that torchvision downloads. The second uses a state dict of your own, with the
transform of ``--weights``, or else the usual one of 224 pixels. Without weights the network guesses::

    python recipes/inference.py FOLDER --model resnet50 --weights IMAGENET1K_V2 --out predictions.csv
    python recipes/inference.py FOLDER --model resnet18 --checkpoint model.pt --classes 14
    python recipes/inference.py FOLDER --loader torch

If you have no images, ``torchdali demo`` writes some to ``torchdali-demo/pictures/val``.

What to expect: a CSV file with the columns ``file``, ``prediction`` and ``probability``, with a line for each image
in the order of the paths, and at the end the images per second. A file that cannot be decoded ends the run with an
error that names the file. ``torchdali check FOLDER`` finds all such files before.
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
    """All images under a folder in the order of their paths. The target of each is its number in ``samples``."""

    def find_classes(self, directory: str | Path) -> tuple[list[str], dict[str, int]]:
        """Return no classes."""
        del directory
        return [], {}

    @staticmethod
    def make_dataset(directory: str | Path, *_, **__) -> list[tuple[str, int]]:
        """Return each file with its number."""
        files = sorted(path for path in Path(directory).rglob("*") if path.suffix.lower() in IMG_EXTENSIONS)
        return [(str(path), number) for number, path in enumerate(files)]


def main() -> None:
    args = parse_args()

    # Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
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
    default = [
        v2.ToImage(),
        v2.Resize(256),
        v2.CenterCrop(224),
        v2.ToDtype(torch.float32, scale=True),
        v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    ]
    dataset = Files(args.folder, transform=weights.transforms() if weights else v2.Compose(default))
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
    parser.add_argument("folder", type=Path, help="folder of images, with subfolders or without")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--weights", help="name of torchvision's weights, such as IMAGENET1K_V1")
    parser.add_argument("--checkpoint", type=Path, help="file with a state dict")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes of the checkpoint")
    parser.add_argument("--out", type=Path, default=Path("predictions.csv"))
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--seed", type=int, default=0, help="seed of the network without weights")
    return parser.parse_args()


if __name__ == "__main__":
    main()
