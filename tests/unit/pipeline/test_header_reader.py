"""Headers of many files at once say what those of each file say."""

from __future__ import annotations

import contextlib
import io
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import skimage.data
import torch
from conftest import Script
from PIL import Image
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader, SampleError
from torchdali.pipeline import graph
from torchdali.pipeline.feed import Prefetcher
from torchdali.pipeline.readers import FileReader, FirstBytes, header_reader
from torchdali.pipeline.readers import files as file_reader
from torchdali.pipeline.readers.header_reader import HeaderReader, HeaderValidator
from torchdali.runtime.threads import DaemonThreadPoolExecutor
from torchdali.sources import HEADER_BYTES, UNREADABLE, read_header
from torchdali.sources.headers.batch import parse
from torchdali.sources.headers.header import parse_header

pytestmark = pytest.mark.timeout(60)

CHAIN = v2.Compose([v2.ToImage(), v2.CenterCrop(20)])


def kinds() -> Iterator[tuple[str, bytes, bool]]:
    """Name, file, and whether its first bytes tell all there is to know."""
    photograph = Image.fromarray(skimage.data.astronaut()).resize((61, 47))

    def saved(image: Image.Image, kind: str, **options: Any) -> bytes:
        stream = io.BytesIO()
        image.save(stream, kind, **options)
        return stream.getvalue()

    plain = saved(photograph, "JPEG")
    exif = Image.Exif()
    exif[0x010E] = "x" * 3000
    yield "plain.jpg", plain, True
    yield "progressive.jpg", saved(photograph, "JPEG", progressive=True), True
    yield "grey.jpg", saved(photograph.convert("L"), "JPEG"), True
    yield "444.jpg", saved(photograph, "JPEG", subsampling=0), True
    yield "restart.jpg", saved(photograph, "JPEG", restart_marker_blocks=2), True
    yield "padded.jpg", plain[:2] + b"\xff\xff" + plain[2:], True
    yield "cmyk.jpg", saved(photograph.convert("CMYK"), "JPEG"), False
    yield "rgb.jpg", saved(photograph, "JPEG", keep_rgb=True), False
    yield "long_exif.jpg", saved(photograph, "JPEG", exif=exif), False
    yield "comment.jpg", saved(photograph, "JPEG", comment=b"y" * 500), True
    yield "cut.jpg", plain[: len(plain) // 2], True
    yield "plain.png", saved(photograph, "PNG"), True
    yield "grey.png", saved(photograph.convert("L"), "PNG"), True
    yield "palette.png", saved(photograph.convert("P"), "PNG"), True
    yield "alpha.png", saved(photograph.convert("RGBA"), "PNG"), False
    yield "16.png", saved(Image.fromarray(np.zeros((5, 4), np.uint16)), "PNG"), False
    yield "photograph.webp", saved(photograph, "WEBP"), False
    yield "photograph.bmp", saved(photograph, "BMP"), False
    yield "photograph.gif", saved(photograph, "GIF"), False


def write(folder: Path, times: int = 1) -> list[Path]:
    folder.mkdir()
    paths: list[Path] = []
    for i in range(times):
        for name, contents, _ in kinds():
            paths.append(folder / f"{i}_{name}")
            paths[-1].write_bytes(contents)
    return paths


def headers_of(paths: list[Path]) -> tuple[Any, Any]:
    first = FirstBytes([str(path) for path in paths])
    assert first.read(0, len(paths)) == len(paths)
    return first.data, first.lengths


def test_first_bytes_say_what_the_header_says(tmp_path: Path) -> None:
    paths = write(tmp_path / "a")
    heads, lengths = headers_of(paths)
    assert heads.shape == (len(paths), HEADER_BYTES)
    found = parse(heads)
    assert found.known.tolist() == [known for _, _, known in kinds()]
    for i, path in enumerate(paths):
        header = read_header(str(path))
        assert lengths[i] == header.length
        if found.known[i]:
            said = (*found.sizes[i].tolist(), bool(found.jpeg[i]), True, bool(found.baseline[i]))
            assert said == (header.height, header.width, header.jpeg, header.native, header.baseline)


def test_what_only_a_whole_decoder_follows_is_for_pil() -> None:
    files = {name: contents for name, contents, _ in kinds()}
    plain, marked = files["plain.jpg"], b"\xff\xee\0\x0eAdobe\0d\0\0\0\0"
    frame, scan = plain.index(b"\xff\xc0"), plain.index(b"\xff\xda")
    animated = io.BytesIO()
    pictures = [Image.new("RGB", (6, 5), colour) for colour in ("red", "blue")]
    pictures[0].save(animated, "PNG", save_all=True, append_images=pictures[1:])
    cases = [(plain[:at] + marked + bytes([kind]) + plain[at:], kind == 1) for at in (2, scan) for kind in (0, 1)]
    cases += [(plain[:scan] + plain[frame:], False), (animated.getvalue(), False), (plain, True)]
    cmyk = files["cmyk.jpg"]
    adobe = cmyk.index(b"Adobe")
    cases += [(cmyk[: adobe + 11] + b"\2" + cmyk[adobe + 12 :], False)]
    found = parse(
        np.stack([np.frombuffer(file[:HEADER_BYTES].ljust(HEADER_BYTES, b"\0"), np.uint8) for file, _ in cases])
    )
    native = [native for _, native in cases]
    assert found.known.tolist() == native
    assert [parse_header(memoryview(file)).native for file, _ in cases] == native


@pytest.mark.parametrize("seed", range(3))
def test_damaged_files_are_never_said_to_be_what_they_are_not(tmp_path: Path, seed: int) -> None:
    """Where the first bytes tell, the header says the same; else one by one decides."""
    random = np.random.default_rng(seed)
    paths = write(tmp_path / "a", 3)
    for path in paths:
        contents = np.frombuffer(path.read_bytes(), np.uint8).copy()
        places = random.integers(0, min(len(contents), 700), 4)
        contents[places] = random.integers(0, 256, 4)
        path.write_bytes(contents[: random.integers(1, len(contents) + 1)].tobytes())
    found = parse(headers_of(paths)[0])
    compared = 0
    for i in np.flatnonzero(found.known).tolist():
        header = read_header(str(paths[i]))
        said = (*found.sizes[i].tolist(), bool(found.jpeg[i]), True, bool(found.baseline[i]))
        assert said == (header.height, header.width, header.jpeg, header.native, header.baseline), paths[i]
        compared += 1
    assert compared > 5


def test_an_epoch_reads_headers_together(tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "a", 4)
    dataset = ImageFolder(tmp_path, CHAIN)
    dataset.samples = [sample for sample in dataset.samples if "cut" not in sample[0] and "16.png" not in sample[0]]
    expected = list(DataLoader(dataset, 40))
    loader = DALILoader(dataset, 40, device=device)
    assert loader._session.reader is not None
    one_by_one: list[int] = []
    read = FileReader._read_header
    monkeypatch.setattr(FileReader, "_read_header", lambda self, row: one_by_one.append(row) or read(self, row))
    for epoch in range(2):
        for (images, labels), (theirs, others) in zip(loader, expected, strict=True):
            assert labels.tolist() == others.tolist()
            limit = 0 if device == "cpu" else 60  # as the certificate says of the JPEG engine
            assert (images.cpu().int() - theirs.int()).abs().max() <= limit, epoch
    together = sum(known for name, _, known in kinds() if name not in ("cut.jpg", "16.png"))
    assert 0 < len(one_by_one) < len(dataset) - together


@pytest.mark.parametrize("missing", [0, 50])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, missing: int, device: str) -> None:
    (tmp_path / "a").mkdir()
    photograph = Image.fromarray(skimage.data.coffee()).resize((40, 30))
    for i in range(80):
        photograph.save(tmp_path / "a" / f"{i:02}.jpg")
    dataset = ImageFolder(tmp_path, CHAIN)
    loader = DALILoader(dataset, 40, device=device)
    (tmp_path / "a" / f"{missing:02}.jpg").unlink()
    batches = iter(loader)
    if missing >= 40:
        assert len(next(batches)[0]) == 40
    with pytest.raises(SampleError, match="there is no such file") as raised:
        next(batches)
    assert raised.value.path == dataset.samples[missing][0]
    photograph.save(raised.value.path)
    assert [len(images) for images, _ in loader] == [40, 40]


