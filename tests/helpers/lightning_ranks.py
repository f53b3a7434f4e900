"""One rank of several with Lightning. It trains, validates and predicts, and saves the batches that it was given.

Run as ``python lightning_ranks.py STRATEGY PICTURES RESULTS``; tests/ecosystem/test_lightning_ranks.py does.
Lightning starts the other rank.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.trained import (
    BATCH,
    DEVICE,
    KINDS,
    TRAIN,
    Net,
    after,
    dataset,
    every_step,
    loader,
    numbered,
    plain,
    trainer,
)

from torchdali import DALILoader
from torchdali.lightning import DALIDataModule

EPOCHS = 2
SHARED = ("read, workers",)
STEPS = (4,)
"""The steps after which runs are resumed: within the second epoch."""


class Made(Net):
    """Makes its loaders in hooks, with ``distributed="auto"``."""

    def __init__(self, kind: str, pictures: Path) -> None:
        super().__init__()
        self.kind, self.pictures = kind, pictures

    def train_dataloader(self) -> Any:
        return loader(self.kind, self.pictures, shuffle=True, distributed="auto", seed=0)

    def val_dataloader(self) -> Any:
        return loader(self.kind, self.pictures, distributed="auto")

    predict_dataloader = val_dataloader


def fit(root: Path, net: Net, *loaders: Any, save: bool = False, path: Path | None = None, **options: Any) -> Net:
    callbacks = [every_step(root)] if save else []
    run = trainer(root, *callbacks, strategy=STRATEGY, devices=2, max_epochs=EPOCHS)
    torch.manual_seed(4 if path else 3)
    run.fit(net, *loaders, ckpt_path=path, **options)
    return net


def given(root: Path, make: Callable[..., Any]) -> dict[str, Any]:
    """Return what a rank is given by a loader without ``distributed``."""
    net = fit(root, Net(), make(shuffle=True), make())
    run = trainer(root, strategy=STRATEGY, devices=2)
    predicted: Any = run.predict(net, make())
    return {"seen": net.labels(), "validated": net.validated, "predicted": [batch.tolist() for batch in predicted]}


def kept(pictures: Path) -> dict[str, Any]:
    """Return whether the Trainer's loader has our arguments, and its types."""
    options = {
        "transform": TRAIN,
        "seed": 7,
        "cache": "host",
        "cache_bytes": 2**20,
        "fidelity": "fast",
        "device": DEVICE,
    }
    passed = DALILoader(numbered(pictures), BATCH, num_workers=2, shuffle=True, **options)
    run = trainer(Path(), strategy=STRATEGY, devices=2, max_epochs=1)
    run.fit(Net(), passed)
    used: Any = run.train_dataloader
    return {
        "same": {name: getattr(used, name) == value for name, value in options.items()},
        "type": type(used).__name__,
        "sampler": type(used.sampler).__name__,
        "window": used._options.prefetch_depth,
    }


def resumed(root: Path, kind: str, pictures: Path) -> dict[str, Any]:
    """Return the rest of resumed runs, and of uninterrupted ones."""
    found: dict[str, Any] = {}
    true = fit(root / "plain", Net(), loader(kind, pictures, shuffle=True), save=True).seen
    again = fit(root / "plain", Net(), loader(kind, pictures, shuffle=True), path=after(root / "plain", 4)).seen
    found["plain, 4"] = again, true[4:]

    def module() -> DALIDataModule:
        return DALIDataModule(
            *[dataset(kind, pictures)] * 2,
            train_transform=TRAIN,
            val_transform=TRAIN,
            batch_size=BATCH,
            num_workers=KINDS[kind],
            seed=5,
        )

    true = fit(root / "module", Net(), datamodule=module(), save=True).seen
    for step in STEPS:
        again = fit(root / "module", Net(), datamodule=module(), path=after(root / "module", step)).seen
        found[f"module, {step}"] = again, true[step:]
    return found


def run_all(pictures: Path, results: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"true": given(results, plain), "kept": kept(pictures)}
    for kind in SHARED:
        found[kind] = given(results, lambda kind=kind, **own: loader(kind, pictures, **own))
    net = fit(results, Made("asked", pictures))
    predicted: Any = trainer(results, strategy=STRATEGY, devices=2).predict(net)
    found["auto"] = {
        "seen": net.labels(),
        "validated": net.validated,
        "predicted": [batch.tolist() for batch in predicted],
    }
    found["resumed"] = resumed(results / "resumed", "asked, workers", pictures)
    return found


class Spawned(Net):
    """Saves its labels from its own process."""

    def __init__(self, results: Path) -> None:
        super().__init__()
        self.results = results

    def on_train_end(self) -> None:
        torch.save(self.labels(), self.results / str(self.global_rank))


def main() -> None:
    pictures, results = map(Path, sys.argv[2:])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if STRATEGY in ("ddp_spawn", "fsdp"):
        made = DALIDataModule(loader("read, workers", pictures, shuffle=True), loader("asked", pictures))
        fit(results, Spawned(results), datamodule=made)
        return
    found = run_all(pictures, results)
    torch.save(found, results / str(torch.distributed.get_rank()))
    torch.distributed.barrier()


STRATEGY = sys.argv[1] if len(sys.argv) == 4 else "ddp"

if __name__ == "__main__":
    main()
