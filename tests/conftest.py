"""What all tests share: a folder of photographs, datasets on it, devices, and scripts in a process of their own."""

from __future__ import annotations

import gc
import io
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Generator, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from helpers.started import run_python
from PIL import Image
from torch.utils.data._utils.signal_handling import _set_SIGCHLD_handler
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali.tools.parity.photographs import write_photographs

torch.set_num_threads(1)  # a forked process would wait for the parent's threads of libgomp, which it does not have

TESTS = Path(__file__).parent
MARKED_FOLDERS = ("robustness", "ecosystem", "docs", "gpu")
LONGEST_FIRST = ("gpu", "docs", "ecosystem", "robustness", "contract", "parity", "unit")
"""Two processes share the files: with the short ones last, both end at about the same time."""

PHOTOGRAPHS = ("astronaut", "chelsea", "coffee")
PER_CLASS = 8
SMALLEST, LARGEST = 50, 90
CROP = 24
PER_BATCH = 3

Numbered = Callable[..., ImageFolder]
Script = Callable[..., subprocess.CompletedProcess[str]]


def in_order(first: int = 0, end: int = len(PHOTOGRAPHS) * PER_CLASS) -> list[list[int]]:
    """The labels of batches of ``PER_BATCH`` samples, not shuffled."""
    return [list(range(start, min(start + PER_BATCH, end))) for start in range(first, end, PER_BATCH)]


def assert_pairs(batches: Iterable[Any], dataset: ImageFolder, labels: list[list[int]] | None = None) -> None:
    """Each label of a numbered dataset comes with its own picture, and these are all the labels."""
    batches = list(batches)
    if labels is not None:
        assert [batch[1].tolist() for batch in batches] == labels
    for images, of_images in batches:
        assert len(images) == len(of_images)
        for image, label in zip(images, of_images.tolist(), strict=True):
            true = dataset[label][0]
            assert image.shape == true.shape
            difference = (image.cpu().float() - true.float()).abs()
            assert difference.max() == 0 if image.device.type == "cpu" else difference.mean() < 5, label


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def same(ours: Any, theirs: Any) -> bool:
    """Whether two objects are equal in types and values all through."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(ours, (list, tuple)):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if isinstance(ours, dict):
        return same(list(ours.items()), list(theirs.items()))
    return ours == theirs


def pytest_configure() -> None:
    """Set the signal handlers that tests rely on.

    At the end of a fit, Lightning restores the handlers that it found. torch sets its SIGCHLD handler once a process,
    so that without this line it would be missing in the tests after Lightning's. A shell lets what it starts in the
    background ignore SIGINT, and all processes of the tests would inherit that.
    """
    _set_SIGCHLD_handler()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Leave what the test modules made to no garbage collection. Else each ``gc.collect()`` of a test takes 0.5 s."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test by its folder, run the longest files first, and skip what needs a GPU where there is none."""
    for item in items:
        if (folder := folder_of(item)) in MARKED_FOLDERS:
            item.add_marker(folder)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in slow, LONGEST_FIRST.index(folder_of(item))))
    if torch.cuda.is_available():
        return
    elsewhere = "TORCHDALI_SMOKE_DEVICE" in os.environ
    skip = pytest.mark.skip(reason="needs a CUDA device: torch.cuda.is_available() is False here")
    for item in items:
        if "gpu" in item.keywords and not (elsewhere and "smoke" in item.path.parts):
            item.add_marker(skip)


def folder_of(item: pytest.Item) -> str:
    """Return the folder of ``tests`` that holds a test."""
    return item.path.relative_to(TESTS).parts[0]


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Where batches are made."""
    return request.param


@pytest.fixture(scope="session")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``<class>/<number>.jpg``: crops of photographs, of varied sizes. Not to be changed."""
    root = tmp_path_factory.mktemp("pictures")
    rng = np.random.default_rng(0)
    for name in PHOTOGRAPHS:
        with (files("skimage") / "data" / f"{name}.png").open("rb") as stream:
            photograph = Image.open(stream).convert("RGB")
        (root / name).mkdir()
        for number in range(PER_CLASS):
            width, height = rng.integers(SMALLEST, LARGEST, 2, endpoint=True).tolist()
            left = int(rng.integers(photograph.width - width))
            top = int(rng.integers(photograph.height - height))
            crop = photograph.crop((left, top, left + width, top + height))
            crop.save(root / name / f"{number}.jpg", quality=int(rng.integers(75, 96)))
    return root


@pytest.fixture(scope="session")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> ImageFolder:
    """Twelve crops of four photographs, no two of one size, without loss."""
    return write_photographs(tmp_path_factory.mktemp("photographs") / "pictures")


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which ``explain()`` wraps no line."""
    monkeypatch.setenv("COLUMNS", "1000")


@pytest.fixture
def fresh_pictures(pictures: Path, tmp_path: Path) -> Path:
    """A copy of the pictures that a test may damage."""
    return Path(shutil.copytree(pictures, tmp_path / "fresh"))


@pytest.fixture(scope="session")
def exact() -> v2.Compose:
    """A transform that gives equal shapes and that changes no pixel, so that a picture is known by its pixels."""
    return v2.Compose([v2.ToImage(), v2.CenterCrop(CROP)])


@pytest.fixture(scope="session")
def numbered(exact: v2.Compose) -> Numbered:
    """Makes an ImageFolder whose targets are the samples' numbers, counted from ``first``."""

    def make(root: Path, transform: Any = exact, first: int = 0, **options: Any) -> ImageFolder:
        dataset = ImageFolder(root, transform, **options)
        dataset.samples = [(path, first + i) for i, (path, _) in enumerate(dataset.samples)]
        return dataset

    return make


@pytest.fixture
def dataset(pictures: Path, numbered: Numbered) -> ImageFolder:
    """The pictures, numbered, with the exact transform."""
    return numbered(pictures)


@pytest.fixture
def fresh(fresh_pictures: Path, numbered: Numbered) -> ImageFolder:
    """A numbered dataset whose files may be damaged."""
    return numbered(fresh_pictures)


@pytest.fixture
def run_script(tmp_path: Path) -> Script:
    """Runs Python code in a process of its own: one that has imported torch and DALI, unless it must be fresh.

    A value of None takes a variable out of the environment of a fresh one.
    """

    def run(code: str, *arguments: object, timeout: float = 100, fresh: bool = False, **variables: str | None) -> Any:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(code))
        if not fresh and not torch.cuda.is_available():
            return run_python(script, *arguments, timeout=timeout, **cast("dict[str, str]", variables))
        merged = {**os.environ, **variables}
        return subprocess.run(
            [sys.executable, str(script), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={name: value for name, value in merged.items() if value is not None},
        )

    return run