def test_a_file_that_cannot_be_read_has_no_first_bytes(tmp_path: Path) -> None:
    paths = write(tmp_path / "a")[:2]
    first = FirstBytes([str(paths[0]), b"/nowhere", str(tmp_path), str(paths[1])])
    first.read(0, 4)
    assert not first.data[1:3].any()
    assert first.lengths.tolist() == [paths[0].stat().st_size, 0, 0, paths[1].stat().st_size]


def test_validator_is_made_anew_for_more_files_and_after_closing(tmp_path: Path) -> None:
    heads = headers_of([path for path in write(tmp_path / "a", 2) if path.suffix == ".jpg"])[0]
    first = list(heads[parse(heads).known])
    validator = HeaderValidator()
    assert validator.find_refused(first[:3]) == []
    built = validator._pipeline
    assert validator.find_refused(first[:3]) == []
    assert validator._pipeline is built
    damaged = [head.copy() for head in first]
    damaged[2][3] = damaged[7][3] = 0  # no marker
    assert validator.find_refused(damaged) == [2, 7]
    assert validator._pipeline is not built
    assert validator.find_refused([np.zeros(5, np.uint8), *first[:2]]) == [0]
    validator.close()
    assert validator.find_refused(first[:3]) == []
    validator.close()


def find_segments(jpeg: bytes) -> list[int]:
    """Return where the segments before the first scan begin, and where the scan's header ends."""
    places = [2]
    while jpeg[places[-1] + 1] != 0xDA:
        places.append(places[-1] + 2 + int.from_bytes(jpeg[places[-1] + 2 : places[-1] + 4], "big"))
    return [*places, places[-1] + 14]


