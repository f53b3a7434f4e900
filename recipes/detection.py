"""Train torchvision's object detectors on pictures with COCO annotations.

What it shows: boxes move with the images. The dataset is torchvision's ``CocoDetection``, and the transforms are those
of torchvision's SSD: random colours, zoom, crops that keep enough of some box, and flips. With DataLoader the dataset
has the transforms. With torchdali the loader has them: DALI transforms the images, on the GPU if there is one, and the
boxes are moved by the same random numbers. Everything else stays, also ``collate_fn``.

FOLDER holds ``train/`` and ``val/`` with pictures, and ``train.json`` and ``val.json`` with their annotations. The
second command first writes such a folder: coloured shapes on a photograph. The package ``pycocotools`` reads it::

    pip install pycocotools
    python recipes/detection.py /tmp/shapes --example
    python recipes/detection.py FOLDER --model ssd300_vgg16 --batch-size 32
    python recipes/detection.py FOLDER --loader torch

What to expect: first what runs where (``explain()``), then one line for each epoch, with the loss, the share of the
objects in ``val/`` that were found (an overlap of 0.5 with the best box of their class), and the training images per
second. The network begins without weights. Give ``--weights COCO_V1`` to begin with torchvision's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch.utils.data import Subset
from torchvision import datasets, models, ops, tv_tensors
from torchvision.transforms import v2

COLOURS = {"disc": (220, 60, 40), "square": (40, 90, 220)}


def read_coco(folder: Path, split: str, transforms: v2.Transform | None) -> Subset:
    """Return the pictures of a split that have objects, with boxes and labels as torchvision's types."""
    coco = datasets.CocoDetection(folder / split, folder / f"{split}.json", transforms=transforms)
    wrapped = datasets.wrap_dataset_for_transforms_v2(coco, target_keys=["boxes", "labels"])
    return Subset(wrapped, [i for i, number in enumerate(coco.ids) if coco.coco.getAnnIds(number)])


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_float = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True)]
    augment = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomPhotometricDistort(),
            v2.RandomZoomOut(fill={tv_tensors.Image: (123, 117, 104), "others": 0}),
            v2.RandomIoUCrop(),
            v2.RandomHorizontalFlip(),
            v2.SanitizeBoundingBoxes(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    view = v2.Compose(to_float)

    # Pictures differ in size and in their number of objects, so a batch is a list of each.
    settings = {"num_workers": args.workers, "collate_fn": collate}
    if args.loader == "torchdali":
        from torchdali import DALILoader

        train, val = (read_coco(args.folder, split, None) for split in ("train", "val"))
        loader = DALILoader(train, args.batch_size, shuffle=True, transform=augment, **settings)
        val_loader = DALILoader(val, args.batch_size, transform=view, **settings)
        loader.explain()
    else:
        from torch.utils.data import DataLoader

        train, val = read_coco(args.folder, "train", augment), read_coco(args.folder, "val", view)
        loader = DataLoader(train, args.batch_size, shuffle=True, **settings)
        val_loader = DataLoader(val, args.batch_size, **settings)

    categories = json.loads((args.folder / "train.json").read_text())["categories"]
    classes = 1 + max(category["id"] for category in categories)
    model = models.get_model(args.model, weights=args.weights, weights_backbone=None, num_classes=classes).to(device)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=5e-4)

    for epoch in range(args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for images, targets in loader:
            images, targets = move(images, targets, device)
            loss = sum(model(images, targets).values())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            loss_sum += loss.detach() * len(images)
            seen += len(images)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / seen
        speed = seen / (time.perf_counter() - start)
        found = evaluate(model, val_loader, device)
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  found {found:7.2%}  {speed:8,.0f} images/s",
            flush=True,
        )


def collate(samples: list) -> tuple:
    """Return the images and the targets of a batch, unstacked. Workers that are spawned take no lambda."""
    return tuple(zip(*samples, strict=True))


def move(images: tuple, targets: tuple, device: torch.device) -> tuple[list, list]:
    """Copy a batch to the device. What torchdali gives is there already."""
    images = [image.to(device, non_blocking=True) for image in images]
    return images, [{name: part.to(device, non_blocking=True) for name, part in target.items()} for target in targets]


@torch.inference_mode()
def evaluate(model: torch.nn.Module, loader, device: torch.device) -> float:
    """Return the share of the objects that a box of their class overlaps by half."""
    model.eval()
    found, count = 0, 0
    for images, targets in loader:
        images, targets = move(images, targets, device)
        for result, target in zip(model(images), targets, strict=True):
            overlap = ops.box_iou(target["boxes"], result["boxes"])
            overlap *= (target["labels"][:, None] == result["labels"]) & (result["scores"] > 0.3)
            found += int((overlap > 0.5).any(dim=1).sum())
            count += len(overlap)
    return found / max(count, 1)


def write_example(folder: Path) -> None:
    """Write pictures with one to three coloured shapes, and their annotations."""
    from skimage import data

    rng = np.random.default_rng(0)
    photograph = Image.fromarray(data.coffee())
    for split, count in {"train": 32, "val": 8}.items():
        (folder / split).mkdir(parents=True, exist_ok=True)
        pictures, annotations = [], []
        for number in range(count):
            width, height = rng.integers(120, 200, 2).tolist()
            left, top = int(rng.integers(0, 600 - width)), int(rng.integers(0, 400 - height))
            picture = photograph.crop((left, top, left + width, top + height))
            draw = ImageDraw.Draw(picture)
            for column in range(int(rng.integers(1, 4))):
                side = int(rng.integers(24, 38))
                x, y = 40 * column + int(rng.integers(0, 3)), int(rng.integers(0, height - side))
                kind = int(rng.integers(1, 3))
                shape = draw.ellipse if kind == 1 else draw.rectangle
                shape((x, y, x + side - 1, y + side - 1), fill=list(COLOURS.values())[kind - 1])
                corners = [x, y, x + side, y, x + side, y + side, x, y + side]
                annotations.append(
                    {"id": len(annotations) + 1, "image_id": number, "category_id": kind, "iscrowd": 0}
                    | {"bbox": [x, y, side, side], "area": side * side, "segmentation": [corners]}
                )
            name = f"{number:03}.jpg"
            picture.save(folder / split / name, quality=90)
            pictures.append({"id": number, "file_name": name, "height": height, "width": width})
        categories = [{"id": i, "name": name} for i, name in enumerate(COLOURS, start=1)]
        table = {"images": pictures, "annotations": annotations, "categories": categories}
        (folder / f"{split}.json").write_text(json.dumps(table))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with train/, val/, train.json and val.json")
    parser.add_argument("--example", action="store_true", help="write the folder first")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument(
        "--model", default="fasterrcnn_mobilenet_v3_large_320_fpn", help="any of torchvision's object detectors"
    )
    parser.add_argument("--weights", help="torchvision's weights to begin with")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
