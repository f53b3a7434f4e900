"""What the loader chooses by itself, and that it is never seen in a batch."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import skimage.data
import torch
from PIL import Image
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.pipeline import jpeg_engine
from torchdali.pipeline.pool import PipelinePool
from torchdali.pipeline.readers import FirstBytes, header_reader
from torchdali.pipeline.readers.header_reader import HeaderReader
from torchdali.pipeline.tuning import Threads, choose_prefetch_depth
from torchdali.runtime import devices, machine
from torchdali.transforms.spec import InputKind, InputStats

CUDA = torch.device("cuda", 0)
CHAIN = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(32), v2.ToDtype(torch.float32, scale=True)])


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A machine of 16 cores whose card has an engine or not."""

    def use(engine: bool) -> None:
        monkeypatch.setattr(machine, "count_available_cores", lambda: 16)
        monkeypatch.setattr(jpeg_engine, "has_jpeg_engine", lambda _device: engine)

    return use


def test_threads_are_few_beside_a_jpeg_engine_and_more_where_it_has_nothing_to_do(card: Any) -> None:
    card(True)
    threads = Threads(0, CUDA, InputKind.FILES)
    assert [threads.choose(InputStats(beside)) for beside in (0.0, 0.05, 0.1, 0.2, 1.0)] == [4, 4, 6, 12, 16]
    assert "JPEG engine busy" in threads.explain()
    assert "20% of the files seen are not for the card's JPEG engine" in threads.explain(InputStats(0.2))
    assert Threads(0, CUDA, InputKind.PIXELS).choose() == 4
    assert [Threads(0, CUDA, InputKind.ENCODED).choose(InputStats(beside)) for beside in (0.0, 1.0)] == [4, 16]
    assert Threads(9, CUDA, InputKind.FILES).choose(InputStats(1.0)) == 9


def test_without_an_engine_and_on_the_cpu_all_cores_decode(card: Any) -> None:
    card(False)
    threads = Threads(0, CUDA, InputKind.FILES)
    assert threads.choose() == 16
    assert "no JPEG engine" in threads.explain()
    assert Threads(0, CUDA, InputKind.ENCODED).choose() == 16
    assert "nothing is decoded" in Threads(0, CUDA, InputKind.PIXELS).explain()
    assert Threads(0, torch.device("cpu"), InputKind.PIXELS).choose() == 16


def test_where_storage_is_slow_as_many_threads_wait_for_it_as_read_headers(card: Any) -> None:
    card(True)
    slow = InputStats(wait=0.0052)
    threads = Threads(0, CUDA, InputKind.FILES)
    assert [threads.choose(InputStats(wait=wait)) for wait in (0.0, 0.0029, 0.0052)] == [4, 4, 16]
    assert threads.explain(slow) == (
        "chosen: storage keeps a thread waiting 5.2 ms for a file; of 16 cores that this process may use"
    )
    assert "not for the card's JPEG engine" in threads.explain(InputStats(1.0, 0.0052)), "16 decode anyway"
    assert Threads(0, CUDA, InputKind.ENCODED).choose(slow) == 4, "nothing is read"
    assert Threads(2, CUDA, InputKind.FILES).choose(slow) == 2
    assert Threads(2, CUDA, InputKind.FILES).explain(slow) == "num_workers"


def test_a_network_file_system_is_taken_as_slow_until_it_is_measured(card: Any) -> None:
    card(True)
    threads = Threads(0, CUDA, InputKind.FILES)
    stats = [InputStats(wait=wait, is_on_network=True) for wait in (0.0, 0.0029, 0.0052)]
    assert [*map(threads.choose, stats)] == [16, 4, 16]
    assert threads.explain(stats[0]).startswith("chosen: files lie on a network file system, whose speed is not known")
    assert Threads(0, CUDA, InputKind.ENCODED).choose(stats[0]) == 4, "nothing is read"