def mutate_jpeg(jpeg: bytes, random: np.random.Generator) -> bytes:
    """Change, drop and insert bytes of a JPEG's header, most of them where a segment begins."""
    segments, changed = find_segments(jpeg), bytearray(jpeg)
    for _ in range(random.integers(1, 5)):
        begin = int(random.choice(segments[:-1]))
        at = begin + int(random.integers(24)) if random.random() < 0.7 else int(random.integers(2, segments[-1]))
        at = min(at, len(changed) - 1)
        match random.integers(5):
            case 0:
                changed[at] = random.integers(256)
            case 1:
                changed[at] = random.choice(
                    [0, 1, 0xC0, 0xC2, 0xC4, 0xC8, 0xCC, 0xD0, 0xD8, 0xDA, 0xDC, 0xE1, 0xEE, 0xFF]
                )
            case 2:
                del changed[at : at + int(random.integers(1, 8))]
            case 3:
                changed[at:at] = random.bytes(int(random.integers(1, 6)))
            case _:
                body = random.bytes(int(random.integers(30)))
                changed[begin:begin] = bytes([0xFF, random.integers(256)]) + (len(body) + 2).to_bytes(2, "big") + body
    return bytes(changed)


@pytest.mark.parametrize("seed", range(2))
def test_dali_refuses_no_jpeg_whose_markers_were_followed(seed: int) -> None:
    """Neither by its first bytes nor whole."""
    random = np.random.default_rng(seed)
    jpegs = [contents for name, contents, _ in kinds() if "jpg" in name and name != "padded.jpg"]
    files = [np.frombuffer(mutate_jpeg(jpeg, random), np.uint8) for jpeg in jpegs * 300]
    first = np.stack([np.pad(file[:HEADER_BYTES], (0, max(0, HEADER_BYTES - len(file)))) for file in files])
    known = np.flatnonzero(parse(first).known)
    native: list[np.ndarray] = []
    for file in files:
        with contextlib.suppress(*UNREADABLE, Warning):
            native += [file] if parse_header(file.data).native else []
    assert min(len(known), len(native)) > 400
    validator = HeaderValidator()
    assert validator.find_refused(list(first[known])) == validator.find_refused(native) == []
    validator.close()


