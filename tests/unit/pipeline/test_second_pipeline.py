"""A second pipeline decodes files while the first one waits, if the training loop waits for DALI most of the time."""

from __future__ import annotations

import operator
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import skimage.data
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.pipeline import clock, feed, jpeg_engine
from torchdali.pipeline.clock import Clock
from torchdali.pipeline.engine import PipelineRunner
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.tuning import Threads
from torchdali.runtime import machine
from torchdali.transforms.spec import InputKind, InputStats

CHAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32), v2.ToDtype(torch.float32, scale=True)])


@pytest.fixture
def numbers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pipelines an epoch had after each that it took. The CPU backend takes two here."""
    taken: list[int] = []
    acquire = PipelinePool.acquire

    def count(pool: PipelinePool, *args: Any) -> Any:
        taken.append(args[3])
        return acquire(pool, *args)

    monkeypatch.setattr(PipelinePool, "acquire", count)
    monkeypatch.setattr(PipelinePool, "is_faster_with_two", lambda *_: True)
    return taken


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the loop wait for DALI from the third batch on, however fast this machine is."""
    monkeypatch.setattr(Clock, "waits_for_dali", property(lambda times: times.batches > 2))
    monkeypatch.setattr(feed, "_SECONDS_WAITED", 0)


def make(pictures: Path, times: int = 4, **options: Any) -> DALILoader[Any]:
    dataset = ImageFolder(pictures, CHAIN)
    dataset.samples = dataset.samples * times
    return DALILoader(dataset, 4, shuffle=True, seed=7, **{"device": "cpu", **options})


