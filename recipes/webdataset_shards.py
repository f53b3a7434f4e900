"""Pack a folder of images into tar shards, and train on them in the sampler's exact order.

What it shows: ``torchdali.datasets.pack`` writes tar files as webdataset does. ``Tar`` reads them in any order. Samples
are dictionaries with the image, the label and the key. ``--loader torch`` gives the same dataset to ``DataLoader``.

FOLDER holds one folder of images per class::

    python recipes/webdataset_shards.py FOLDER --shards /tmp/shards

What to expect: one line about the shards, then one for each epoch, with the loss and the number of images. Shards that
exist are used as they are. Shards of webdataset work, too: give their folder as ``--shards``.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.models import get_model
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import Tar, pack


def main() -> None:
    args = parse_args()
    if not list(args.shards.glob("*.tar")):
        pack(args.folder, args.shards, args.shard_megabytes * 10**6)
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(args.size),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    dataset = Tar(args.shards / "*.tar", label=("cls", "__key__"), transform=transform)
    print(f"{len(dataset)} images in {len(dataset.shards.paths)} shards")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    loader = (DALILoader if args.loader == "torchdali" else DataLoader)(dataset, args.batch_size, shuffle=True)
    classes = len(ImageFolder(args.folder).classes)
    model = get_model("resnet18", num_classes=classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        loss_sum, keys = torch.zeros((), device=device), set[str]()
        for batch in loader:
            images, labels = batch["image"].to(device), batch["cls"].to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            keys.update(batch["__key__"])
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum.item() / len(dataset):.4f}  {len(keys)} images")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="one folder of images per class")
    parser.add_argument("--shards", type=Path, required=True, help="folder of the shards")
    parser.add_argument("--shard-megabytes", type=int, default=1000, help="size of a shard at most")
    parser.add_argument("--loader", choices=("torchdali", "torch"), default="torchdali")
    parser.add_argument("--size", type=int, default=224, help="side of the crops")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