@pytest.mark.slow
def test_a_file_that_never_answers_ends_one_epoch_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the epochs after it nor what reads the batches after it wait behind it."""
    (tmp_path / "class").mkdir()
    for number in range(80):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(next(kinds())[1])
    dataset, answers, read = ImageFolder(tmp_path, CHAIN), threading.Event(), FirstBytes._read
    late = os.fsencode(dataset.samples[25][0])

    def wait_for_one(first: FirstBytes, i: int) -> None:
        if first._paths[i] == late:
            answers.wait()
        read(first, i)

    with monkeypatch.context() as patched:
        patched.setattr(FirstBytes, "_read", wait_for_one)
        loader = DALILoader(dataset, 40, timeout=0.5, device="cpu")
        with pytest.raises(RuntimeError, match=r"timed out after 0\.5 seconds"):
            next(iter(loader))
    for (images, _), (others, _) in zip(loader, DALILoader(dataset, 40, device="cpu"), strict=True):
        assert torch.equal(images, others)
    answers.set()


@pytest.mark.parametrize("slow", [0.0, 0.002])
def test_several_threads_read_a_batch_if_files_take_long(
    tmp_path: Path, slow: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class").mkdir()
    content = next(kinds())[1]
    for number in range(200):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(content)
    threads, read = set[int](), FirstBytes._read

    def read_slowly(first: FirstBytes, i: int) -> None:
        threads.add(threading.get_ident())
        time.sleep(slow)
        read(first, i)

    monkeypatch.setattr(FirstBytes, "_read", read_slowly)
    monkeypatch.setattr(header_reader, "_PATIENCE", 5e-3 if slow else 60)
    ((images, _),) = DALILoader(ImageFolder(tmp_path, CHAIN), 200, device="cpu")
    assert (images == images[0]).all()
    assert len(threads) > 3 if slow else len(threads) == 1


def test_the_calling_thread_reads_while_files_are_quick(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [os.fsencode(tmp_path / f"{number}.jpg") for number in range(64)]
    for path in paths:
        Path(os.fsdecode(path)).write_bytes(next(kinds())[1])
    here, threads, read = threading.get_ident(), set[int](), FirstBytes._read
    slow = 0.0

    def watch(first: FirstBytes, i: int) -> None:
        threads.add(threading.get_ident())
        time.sleep(slow)
        read(first, i)

    monkeypatch.setattr(FirstBytes, "_read", watch)
    reader = HeaderReader()

    def scan(pool: DaemonThreadPoolExecutor, has_time_limit: bool = False) -> set[int]:
        threads.clear()
        lengths: list[int] = []
        reader.scan(paths, lambda first, scan: lengths.extend(first.lengths), lambda: pool, None, has_time_limit).wait()
        assert len(lengths) == 64
        return set(threads)

    pool = DaemonThreadPoolExecutor(4, "scan")
    monkeypatch.setattr(header_reader, "_NUM_BY_THREADS", 2)
    monkeypatch.setattr(header_reader, "_PATIENCE", 60)  # for a machine that is busy
    assert here not in scan(pool), "nothing is known about the storage"
    assert scan(pool) == {here}
    with reader._turn:  # as a thread does that reads another batch
        reader._turn_began = time.perf_counter()
        assert scan(pool) == {here}
        reader._turn_began -= 60
        assert here not in scan(pool), "a file may never answer that thread"
        assert here not in scan(pool), "a thread that reads beside it changes nothing"
    slow = 0.003
    monkeypatch.setattr(header_reader, "_PATIENCE", 0.001)
    assert len(scan(pool) - {here}) > 1, "files were late"
    slow = 0.0
    monkeypatch.setattr(header_reader, "_PATIENCE", 60)
    assert here not in scan(pool)
    assert here not in scan(pool)
    assert scan(pool) == {here}, "it tries again"
    assert here not in scan(pool, has_time_limit=True), "it would exceed it, if a file never answers"
    monkeypatch.setattr(reader, "is_on_network", True)
    assert here not in scan(pool), "a file there may never answer"
    pool.shutdown()


def test_a_few_late_files_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, clock = FirstBytes([b"name"] * 20), [0.0]
    late: dict[int, float] = {}
    monkeypatch.setattr(FirstBytes, "_read", lambda _, i: clock.append(clock[-1] + late.get(i, 1e-5)))
    monkeypatch.setattr(header_reader, "perf_counter", lambda: clock[-1])
    late = dict.fromkeys((3, 5, 7, 9), 0.04)
    assert first.read(0, 20, patience=0.005) == 20
    late = dict.fromkeys((3, 5, 7, 9, 12), 0.04)
    assert first.read(0, 20, patience=0.005) == 13
    late = {4: 0.06}
    assert first.read(0, 20, patience=0.005) == 5, "longer than any wait for a core"
    late = dict.fromkeys(range(20), 0.0009)
    assert first.read(0, 20, patience=0.005) == 6


def test_an_exception_of_a_signal_handler_is_no_error_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TimeoutError`` is an ``OSError``. The system's have a number."""
    for error, expected in ((OSError(5, "the disk's"), 3), (TimeoutError("the alarm's"), None)):
        monkeypatch.setattr(FirstBytes, "_read", Mock(side_effect=error))
        with pytest.raises(TimeoutError, match="alarm") if expected is None else contextlib.nullcontext():
            assert FirstBytes([b"name"] * 3).read(0, 3) == expected


