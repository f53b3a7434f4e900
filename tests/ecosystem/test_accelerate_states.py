"""A run with Accelerate resumes with the order and augmentations of an uninterrupted one."""

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


def test_two_loaders_resume(pictures: Path, tmp_path: Path) -> None:
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


DEFAULT: dict[str, Any] = {}
SEEDABLE = {"use_seedable_sampler": True, "data_seed": 5}


@pytest.mark.parametrize(
    ("config", "generator", "stop"),
    [(DEFAULT, False, 1), (DEFAULT, True, 8), (SEEDABLE, False, 6), (SEEDABLE, True, 8)],
)
def test_a_saved_run_resumes_in_any_epoch(
    pictures: Path, tmp_path: Path, config: dict[str, Any], generator: bool, stop: int
) -> None:
    """The order of a seedable sampler follows from the epoch's number."""

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


@pytest.mark.parametrize(("config", "stop"), [(DEFAULT, 0), (SEEDABLE, 6), (DEFAULT, 8)])
def test_a_loaded_state_is_saved_again(pictures: Path, tmp_path: Path, config: dict[str, Any], stop: int) -> None:
    """A run may end before its first step. A loader may also return to an earlier epoch."""

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
    """Also after a restart, and if first batches are skipped."""
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
    assert pixels(again) == true[4], "epochs with skipped batches count, too"
    again.set_epoch(2)
    assert pixels(again) == true[2]
    left = prepared()
    first = next(iter(left))[1].tolist()[0]
    next(iter(left))
    assert pixels(left)[first] == true[2][first], (
        "the loader counts an epoch that is left early, which Accelerate does not"
    )


DRAWS: dict[str, Any] = {
    "torch": lambda: torch.rand(1).item(),
    "numpy": lambda: np.random.rand(),  # noqa: NPY002
    "python": random.random,
}


class Drawn(torch.utils.data.Sampler[int]):
    """A sampler that draws its order from one of the global generators."""

    def __init__(self, of: str) -> None:
        self.of = of

    def __len__(self) -> int:
        return 23

    def __iter__(self) -> Iterator[int]:
        return iter(sorted(range(23), key=[DRAWS[self.of]() for _ in range(23)].__getitem__))


@pytest.mark.parametrize(
    ("order", "of"),
    [("shuffled", "torch"), ("in order", "numpy"), ("of a sampler", "torch"), ("of a sampler", "python")],
)
def test_a_run_that_draws_resumes(pictures: Path, tmp_path: Path, order: str, of: str) -> None:
    """As with dropout on the CPU. Accelerate restores the global generators itself, after the loader's state."""
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


def test_the_state_of_an_unprepared_loader_is_loaded(pictures: Path) -> None:
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


def test_a_loader_without_an_order_cannot_be_saved(pictures: Path) -> None:
    given: dict[str, Any] = {"num_workers": 2, "in_order": False, "transform": TRAIN}
    loader = DALILoader(datasets(pictures)["asked"], BATCH, **given)
    assert sum(len(labels) for _, labels in accelerator(True).prepare(loader)) == 23
    with pytest.raises(ValueError, match="in_order must be True to save or load a state, got False"):
        accelerator(True, use_stateful_dataloader=True).prepare(loader)


def test_order_of_two_stateful_loaders_is_that_without_a_state(pictures: Path) -> None:
    """torchdata's loaders draw when they are prepared. A DALILoader draws when its epoch begins."""

    def labels(ours: bool) -> list[Any]:
        torch.manual_seed(3)
        of = accelerator(ours, **({"use_stateful_dataloader": True} if ours else {}))
        make: Any = partial(made, pictures) if ours else partial(torch.utils.data.DataLoader, Labels(), BATCH)
        pair = of.prepare(*(make(shuffle=True, num_workers=2) for _ in range(2)))
        return [[batch.tolist() for _, batch in loader] for loader in pair]

    assert labels(True) == labels(False)


def test_a_loader_between_epochs_leaves_the_generators_alone(pictures: Path) -> None:
    """Accelerate restores them itself, and other loaders may have drawn from them since."""

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
