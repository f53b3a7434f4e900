"""Train on tar shards in an object store, and keep what was fetched on a local disk.

What it shows: ``Tar`` reads shards at ``s3://`` in the sampler's order. ``cache="disk"`` keeps their images, so that
later epochs and runs send no request for them. ``--loader torch`` gives the same dataset to ``DataLoader``.

With shards in a bucket, whose credentials the environment has (``AWS_ACCESS_KEY_ID``, ``AWS_REGION`` and so on)::

    python recipes/s3_training.py --shards "s3://bucket/train-{000..146}.tar" --cache-dir /local/cache

Without a bucket: FOLDER, one folder of images per class, is packed into shards, and the folder of shards stands in for
the bucket::

    python recipes/s3_training.py --folder FOLDER --cache-dir /tmp/cache

What to expect: one line about the shards, then one for each epoch, with the loss and what the cache holds. It needs
``pip install 'torchdali[remote]'``.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from obstore.store import LocalStore
from torch import nn
from torch.utils.data import DataLoader
from torchvision.models import get_model
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.datasets import Tar, pack


def main() -> None:
    args = parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store = None
        if args.shards is None:
            pack(args.folder, folder)
            args.shards, store = "s3://stand-in/*.tar", LocalStore(folder)
        train(args, store)


def train(args: argparse.Namespace, store: Any) -> None:
    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(args.size),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    args.cache_dir.mkdir(parents=True, exist_ok=True)
    # The index takes one read of each shard. Keep it for the next run, too.
    dataset = Tar(args.shards, transform=transform, index=args.cache_dir / "index.npz", remote=store)
    print(f"{len(dataset)} images in {len(dataset.shards.paths)} shards, from {dataset.shards.paths[0]} on")

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)
    loader: Any
    if args.loader == "torchdali":
        loader = DALILoader(
            dataset, args.batch_size, shuffle=True, cache="disk", cache_dir=args.cache_dir / "objects", on_error="skip"
        )
    else:
        loader = DataLoader(dataset, args.batch_size, shuffle=True, num_workers=args.workers)
    model = get_model("resnet18", num_classes=args.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    for epoch in range(args.epochs):
        loss_sum = torch.zeros((), device=device)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            loss = nn.functional.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
        files = [file for file in (args.cache_dir / "objects").rglob("*") if file.is_file() and file.name != "used"]
        print(f"epoch {epoch + 1}/{args.epochs}  loss {loss_sum.item() / len(dataset):.4f}  {len(files)} images kept")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--shards", help="shards in a bucket")
    source.add_argument("--folder", type=Path, help="one folder of images per class, to try it without a bucket")
    parser.add_argument("--cache-dir", type=Path, required=True, help="where images and the index are kept")
    parser.add_argument("--loader", choices=("torchdali", "torch"), default="torchdali")
    parser.add_argument("--workers", type=int, default=2, help="processes of DataLoader")
    parser.add_argument("--classes", type=int, default=1000, help="number of classes")
    parser.add_argument("--size", type=int, default=224, help="side of the crops")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