@pytest.mark.usefixtures("waiting")
def test_batches_are_those_of_one_pipeline(
    pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    torch.manual_seed(1)
    of_two = [batch for loader in [make(pictures, device=device)] for _ in range(2) for batch in loader]
    assert numbers == [1, 2, 1, 2]
    monkeypatch.setattr(PipelinePool, "is_faster_with_two", lambda *_: False)
    torch.manual_seed(1)
    of_one = [batch for loader in [make(pictures, device=device)] for _ in range(2) for batch in loader]
    assert numbers[4:] == [1, 1]
    for (images, labels), (others, other_labels) in zip(of_two, of_one, strict=True):
        assert torch.equal(images, others)
        assert torch.equal(labels, other_labels)


@pytest.mark.usefixtures("waiting", "numbers")
def test_pipelines_take_turns(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    submit = PipelineRunner.submit
    monkeypatch.setattr(
        PipelineRunner, "submit", lambda runner, *args: runs.append(id(runner)) or submit(runner, *args)
    )
    list(make(pictures))
    first, second = (runs.count(runner) for runner in dict.fromkeys(runs))
    begin = next(i for i, runner in enumerate(runs) if runner != runs[0])
    assert begin < 12, "there are six batches in flight, and the third one decides"
    assert abs(first - begin - second) < 8, "the first pipeline had all of those in flight when the second one came"
    assert second > (len(runs) - begin) / 3, "each takes about half of the rest"
    assert not any(map(operator.eq, runs[begin:], runs[begin + 1 :])), "else one has nothing to do now and then"


@pytest.mark.usefixtures("waiting")
def test_both_pipelines_are_kept_for_the_next_epoch(
    pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    loader, built = make(pictures), []
    make_runner = PipelinePool.make
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PipelinePool, "make", lambda *args: built.append(1) or make_runner(*args))
        for _ in range(3):
            list(loader)
        iterator = iter(loader)
        for _ in range(12):
            next(iterator)
        del iterator
        assert sum(len(images) for images, _ in loader) == len(loader.dataset)
    assert len(built) == 2
    assert numbers == [1, 2] * 5
    monkeypatch.setattr(Clock, "waits_for_dali", False)
    num_batches = len(list(loader))
    assert numbers == [1, 2] * 6, "taken without waiting"
    monkeypatch.setattr(clock, "_ENOUGH", num_batches // 2)
    assert loader._session.native_plan is not None
    idle = loader._session.native_plan.pool._idle
    assert len(idle) == 2
    for _ in loader:
        time.sleep(0.05)
    assert len(idle) == 1, "a loop that takes longer than DALI frees it"
    assert loader._native_plan().pool.seconds_waited == 0
    list(loader)
    assert numbers == [1, 2] * 7 + [1]


def test_a_loop_that_takes_longer_than_dali_has_one(
    pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "_ENOUGH", 3)
    monkeypatch.setattr(feed, "_SECONDS_WAITED", 0)
    for _ in make(pictures):
        time.sleep(0.05)
    assert numbers == [1]


@pytest.mark.usefixtures("waiting")
def test_the_wait_of_several_epochs_counts(pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    loader = make(pictures)
    pool = loader._native_plan().pool
    monkeypatch.setattr(feed, "_SECONDS_WAITED", 1000)
    list(loader)
    assert 0 < pool.seconds_waited < 1000
    waited, pool.seconds_waited = pool.seconds_waited, 1000
    list(loader)
    assert pool.seconds_waited > 1000 + waited / 100
    assert numbers == [1, 1, 2]


@pytest.mark.usefixtures("waiting")
@pytest.mark.parametrize("is_torchs", [True, False])
def test_a_long_epoch_takes_two_at_once(
    is_torchs: bool, pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait until its end counts, if the sampler tells how long it is without drawing random numbers."""
    dataset, expected = ImageFolder(pictures, CHAIN), list[float]()
    dataset.samples = dataset.samples * 10
    own = [[0, 1, 2, 3]] * (len(dataset) // 4)
    batches = {"batch_size": 4, "shuffle": True} if is_torchs else {"batch_sampler": own}
    needs_second = feed.Prefetcher._needs_second

    def expect(prefetcher: feed.Prefetcher, batch: Any) -> bool:
        if prefetcher._clock.timed.batches > 2 and not expected:
            expected.append(prefetcher._clock.expected_wait)
            monkeypatch.setattr(feed, "_SECONDS_WAITED", 5 * prefetcher._clock.timed.waited)
        return needs_second(prefetcher, batch)

    monkeypatch.setattr(feed, "_SECONDS_WAITED", 1000)
    monkeypatch.setattr(feed.Prefetcher, "_needs_second", expect)
    iterator = iter(DALILoader(dataset, device="cpu", **batches))  # type: ignore[arg-type]
    for _ in range(8):
        next(iterator)
    assert numbers == ([1, 2] if is_torchs else [1])
    assert expected[0] == pytest.approx(
        feed._SECONDS_WAITED / 5 * (1 + (len(dataset) // 4 - 4) / 3 if is_torchs else 1)
    )


def test_the_rest_of_a_resumed_epoch_is_what_counts(pictures: Path) -> None:
    loader, resumed = make(pictures), make(pictures)
    iterator = iter(loader)
    assert iterator.clock.num_batches == len(loader)  # type: ignore[attr-defined]
    for _ in range(3):
        next(iterator)
    resumed.load_state_dict(loader.state_dict())
    rest = iter(resumed)
    assert rest.clock.num_batches == len(list(rest)) == len(loader) - 3  # type: ignore[attr-defined]


@pytest.mark.usefixtures("waiting")
def test_without_room_there_is_one(pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    loader = make(pictures)
    loader._native_plan()
    monkeypatch.setattr(feed.machine, "free_memory", lambda device: asked.append(device) or 0)
    list(loader)
    assert numbers == [1]
    assert len(asked) == 1, "decided once an epoch"


@pytest.mark.usefixtures("waiting")
def test_where_few_files_may_be_open_there_is_one(
    pictures: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """DALI opens all files of a run at once."""
    for limit in (11, 12):
        monkeypatch.setattr(feed.machine, "max_open_files", lambda limit=limit: limit)
        list(make(pictures))
    assert numbers == [1, 1, 2]


@pytest.mark.usefixtures("waiting", "numbers")
def test_batches_that_grow_leave_small_pipelines_behind(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    submit = PipelineRunner.submit
    monkeypatch.setattr(
        PipelineRunner, "submit", lambda runner, *args: sizes.append(runner.batch_size) or submit(runner, *args)
    )
    batches = [list(range(size)) for size in (2, 4, 8, *[4] * 20)]
    loader = DALILoader(ImageFolder(pictures, CHAIN), batch_sampler=batches, device="cpu")
    assert [len(images) for images, _ in loader] == [len(batch) for batch in batches]
    assert sizes == [2, 4, *[8] * 21]


@pytest.mark.slow
@pytest.mark.usefixtures("waiting", "numbers")
def test_after_a_timeout_the_other_pipeline_keeps_nobody_waiting(fresh_pictures: Path) -> None:
    """It may wait for the same storage."""
    dataset = ImageFolder(fresh_pictures, CHAIN)
    dataset.samples = dataset.samples[:12] * 3 + dataset.samples[12:]
    loader = DALILoader(dataset, 4, num_workers=2, timeout=3, device="cpu")
    list(loader)
    files = {Path(path): Path(path).read_bytes() for path, _ in dataset.samples[36:]}
    for path in files:
        path.unlink()
        os.mkfifo(path)
    with pytest.raises(RuntimeError, match="timed out after 3 seconds"):
        list(loader)
    for path, content in files.items():
        path.unlink()
        path.write_bytes(content)
    assert sum(len(images) for images, _ in loader) == len(dataset)
    loader.close()


@pytest.mark.usefixtures("waiting")
def test_a_damaged_file_is_named_and_the_next_epoch_is_whole(fresh_pictures: Path, numbers: list[int]) -> None:
    loader = make(fresh_pictures)
    path, _ = loader.dataset.samples[9]  # type: ignore[attr-defined]
    whole = Path(path).read_bytes()
    list(loader)
    Path(path).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SampleError, match=Path(path).name):
        list(loader)
    Path(path).write_bytes(whole)
    assert sum(len(images) for images, _ in loader) == len(loader.dataset)
    assert max(numbers) == 2


@pytest.mark.parametrize(
    ("batches", "waited", "consumer", "in_dali", "expected"),
    [
        (16, 0.9, 0.1, 0.8, True),
        (15, 0.9, 0.1, 0.8, False),
        (16, 0.4, 0.6, 0.8, False),  # the GPU has work, although the host waits
        (16, 0.9, 0.1, 0.3, True),
        (16, 0.9, 0.1, 0.2, False),  # it waits for something else
    ],
)
def test_whether_the_loop_waits_for_dali(
    batches: int, waited: float, consumer: float, in_dali: float, expected: bool
) -> None:
    times = Clock(torch.device("cpu"))
    for _ in range(batches):
        times.timed.add(consumer, waited, 1)
    times.parts["DALI"] = in_dali * batches
    assert times.waits_for_dali == expected


@pytest.mark.parametrize(
    ("device", "engine", "kind", "non_engine", "expected"),
    [
        ("cuda:0", True, InputKind.FILES, 0.0, True),
        ("cuda:0", True, InputKind.PLACES, 0.05, True),
        ("cuda:0", True, InputKind.FILES, 0.2, False),  # cores decode a fifth, and are busy
        ("cuda:0", True, InputKind.PIXELS, 0.0, False),
        ("cuda:0", False, InputKind.FILES, 0.0, False),
        ("cpu", True, InputKind.FILES, 0.0, False),
    ],
)
def test_which_pipelines_are_faster_with_two(
    device: str,
    engine: bool,
    kind: InputKind,
    non_engine: float,
    expected: bool,
    monkeypatch: pytest.MonkeyPatch,
    pool_of: Callable[[Threads], PipelinePool],
) -> None:
    monkeypatch.setattr(machine, "count_available_cores", lambda: 16)
    monkeypatch.setattr(jpeg_engine, "has_jpeg_engine", lambda _: engine)
    pool = pool_of(Threads(0, torch.device(device), kind))
    assert pool.is_faster_with_two(InputStats(non_engine)) == expected
    assert not pool.get_masks(torch.uint8).is_faster_with_two(InputStats(non_engine)), "no engine decodes PNGs"


@pytest.fixture
def pool_of(pictures: Path) -> Callable[[Threads], PipelinePool]:
    """Make a pool of an image folder's plan with other threads."""
    plan = make(pictures)._native_plan().pool.plan
    return lambda threads: PipelinePool(plan, 4, threads)


@pytest.mark.gpu
def test_a_loop_that_only_reads_takes_two_on_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not jpeg_engine.has_jpeg_engine(torch.device("cuda", 0)):
        pytest.skip("needs a card with a JPEG engine")
    monkeypatch.setattr(clock, "_ENOUGH", 3)
    monkeypatch.setattr(feed, "_SECONDS_WAITED", 0.1)
    (tmp_path / "class").mkdir()
    photograph = Image.fromarray(skimage.data.astronaut()).resize((1024, 1024))
    for number in range(32):
        photograph.rotate(number).save(tmp_path / "class" / f"{number}.jpg")
    dataset = ImageFolder(tmp_path, CHAIN)
    dataset.samples = dataset.samples * 80
    iterator = iter(DALILoader(dataset, 128, device="cuda"))
    assert max(len(iterator._prefetcher._runners) for _ in iterator) == 2  # type: ignore[attr-defined]
