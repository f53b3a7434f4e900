"""Train with fastai's Learner, its one-cycle schedule and callbacks, on loaders of torchdali.

What it shows: fastai's ``DataLoaders`` accepts two ready loaders, so only the lines that make them change. The
transforms are torchvision's, and run in DALI. fastai splits them into ``item_tfms`` on the CPU and ``batch_tfms`` on
the GPU. Here they are one chain, which decodes, crops and changes the colours of each image on the GPU.

DATA holds ``train/`` and ``val/``, each with one folder of images per class::

    pip install fastai
    python recipes/fastai_training.py DATA
    python recipes/fastai_training.py DATA --loader fastai

The second command does the same with fastai's ``ImageDataLoaders``, ``RandomResizedCrop`` and ``aug_transforms``, to
compare the images per second. If you have no dataset, ``torchdali demo`` writes a small one to
``torchdali-demo/pictures``. For that one, add ``--size 96 --batch-size 32 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss, the accuracy on ``val/``, and the training images per second,
and at the end the accuracy from ``get_preds``. The loaders do not augment in exactly the same way, so their
accuracies differ a little more than those of two seeds.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch

# Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
from torchdali import DALILoader

# isort: split
from fastai.callback.core import Callback
from fastai.callback.schedule import Learner  # with fit_one_cycle
from fastai.data.core import DataLoaders
from fastai.metrics import accuracy
from fastai.vision.augment import RandomResizedCrop, aug_transforms
from fastai.vision.data import ImageDataLoaders
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_torchdali_loaders(args: argparse.Namespace, device: torch.device) -> DataLoaders:
    """Return two loaders on one device. fastai puts the network there."""
    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    # Close to aug_transforms(): flips, small rotations and zooms, brightness and contrast.
    augment = [
        v2.RandomResizedCrop(args.size, scale=(0.35, 1.0)),
        v2.RandomHorizontalFlip(),
        v2.RandomAffine(10, scale=(1.0, 1.1)),
        v2.ColorJitter(brightness=0.2, contrast=0.2),
    ]
    train = v2.Compose([v2.ToImage(), *augment, *to_float])
    val = v2.Compose([v2.ToImage(), v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *to_float])
    settings = {"num_workers": args.workers, "device": device}
    # fastai puts the network on the first loader's device, so that must not be "auto".
    loaders = [
        DALILoader(args.data / "train", args.batch_size, shuffle=True, drop_last=True, transform=train, **settings),
        DALILoader(args.data / "val", args.batch_size, transform=val, **settings),
    ]
    return DataLoaders(*loaders)


def make_fastai_loaders(args: argparse.Namespace, device: torch.device) -> DataLoaders:
    """Return fastai's own loaders for the same images."""
    crop = RandomResizedCrop(args.size, min_scale=0.35)
    settings = {"bs": args.batch_size, "num_workers": args.workers, "device": device}
    return ImageDataLoaders.from_folder(
        args.data, train="train", valid="val", item_tfms=crop, batch_tfms=aug_transforms(), **settings
    )


class Lines(Callback):
    """Prints a line for each epoch."""

    order = 60  # after the Recorder

    def before_fit(self):
        """Run for training, not for get_preds()."""
        self.run = not hasattr(self.learn, "gather_preds")

    def before_train(self):
        """Start the clock."""
        self.start, self.images = time.perf_counter(), 0

    def after_batch(self):
        """Count the images."""
        self.images += len(self.learn.yb[0]) if self.training else 0

    def after_train(self):
        """Read the clock when the GPU is done."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.speed = self.images / (time.perf_counter() - self.start)

    def after_epoch(self):
        """Print the line."""
        loss, _, acc = self.learn.recorder.values[-1]
        print(
            f"epoch {self.epoch + 1:3}/{self.n_epoch}  loss {loss:.4f}  acc {acc:7.2%}  {self.speed:8,.0f} images/s",
            flush=True,
        )


def main() -> None:
    args = parse_args()
    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    classes = len(ImageFolder(args.data / "train").classes)

    loaders = (make_fastai_loaders if args.loader == "fastai" else make_torchdali_loaders)(args, device)
    net = models.get_model(args.model, weights=None, num_classes=classes)
    learner = Learner(loaders, net, loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy, cbs=Lines())
    if device.type == "cuda":
        learner.to_fp16()
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(args.epochs, args.lr)
        predictions, labels = learner.get_preds(dl=loaders.valid)
    print(f"get_preds: {accuracy(predictions, labels).item():.2%} of {len(labels)} validation images")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/ and val/")
    parser.add_argument("--loader", choices=["torchdali", "fastai"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--size", type=int, default=224, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=3e-3, help="largest learning rate")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
