"""Train on a folder with some damaged files, and list them at the end.

What it shows: with ``on_error="skip"``, the next sample of the batch replaces one that cannot be read, so batches
keep their sizes. ``max_errors`` ends a run with too many damaged files. ``loader.errors`` is written to a table.
``--on-error replace`` uses a black image with the label, and ``raise`` stops at the first damaged file, as DataLoader
does.

FOLDER holds one folder of images per class. The second command first writes crops of scikit-image's photographs, and
damages some of them in four ways::

    python recipes/damaged_dataset.py FOLDER
    python recipes/damaged_dataset.py /tmp/damaged --example

What to expect: one line for each epoch, with the loss and the number of images, which is always the same. The log has
a line for each damaged file when it is first met, and ``damaged.csv`` lists all of them. ``torchdali check FOLDER``
finds them without training.
"""

from __future__ import annotations

import argparse
import csv
import shutil
from pathlib import Path

import torch
from torch import nn
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

from torchdali import DALILoader


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(args.size),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = ImageFolder(args.folder, transform)
    limit = None if args.on_error == "raise" else args.max_errors
    loader = DALILoader(dataset, args.batch_size, shuffle=True, on_error=args.on_error, max_errors=limit)

    model = get_model("resnet18", num_classes=len(dataset.classes)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        loss_sum, seen = torch.zeros((), device=device), 0
        for images, labels in loader:
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
        damaged = len(loader.errors)
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum.item() / seen:.4f}  {seen} images, {damaged} damaged")

    with args.table.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["index", "file", "reason"])
        table.writerows([error.index, error.path, error.reason] for error in loader.errors)
    print(f"{len(loader.errors)} damaged files are listed in {args.table}")


def write_example(folder: Path) -> None:
    """Write the pictures of ``torchdali demo``, and damage one in each class."""
    from torchdali.tools.demo.pictures import write_pictures

    shutil.rmtree(folder, ignore_errors=True)
    pictures = folder.with_name(f"{folder.name}-pictures")
    shutil.rmtree(pictures, ignore_errors=True)
    write_pictures(pictures, train=16, val=1, seed=0, tick=lambda _: None)
    shutil.move(pictures / "train", folder)
    shutil.rmtree(pictures)
    for number, class_folder in enumerate(sorted(folder.iterdir())):
        file = sorted(class_folder.iterdir())[number]
        data = file.read_bytes()
        file.write_bytes([b"", data[: len(data) // 2], b"<html>not found</html>", data[: len(data) - 9]][number % 4])


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder with one folder of images per class")
    parser.add_argument("--example", action="store_true", help="first write the folder, with damaged files")
    parser.add_argument("--on-error", choices=["raise", "skip", "replace"], default="skip")
    parser.add_argument("--max-errors", type=int, default=100, help="number of damaged files at which the run ends")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--size", type=int, default=64, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, default=Path("damaged.csv"), help="file for the list of damaged files")
    return parser.parse_args()


if __name__ == "__main__":
    main()
