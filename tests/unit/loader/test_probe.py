"""loader.stats(probe=True): what the loader can do alone."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from conftest import CROP, PER_BATCH, Numbered, same
from helpers.in_memory import MAKERS, on_host
from helpers.timed import COUNT, NAP, Asked, epochs, nap, slow_engine, with_transform
from torch.utils.data import default_collate
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError, UnsupportedDatasetError
from torchdali.loader import probe, verdict
from torchdali.loader.stats import Bottleneck, Probe, Stats
from torchdali.pipeline.engine import PipelineRunner
from torchdali.transforms.spec import InputKind

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def photographs(pictures: Path) -> list[Path]:
    return sorted(pictures.rglob("*.jpg"))


def probed(read: float | None, decode: float | None, transforms: float, parts: Any, overlapping: bool = True) -> Probe:
    together = max(read or 0, decode or 0, transforms, sum(parts.values()))
    return Probe(100, read, decode, transforms, together, parts, overlapping)


@pytest.mark.parametrize(
    ("case", "bottleneck", "sentence"),
    [
        (probed(0.031, 0.02, 0.01, {}), "storage", "storage is the bottleneck: reading takes 31.0 of 31.0 ms a batch"),
        (probed(0.001, 0.02, 0.01, {}), "decoding", "decoding is the bottleneck: it takes 20.0 of 20.0 ms a batch"),
        (
            probed(0.001, 0.002, 0.25, {"feed": 0.2}),
            "transforms",
            "transforms in DALI are the bottleneck: they take 250 of",
        ),
        (probed(None, None, 0.001, {"feed": 0.002}), "host", "drawing parameters and feeding DALI takes 2.00 of 2.00"),
        (probed(0.01, 0.02, 0.03, {"feed": 0.001, "torch": 0.04}), "torch", "transforms that run in torch"),
        (probed(0.01, 0.02, 0.03, {"torch": 0.04}, False), "transforms", "they take 30.0 of 40.0 ms"),
        (probed(0.01, 0.02, 0.03, {"DALI": 0.005, "headers": 0.035}), "transforms", "they take 30.0 of 40.0 ms"),
    ],
)
def test_the_bottleneck_of_the_loader_alone(case: Probe, bottleneck: Bottleneck, sentence: str) -> None:
    stats = verdict.diagnose(None, case, None)
    assert (stats.bottleneck, stats.possible) == (bottleneck, case.rate)
    assert sentence in stats.verdict
    assert stats.verdict.endswith(f"; {case.rate:,.0f} images/s are possible")
    assert "together" in str(stats)


PROBED: dict[str, list[Any]] = {
    "a window": [v2.RandomResizedCrop(CROP), v2.RandomHorizontalFlip(), v2.ToDtype(torch.float32, scale=True)],
    "a window in a window": [v2.CenterCrop(CROP + 4), v2.RandomCrop(CROP)],
    "a window that is padded": [v2.RandomCrop(CROP, padding=4)],
    "whole images": [v2.Resize((CROP, CROP)), v2.ColorJitter(0.3)],
    "nothing": [],
    "views": [v2.Resize((CROP, CROP)), v2.FiveCrop(10)],
    "a chain that some take": [v2.RandomApply([v2.GaussianBlur(3)]), v2.Resize((CROP, CROP))],
    "in torch": [v2.Resize((CROP, CROP)), v2.Lambda(torch.clone)],
}


@pytest.mark.parametrize("chain", PROBED.values(), ids=PROBED.keys())
def test_every_plan_can_be_probed(pictures: Path, numbered: Numbered, chain: list[Any], device: str) -> None:
    size = 1 if not chain else PER_BATCH
    loader = DALILoader(numbered(pictures, v2.Compose([v2.ToImage(), *chain])), size, device=device)
    stats = loader.stats(probe=True)
    case = stats.probe
    assert case is not None
    assert None not in (case.read, case.decode)
    assert case.overlapping == (device == "cuda")
    assert min(case.read or 0, case.decode or 0, case.transforms, case.together) > 0
    assert (stats.possible, stats.batches) == (size / case.together, 0)
    epochs(loader)
    assert loader.stats().probe is case
    loader.transform = v2.RandomVerticalFlip(1.0)
    epochs(loader, 1)
    assert loader.stats().probe is None, "of another plan"


def test_arrays_are_neither_read_nor_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    dataset = MAKERS["CIFAR10"](tmp_path, monkeypatch, transform=v2.Compose([v2.ToImage(), v2.RandomCrop(24)]))
    case = DALILoader(dataset, None, device=device).stats(probe=True).probe
    assert case is not None
    assert (case.read, case.decode, case.images) == (None, None, 1)
    assert case.transforms > 0


@pytest.mark.slow
def test_the_probe_finds_what_is_slow_in_torch(dataset: ImageFolder) -> None:
    loader = DALILoader(with_transform(dataset, v2.Lambda(nap)), PER_BATCH, device="cpu")
    stats = loader.stats(probe=True)
    assert stats.bottleneck == "torch"
    assert "Lambda at position 3 take" in stats.verdict
    assert stats.possible is not None
    assert stats.possible < PER_BATCH / NAP


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bottleneck", "slow"),
    [
        ("storage", lambda engine: not engine._views),
        ("decoding", lambda engine: engine._input_kind is InputKind.ENCODED),
    ],
)
def test_the_probe_finds_what_is_slow_in_dali(
    dataset: ImageFolder,
    monkeypatch: pytest.MonkeyPatch,
    bottleneck: Bottleneck,
    slow: Callable[[PipelineRunner], bool],
) -> None:
    slow_engine(monkeypatch, lambda engine: slow(engine) or engine._input_kind is InputKind.FILES)
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader)
    assert loader.stats().bottleneck == "pipeline"
    monkeypatch.undo()
    slow_engine(monkeypatch, slow)
    assert loader.stats(probe=True).bottleneck == bottleneck


@pytest.mark.slow
def test_the_model_is_told_what_it_leaves_unused(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    for _ in range(2):
        for number, _ in enumerate(loader):
            if number == 3:
                loader.stats(probe=True)
            time.sleep(2 * NAP)
    stats = loader.stats()
    assert (stats.bottleneck, stats.timed) == ("model", 6), "the probe's own time is nobody's"
    assert stats.verdict.startswith(
        f"your model is the bottleneck: {stats.throughput:,.0f} of {stats.possible:,.0f} images/s"
    )


class Counting:
    """A sampler that is asked no more often for a probe.

    Args:
        seed: Of its generator.
    """

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.begun = 0

    def __len__(self) -> int:
        return COUNT

    def __iter__(self) -> Iterator[int]:
        self.begun += 1
        yield from torch.randperm(COUNT, generator=self.generator).tolist()


def global_states() -> list[Any]:
    name, *numbers = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), name, [np.asarray(x).tolist() for x in numbers], torch.get_rng_state()]


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "workers"), [(None, 0), (3, 2)])
def test_a_probe_changes_nothing(
    pictures: Path, numbered: Numbered, seed: int | None, workers: int, device: str
) -> None:
    chain = [v2.ToImage(), v2.RandomResizedCrop(CROP), v2.Lambda(lambda image: image + torch.rand(1).item())]

    def batches(probes: Iterable[int]) -> tuple[list[Any], int]:
        torch.manual_seed(1)
        sampler = Counting(2)
        loader = DALILoader(
            numbered(pictures, v2.Compose(chain)),
            PER_BATCH,
            sampler=sampler,
            seed=seed,
            num_workers=workers,
            generator=torch.Generator().manual_seed(5),
            collate_fn=lambda samples: [*default_collate(samples), torch.rand(2)],
            batch_transform=lambda images, labels, noise: (images * torch.rand(1).item(), labels, noise),
            device=device,
        )
        seen: list[Any] = []
        for epoch in range(3):
            if -epoch in probes:
                loader.stats(probe=True)
            for number, batch in enumerate(loader):
                seen.append(batch)
                if 10 * epoch + number in probes:
                    before = global_states()
                    loader.stats(probe=True)
                    assert same(global_states(), before)
                if epoch == 1 and number == 4:
                    break
        return on_host(seen), sampler.begun

    assert same(batches([0, -1, 3, 12, 14, -2]), batches([]))


def test_a_dataset_that_is_asked_is_not_probed(photographs: list[Path], exact: Any) -> None:
    loader = DALILoader(Asked(photographs), transform=exact, device="cpu")
    with pytest.raises(UnsupportedDatasetError, match="needs a native dataset, got a worker-fed one"):
        loader.stats(probe=True)
    assert loader.stats() == Stats()


def test_a_loader_with_a_cache_is_not_probed(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu", cache="host")
    with pytest.raises(
        ValueError, match="needs a loader without a cache, because its speed changes as the cache fills"
    ):
        loader.stats(probe=True)
    assert loader.stats() == Stats()


def test_batches_of_a_probe_are_as_large_as_the_epochs(dataset: ImageFolder) -> None:
    batches = [[*range(8)], [*range(4)], [*range(7)]]
    loader = DALILoader(dataset, batch_sampler=batches, device="cpu")
    found = [loader.stats(probe=True).probe]
    iterator = iter(loader)
    found.append(loader.stats(probe=True).probe)
    assert len([*iterator]) == 3
    found.append(loader.stats(probe=True).probe)
    assert [one and one.images for one in found] == [1, 1, 6]
    assert loader.stats().possible == found[-1].rate  # pyright: ignore[reportOptionalMemberAccess]


def test_a_probe_is_of_the_dataset_as_it_is_now(dataset: ImageFolder) -> None:
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    dataset.loader = lambda path: path  # type: ignore[assignment]
    with pytest.raises(UnsupportedDatasetError, match="needs a native dataset, got a worker-fed one"):
        loader.stats(probe=True)
    assert loader.stats().probe is None


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"no image")])
def test_a_probe_names_a_damaged_file(fresh: ImageFolder, damage: Callable[[Path], object]) -> None:
    for path, _ in fresh.samples:
        damage(Path(path))
    with pytest.raises(SampleError):
        DALILoader(fresh, PER_BATCH, device="cpu").stats(probe=True)


@pytest.mark.parametrize("on_error", ["skip", "replace"])
@pytest.mark.parametrize("found", [False, True], ids=["new", "found in an epoch"])
def test_a_probe_puts_up_with_what_the_loader_does(fresh: ImageFolder, on_error: Any, found: bool) -> None:
    for path, _ in fresh.samples[1:4]:
        Path(path).write_bytes(b"no image")
    loader = DALILoader(fresh, PER_BATCH, device="cpu", on_error=on_error, max_errors=3)
    epochs(loader, int(found))
    before = list(loader.errors)
    assert loader.stats(probe=True).possible is not None
    assert loader.errors == before
    assert len(before) == 3 * found


def test_a_probe_leaves_out_any_number_of_samples_that_an_epoch_found(fresh: ImageFolder) -> None:
    for path, _ in fresh.samples[2:]:
        Path(path).write_bytes(b"no image")
    loader = DALILoader(fresh, PER_BATCH, device="cpu", on_error="replace")
    with pytest.raises(SampleError):
        loader.stats(probe=True)
    epochs(loader, 1)
    assert len(loader.errors) == COUNT - 2
    assert loader.stats(probe=True).possible is not None


def test_batches_of_a_probe_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = probe._draw_batches(10_000, (), 16, 6)
    assert len(set(np.concatenate([*first, *second]).tolist())) == 32 * len(first)
    assert {len(batch) for batch in probe._draw_batches(1, (), 16, 6)[1]} == {16}
    assert set(np.concatenate(probe._draw_batches(4, {0, 2}, 16, 6)[0]).tolist()) <= {1, 3}


def test_the_documents_show_what_is_printed(dataset: ImageFolder) -> None:
    text = (Path(__file__).parents[3] / "docs" / "explain_and_stats.md").read_text()
    (shown,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    loader = DALILoader(dataset, PER_BATCH, device="cpu")
    epochs(loader)
    printed = str(replace(loader.stats(probe=True), bottleneck="transforms"))  # whose row "to do" is shown
    labels = [[label for line in lines.splitlines() if (label := line[:11].strip())] for lines in (printed, shown)]
    assert labels[0] == labels[1]
    table = text[text.index("| `bottleneck` |") :].split("\n\n")[0]
    assert set(re.findall(r"`([a-z_ ]+)`", re.sub(r"(?m)^(\| [^|]+\|).*$", r"\1", table))) - {"bottleneck"} == set(
        get_args(Bottleneck)
    )