@pytest.mark.parametrize("paths", [[b"/data/a.jpg", b"/other/b.jpg"], [b"a.jpg"]])
def test_the_folder_of_the_first_file_tells_where_files_lie(
    monkeypatch: pytest.MonkeyPatch, paths: list[bytes]
) -> None:
    folders: list[str] = []
    monkeypatch.setattr(machine, "is_on_network", lambda folder: not folders.append(folder))
    reader = HeaderReader()
    assert not reader.is_on_network, "nothing was asked for"
    with ThreadPoolExecutor(1) as pool:
        for some in (paths, [b"/later/c.jpg"]):
            reader.scan(some, lambda first, scan: None, lambda: pool).wait()
    assert reader.is_on_network
    assert folders == ["/data" if len(paths) == 2 else "."]


def late(monkeypatch: pytest.MonkeyPatch, late_by: float, work: float) -> None:
    """From now on a reading of files seems to take so many seconds, and the processor so many of them."""
    for name, step in (("perf_counter", late_by), ("thread_time", work)):
        times = itertools.count(0, step)
        monkeypatch.setattr(header_reader, name, times.__next__)
    monkeypatch.setattr(FirstBytes, "read", lambda self, begin, end, patience=0: end)


def test_readings_tell_how_long_threads_wait_for_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, first = HeaderReader(), FirstBytes([])
    for late_by, files in ((0.4, 7), *[(0.9, 16)] * 64, (0.9, 16), (0.1, 16), *[(0.3, 16)] * 62):
        assert reader.wait == 0.0
        late(monkeypatch, late_by, 0.2)
        assert reader._read_timed(first, 0, files, 0.0) == files
    expected = pytest.approx((0.3 - 0.2) / 16)
    assert reader.wait == expected, "neither of the first nor of one beside which the processor was busy"
    for late_by in [0.9] * 100:
        late(monkeypatch, late_by, 0.2)
        reader._read_timed(first, 0, 16, 0.0)
    assert reader.wait == expected, "of the first readings"


def test_small_batches_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, first = HeaderReader(), FirstBytes([])
    for number in range(256):
        assert reader.wait == 0.0, f"of {number} batches of 4"
        late(monkeypatch, 0.3, 0.2)
        reader._read_timed(first, 0, 4, 0.0)
    assert reader.wait == pytest.approx((0.3 - 0.2) / 4)


def test_threads_are_chosen_for_slow_storage_from_the_second_epoch_on(
    pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "count_available_cores", lambda: 2)
    monkeypatch.setattr(header_reader, "_NUM_WARMUP", 6)
    monkeypatch.setattr(header_reader, "_NUM_MEASURED", 6)  # 12 batches: more than are read ahead
    epochs: list[Any] = []
    for late_by, expected in ((0.003, [2, 2]), (0.3, [2, 16])):
        late(monkeypatch, late_by, 0.0)
        dataset = ImageFolder(pictures, CHAIN)
        dataset.samples = dataset.samples * 22
        loader, threads = DALILoader(dataset, 32, seed=3, device="cpu"), []
        for _ in range(2):
            epochs.append([images for images, _ in loader])
            assert loader._session.native_plan is not None
            threads += [engine.threads for engine in loader._session.native_plan.pool._idle]
        assert threads == expected
        loader.explain()
        assert f"threads    {threads[-1]} of DALI (chosen: " in capsys.readouterr().out
    of_few, of_many = epochs[1], epochs[3]
    assert all(torch.equal(few, many) for few, many in zip(of_few, of_many, strict=True))


