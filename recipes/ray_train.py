"""Train a torchvision network on an image folder with Ray Train, on one machine or on a cluster.

What it shows: ``prepare_data_loader`` and the loader are imported from torchdali, and nothing else changes. Each worker
reads, decodes and transforms its own share of the images, on its own GPU if there is one.

DATA holds ``train/`` with one folder of images per class. All workers must see it under the same path. Ray starts the
workers itself. On a cluster, run the command on one of its machines::

    pip install 'ray[train]'
    python recipes/ray_train.py DATA
    python recipes/ray_train.py DATA --workers 16

If you have no dataset, ``torchdali demo`` writes a small one to ``torchdali-demo/pictures``. For that one, add
``--size 96 --batch-size 32 --lr 0.05 --epochs 5``. A CPU is enough.

What to expect: one line for each epoch, with the loss and the number of images of all workers together. It comes from
the first worker, so Ray puts the worker's process number before it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import ray.train.torch
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch import distributed, nn
from torchvision import models
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader as DataLoader
from torchdali.ray import prepare_data_loader  # not ray.train.torch's

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def train_loop(config: dict[str, Any]) -> None:
    """Train in one worker."""
    train = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(config["size"]),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(MEAN, STD),
        ]
    )
    dataset = ImageFolder(config["data"], train)
    loader = DataLoader(dataset, config["batch_size"], shuffle=True)
    loader = prepare_data_loader(loader)

    # Ray pickles this function, and would take `dataset.classes` for the module `torch.classes`.
    net = models.get_model(config["model"], weights=None, num_classes=len(dataset.class_to_idx))
    net = ray.train.torch.prepare_model(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=config["lr"], momentum=0.9)
    context = ray.train.get_context()
    for epoch in range(config["epochs"]):
        if context.get_world_size() > 1:
            loader.sampler.set_epoch(epoch)
        sums = torch.zeros(2, device=ray.train.torch.get_device())
        for images, labels in loader:
            loss = nn.functional.cross_entropy(net(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            sums += torch.stack([loss.detach() * len(labels), torch.full_like(loss, len(labels))])
        if context.get_world_size() > 1:
            distributed.all_reduce(sums)
        mean, count = (sums[0] / sums[1]).item(), int(sums[1])
        if context.get_world_rank() == 0:
            print(f"epoch {epoch + 1:3}/{config['epochs']}  loss {mean:.4f}  {count} images", flush=True)
        ray.train.report({"loss": mean, "images": count})


def main() -> None:
    args = parse_args()
    trainer = TorchTrainer(
        train_loop,
        train_loop_config={**vars(args), "data": str((args.data / "train").resolve())},
        scaling_config=ScalingConfig(num_workers=args.workers, use_gpu=torch.cuda.is_available()),
        run_config=RunConfig(storage_path=str(args.results.resolve())),
    )
    trainer.fit()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("data", type=Path, help="folder with train/")
    parser.add_argument("--workers", type=int, default=2, help="processes of Ray, each with a GPU if there are any")
    parser.add_argument("--model", default="resnet18", help="any of torchvision.models.list_models()")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=64, help="images in a step of each worker")
    parser.add_argument("--size", type=int, default=224, help="height and width that the network sees")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--results", type=Path, default=Path("ray-results"), help="folder in which Ray keeps the run")
    return parser.parse_args()


if __name__ == "__main__":
    main()
