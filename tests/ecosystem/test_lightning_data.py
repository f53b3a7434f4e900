"""DALIDataModule with several loaders, with checkpoints of other runs, with streams, and without a Trainer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same

pytest.importorskip("lightning.pytorch", reason="needs lightning")

from helpers.trained import BATCH, COUNT, MARKS, TRAIN, Net, after, dataset, every_step, loader, numbered, trainer
from lightning.pytorch import Callback
from torch.utils.data import DistributedSampler, IterableDataset

from torchdali import DALILoader
from torchdali.lightning import DALIDataModule

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

STEPS = -(-COUNT // BATCH)


@pytest.mark.parametrize("told", [False, True])
def test_a_loader_that_is_repeated_within_an_epoch_looks_different(pictures: Path, tmp_path: Path, told: bool) -> None:
    """If another loader is longer; also with samplers that are told the epoch, as with several processes."""
    given = {"long": dataset("read", pictures), "short": numbered(pictures, 2 * BATCH)}
    options: dict[str, Any] = {"batch_size": BATCH, "seed": 5}
    made = DALIDataModule(given, train_transform=TRAIN, train_options={"shuffle": False}, **options)
    if told:
        options |= {"transform": TRAIN, "device": "cpu"}
        samplers = {name: DistributedSampler(data, 1, 0, shuffle=False) for name, data in given.items()}
        made = DALIDataModule({name: DALILoader(given[name], sampler=samplers[name], **options) for name in given})
    trainer(tmp_path, every_step(tmp_path), max_epochs=2).fit(true := Net(), datamodule=made)
    looks = [images for _, _, _, (labels, images) in true.seen if labels[0] == 0]
    assert len(looks) == STEPS
    assert not any(torch.equal(look, earlier) for i, look in enumerate(looks) for earlier in looks[:i])
    trainer(tmp_path, max_epochs=2).fit(again := Net(), datamodule=made, ckpt_path=after(tmp_path, 3))
    assert same(again.seen, true.seen[3:])


class SaveAtStart(Callback):
    """Writes a checkpoint before the first batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.save_checkpoint(self.path)


def test_a_run_resumes_from_the_checkpoint_of_another(pictures: Path, tmp_path: Path) -> None:
    """Of one without a data module, and of two that ended before their first batch."""

    def fit(seed: int, path: Path | None, *callbacks: Any, **data: Any) -> list[Any]:
        torch.manual_seed(seed)
        trainer(tmp_path, *callbacks, max_epochs=2).fit(net := Net(), **data, ckpt_path=path)
        return net.seen

    given = loader("read", pictures, shuffle=True)
    made = DALIDataModule(given)
    own = tmp_path / "own"
    true = fit(3, None, every_step(tmp_path), train_dataloaders=given)
    assert same(fit(4, after(tmp_path, 2), every_step(own), datamodule=made), true[2:])
    assert type(given) is DALILoader, "it was copied"
    fit(5, after(own, 3), SaveAtStart(tmp_path / "again"), datamodule=made)
    assert same(fit(6, tmp_path / "again", datamodule=made), true[3:])
    assert fit(7, after(own, len(true)), datamodule=made) == []
    assert same(fit(3, None, SaveAtStart(tmp_path / "before"), datamodule=made), true)
    assert same(fit(3, tmp_path / "before", datamodule=made), true)


def test_a_stream_is_not_shuffled(pictures: Path, tmp_path: Path) -> None:
    asked = dataset("asked", pictures)

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return (asked[index] for index in range(COUNT))

    trainer(tmp_path, max_epochs=2).fit(
        net := Net(), datamodule=DALIDataModule(Stream(), batch_size=BATCH, train_transform=TRAIN)
    )
    assert [label for _, _, labels in net.labels() for label in labels] == [*range(COUNT)] * 2


def test_a_module_gives_batches_without_a_trainer(pictures: Path, tmp_path: Path) -> None:
    class Found:
        """A dataset that does not inherit from torch's."""

        asked = dataset("asked", pictures)

        def __len__(self) -> int:
            return COUNT

        def __getitem__(self, index: int) -> Any:
            return self.asked[index]

    given = loader("read", pictures)
    options: dict[str, Any] = {"batch_size": BATCH, "device": "cpu", "train_transform": TRAIN, "val_transform": TRAIN}
    made = DALIDataModule(Found(), (Found(), given), seed=5, train_options={"shuffle": False}, **options)
    seen = made.train_dataloader()
    first, second = ([images for images, _ in seen] for _ in range(2))
    assert not torch.equal(first[0], second[0]), "epochs are counted"
    validated, last = made.val_dataloader()
    assert [label for _, labels in validated for label in labels.tolist()] == [*range(COUNT)]
    assert last is given
    made.load_state_dict(made.state_dict())
    trainer(tmp_path, max_epochs=1, limit_val_batches=1).fit(net := Net(), datamodule=made)
    assert same([images for _, _, (_, images) in net.seen], first)
