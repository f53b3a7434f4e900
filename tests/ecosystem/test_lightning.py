"""Lightning's Trainer with DALILoader and with DALIDataModule gives DataLoader's batches, and resumes."""

from __future__ import annotations

import inspect
import pickle
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same

pl = pytest.importorskip("lightning.pytorch", reason="needs lightning")

from helpers.trained import (  # noqa: E402
    BATCH,
    COUNT,
    KINDS,
    MARKS,
    SIZE,
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
from lightning.fabric.utilities.data import _replace_dunder_methods  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler  # noqa: E402
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402

from torchdali import DALILoader  # noqa: E402
from torchdali.lightning import DALIDataModule, TrainLoader, _adapt_to_ranks, _bases  # noqa: E402

pytestmark = [
    *MARKS,
    pytest.mark.filterwarnings("ignore:You have overridden `on_before_batch_transfer`"),
    pytest.mark.filterwarnings("ignore:You requested to overfit but enabled"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

STEPS = -(-COUNT // BATCH)


@pytest.fixture(autouse=True)
def _unpatched() -> Iterator[None]:
    """Take back the patches that Lightning leaves on DataLoader if a hook raises."""
    methods = {name: DataLoader.__dict__.get(name) for name in ("__init__", "__setattr__", "__delattr__")}
    own = DALILoader.__dict__["__init__"]
    yield
    DALILoader.__init__ = own
    for name, method in methods.items():
        if method is not None:
            setattr(DataLoader, name, method)
        elif name in DataLoader.__dict__:
            delattr(DataLoader, name)


def in_order(first: int = 0, end: int = COUNT) -> list[list[int]]:
    return [list(range(start, min(start + BATCH, end))) for start in range(first, end, BATCH)]


# A loader that is passed to the Trainer


TRAINERS: list[tuple[str, dict[str, Any]]] = [
    ("asked", {"limit_train_batches": 4, "limit_val_batches": 2, "num_sanity_val_steps": 1}),
    ("read", {"val_check_interval": 0.5, "limit_val_batches": 0.5}),
    ("asked", {"num_sanity_val_steps": 0, "check_val_every_n_epoch": 2}),
    ("read", {"overfit_batches": 2}),
    ("asked", {"fast_dev_run": 2}),
    ("read", {"max_steps": STEPS + 2, "max_epochs": -1}),
    ("asked", {"reload_dataloaders_every_n_epochs": 1}),
]


@pytest.mark.parametrize(("kind", "options"), TRAINERS, ids=["-".join(options) for _, options in TRAINERS])
def test_batches_are_dataloaders(pictures: Path, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    results: list[Any] = []
    for make in (plain, lambda **own: loader(kind, pictures, **own)):
        torch.manual_seed(3)
        net = Net()
        trainer(tmp_path, **options).fit(net, make(shuffle=True), [make(), make(batch_size=9)])
        results.append((net.labels(), net.validated))
    theirs, ours = results
    assert ours == theirs
    assert min(map(len, theirs)) >= 2


@pytest.mark.parametrize("mode", ["min_size", "max_size_cycle"])
def test_batches_of_several_loaders_at_once_are_dataloaders(pictures: Path, tmp_path: Path, mode: Any) -> None:
    def fit(make: Any) -> Net:
        torch.manual_seed(3)
        both = pl.utilities.CombinedLoader({"a": make(shuffle=True), "b": make(batch_size=9, shuffle=True)}, mode)
        trainer(tmp_path).fit(net := Net(), both)
        return net

    theirs, ours = fit(plain), fit(lambda **own: loader("read", pictures, **own))
    assert ours.labels() == theirs.labels()
    assert len(theirs.seen) == 3 * (3 if mode == "min_size" else STEPS)


@pytest.mark.parametrize("kind", ["read", "asked, workers"])
def test_the_rest_of_an_epoch_may_be_skipped(pictures: Path, tmp_path: Path, kind: str) -> None:
    torch.manual_seed(3)
    trainer(tmp_path).fit(net := Net(skip_from=2), loader(kind, pictures, shuffle=True))
    assert [seen[:2] for seen in net.seen] == [[epoch, number] for epoch in range(3) for number in range(2)]
    assert len({tuple(labels) for _, _, labels in net.labels()}) == 6


@pytest.mark.parametrize(("kind", "steps"), [("read", STEPS + 2), ("asked, workers", 1)])
def test_a_run_resumes_within_an_epoch(pictures: Path, tmp_path: Path, kind: str, steps: int) -> None:
    torch.manual_seed(3)
    save = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=steps, save_top_k=-1)
    trainer(tmp_path, save).fit(true := Net(), loader(kind, pictures, shuffle=True))
    torch.manual_seed(4)
    again = Net()
    trainer(tmp_path).fit(again, loader(kind, pictures, shuffle=True), ckpt_path=after(tmp_path, steps))
    assert len(again.seen) == 3 * STEPS - steps
    assert same(again.seen, true.seen[steps:])


@pytest.mark.parametrize("kind", ["read, workers", "asked"])
def test_order_with_fabric_is_dataloaders(pictures: Path, kind: str) -> None:
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    orders: list[list[list[int]]] = []
    for own in (plain(shuffle=True), loader(kind, pictures, shuffle=True, device="cpu")):
        torch.manual_seed(3)
        orders.append([labels.tolist() for _, labels in fabric.setup_dataloaders(own)])
    assert orders[0] == orders[1]
    assert len(orders[0]) == STEPS


def test_the_trainer_copies_a_loader_with_all_of_its_arguments(pictures: Path, tmp_path: Path) -> None:
    """As it does for prediction, and with several processes."""
    given: dict[str, Any] = {
        "transform": TRAIN,
        "batch_transform": lambda *parts: [*parts],
        "device": "cpu",
        "seed": 7,
        "fidelity": "fast",
        "cache": "host",
        "cache_bytes": 2**20,
        "on_error": "replace",
        "max_errors": 3,
        "images": 0,
        "decode_bytes": 2**28,
    }
    ours, theirs = (set(inspect.signature(kind).parameters) for kind in (DALILoader, DataLoader))
    own = ours - theirs
    assert set(given) == own - {"distributed", "cache_dir"}, "the copy has a sampler, and files are not fetched"
    given |= {"num_workers": 2, "timeout": 50.0}
    run = trainer(tmp_path)
    for options in (given, given | {"prefetch_factor": 3}):
        passed = DALILoader(dataset("read", pictures), BATCH, **options)
        batches: Any = run.predict(Net(), passed)
        copied: Any = run.predict_dataloaders
        assert [batch.tolist() for batch in batches] == in_order()
        assert copied is not passed
        assert type(copied) is DALILoader
        assert {name: getattr(copied, name) for name in given} == given
        assert copied._options.prefetch_depth == passed._options.prefetch_depth == options.get("prefetch_factor")


class Writer(pl.callbacks.BasePredictionWriter):
    """Keeps the indices that Lightning gives with each prediction."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.pairs: list[Any] = []

    def write_on_batch_end(self, trainer: Any, net: Any, prediction: Any, indices: Any, *_: Any) -> None:
        self.pairs.append((indices, prediction.tolist()))


@pytest.mark.parametrize("kind", ["read, workers", "asked"])
def test_predictions_come_with_their_indices(pictures: Path, tmp_path: Path, kind: str) -> None:
    """Although the sampler is asked far ahead."""
    trainer(tmp_path, writer := Writer()).predict(Net(), loader(kind, pictures, drop_last=True))
    assert writer.pairs == [(labels, labels) for labels in in_order()]


def test_batches_are_not_copied_to_the_device_again(pictures: Path, tmp_path: Path, device: str) -> None:
    class Watched(Net):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.before = [part.data_ptr() for part in batch]
            return batch

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert [part.data_ptr() for part in batch] == self.before
            assert {part.device.type for part in batch} == {device}
            return super().training_step(batch, batch_idx)

    kind = {"cuda": "gpu"}.get(device, device)
    for run in (True, False):
        net, fit = Watched(), trainer(tmp_path, accelerator=kind, max_epochs=1).fit
        if run:
            fit(net, loader("read", pictures, device=device))
        else:
            fit(net, datamodule=DALIDataModule(dataset("asked", pictures), train_transform=TRAIN, batch_size=BATCH))
        assert len(net.seen) == STEPS


# The data module


def module(kind: str, pictures: Path, **options: Any) -> DALIDataModule:
    options = {"batch_size": BATCH, "num_workers": KINDS[kind], "train_transform": TRAIN, "seed": 5, **options}
    return DALIDataModule(dataset(kind, pictures), **options)


RESUMED: dict[str, tuple[str, dict[str, Any]]] = {
    "workers": ("asked, workers", {"max_epochs": 2}),
    "reload": ("asked", {"reload_dataloaders_every_n_epochs": 1, "max_epochs": 2}),
    "limit": ("read", {"limit_train_batches": 2}),
    "max_steps": ("read", {"max_epochs": -1, "max_steps": 2 * STEPS + 1}),
}


@pytest.mark.parametrize(("kind", "options"), RESUMED.values(), ids=RESUMED.keys())
def test_a_run_resumes_after_any_step(pictures: Path, tmp_path: Path, kind: str, options: dict[str, Any]) -> None:
    """Also after the last step of an epoch, where Lightning leads loaders that have a state into an empty epoch."""
    torch.manual_seed(3)
    trainer(tmp_path, every_step(tmp_path), **options).fit(true := Net(), datamodule=module(kind, pictures))
    for step in (1, STEPS, STEPS + 2) if KINDS[kind] else range(1, len(true.seen)):
        torch.manual_seed(4)
        run = trainer(tmp_path, **options)
        run.fit(again := Net(), datamodule=module(kind, pictures), ckpt_path=after(tmp_path, step))
        assert same([seen[2:] for seen in again.seen], [seen[2:] for seen in true.seen[step:]]), step


@pytest.mark.parametrize("kind", ["read, workers", "asked"])
def test_a_run_resumes_after_an_epoch(pictures: Path, tmp_path: Path, kind: str) -> None:
    """From the checkpoint that Lightning writes by default, from which it restores no loader."""

    def fit(made: DALIDataModule, number: int, path: Path | None = None) -> list[Any]:
        torch.manual_seed(number)
        save = pl.callbacks.ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1)
        trainer(tmp_path, save, max_epochs=2).fit(net := Net(), datamodule=made, ckpt_path=path)
        return net.seen

    true = fit(module(kind, pictures), 3)
    assert same(fit(module(kind, pictures), 4, after(tmp_path, STEPS)), true[STEPS:])
    given = loader(kind, pictures, shuffle=True, seed=5)
    assert same(fit(DALIDataModule(given), 4, after(tmp_path, STEPS)), true[STEPS:])


class Brighter(DALILoader[Any]):
    """A subclass that changes its batches."""

    def __iter__(self) -> Iterator[Any]:
        return ((images + 1, labels) for images, labels in super().__iter__())


def test_a_subclass_keeps_its_batches_in_a_data_module(pictures: Path, tmp_path: Path) -> None:
    def fit(kind: Any, folder: Path, path: Path | None = None) -> list[Any]:
        given = kind(dataset("read", pictures), BATCH, shuffle=True, seed=5, transform=TRAIN, device="cpu")
        run = trainer(folder, every_step(folder), max_epochs=2, accelerator="cpu")
        run.fit(net := Net(), datamodule=DALIDataModule(given), ckpt_path=path)
        assert type(run.train_dataloader).__name__ == ("TrainLoader" if kind is DALILoader else "Brighter")
        return net.seen

    torch.manual_seed(3)
    unchanged = fit(DALILoader, tmp_path / "plain")
    torch.manual_seed(3)
    true = fit(Brighter, tmp_path / "own")
    assert same([(labels, images) for *_, (labels, images) in true], [(x, y + 1) for *_, (x, y) in unchanged])
    torch.manual_seed(4)
    assert same(fit(Brighter, tmp_path / "own", after(tmp_path / "own", 2)), true[2:])


def test_a_run_resumes_whose_length_was_asked_for(pictures: Path, tmp_path: Path) -> None:
    """Lightning then takes the loaders before it has read their states, and never loads them."""

    class Scheduled(Net):
        def configure_optimizers(self) -> Any:
            assert self.trainer.estimated_stepping_batches == 3 * STEPS
            return super().configure_optimizers()

    torch.manual_seed(3)
    trainer(tmp_path, every_step(tmp_path)).fit(true := Scheduled(), datamodule=module("read", pictures))
    for step in (2, STEPS):
        run = trainer(tmp_path)
        run.fit(again := Scheduled(), datamodule=module("read", pictures), ckpt_path=after(tmp_path, step))
        assert same(again.seen, true.seen[step:])


def test_the_trainer_numbers_epochs_which_look_different(pictures: Path, tmp_path: Path) -> None:
    looks: list[list[Any]] = []
    for reload in (0, 1):
        made = module("read", pictures, train_options={"shuffle": False})
        trainer(tmp_path, reload_dataloaders_every_n_epochs=reload).fit(net := Net(), datamodule=made)
        looks.append([images for _, _, (_, images) in net.seen[::STEPS]])
    assert same(*looks)
    alone = loader("read", pictures, seed=5)
    assert same(looks[0], [next(iter(alone))[0] for _ in range(3)])
    assert not torch.equal(looks[0][0], looks[0][1])


def test_order_of_a_modules_loaders_is_dataloaders(pictures: Path, tmp_path: Path) -> None:
    """Two train loaders draw in turn, and the iterator of the validation loader outlives its epoch."""

    def fit(make: Any, of_module: bool) -> Net:
        torch.manual_seed(3)
        train = {"a": make(shuffle=True), "b": make(shuffle=True)}
        val = make(shuffle=True, generator=torch.Generator().manual_seed(7))
        data: Any = {"datamodule": DALIDataModule(train, val)} if of_module else {}
        given = () if of_module else (train, val)
        trainer(tmp_path, limit_val_batches=1).fit(net := Net(), *given, **data)
        return net

    theirs = fit(plain, False)
    for of_module in (False, True):
        ours = fit(lambda **own: loader("read", pictures, **own), of_module)
        assert ours.labels() == theirs.labels()
        assert ours.validated == theirs.validated
    assert len(theirs.validated) > 3


@pytest.mark.parametrize(("step", "epoch"), [(2, 0), (STEPS, 1)])
def test_a_checkpoint_that_does_not_fit_is_warned_of(pictures: Path, tmp_path: Path, step: int, epoch: int) -> None:
    trainer(tmp_path, every_step(tmp_path), max_epochs=2).fit(Net(), datamodule=module("read", pictures))
    other = module("read", pictures, train_options={"sampler": SequentialSampler(range(COUNT))})
    text = (
        f"Epoch {epoch} begins again from its start, not where it was: the state must come from a loader like this "
        "one; make the loader as it was when the state was saved: sampler is 'RandomS"
    )
    with pytest.warns(UserWarning, match=text):
        trainer(tmp_path, max_epochs=2).fit(net := Net(), datamodule=other, ckpt_path=after(tmp_path, step))
    assert [labels for number, _, labels in net.labels() if number == epoch] == in_order()[: STEPS - step % STEPS]


def test_any_number_of_ranks_resumes_from_the_state_of_the_first(pictures: Path) -> None:
    def share(rank: int, ranks: int) -> DALILoader[Any]:
        sampler = DistributedSampler(range(24), ranks, rank)  # pyright: ignore
        return DALILoader(numbered(pictures, 24), BATCH, sampler=sampler, transform=TRAIN, device="cpu", seed=1)

    first = [iter(share(rank, 2)) for rank in range(2)]
    had = [label for iterator in first for label in next(iterator)[1].tolist()]
    begun = share(0, 2)
    next(iter(begun))
    state, rest = begun.state_dict(), []
    for rank in range(4):
        again: Any = share(rank, 4)
        again.load_state_dict(_adapt_to_ranks(state, again))
        rest += [label for _, labels in again for label in labels.tolist()]
    assert sorted(had + rest) == list(range(24))


def test_a_checkpoint_loaded_for_a_test_is_not_used_in_a_fit(pictures: Path, tmp_path: Path) -> None:
    made = module("read", pictures, test=dataset("read", pictures), test_transform=TRAIN)
    trainer(tmp_path, every_step(tmp_path), max_epochs=1).fit(net := Net(), datamodule=made)
    trainer(tmp_path).test(net, datamodule=made, ckpt_path=after(tmp_path, 2))
    trainer(tmp_path, max_epochs=1).fit(again := Net(), datamodule=made)
    assert len(again.seen) == STEPS


def test_each_stage_has_its_own_options(pictures: Path, tmp_path: Path) -> None:
    """Folders, lists and dictionaries; transforms; shuffling; the device of the strategy."""
    val = v2.Compose([v2.ToImage(), v2.CenterCrop(SIZE), v2.ToDtype(torch.float32)])
    made = DALIDataModule(
        {"a": pictures, "b": str(pictures)},
        [dataset("read", pictures), plain()],
        predict=dataset("asked", pictures),
        **{f"{stage}_transform": val for stage in ("val", "predict")},
        train_transform=TRAIN,
        batch_size=BATCH,
        train_options={"drop_last": True, "batch_transform": lambda images, labels: [images + 1000, labels]},
        val_options={"batch_size": 7},
    )
    run = trainer(tmp_path, max_epochs=1)
    run.fit(net := Net(), datamodule=made)
    first, second = run.train_dataloader["a"], run.train_dataloader["b"]
    assert first.dataset is second.dataset, "a folder is listed once"
    assert type(first) is type(second) is TrainLoader
    assert (str(first.device), first.drop_last, first.batch_size) == ("cpu", True, BATCH)
    assert len(net.seen) == 24 // BATCH
    assert all(part[1].min() >= 1000 for seen in net.seen for part in seen[2:])
    assert net.seen[0][2][0] != net.seen[0][3][0], "both shuffle"
    validated = [labels for _, _, number, labels in net.validated if number == 0][-4:]
    assert [len(labels) for labels in validated] == [7, 7, 7, 2]
    assert [label for labels in validated for label in labels] == list(range(COUNT))
    assert [labels for _, _, number, labels in net.validated if number == 1][-STEPS:] == in_order()
    predicted: Any = run.predict(net, datamodule=made)
    assert [batch.tolist() for batch in predicted] == in_order()


def test_a_missing_dataset_is_named(pictures: Path, tmp_path: Path) -> None:
    made = module("read", pictures)
    trainer(tmp_path, max_epochs=1).fit(net := Net(), datamodule=made)
    assert net.validated == []
    for call, stage in (("validate", "val"), ("test", "test"), ("predict", "predict")):
        with pytest.raises(
            pl.utilities.exceptions.MisconfigurationException, match=f"`{stage}_dataloader` must be implemented"
        ):
            getattr(trainer(tmp_path), call)(net, datamodule=made)
    for options, text in (
        ({"val_transform": TRAIN}, "transform: for val= there is no dataset"),
        ({"test": plain(), "test_options": {"drop_last": True}}, "drop_last: for test= there is no dataset"),
        ({"train": [plain(), plain()], "train_transform": TRAIN}, "transform: for train= there is no dataset"),
    ):
        with pytest.raises(ValueError, match=text):
            DALIDataModule(**options)  # pyright: ignore


def test_a_users_own_samplers_stay(pictures: Path, tmp_path: Path) -> None:
    shares = DistributedSampler(range(COUNT), 2, 1, shuffle=False)  # pyright: ignore
    for options in ({"sampler": shares}, {"batch_sampler": torch.utils.data.BatchSampler(shares, BATCH, False)}):
        made = module("read", pictures, train_options=options)
        trainer(tmp_path, max_epochs=1).fit(net := Net(), datamodule=made)
        assert [label for _, _, labels in net.labels() for label in labels] == list(shares)


def test_an_import_without_lightning_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("lightning", "pytorch_lightning"):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r"^torchdali.lightning needs Lightning: pip install lightning$"):
        _bases()
    other = types.ModuleType("pytorch_lightning")
    other.LightningDataModule = pl.LightningDataModule  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(sys.modules, "pytorch_lightning", other)
    assert _bases() == (pl.LightningDataModule,), "either package suffices"


def test_a_loader_can_be_pickled_though_lightning_patches_it(dataset: ImageFolder) -> None:
    with pytest.raises(KeyError), _replace_dunder_methods(DataLoader, "dataset"):
        raise KeyError
    loader = DALILoader(dataset, 3, device="cpu")
    labels = [labels.tolist() for _, labels in loader]
    assert "__pl_attrs_record" in vars(loader)
    assert [labels.tolist() for _, labels in pickle.loads(pickle.dumps(loader))] == labels


@pytest.mark.parametrize("options", [{"batch_size": 7}, {"seed": 3, "num_workers": 2}])
def test_options_of_finished_loaders_are_refused(options, pictures):
    loader = DALILoader(ImageFolder(pictures, v2.Compose([v2.CenterCrop(24), v2.ToImage()])), device="cpu")
    with pytest.raises(ValueError, match="there is no dataset whose loader would take this"):
        DALIDataModule(loader, [loader, loader], **options)
    DALIDataModule(loader, loader.dataset, **options)
