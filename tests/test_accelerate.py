"""Accelerate's prepare() keeps DALI, and gives each process what it gives it of a DataLoader."""

from __future__ import annotations

import copy
import io
import pickle
import random
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

from accelerated import BATCH, CONFIGS, OPTIONS, SKIPPED, Labels, Stream, accelerator, datasets, looks  # noqa: E402
from processes import run_ranks  # noqa: E402
from ranked import TRAIN  # noqa: E402

from torchdali import DALILoader  # noqa: E402
from torchdali.accelerate import Accelerator, prepare_data_loader, skip_first_batches  # noqa: E402

pytestmark = [
    pytest.mark.timeout(190),
    pytest.mark.filterwarnings("ignore:.*accelerate.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
Found = list[dict[str, Any]]


@pytest.fixture(scope="module", params=(1, 2))
def found(request: Any, pictures: Path, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """For each rank of one or two processes what it saw."""
    folder = tmp_path_factory.mktemp(f"of_{request.param}")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ranks = [(rank, request.param, port, pictures, folder) for rank in range(request.param)]
    run_ranks("accelerated.py", *ranks, limit=170)
    return [torch.load(folder / str(rank), weights_only=False) for rank in range(request.param)]


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", ["read", "asked", "stream"])
def test_shares_are_dataloaders(found: Found, kind: str, config: str, options: str) -> None:
    """Their lengths, the epoch's end and what is gathered for a metric as well."""
    name = f"{kind}, {config}, {options}"
    for rank in found:
        if name not in rank:
            assert kind in ("stream", "asked")
            continue
        ours, theirs = rank[name]
        assert ours == theirs
        assert len(ours[0]) == 2
        assert ours[0][0][1], "an epoch has batches"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["read", "asked"])
def test_a_saved_run_goes_on(found: Found, kind: str) -> None:
    for rank in found:
        ours, true = rank[f"{kind}, resumed"]
        assert len(true) == 11 // len(found)
        assert same(ours, true)


@pytest.mark.slow
@pytest.mark.parametrize("config", SKIPPED)
@pytest.mark.parametrize("kind", ["read", "asked"])
def test_first_batches_are_skipped(found: Found, kind: str, config: str) -> None:
    for rank in found:
        ours, theirs = rank[f"{kind}, skipped, {config}"]
        assert ours == theirs
        assert ours[0] == len(ours[1])


@pytest.mark.slow
def test_a_sampler_of_batches_is_shared(found: Found) -> None:
    several = [rank for rank in found if "batched" in rank]
    assert len(several) == (len(found) if len(found) > 1 else 0)
    for rank in several:
        ours, theirs = rank["batched"]
        assert ours == theirs
        assert [len(one) for one in ours] == [3, 1]


@pytest.mark.slow
def test_dali_makes_the_batches_of_every_rank(found: Found, pictures: Path) -> None:
    alone: dict[int, torch.Tensor] = {}
    for images, labels in looks(pictures)[1:]:
        alone |= dict(zip(labels.tolist(), images, strict=True))
    assert len(alone) == 23
    for rank in found:
        (device, kind), *batches = rank["looks"]
        assert (torch.device(device).type, kind) == ("cpu", "_Shard")
        assert all(
            torch.equal(image, alone[label])
            for images, labels in batches
            for image, label in zip(images, labels.tolist(), strict=True)
        )


# In this process


@pytest.fixture(autouse=True)
def _states() -> Any:
    """Accelerate keeps its state in classes."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


def made(pictures: Path, **options: Any) -> DALILoader[Any]:
    return DALILoader(datasets(pictures)["read"], BATCH, transform=TRAIN, **options)


def test_where_dali_would_be_lost(pictures: Path) -> None:
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


def test_other_objects_and_prepared_ones_pass(pictures: Path) -> None:
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


@pytest.mark.parametrize("again", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("dispatch", [False, True])
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


@pytest.mark.parametrize("config", [{}, {"dispatch_batches": True}], ids=["shares", "dispatch"])
@pytest.mark.parametrize("kind", ["read", "stream"])
def test_what_is_left_out_is_what_dataloader_leaves_out(pictures: Path, config: dict[str, Any], kind: str) -> None:
    config = {"dispatch_batches": False, **config}  # which is not the default for streams
    found: list[Any] = []
    for ours in (True, False):
        of = accelerator(ours, **config)
        given: dict[str, Any] = {"batch_size": BATCH, "drop_last": True}
        given |= {"shuffle": True, "generator": torch.Generator().manual_seed(2)} if kind == "read" else {}
        if ours:
            plain: Any = DALILoader(datasets(pictures)[kind], transform=TRAIN, **given)
        else:
            plain = torch.utils.data.DataLoader(Labels() if kind == "read" else Stream(Labels()), **given)
        loader = of.prepare(plain)
        found.append([[labels.tolist() for _, labels in one] for one in (loader, of.skip_first_batches(loader, 2))])
    assert found[0] == found[1]
    assert [len(batch) for batch in found[0][1]] == [4, 4, 4]


def test_arguments_of_prepare(pictures: Path) -> None:
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


def test_two_loaders_are_saved(pictures: Path, tmp_path: Path) -> None:
    def prepared() -> tuple[Any, Any]:
        of = accelerator(True, use_stateful_dataloader=True)
        return of, of.prepare(*(made(pictures, shuffle=True) for _ in range(2)))

    of, pair = prepared()
    begun = list(map(iter, pair))
    assert [len(next(one)[1]) for one in (*begun, begun[1])] == [4, 4, 4]
    of.save_state(str(tmp_path))
    true = [[labels.tolist() for _, labels in one] for one in begun]
    of, pair = prepared()
    of.load_state(str(tmp_path))
    assert [[labels.tolist() for _, labels in one] for one in pair] == true


def test_arguments_are_kept(pictures: Path) -> None:
    given: dict[str, Any] = {"seed": 3, "fidelity": "fast", "cache": "host", "cache_bytes": 2**20, "num_workers": 2}
    given["device"] = "cpu"
    given |= {"on_error": "replace", "max_errors": 2, "batch_transform": lambda images, labels: [labels, images]}
    loader = accelerator(True).prepare(made(pictures, **given))
    base = loader.base_dataloader
    assert type(base).__base__ is DALILoader
    text = io.StringIO()
    loader.explain(text)
    assert text.getvalue().startswith("DALILoader\ndevice     cpu")
    assert {name: getattr(base, name) for name in given} == given
    assert base._window is None
    labels, images = next(iter(loader))
    assert (labels.shape, images.shape) == ((BATCH,), (BATCH, 3, 16, 16))


def test_batches_are_where_the_accelerator_is(pictures: Path, device: str) -> None:
    of = Accelerator(cpu=device == "cpu")
    loader = of.prepare(made(pictures, shuffle=True))
    assert of.device.type == device
    assert torch.device(loader.base_dataloader.device).type == device
    assert {part.device.type for batch in loader for part in batch} == {device}


def test_gradients_are_accumulated_to_the_end_of_an_epoch(pictures: Path) -> None:
    of = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, loader = of.prepare(torch.nn.Linear(3 * 16 * 16, 1), made(pictures))
    steps: list[bool] = []
    for images, _ in loader:
        with of.accumulate(model):
            of.backward(model(images.flatten(1).float()).mean())
            steps.append(of.sync_gradients)
    assert steps == [False, False, False, True, False, True]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("stop", [1, 6, 8, 12])
@pytest.mark.parametrize("generator", [False, True], ids=["", "generator="])
@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True, "data_seed": 5}], ids=["default", "seedable"])
def test_a_saved_run_goes_on_in_any_epoch(
    pictures: Path, tmp_path: Path, config: dict[str, Any], generator: bool, stop: int
) -> None:
    """A seedable sampler has a generator from its first epoch on, and its order is that of the epoch's number."""

    def labels(save: int | None) -> list[Any]:
        of = accelerator(True, use_stateful_dataloader=True, **config)
        own = torch.Generator().manual_seed(torch.initial_seed()) if generator else None
        loader = of.prepare(made(pictures, shuffle=True, generator=own))
        if save is None:
            of.load_state(str(tmp_path / "state"))
        found: list[Any] = []
        for _ in range(3):
            for _, of_batch in loader:
                found.append(of_batch.tolist())
                if len(found) == save:
                    of.save_state(str(tmp_path / "state"))
        return found

    torch.manual_seed(3)
    true = labels(stop)
    assert len(true) == 18
    torch.manual_seed(4)
    assert labels(None)[: 18 - stop] == true[stop:]


@pytest.mark.parametrize("stop", [0, 1, 6, 8])
@pytest.mark.parametrize("config", [{}, {"use_seedable_sampler": True, "data_seed": 5}], ids=["default", "seedable"])
def test_a_place_that_was_loaded_is_saved_again(
    pictures: Path, tmp_path: Path, config: dict[str, Any], stop: int
) -> None:
    """As by a run that is ended before its first step. A loader may also go back to a place in an earlier epoch."""

    def prepared() -> tuple[Any, Any]:
        of = accelerator(True, use_stateful_dataloader=True, **config)
        return of, of.prepare(made(pictures, shuffle=True))

    def labels(loader: Any) -> Any:
        return (of_batch.tolist() for _ in range(3) for _, of_batch in loader)

    of, loader = prepared()
    batches = labels(loader)
    assert len([next(batches) for _ in range(stop)]) == stop
    of.save_state(str(tmp_path / "first"))
    true = list(batches)
    of.load_state(str(tmp_path / "first"))
    assert list(labels(loader))[: 18 - stop] == true
    of, _ = prepared()
    of.load_state(str(tmp_path / "first"))
    of.save_state(str(tmp_path / "again"))
    of, loader = prepared()
    of.load_state(str(tmp_path / "again"))
    assert list(labels(loader))[: 18 - stop] == true


def pixels(loader: Any) -> dict[int, bytes]:
    return {
        label: image.numpy().tobytes()
        for images, labels in loader
        for image, label in zip(images, labels.tolist(), strict=True)
    }


def test_augmentations_follow_the_epochs_of_accelerate(pictures: Path) -> None:
    """After a restart in another process as well, and where first batches are skipped."""
    of = accelerator(True)

    def prepared() -> Any:
        return of.prepare(made(pictures, shuffle=True, seed=1))

    loader = prepared()
    true = [pixels(loader) for _ in range(5)]
    assert all(one[0] != other[0] for one in true for other in true if one is not other)
    again = prepared()
    again.set_epoch(3)
    rest = pixels(of.skip_first_batches(again, 2))
    assert rest == {label: true[3][label] for label in rest}
    assert pixels(again) == true[4], "which is counted on after what was skipped, too"
    again.set_epoch(2)
    assert pixels(again) == true[2]
    left = prepared()
    first = next(iter(left))[1].tolist()[0]
    next(iter(left))
    assert pixels(left)[first] == true[2][first], "Accelerate does not count an epoch that is left, its loader does"


DRAWS: dict[str, Any] = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "python": random.random,
}


class Drawn(torch.utils.data.Sampler[int]):
    """An order from one of the global generators."""

    def __init__(self, of: str) -> None:
        self.of = of

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(23), key=[DRAWS[self.of]() for _ in range(23)].__getitem__))


