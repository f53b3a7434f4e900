"""Train a torchvision network on an image folder with Hugging Face Accelerate, and resume within an epoch.

What it shows: torchdali changes the import of ``Accelerator`` and that of the loader. As with DataLoader,
``prepare()`` gives each process its share, gradients are accumulated, and metrics leave out repeated images.
``save_state()`` and ``load_state()`` resume within an epoch.

DATA holds ``train/`` and ``val/``, each with one folder of images per class. The commands train alone, train with
DataLoader to compare, train with one process for each of four GPUs, and resume. Only DataLoader needs torchdata::

    pip install accelerate torchdata
    python recipes/accelerate_classification.py DATA
    python recipes/accelerate_classification.py DATA --loader torch
    accelerate launch --num-processes 4 recipes/accelerate_classification.py DATA
    python recipes/accelerate_classification.py DATA --resume

If you have no dataset, ``torchdali demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add
``--size 96 --batch-size 32 --lr 0.05 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss, the accuracy on ``val/``, and the training images per second
of all processes together. Both loaders give the same images in the same order, with the same kind of random
augmentation. After its first epoch, a resumed run prints the losses and accuracies of a run that was never stopped.
On the CPU they are equal to the last digit, on a GPU as far as its kernels are deterministic.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def main() -> None:
    args = parse_args()

    # Import torchdali before the first use of CUDA. It sets the number of hardware queues of this process.
    if args.loader == "torchdali":
        from torchdali import DALILoader as DataLoader  # the first changed line
        from torchdali.accelerate import Accelerator  # the second
    else:
        from accelerate import Accelerator
        from torch.utils.data import DataLoader

    # With this, save_state() also saves the loader's position.
    config = DataLoaderConfiguration(use_stateful_dataloader=True)
    gpu = torch.cuda.is_available()
    accelerator = Accelerator(
        mixed_precision="bf16" if gpu else "no", gradient_accumulation_steps=args.accumulate, dataloader_config=config
    )
    set_seed(args.seed)

    to_float = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    train = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(args.size), v2.RandomHorizontalFlip(), *to_float])
    view = v2.Compose([v2.ToImage(), v2.Resize(args.size * 8 // 7), v2.CenterCrop(args.size), *to_float])
    train_set, val_set = ImageFolder(args.data / "train", train), ImageFolder(args.data / "val", view)
    settings = {"num_workers": args.workers, "pin_memory": gpu}
    loader = DataLoader(train_set, args.batch_size, shuffle=True, drop_last=True, **settings)
    val_loader = DataLoader(val_set, args.batch_size, **settings)
    if not len(loader):
        raise SystemExit(f"{len(train_set)} training images are less than --batch-size {args.batch_size}")

    net = models.get_model(args.model, weights=None, num_classes=len(train_set.classes))
    optimizer = torch.optim.SGD(net.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer, loader, val_loader = accelerator.prepare(net, optimizer, loader, val_loader)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)

    progress = {"epoch": 0, "steps": 0}
    if args.resume:
        accelerator.load_state(str(args.checkpoint))
        progress = json.loads((args.checkpoint / "progress.json").read_text())

    for epoch in range(progress["epoch"], args.epochs):
        model.train()
        start, loss_sum, seen = time.perf_counter(), torch.zeros((), device=accelerator.device), 0
        for step, (images, labels) in enumerate(loader, progress["steps"] if epoch == progress["epoch"] else 0):
            with accelerator.accumulate(model):
                loss = criterion(model(images), labels)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            loss_sum += loss.detach() * len(labels)
            seen += len(labels)
            if args.save_every and (step + 1) % args.save_every == 0:
                save(accelerator, args.checkpoint, *divmod(epoch * len(loader) + step + 1, len(loader)))
            if args.stop_after and epoch * len(loader) + step + 1 == args.stop_after:
                raise SystemExit(f"stopped after {args.stop_after} steps")
        loss_sum, seen = (
            accelerator.gather(torch.tensor([x], device=accelerator.device)).sum() for x in (loss_sum, seen)
        )
        speed = seen.item() / (time.perf_counter() - start)

        model.eval()
        correct = count = 0
        with torch.inference_mode():
            for images, labels in val_loader:
                # Leaves out images that were repeated so that all processes have equally many.
                predicted, labels = accelerator.gather_for_metrics((model(images).argmax(1), labels))
                correct += (predicted == labels).sum().item()
                count += len(labels)
        accelerator.print(
            f"epoch {epoch + 1:3}/{args.epochs}  loss {loss_sum / seen:.4f}  acc {correct / count:7.2%}  "
            f"{speed:8,.0f} images/s  ({count} validation images)",
            flush=True,
        )
    accelerator.end_training()


def save(accelerator: accelerate.Accelerator, folder: Path, epoch: int, steps: int) -> None:
    """Save the network, the optimizer and the position in the epoch."""
    accelerator.save_state(str(folder))
    if accelerator.is_main_process:
        (folder / "progress.json").write_text(json.dumps({"epoch": epoch, "steps": steps}))
    accelerator.wait_for_everyone()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/ and val/")
    parser.add_argument("--loader", choices=["torchdali", "torch"], default="torchdali")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=256, help="images in a step of each process")
    parser.add_argument("--accumulate", type=int, default=1, help="number of steps whose gradients are added")
    parser.add_argument("--size", type=int, default=224, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)), help="num_workers")
    parser.add_argument("--checkpoint", type=Path, default=Path("accelerate-checkpoint"))
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints; 0 saves none")
    parser.add_argument("--stop-after", type=int, help="number of steps after which the run ends")
    parser.add_argument("--resume", action="store_true", help="resume from the checkpoint")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
