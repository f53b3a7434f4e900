"""Train on a dataset of your own: scans in 16-bit grey PNGs, and a table with their labels.

What it shows: a ``Dataset`` that only its author understands does not change. Worker processes ask it for samples,
with DataLoader's arguments. It reads its files, maps them to the range that matters (a window, in radiology), and
returns arrays, labels and patients in a dictionary. Only the transforms move, from the dataset to the loader's
``transform=``. They run in DALI, on the GPU if there is one.

FOLDER holds the files, and ``table.csv`` with the columns ``file``, ``label``, ``patient`` and ``split`` (``train``
or ``val``). The second command first writes such a folder, from pictures in scikit-image: pieces of a photograph of a
retina, and of tissue under a microscope::

    python recipes/existing_dataset.py FOLDER
    python recipes/existing_dataset.py /tmp/scans --example --epochs 3
    python recipes/existing_dataset.py FOLDER --loader torch

What to expect: first what runs where (``explain()``), then one line for each epoch, with the loss, the accuracy on
the scans of ``val``, and the training images per second. At the end come the patients with scans that were not
recognised. The workers still decode the PNGs, which then takes the most time, but they no longer transform them. A
dataset of files that DALI can decode (8-bit JPEGs and PNGs) can return paths instead of pixels, which is faster:
docs/own_datasets.md.
"""

from __future__ import annotations

import argparse
import csv
import os
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import Dataset
from torchvision import models
from torchvision.transforms import v2


class Scans(Dataset):
    """The scans of one split, as dictionaries. ``transform`` is for torch's DataLoader only."""

    def __init__(self, folder: Path, split: str, window: tuple[float, float], transform=None) -> None:
        with (folder / "table.csv").open(newline="") as file:
            self.rows = [row for row in csv.DictReader(file) if row["split"] == split]
        self.folder, self.window, self.transform = folder, window, transform

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        row = self.rows[index]
        with Image.open(self.folder / row["file"]) as file:
            values = np.asarray(file, np.float32)
        low, high = self.window
        scan = ((values - low) / (high - low) * 255).clip(0, 255).astype(np.uint8)[:, :, None]
        if self.transform:
            scan = self.transform(scan)
        return {"scan": scan, "label": int(row["label"]), "patient": row["patient"]}


def main() -> None:
    args = parse_args()
    if args.example:
        write_example(args.folder)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(args.seed)

    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5], [0.25])]
    augment = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomAffine(degrees=10, translate=(0.05, 0.05)),
            v2.RandomResizedCrop(args.size, scale=(0.5, 1.0)),
            v2.ColorJitter(brightness=0.2, contrast=0.2),
            *to_float,
        ]
    )
    whole = v2.Compose([v2.ToImage(), v2.Resize(args.size), v2.CenterCrop(args.size), *to_float])

    settings = {"num_workers": args.workers, "persistent_workers": args.workers > 0}
    if args.loader == "torchdali":
        from torchdali import DALILoader

        # With DataLoader the dataset has the transform, and a worker runs it, scan by scan.
        train, val = (Scans(args.folder, split, args.window) for split in ("train", "val"))
        loader = DALILoader(train, args.batch_size, shuffle=True, transform=augment, **settings)
        val_loader = DALILoader(val, args.batch_size, transform=whole, **settings)
        loader.explain()
    else:
        from torch.utils.data import DataLoader

        settings["pin_memory"] = device.type == "cuda"
        loader = DataLoader(
            Scans(args.folder, "train", args.window, augment), args.batch_size, shuffle=True, **settings
        )
        val_loader = DataLoader(Scans(args.folder, "val", args.window, whole), args.batch_size, **settings)

    classes = 1 + max(int(row["label"]) for row in loader.dataset.rows)
    model = models.get_model(args.model, weights=None, num_classes=classes)
    model.conv1 = nn.Conv2d(1, model.conv1.out_channels, 7, stride=2, padding=3, bias=False)
    model = model.to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), args.lr)

    missed: list[str] = []
    for epoch in range(args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=device), 0
        for batch in loader:
            scans = batch["scan"].to(device, memory_format=torch.channels_last, non_blocking=True)
            labels = batch["label"].to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(scans), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
        # Reading the sum waits for the GPU, so the time is read after it.
        loss = loss_sum.item() / seen
        speed = seen / (time.perf_counter() - start)

        model.eval()
        missed, count = [], 0
        with torch.inference_mode():
            for batch in val_loader:
                wrong = model(batch["scan"].to(device)).argmax(1).cpu() != batch["label"].cpu()
                missed += [
                    patient for patient, is_wrong in zip(batch["patient"], wrong.tolist(), strict=True) if is_wrong
                ]
                count += len(wrong)
        accuracy = 1 - len(missed) / count
        print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss:.4f}  acc {accuracy:7.2%}  {speed:8,.0f} images/s",
            flush=True,
        )
    print(f"not recognised: {', '.join(sorted(set(missed))) or 'none'}")


def write_example(folder: Path) -> None:
    """Write 160 scans of 40 made-up patients: pieces of two photographs, grey, 16 bits, of varied sizes."""
    from skimage import color, data

    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = [["file", "label", "patient", "split"]]
    for label, picture in enumerate((data.retina()[200:1200, 200:1200], data.immunohistochemistry())):
        grey = (color.rgb2gray(picture) * 40_000 + 10_000).astype(np.uint16)
        for number in range(80):
            height, width = rng.integers(80, 160, 2)
            top, left = rng.integers(0, grey.shape[0] - height), rng.integers(0, grey.shape[1] - width)
            name = f"{label}_{number:02}.png"
            Image.fromarray(grey[top : top + height, left : left + width].copy()).save(folder / name)
            patient = number // 4
            lines.append([name, label, f"P{label}{patient:02}", "val" if patient % 4 == 3 else "train"])
    with (folder / "table.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="with table.csv and the files")
    parser.add_argument("--example", action="store_true", help="write the folder first")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision's ResNets")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--size", type=int, default=96, help="height and width that the network sees")
    parser.add_argument(
        "--window", type=float, nargs=2, default=(10_000.0, 50_000.0), help="values that become black and white"
    )
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--workers", type=int, default=min(8, len(os.sched_getaffinity(0))), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