@pytest.mark.parametrize(("quota", "cores"), [(None, 4), (0.2, 1), (1.5, 2), (9.0, 4)])
def test_cores_are_those_of_the_affinity_and_of_the_control_group(
    quota: float | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr(machine, "_cgroup_quota", lambda: quota)
    assert machine.count_available_cores() == cores


def test_memory_that_is_used_up_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_cgroup_memory", list)
    assert machine.measure_available_memory() > 2**20
    monkeypatch.setattr(machine, "_cgroup_memory", lambda: [-5])
    assert machine.measure_available_memory() == 0


@pytest.mark.parametrize(
    ("capability", "asked", "engine"),
    [((7, 5), None, False), ((8, 0), None, True), ((9, 0), None, True), ((8, 9), True, True), ((8, 6), False, False)],
)
def test_nvjpeg_is_asked_only_where_the_kind_of_card_does_not_tell(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], asked: bool | None, engine: bool
) -> None:
    def ask() -> bool:
        assert asked is not None
        return asked

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    monkeypatch.setattr(devices, "use", lambda _device: nullcontext())
    monkeypatch.setattr(jpeg_engine, "_ask_nvjpeg", ask)
    assert jpeg_engine.has_jpeg_engine.__wrapped__(CUDA) is engine


@pytest.mark.gpu
def test_nvjpeg_says_of_this_card_what_its_kind_does() -> None:
    if (torch.cuda.get_device_capability(0)) not in jpeg_engine._WITH_ENGINE:
        pytest.skip("a card whose kind does not tell")
    assert jpeg_engine._ask_nvjpeg()


@pytest.mark.parametrize(
    ("sample", "memory", "most"),
    [(602_112, 2**40, 6), (3 * 2**20, 2**40, 2), (602_112, 2**29, 3), (602_112, 2**10, 2), (100, 2**40, 6)],
)
def test_the_window_fits_the_memory(sample: int, memory: int, most: int) -> None:
    assert choose_prefetch_depth(256 * sample, memory) == most