def test_headers_that_the_first_bytes_do_not_tell_are_read_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "class").mkdir()
    for number in range(80):
        Image.new("RGB", (40 + number, 30)).save(tmp_path / "class" / f"{number:02}.tif", compression="tiff_lzw")
    here, threads, read = threading.get_ident(), list[int](), FileReader._read_each
    monkeypatch.setattr(FileReader, "_read_each", lambda *args: threads.append(threading.get_ident()) or read(*args))
    monkeypatch.setattr(header_reader, "_PATIENCE", 60)
    sizes = v2.Lambda(lambda image: torch.tensor(image.size))
    loader = DALILoader(ImageFolder(tmp_path, sizes), 4, device="cpu")
    widths = [int(width) for images, _ in loader for width in images[:, 0]]
    assert widths == [*range(40, 120)]
    assert len(threads) == 20
    assert here not in threads


WAITING = """
import os, sys, threading, time
from torchvision.transforms import v2
from torchdali import DALILoader
from torchdali.pipeline.readers import header_reader

crop = v2.Compose([v2.ToImage(), v2.CenterCrop(8)])
loader = DALILoader(sys.argv[1], 100, transform=crop, device="cpu")
header_reader.FirstBytes._read = lambda first, i: time.sleep(1000)
threading.Timer(1, os.kill, (os.getpid(), 2)).start()
try:
    list(loader)
except KeyboardInterrupt as error:
    print(type(error).__name__)
"""


@pytest.mark.slow
def test_a_process_ends_while_a_file_is_waited_for(run_script: Script, tmp_path: Path) -> None:
    """As it does after a timeout: tests/robustness/test_recovery.py."""
    folder = tmp_path / "some" / "class"
    folder.mkdir(parents=True)
    for number in range(40):
        (folder / f"{number}.jpg").write_bytes(next(kinds())[1])
    done = run_script(WAITING, folder.parent)
    assert (done.returncode, done.stdout) == (0, "KeyboardInterrupt\n"), done.stderr