@pytest.mark.parametrize("of", DRAWS)
@pytest.mark.parametrize("order", ["shuffled", "in order", "of a sampler"])
def test_a_run_that_draws_goes_on(pictures: Path, tmp_path: Path, order: str, of: str) -> None:
    """Dropout on the CPU, for one: Accelerate puts the global generators back itself, later than the place's."""
    draw = DRAWS[of]

    def steps(save: bool) -> list[Any]:
        given: dict[str, Any] = {"sampler": Drawn(of)} if order == "of a sampler" else {"shuffle": order == "shuffled"}
        accelerate_ = accelerator(True, use_stateful_dataloader=True)
        loader = accelerate_.prepare(made(pictures, **given))
        if not save:
            accelerate_.load_state(str(tmp_path))
        seen: list[Any] = []
        for _ in range(2):
            for images, labels in loader:
                seen.append((labels.tolist(), images, draw()))
                if save and len(seen) == 2:
                    accelerate_.save_state(str(tmp_path))
        return seen

    accelerate.utils.set_seed(3)
    true = steps(save=True)
    accelerate.utils.set_seed(9)
    assert same(steps(save=False), true[2:])


def test_a_run_that_could_not_go_on_at_once_draws_as_it_would_have(pictures: Path, tmp_path: Path) -> None:
    class Moody(torch.utils.data.RandomSampler):
        ready = True

        def __iter__(self) -> Iterator[int]:
            if not self.ready:
                raise OSError("no list of files yet")
            return super().__iter__()

    def prepared() -> tuple[Any, Any, Moody]:
        of, sampler = accelerator(True, use_stateful_dataloader=True), Moody(datasets(pictures)["read"])
        return of, of.prepare(made(pictures, sampler=sampler)), sampler

    def steps(batches: Any) -> list[Any]:
        return [(labels.tolist(), torch.rand(1).item()) for _, labels in batches]

    torch.manual_seed(3)
    of, loader, _ = prepared()
    batches = iter(loader)
    next(batches)
    of.save_state(str(tmp_path))
    true = steps(batches)
    of, loader, sampler = prepared()
    of.load_state(str(tmp_path))
    sampler.ready = False
    with pytest.raises(OSError, match="no list of files yet"):
        next(iter(loader))
    sampler.ready = True
    assert steps(loader) == true


