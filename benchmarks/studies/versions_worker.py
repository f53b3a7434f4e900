"""Measure one version of torchdali, for `versions.py`: a turn for each line of standard input."""

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any


def describe(torch: Any) -> dict[str, Any]:
    """Return the versions of the packages, and the GPU's name or None."""
    versions = {name: importlib.import_module(name).__version__ for name in ("torch", "torchvision", "nvidia.dali")}
    return {"versions": versions, "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


COMPILERS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "compiled": {},
    "graphs": {"mode": "reduce-overhead"},
}
"""Arguments of ``torch.compile`` for each kind of step. "graphs": the model's kernels are replayed by CUDA graphs."""


def make_step(torch: Any, device: Any, kind: str = "eager") -> Callable[[Any, Any], None]:
    """Return a training step of ResNet-18 in bfloat16, which takes images and labels."""
    models = importlib.import_module("torchvision.models")
    model = models.resnet18().to(device, memory_format=torch.channels_last)
    options = COMPILERS[kind]
    model = model if options is None else torch.compile(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def step(images: Any, labels: Any) -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, torch.bfloat16):
            outputs = model(images.contiguous(memory_format=torch.channels_last))
            loss = torch.nn.functional.cross_entropy(outputs, labels.to(device, non_blocking=True))
        loss.backward()
        optimizer.step()

    return step


def work(options: dict[str, Any], commands: Iterable[str]) -> None:
    """Print what is measured here, and the images per second of each turn that `commands` asks for."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[: options["cores"]]))
    import torch
    from torchvision.datasets import ImageFolder
    from torchvision.transforms import v2

    from torchdali import DALILoader

    scale = [v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.25] * 3)]
    transform = v2.Compose([v2.RandomResizedCrop(224), v2.RandomHorizontalFlip(), *scale])
    loader = DALILoader(ImageFolder(options["root"], transform), options["batch_size"], shuffle=True, drop_last=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    images = torch.randn(options["batch_size"], 3, 224, 224, device=device).to(memory_format=torch.channels_last)
    batch = [(images, torch.zeros(len(images), dtype=torch.long))]
    train = make_step(torch, device)

    def synchronize() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize()

    def turn(batches: Iterable[Any]) -> float:
        synchronize()
        start, count = time.perf_counter(), 0
        for _ in range(options["epochs"]):
            for images, labels in batches:
                count += len(images)
                if options["case"] == "resnet18":
                    train(images, labels)
        synchronize()
        return count / (time.perf_counter() - start)

    turn(loader)
    print(json.dumps(describe(torch)), flush=True)
    for command in commands:
        print(turn(loader if command.strip() == "loader" else batch * len(loader)), flush=True)


if __name__ == "__main__":
    work(json.loads(sys.argv[1]), sys.stdin)
