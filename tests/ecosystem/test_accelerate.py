"""Accelerate's prepare() gives each process the share that it gives it of a DataLoader, from DALI."""

from __future__ import annotations

import copy
import io
import pickle
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import same

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

from helpers.accelerated import (  # noqa: E402
    BATCH,
    CONFIGS,
    OPTIONS,
    SHARES,
    SKIPPED,
    Labels,
    Stream,
    accelerator,
    both,
    datasets,
    forget,
    looks,
    made,
)
from helpers.forked_ranks import run_ranks  # noqa: E402
from helpers.ranked import TRAIN  # noqa: E402

from torchdali import DALILoader  # noqa: E402
from torchdali.accelerate import Accelerator, prepare_data_loader, skip_first_batches  # noqa: E402

pytestmark = [
    pytest.mark.timeout(190),
    pytest.mark.filterwarnings("ignore:.*accelerate.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
RANKS = 2
Seen = list[dict[str, Any]]


@pytest.fixture(scope="module")
def seen(pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What each rank saw."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run_ranks("accelerated.py", *((rank, RANKS, port, pictures, folder) for rank in range(RANKS)), limit=170)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(RANKS)]


@pytest.fixture(autouse=True)
def _states() -> Any:
    yield
    forget()


@pytest.mark.slow
@pytest.mark.parametrize("name", [", ".join(share) for share in SHARES])
def test_shares_of_ranks_are_dataloaders(seen: Seen, name: str) -> None:
    """And so are lengths, the mark of an epoch's end and what is gathered for a metric."""
    for rank in seen:
        ours, theirs = rank[name]
        assert ours == theirs
        assert len(ours[0]) == 2
        assert ours[0][0][1], "an epoch has batches"


@pytest.mark.parametrize(("kind", "config", "options"), SHARES)
def test_epochs_of_one_process_are_dataloaders(pictures: Path, kind: str, config: str, options: str) -> None:
    ours, theirs = both(datasets(pictures)[kind], CONFIGS[config], OPTIONS[options])
    assert ours == theirs
    assert ours[0][0][1], "an epoch has batches"


@pytest.mark.slow
@pytest.mark.parametrize("kind", SKIPPED)
def test_ranks_resume_and_skip_first_batches(seen: Seen, kind: str) -> None:
    for rank in seen:
        ours, true = rank[f"{kind}, resumed"]
        assert len(true) == 5
        assert same(ours, true)
        ours, theirs = rank[f"{kind}, skipped"]
        assert ours == theirs
        assert ours[0] == len(ours[1])


@pytest.mark.slow
def test_a_sampler_of_batches_is_shared(seen: Seen) -> None:
    for rank in seen:
        ours, theirs = rank["batched"]
        assert ours == theirs
        assert list(map(len, ours)) == [3, 1]


@pytest.mark.slow
def test_dali_makes_the_batches_of_every_rank(seen: Seen, pictures: Path) -> None:
    alone: dict[int, torch.Tensor] = {}
    for images, labels in looks(pictures)[1:]:
        alone |= dict(zip(labels.tolist(), images, strict=True))
    for rank in seen:
        (device, kind), *batches = rank["looks"]
        assert (torch.device(device).type, kind) == ("cpu", "_Shard")
        assert all(
            torch.equal(image, alone[label])
            for images, labels in batches
            for image, label in zip(images, labels.tolist(), strict=True)
        )


# In this process


def test_first_batches_of_an_unprepared_loader_are_skipped(pictures: Path) -> None:
    whole, rest = list(made(pictures, seed=1)), skip_first_batches(made(pictures, seed=1), 2)
    assert type(rest) is DALILoader
    for (images, labels), (true_images, true_labels) in zip(rest, whole[2:], strict=True):
        assert torch.equal(labels, true_labels)
        assert images.dtype == true_images.dtype


def test_a_use_that_would_lose_dali_is_refused(pictures: Path) -> None:
    with pytest.raises(TypeError, match=r"nothing would run in DALI: use the Accelerator of torchdali\.accelerate"):
        accelerate.Accelerator(cpu=True).prepare(made(pictures))
    of = accelerator(True)
    loader = of.prepare(made(pictures))
    rest = accelerate.skip_first_batches(loader, 1)
    with pytest.raises(ValueError, match=r"plain DataLoader of a prepared DALILoader.*skip_first_batches of torchdali"):
        next(iter(rest))
    assert [len(labels) for _, labels in skip_first_batches(loader, 4)] == [4, 3]
    with pytest.raises(ValueError, match="leave out distributed='auto'"):
        of.prepare(made(pictures, distributed="auto"))
    of = accelerator(True, dispatch_batches=True, use_stateful_dataloader=True)
    with pytest.raises(ValueError, match="with dispatch_batches the first process takes batches ahead"):
        of.prepare(made(pictures))


def test_other_objects_and_prepared_loaders_pass(pictures: Path) -> None:
    of = accelerator(True)
    plain: Any = torch.utils.data.DataLoader([1, 2, 3])
    model = torch.nn.Linear(1, 1)
    theirs, loader, same_model = of.prepare(plain, made(pictures), model)
    assert type(theirs) is accelerate.data_loader.DataLoaderShard
    assert same_model is model
    assert of.prepare(loader) is loader
    assert of._dataloaders == [theirs, loader]
    assert isinstance(loader, DALILoader)
    assert [batch.tolist() for batch in of.skip_first_batches(theirs, 1)] == [[2], [3]]
    assert len(of.skip_first_batches(loader, 2)) == 4
    of = accelerator(True, dispatch_batches=True)
    loader = of.prepare(made(pictures))
    assert of.prepare(loader) is loader
    assert of._dataloaders == [loader]


@pytest.mark.parametrize(
    ("again", "dispatch"), [(copy.deepcopy, False), (lambda loader: pickle.loads(pickle.dumps(loader)), True)]
)
def test_copies_are_prepared_loaders(pictures: Path, again: Any, dispatch: bool) -> None:
    of = accelerator(True, dispatch_batches=dispatch)
    loader = again(of.prepare(made(pictures, seed=1)))
    assert of.prepare(loader) is loader
    true = of.prepare(made(pictures, seed=1))
    for one in (loader, true):
        one.set_epoch(5)
    assert same([*loader], [*true])
    with pytest.raises(ValueError, match="Accelerate made a plain DataLoader of a prepared DALILoader"):
        next(iter(accelerate.skip_first_batches(loader, 1)))


@pytest.mark.parametrize(("kind", "dispatch"), [("read", True), ("stream", False)])
def test_first_batches_are_skipped_as_dataloaders(pictures: Path, kind: str, dispatch: bool) -> None:
    results: list[Any] = []
    for ours in (True, False):
        of = accelerator(ours, dispatch_batches=dispatch)
        given: dict[str, Any] = {"batch_size": BATCH, "drop_last": True}
        given |= {"shuffle": True, "generator": torch.Generator().manual_seed(2)} if kind == "read" else {}
        if ours:
            plain: Any = DALILoader(datasets(pictures)[kind], transform=TRAIN, **given)
        else:
            plain = torch.utils.data.DataLoader(Labels() if kind == "read" else Stream(Labels()), **given)
        loader = of.prepare(plain)
        results.append([[labels.tolist() for _, labels in part] for part in (loader, of.skip_first_batches(loader, 2))])
    assert results[0] == results[1]
    assert [len(batch) for batch in results[0][1]] == [4, 4, 4]


def test_arguments_of_prepare_are_accelerates(pictures: Path) -> None:
    def cut(data: Any, part: slice, **_: Any) -> Any:
        return [data[1][part], data[0][part]]

    found: list[Any] = []
    for ours in (True, False):
        plain: Any = made(pictures) if ours else torch.utils.data.DataLoader(Labels(), BATCH)
        of = accelerator(ours)
        stays = of.prepare(plain, device_placement=[False])
        of = accelerator(ours, dispatch_batches=True)
        labels, _ = next(iter(of.prepare_data_loader(plain, slice_fn_for_dispatch=cut)))
        found.append((stays.device, labels.tolist()))
        if ours:
            assert stays.base_dataloader.device == "auto"
    assert found == [(None, [0, 1, 2, 3])] * 2


def test_arguments_are_kept(pictures: Path) -> None:
    given: dict[str, Any] = {"seed": 3, "fidelity": "fast", "cache": "host", "cache_bytes": 2**20, "num_workers": 2}
    given["device"] = "cpu"
    given |= {"on_error": "replace", "max_errors": 2, "batch_transform": lambda images, labels: [labels, images]}
    loader = accelerator(True).prepare(made(pictures, **given))
    base = loader.base_dataloader
    assert type(base).__base__ is DALILoader
    text = io.StringIO()
    loader.explain(text)
    assert text.getvalue().startswith("3 of 3 transforms run in DALI on cpu\ndevice     cpu")
    assert {name: getattr(base, name) for name in given} == given
    assert base._options.prefetch_depth is None
    labels, images = next(iter(loader))
    assert (labels.shape, images.shape) == ((BATCH,), (BATCH, 3, 16, 16))


def test_batches_are_where_the_accelerator_is(pictures: Path, device: str) -> None:
    of = Accelerator(cpu=device == "cpu")
    loader = of.prepare(made(pictures, shuffle=True))
    assert of.device.type == device
    assert torch.device(loader.base_dataloader.device).type == device
    assert {part.device.type for batch in loader for part in batch} == {device}


def test_gradients_accumulate_up_to_the_end_of_an_epoch(pictures: Path) -> None:
    of = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader = of.prepare(torch.nn.Linear(3 * 16 * 16, 1), made(pictures))
    steps: list[bool] = []
    for images, _ in loader:
        with of.accumulate(model):
            of.backward(model(images.flatten(1).float()).mean())
            steps.append(of.sync_gradients)
    assert steps == [False, False, False, True, False, True]


def test_a_plain_accelerator_prepares_with_the_function(pictures: Path) -> None:
    """As in the Trainer of transformers, whose Accelerator is Accelerate's own."""
    of = accelerate.Accelerator(cpu=True)
    loader = prepare_data_loader(of, made(pictures))
    assert sum(len(labels) for _, labels in loader) == 23
    assert of._dataloaders == [loader]
    assert of.prepare(loader) is loader


@pytest.mark.filterwarnings("ignore")
def test_the_trainer_of_transformers_trains(pictures: Path, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    seen: list[int] = []

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(3 * 16 * 16, 3)

        def forward(self, pixel_values: Any, labels: Any) -> Any:
            seen.extend(labels.tolist())
            logits = self.head(pixel_values.flatten(1).float() / 255)
            return {"loss": torch.nn.functional.cross_entropy(logits, labels % 3), "logits": logits}

    class Trainer(transformers.Trainer):
        def get_train_dataloader(self) -> Any:
            size = self.args.train_batch_size
            loader = DALILoader(
                self.train_dataset, size, shuffle=True, transform=TRAIN, batch_transform=named, device=self.args.device
            )
            return prepare_data_loader(self.accelerator, loader)

    def named(images: Any, labels: Any) -> Any:
        return {"pixel_values": images, "labels": labels}

    settings = {"report_to": [], "use_cpu": True, "save_strategy": "no", "disable_tqdm": True}
    arguments = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=2, per_device_train_batch_size=BATCH, **settings
    )
    trainer = Trainer(Net(), arguments, train_dataset=datasets(pictures)["read"])
    assert trainer.train().global_step == 12
    assert sorted(seen) == sorted([*range(23)] * 2)
    assert seen[:23] != seen[23:]
