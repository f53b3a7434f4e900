"""A run with Accelerate goes on where it was saved, with the order and augmentations that it would have had."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same

accelerate = pytest.importorskip("accelerate", reason="needs accelerate")

from helpers.accelerated import BATCH, Labels, accelerator, datasets, forget, made  # noqa: E402
from helpers.ranked import TRAIN  # noqa: E402

from torchdali import DALILoader  # noqa: E402

pytestmark = [
    pytest.mark.timeout(190),
    pytest.mark.filterwarnings("ignore:.*accelerate.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated"),
]


@pytest.fixture(autouse=True)
def _states() -> Any:
    yield
    forget()


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