@pytest.fixture
def vetting(device: str, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has headers read as beside a GPU, also on the CPU; how many whole files were validated together."""
    if device == "cpu":
        monkeypatch.setattr(HeaderValidator, "is_on", True)
    together: list[int] = []
    find = HeaderValidator.find_refused
    monkeypatch.setattr(
        HeaderValidator,
        "find_refused",
        lambda self, files: (together.append(len(files)) if isinstance(files, list) else None) or find(self, files),
    )
    return together


@pytest.mark.parametrize("times", [1, 4])
def test_a_file_whose_header_dali_refuses_is_left_to_pil(
    tmp_path: Path, device: str, times: int, vetting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the others are still read together; no batch is run twice for it."""
    write(tmp_path / "a", times)
    photograph = Image.fromarray(skimage.data.coffee()).resize((40, 30))
    for name in ("x", "y"):
        photograph.save(tmp_path / "a" / f"{name}.png")
    whole = (tmp_path / "a" / "x.png").read_bytes()
    (tmp_path / "a" / "x.png").write_bytes(whole[:-12])  # PIL needs no last chunk
    dataset = ImageFolder(tmp_path, CHAIN)
    dataset.samples = [sample for sample in dataset.samples if "cut" not in sample[0] and "16.png" not in sample[0]]
    monkeypatch.setattr(Prefetcher, "_run_again", lambda self, batch: pytest.fail("run twice"))
    loader = DALILoader(dataset, len(dataset), device=device)
    ((images, _),) = loader
    at = [Path(path).name for path, _ in dataset.samples].index("x.png")
    assert (images[at] == images[at + 1]).all()
    foreign = loader._session.reader.find_pil_only(np.arange(len(dataset))).tolist()
    known = {name for name, _, _ in kinds() if read_header(str(tmp_path / "a" / f"0_{name}")).native}
    assert [place for place in foreign if place >= at] == [at]
    assert not {Path(dataset.samples[place][0]).name[2:] for place in foreign if place < at} & known
    assert 1 < len(vetting) < 16


@pytest.mark.parametrize("count", [10, 80])
def test_what_is_for_pil_is_not_asked_of_dali_again(
    tmp_path: Path, device: str, count: int, vetting: list[int]
) -> None:
    (tmp_path / "a").mkdir()
    photograph = Image.fromarray(skimage.data.coffee()).resize((40, 30))
    for i in range(count):
        photograph.save(tmp_path / "a" / f"{i:02}.png", "GIF" if i % 4 else "PNG")
    ((images, _),) = DALILoader(ImageFolder(tmp_path, CHAIN), count, device=device)
    assert len(images) == count
    few = -(-count // 4)
    assert vetting == [few]


def test_few_whole_files_are_in_memory_for_dali_at_once(
    tmp_path: Path, device: str, vetting: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    photograph = Image.fromarray(skimage.data.coffee()).resize((40, 30))
    for i in range(80):
        photograph.save(tmp_path / "a" / f"{i:02}.png")
    length = (tmp_path / "a" / "00.png").stat().st_size
    monkeypatch.setattr(file_reader, "_MAX_READ", 12 * length)
    ((images, _),) = DALILoader(ImageFolder(tmp_path, CHAIN), 80, device=device)
    assert (images == images[0]).all()
    assert vetting == [12] * 6 + [8]


def test_a_pipe_among_few_files_is_named(tmp_path: Path, device: str, vetting: list[int]) -> None:
    write(tmp_path / "a")
    os.mkfifo(tmp_path / "a" / "0_a.jpg")
    iterator = iter(DALILoader(ImageFolder(tmp_path, CHAIN), 4, device=device))
    with pytest.raises(SampleError, match=r"0_a\.jpg\): .*it is no regular file"):
        next(iterator)
    for _ in range(2):  # headers may be vetted by other threads, and some files are cut off
        with contextlib.suppress(SampleError):
            next(iterator)
    assert max(vetting) < 5


def test_an_interrupted_validator_says_nothing_of_other_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = list(headers_of([path for path in write(tmp_path / "a") if path.suffix == ".jpg"])[0])
    validator = HeaderValidator()
    assert validator.find_refused(first[:1]) == []

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(validator._pipeline, "share_outputs", interrupted)
        with pytest.raises(KeyboardInterrupt):
            validator.find_refused([np.zeros(9, np.uint8)])
    assert validator.find_refused(first[:1]) == []
    validator.close()


def test_no_sound_file_is_left_to_pil_for_want_of_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").mkdir()
    photograph = Image.fromarray(skimage.data.coffee()).resize((40, 30))
    for i in range(80):
        photograph.save(tmp_path / "a" / f"{i:02}.png")
    build, fails = graph.build_header_validator, [1]

    def build_header_validator(*about: Any) -> Any:
        if fails.pop() if fails else False:
            raise RuntimeError("Resource temporarily unavailable")
        return build(*about)

    monkeypatch.setattr(graph, "build_header_validator", build_header_validator)
    monkeypatch.setattr(HeaderValidator, "is_on", True)
    loader = DALILoader(ImageFolder(tmp_path, CHAIN), 40, device="cpu")
    assert [len(images) for images, _ in loader] == [40, 40]
    assert not fails
    assert not len(loader._session.reader.find_pil_only(np.arange(80)))
