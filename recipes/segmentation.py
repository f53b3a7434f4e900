"""Train torchvision's semantic segmentation networks on pictures in the layout of Pascal VOC.

What it shows: masks move with the images. The dataset is torchvision's ``VOCSegmentation``, and the transforms are
those of torchvision's reference: resizing to a random size, cropping, flips. Where a picture is too small for the crop,
its border is black, and its mask is 255 there, which the loss ignores. With DataLoader the dataset has the transforms.
With torchdali the loader has them: DALI transforms the images, on the GPU if there is one, and the masks are moved by
the same random numbers. No mask gets a value that its file does not have.

FOLDER holds ``VOCdevkit/VOC2012``. The second command first writes such a folder: coloured shapes on a photograph::

    python recipes/segmentation.py FOLDER
    python recipes/segmentation.py /tmp/shapes --example --classes 3 --size 96
    python recipes/segmentation.py FOLDER --loader torch

What to expect: first what runs where (``explain()``), then one line for each epoch, with the loss, the mean of
intersection over union (IoU) of the classes in the validation pictures, and the training images per second. The network
begins without weights.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torchvision import datasets, models, tv_tensors
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
IGNORED = 255
COLOURS = {"disc": (220, 60, 40), "square": (40, 90, 220)}


def read_voc(folder: Path, split: str, transforms: v2.Transform | None) -> torch.utils.data.Dataset:
    """Return the pictures of a split with their masks as torchvision's types."""
    voc = datasets.VOCSegmentation(folder, "2012", split, transforms=transforms)
    return datasets.wrap_dataset_for_transforms_v2(voc)


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_float = [
        v2.ToDtype({tv_tensors.Image: torch.float32, tv_tensors.Mask: torch.int64, "others": None}, scale=True),
        v2.Normalize(MEAN, STD),
    ]
    fill = {tv_tensors.Image: 0, tv_tensors.Mask: IGNORED}
    augment = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResize(args.size // 2, args.size * 2),
            v2.RandomCrop(args.size, pad_if_needed=True, fill=fill),
            v2.RandomHorizontalFlip(),
            *to_float,
        ]
    )
    # All pictures of a batch have one size: the middle, with a border where it is missing.
    view = v2.Compose(
        [v2.ToImage(), v2.Resize(args.size), v2.RandomCrop(args.size, pad_if_needed=True, fill=fill), *to_float]
    )

    settings = {"num_workers": args.workers}
    if args.loader == "torchdali":
        from torchdali import DALILoader

        train, val = (read_voc(args.folder, split, None) for split in ("train", "val"))
        loader = DALILoader(train, args.batch_size, shuffle=True, drop_last=True, transform=augment, **settings)
        val_loader = DALILoader(val, args.batch_size, transform=view, **settings)
        loader.explain()
    else:
        from torch.utils.data import DataLoader

        train, val = read_voc(args.folder, "train", augment), read_voc(args.folder, "val", view)
        loader = DataLoader(train, args.batch_size, shuffle=True, drop_last=True, **settings)
        val_loader = DataLoader(val, args.batch_size, **settings)

    model = models.get_model(args.model, weights=None, weights_backbone=None, num_classes=args.classes).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)
    criterion = nn.CrossEntropyLoss(ignore_index=IGNORED)

    for epoch in range(args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for images, masks in loader:
            images, masks = prepare(images, masks, device)
            loss = criterion(model(images)["out"], masks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(images)
            seen += len(images)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / max(seen, 1)
        speed = seen / (time.perf_counter() - start)
        iou = evaluate(model, val_loader, args.classes, device)
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  IoU {iou:7.2%}  {speed:8,.0f} images/s",
            flush=True,
        )


def prepare(images: torch.Tensor, masks: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Copy a batch to the device, unless it is there, and take the masks' axis of one channel away."""
    return images.to(device, non_blocking=True), masks.to(device, non_blocking=True).squeeze(1)


@torch.inference_mode()
def evaluate(model: nn.Module, loader, classes: int, device: torch.device) -> float:
    """Return the mean of intersection over union of the classes that occur."""
    model.eval()
    pairs = torch.zeros(classes * classes, dtype=torch.int64, device=device)
    for images, masks in loader:
        images, masks = prepare(images, masks, device)
        counted = masks != IGNORED
        guess = model(images)["out"].argmax(1)
        pairs += torch.bincount((masks * classes + guess)[counted], minlength=classes * classes)
    table = pairs.view(classes, classes).double()
    union = table.sum(0) + table.sum(1) - table.diagonal()
    return (table.diagonal() / union)[union > 0].mean().item()


def write_example(folder: Path) -> None:
    """Write pictures with one to three coloured shapes, and their masks as PNGs with a palette."""
    from skimage import data

    rng = np.random.default_rng(0)
    root = folder / "VOCdevkit" / "VOC2012"
    for part in ("JPEGImages", "SegmentationClass", "ImageSets/Segmentation"):
        (root / part).mkdir(parents=True, exist_ok=True)
    photograph = Image.fromarray(data.coffee())
    for split, count in {"train": 32, "val": 8}.items():
        names = []
        for number in range(count):
            width, height = rng.integers(90, 160, 2).tolist()
            left, top = int(rng.integers(0, 600 - width)), int(rng.integers(0, 400 - height))
            picture = photograph.crop((left, top, left + width, top + height))
            mask = Image.new("P", picture.size)
            mask.putpalette([0, 0, 0, *(value for colour in COLOURS.values() for value in colour)])
            for column in range(int(rng.integers(1, 4))):
                side = int(rng.integers(20, 40))
                x, y = 40 * column, int(rng.integers(0, height - side))
                kind = int(rng.integers(1, 3))
                for image, colour in ((picture, list(COLOURS.values())[kind - 1]), (mask, kind)):
                    draw = ImageDraw.Draw(image)
                    shape = draw.ellipse if kind == 1 else draw.rectangle
                    shape((x, y, x + side - 1, y + side - 1), fill=colour)
            names.append(f"{split}_{number:03}")
            picture.save(root / "JPEGImages" / f"{names[-1]}.jpg", quality=90)
            mask.save(root / "SegmentationClass" / f"{names[-1]}.png")
        (root / "ImageSets" / "Segmentation" / f"{split}.txt").write_text("\n".join(names) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with VOCdevkit/VOC2012")
    parser.add_argument("--example", action="store_true", help="write the folder first")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="fcn_resnet50", help="any of torchvision's semantic segmentation networks")
    parser.add_argument("--classes", type=int, default=21, help="with the background")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--size", type=int, default=480, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
