"""DALIDataModule where its loaders are not one of a dataset that begins with the epoch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same

pytest.importorskip("lightning.pytorch", reason="needs lightning")

from torch.utils.data import IterableDataset  # noqa: E402
from trained import BATCH, COUNT, TRAIN, Net, after, dataset, every_step, loader, numbered, trainer  # noqa: E402

from torchdali.lightning import DALIDataModule  # noqa: E402

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
]

STEPS = -(-COUNT // BATCH)


def test_a_loader_that_comes_round_again_looks_different(pictures: Path, tmp_path: Path) -> None:
    """Where another one is longer."""
    given = {"long": dataset("read", pictures), "short": numbered(pictures, 2 * BATCH)}
    made = DALIDataModule(given, batch_size=BATCH, train_transform=TRAIN, seed=5, train_options={"shuffle": False})
    trainer(tmp_path, every_step(tmp_path), max_epochs=2).fit(true := Net(), datamodule=made)
    looks = [images for _, _, _, (labels, images) in true.seen if labels[0] == 0]
    assert len(looks) == STEPS
    assert not any(torch.equal(one, other) for i, one in enumerate(looks) for other in looks[:i])
    trainer(tmp_path, max_epochs=2).fit(again := Net(), datamodule=made, ckpt_path=after(tmp_path, 3))
    assert same(again.seen, true.seen[3:])


def test_a_run_without_a_module_goes_on_with_one(pictures: Path, tmp_path: Path) -> None:
    torch.manual_seed(3)
    trainer(tmp_path, every_step(tmp_path), max_epochs=2).fit(true := Net(), loader("read", pictures, shuffle=True))
    torch.manual_seed(4)
    made = DALIDataModule(loader("read", pictures, shuffle=True))
    trainer(tmp_path, max_epochs=2).fit(again := Net(), datamodule=made, ckpt_path=after(tmp_path, 2))
    assert same(again.seen, true.seen[2:])


def test_a_stream_is_not_shuffled(pictures: Path, tmp_path: Path) -> None:
    asked = dataset("asked", pictures)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (asked[index] for index in range(COUNT))

    trainer(tmp_path, max_epochs=2).fit(
        net := Net(), datamodule=DALIDataModule(Stream(), batch_size=BATCH, train_transform=TRAIN)
    )
    assert [label for _, _, labels in net.labels() for label in labels] == [*range(COUNT)] * 2
