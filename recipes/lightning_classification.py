"""Train a torchvision network on an image folder with Lightning, stop within an epoch, and resume.

What it shows: ``DALIDataModule`` makes the loaders for the Trainer, on the device of each process, with a transform
for each stage. MixUp on the device is an option of the training loader. A run that resumes within an epoch gets the
batches that it would have had. The network and the Trainer are as with any other data module. With ``--plain``, plain
``DALILoader``s are passed to ``trainer.fit``, with the same batches. But Lightning restores no loader in a program
that uses ``estimated_stepping_batches``, as this one does.

DATA holds ``train/`` and ``val/``, each with one folder of images per class. The commands train on all GPUs of the
machine, or on the CPU, stop a run, and resume it from its last checkpoint::

    pip install lightning
    python recipes/lightning_classification.py DATA
    python recipes/lightning_classification.py DATA --stop-after 100
    python recipes/lightning_classification.py DATA --resume lightning-checkpoints/last.ckpt

If you have no dataset, ``torchdali demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add
``--size 96 --batch-size 32 --lr 0.05 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss, the accuracy on ``val/``, and the training images per second
of all processes together. After its first epoch, a resumed run prints the losses and accuracies of a run that was
never stopped. On the CPU they are equal to the last digit, on a GPU as far as its kernels are deterministic.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

# Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
from torchdali import DALILoader
from torchdali.lightning import DALIDataModule

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


class Classifier(pl.LightningModule):
    """A network of torchvision, trained with SGD."""

    def __init__(self, model: str, classes: int, lr: float) -> None:
        super().__init__()
        self.lr = lr
        self.net = models.get_model(model, weights=None, num_classes=classes)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.images = 0

    def training_step(self, batch):
        """Return the loss of a batch, which is on the device already."""
        images, labels = batch
        self.images += len(images)
        loss = self.criterion(self.net(images), labels)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(images))
        return loss

    def validation_step(self, batch):
        """Log the accuracy of a batch."""
        images, labels = batch
        correct = (self.net(images).argmax(1) == labels).float().mean()
        self.log("acc", correct, on_epoch=True, sync_dist=True, batch_size=len(images))

    def configure_optimizers(self):
        """Return SGD, with a learning rate that falls at each step."""
        optimizer = torch.optim.SGD(self.parameters(), self.lr, momentum=0.9, weight_decay=1e-4)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Lines(pl.Callback):
    """Prints a line for each epoch."""

    def on_train_start(self, _, model):
        """Start the clock. A resumed epoch begins here."""
        self.start, model.images = time.perf_counter(), 0

    on_train_epoch_start = on_train_start

    def on_train_epoch_end(self, trainer, model):
        """Print the line."""
        seconds, metrics = time.perf_counter() - self.start, trainer.callback_metrics
        if trainer.is_global_zero:
            print(
                f"epoch {trainer.current_epoch + 1:3}/{trainer.max_epochs}  loss {metrics['loss']:.4f}  "
                f"acc {metrics['acc']:7.2%}  {model.images * trainer.world_size / seconds:8,.0f} images/s",
                flush=True,
            )


class StopAfter(pl.Callback):
    """Ends the run, as a time limit would."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer, *_):
        """End the run after the given number of steps."""
        if trainer.global_step == self.steps:
            raise SystemExit(f"stopped after {self.steps} steps")


def main() -> None:
    args = parse_args()
    pl.seed_everything(args.seed, verbose=False)

    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    train = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), *to_float])
    val = v2.Compose([v2.ToImage(), v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *to_float])
    folders = [ImageFolder(args.data / split) for split in ("train", "val")]
    classes = len(folders[0].classes)
    mixup = v2.MixUp(alpha=args.mixup, num_classes=classes) if args.mixup else None

    settings = {"batch_size": args.batch_size, "num_workers": args.workers, "seed": args.seed}
    train_options = {"drop_last": True, "batch_transform": mixup}
    if args.plain:
        # Lightning treats it as a DataLoader: with several processes each gets its share.
        loader = DALILoader(folders[0], shuffle=True, transform=train, **train_options, **settings)
        data = {"train_dataloaders": loader, "val_dataloaders": DALILoader(folders[1], transform=val, **settings)}
    else:
        module = DALIDataModule(
            *folders, train_transform=train, val_transform=val, train_options=train_options, **settings
        )
        data = {"datamodule": module}

    often = {"every_n_train_steps": args.save_every, "enable_version_counter": False}
    save = ModelCheckpoint(args.checkpoints, filename="last", **often)
    stop = [StopAfter(args.stop_after)] if args.stop_after else []
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    precision = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    trainer = pl.Trainer(max_epochs=args.epochs, precision=precision, callbacks=[Lines(), save, *stop], **quiet)
    trainer.fit(Classifier(args.model, classes, args.lr), **data, ckpt_path=args.resume)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/ and val/")
    parser.add_argument("--plain", action="store_true", help="pass DALILoaders to the Trainer, without a data module")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256, help="images in a step of each process")
    parser.add_argument("--size", type=int, default=224, help="height and width that the network sees")
    parser.add_argument("--mixup", type=float, default=0.0, help="alpha")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate at the start")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--checkpoints", type=Path, default=Path("lightning-checkpoints"))
    parser.add_argument("--save-every", type=int, default=100, help="number of steps between checkpoints")
    parser.add_argument("--stop-after", type=int, help="number of steps after which the run ends")
    parser.add_argument("--resume", type=Path, help="checkpoint to resume from")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