@pytest.mark.timeout(60)
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_the_window_of_a_dataset_that_is_asked_fits_what_its_batches_take(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = torch.zeros(40, 3, 64, 64, dtype=torch.uint8).unbind()
    packed, made = samples[0].nbytes, 3 * 128 * 128 * 4
    monkeypatch.setattr(machine, "choose_memory_for_batches", lambda _device: 3 * 4 * (packed + made))
    transform = v2.Compose([v2.Resize((128, 128)), v2.ToDtype(torch.float32, scale=True)])
    loader = DALILoader(cast("Any", samples), 4, transform=transform, num_workers=1, device="cpu")
    assert len(list(loader)) == 10
    assert loader._session.proxy_plan is not None
    assert loader._session.proxy_plan.prefetch_depth == 3


def test_batches_do_not_depend_on_threads_or_window(pictures: Any, device: str) -> None:
    dataset = ImageFolder(pictures, CHAIN)
    chosen = DALILoader(dataset, 4, shuffle=True, seed=5, device=device, generator=torch.Generator().manual_seed(1))
    epochs = [list(chosen) for _ in range(2)]
    for threads, window in ((1, 2), (3, 5)):
        pinned = DALILoader(
            dataset,
            4,
            shuffle=True,
            seed=5,
            device=device,
            generator=torch.Generator().manual_seed(1),
            num_workers=threads,
            prefetch_factor=window,
        )
        for epoch in epochs:
            for (images, labels), (others, theirs) in zip(epoch, pinned, strict=True):
                assert torch.equal(images, others)
                assert torch.equal(labels, theirs)


@pytest.mark.parametrize("cache", [None, "host", "device"])
def test_a_window_that_is_set_later_holds_from_the_next_epoch_on(pictures: Any, device: str, cache: Any) -> None:
    options: dict[str, Any] = {"num_workers": 2, "device": device, "cache": cache, "seed": 5}
    loader, other = (DALILoader(ImageFolder(pictures, CHAIN), 4, **options) for _ in range(2))
    _, expected = list(other), list(other)
    list(loader)
    chosen = loader._native_plan()
    loader.prefetch_factor = chosen.prefetch_depth + 3
    images = [images for images, _ in loader]
    assert loader._native_plan().prefetch_depth == chosen.prefetch_depth + 3
    assert loader._native_plan().cache is chosen.cache
    assert all(torch.equal(one, theirs) for one, (theirs, _) in zip(images, expected, strict=True))


def test_an_engine_with_too_few_threads_is_not_used_again(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader, used = DALILoader(ImageFolder(pictures, CHAIN), 4, device="cpu"), []
    for threads in (1, 2, 1):
        monkeypatch.setattr(Threads, "choose", lambda *_, threads=threads: threads)
        list(loader)
        assert loader._session.native_plan is not None
        used += [engine.threads for engine in loader._session.native_plan.pool._idle]
    assert used == [1, 2, 2]


def test_what_is_set_later_is_built_for(pictures: Path) -> None:
    loader = DALILoader(ImageFolder(pictures, CHAIN), 4, cache="host", cache_bytes=1, device="cpu")
    before = loader._native_plan()
    assert loader._native_plan() is before
    loader.num_workers = before.threads.choose() + 1
    assert loader._native_plan().threads.choose() == loader.num_workers
    before = loader._native_plan()
    loader.cache_bytes = 2**20
    assert loader._native_plan() is not before
    loader.cache = cast("Any", "tape")
    with pytest.raises(ValueError, match="tape"):
        iter(loader)


def test_a_prefetch_factor_that_nobody_chose_is_none_of_a_copy(pictures: Path) -> None:
    loader = DALILoader(ImageFolder(pictures, CHAIN), 4, num_workers=2, device="cpu")
    for one in (loader, pickle.loads(pickle.dumps(loader))):
        assert one.prefetch_factor == 2
        again = DALILoader(one.dataset, 4, num_workers=2, prefetch_factor=one.prefetch_factor, device="cpu")
        assert again._native_plan().prefetch_depth == 6


class Growing:
    """A batch sampler whose first batch is a small one."""

    batch_size = 6

    def __iter__(self) -> Iterator[list[int]]:
        yield [0]
        yield [*range(6)]


def test_one_engine_is_built_for_small_batches_and_large_ones(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = PipelinePool.make
    monkeypatch.setattr(
        PipelinePool, "make", lambda pool, size, threads: made.append(size) or make(pool, size, threads)
    )
    loader = DALILoader(ImageFolder(pictures, CHAIN), batch_sampler=Growing(), device="cpu")
    assert [len(images) for images, _ in loader] == [1, 6]
    assert made == [6]


@pytest.mark.parametrize("asked", [False, True], ids=["folder", "bytes"])
def test_files_that_are_not_for_an_engine_are_counted(
    tmp_path: Path, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    leased: list[float] = []
    choose = Threads.choose
    monkeypatch.setattr(Threads, "choose", lambda self, seen: leased.append(seen.non_engine) or choose(self, seen))
    photograph = Image.fromarray(skimage.data.astronaut()).resize((60, 50))
    (tmp_path / "a").mkdir()
    for i in range(5):
        photograph.save(tmp_path / "a" / f"{i}.jpg")
    photograph.save(tmp_path / "a" / "5.jpg", progressive=True)
    photograph.save(tmp_path / "a" / "6.png")
    photograph.convert("CMYK").save(tmp_path / "a" / "7.jpg")
    folder = ImageFolder(tmp_path, CHAIN)
    if asked:
        encoded = [(Path(path).read_bytes(), label) for path, label in folder.samples]
        list(DALILoader(cast("Any", encoded), 8, transform=CHAIN, device="cpu"))
        assert leased == [3 / 8]
    else:
        loader = DALILoader(folder, 4, device="cpu")
        list(loader)
        list(loader)
        assert leased[-1] == 3 / 8  # the first epoch knows the headers that were read until its first batch


def test_explain_says_what_was_chosen_and_why(pictures: Any, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = ImageFolder(pictures, CHAIN)
    DALILoader(dataset, 4, device="cpu").explain()
    DALILoader(dataset, 4, device="cpu", num_workers=1, prefetch_factor=4).explain()
    chosen, pinned = capsys.readouterr().out.split("3 of 3 transforms run in DALI on cpu\n")[1:]
    assert f"{machine.count_available_cores()} of DALI (chosen: the" in chosen
    assert "depth 6 batches (chosen" in chosen
    assert "1 of DALI (num_workers)" in pinned
    assert "depth 4 batches (prefetch_factor)" in pinned