def test_the_place_of_a_loader_before_it_was_prepared(pictures: Path) -> None:
    def loader() -> DALILoader[Any]:
        dataset = datasets(pictures)["read"]
        batches = torch.utils.data.BatchSampler(range(23), BATCH, drop_last=False)
        return DALILoader(dataset, batch_sampler=batches, transform=TRAIN, seed=1)

    alone = loader()
    batches = iter(alone)
    next(batches)
    state = alone.state_dict()
    true = [*batches, *alone]
    prepared = accelerator(True, use_stateful_dataloader=True).prepare(loader())
    assert len([*prepared, *prepared]) == 12
    prepared.load_state_dict(state)
    assert same([*prepared, *prepared], true)
    fresh = accelerator(True, use_stateful_dataloader=True).prepare(loader())
    fresh.load_state_dict(prepared.state_dict())
    fresh.load_state_dict({})
    assert same([*fresh], [*loader()]), "as if nothing had been loaded"


def test_a_loader_whose_place_cannot_be_saved(pictures: Path) -> None:
    given: dict[str, Any] = {"num_workers": 2, "in_order": False, "transform": TRAIN}
    loader = DALILoader(datasets(pictures)["asked"], BATCH, **given)
    assert sum(len(labels) for _, labels in accelerator(True).prepare(loader)) == 23
    with pytest.raises(ValueError, match="with in_order=False batches come in an order that cannot be found again"):
        accelerator(True, use_stateful_dataloader=True).prepare(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_of_two_stateful_loaders_is_that_without_a_state(pictures: Path, num_workers: int) -> None:
    """Accelerate has torchdata's loaders draw when they are prepared; a DALILoader draws when it is iterated over."""

    def labels(ours: bool) -> list[Any]:
        torch.manual_seed(3)
        of = accelerator(ours, **({"use_stateful_dataloader": True} if ours else {}))
        make: Any = partial(made, pictures) if ours else partial(torch.utils.data.DataLoader, Labels(), BATCH)
        pair = of.prepare(*(make(shuffle=True, num_workers=num_workers) for _ in range(2)))
        return [[batch.tolist() for _, batch in loader] for loader in pair]

    assert labels(True) == labels(False)


def test_a_loader_between_epochs_leaves_the_generators_alone(pictures: Path) -> None:
    """Which Accelerate restores itself, and which other loaders have moved since."""

    def numbers(state: dict[str, Any] | None) -> list[int]:
        loader = accelerator(True, use_stateful_dataloader=True).prepare(made(pictures, shuffle=True))
        torch.manual_seed(5)
        if state is not None:
            loader.load_state_dict(state)
        return [label for _, labels in loader for label in labels.tolist()]

    saved = accelerator(True, use_stateful_dataloader=True).prepare(made(pictures, shuffle=True))
    states = [None, saved.state_dict()]
    assert len([*saved]) == 6
    states.append(saved.state_dict())
    first, *others = map(numbers, states)
    assert all(one == first for one in others)


def test_with_the_accelerator_of_another(pictures: Path) -> None:
    """As in the Trainer of transformers."""
    of = accelerate.Accelerator(cpu=True)
    loader = prepare_data_loader(of, made(pictures))
    assert sum(len(labels) for _, labels in loader) == 23
    assert of._dataloaders == [loader]
    assert of.prepare(loader) is loader


@pytest.mark.filterwarnings("ignore")
def test_in_the_trainer_of_transformers(pictures: Path, tmp_path: Path) -> None:
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
