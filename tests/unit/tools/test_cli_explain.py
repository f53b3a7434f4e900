"""``torchdali explain``: folders, objects in files, and scripts, which it ends early."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from helpers.started import run_python
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, WeightedRandomSampler
from torchvision.datasets import ImageFolder

from torchdali import DALILoader
from torchdali.tools.cli import commands
from torchdali.tools.commands.explain import convert_loader

pytestmark = pytest.mark.timeout(60)

MINE = """
from pathlib import Path

import PIL.Image
import torch
from torch.utils.data import DataLoader, Dataset
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader

ROOT = PICTURES
assert __name__ != "__main__"

chain = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(40), v2.ToDtype(torch.float32, scale=True)])
folder = ImageFolder(ROOT, chain)


class Pictures(Dataset):
    def __init__(self):
        self.files = sorted(Path(ROOT).rglob("*.jpg"))
        self.transform = v2.Compose([v2.ToImage(), v2.CenterCrop(30), v2.RandomHorizontalFlip(0.25)])

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.transform(PIL.Image.open(self.files[index]))


def ours():
    return DALILoader(folder, 5, device="cpu")


def both(batch_size=4):
    return ours(), DataLoader(folder, batch_size, shuffle=True, drop_last=True)


def fails():
    raise ValueError("of my own")


def named():
    return {"train": folder, "val": DataLoader(Pictures(), 3)}


def mine(image):
    return image


several = [v2.ToImage(), v2.CenterCrop(20)]
needs = DataLoader
number = 3
"""


def run(*options: object) -> Result:
    return CliRunner().invoke(commands(), ["explain", *map(str, options)])


def flatten_output(result: Result) -> str:
    return " ".join(result.output.replace("\u2502", " ").split())


@pytest.fixture
def mine(pictures: Path, tmp_path: Path) -> Path:
    """Return a file with loaders, datasets and transforms."""
    file = tmp_path / f"explained_{tmp_path.name}.py"
    file.write_text(MINE.replace("PICTURES", repr(str(pictures))))
    return file


@pytest.fixture
def script(pictures: Path, tmp_path: Path) -> Any:
    """Return a function that writes a script with the folder's path."""

    def write(code: str) -> Path:
        file = tmp_path / "train.py"
        file.write_text(textwrap.dedent(code).replace("PICTURES", repr(str(pictures))))
        return file

    return write


# Folders


def test_a_folder_of_class_folders(pictures: Path) -> None:
    result = run(pictures, "--device", "cpu")
    assert result.exit_code == 0, result.output
    assert "24 files in 3 classes (ImageFolder)" in result.output
    assert "has no class folders" not in result.output
    assert "RandomResizedCrop(size=(224, 224)" in result.output


def test_a_folder_without_classes_and_a_transform(pictures: Path, mine: Path) -> None:
    result = run(pictures / "coffee", "--transform", f"{mine}:chain")
    assert result.exit_code == 0, result.output
    assert "has no class folders, which ImageFolder needs. With one around all its images:\n" in result.output
    assert "8 files in 1 class (" in result.output
    assert "RandomResizedCrop(size=(40, 40)" in result.output


# Names


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ours", ["24 files in 3 classes (ImageFolder)", "RandomResizedCrop(size=(40, 40)"]),
        ("folder", ["24 files in 3 classes (ImageFolder)", "RandomResizedCrop(size=(40, 40)"]),
        ("chain", ["3 of 3 transforms run in DALI on cpu decode", "RandomResizedCrop(size=(40, 40)"]),
        ("several", ["2 of 2 transforms run in DALI on cpu decode", "CenterCrop(size=(20, 20))"]),
        (
            "mine",
            [
                "0 of 1 transform runs in DALI on cpu to do replace transform 1, function",
                "torchdali has no rule for function",
            ],
        ),
        (
            "Pictures",
            [
                "Pictures, worker-fed: its samples come from",
                "given as transform=: 3 of 3 transforms run in DALI on cpu decode",
                "probability 0.25",
            ],
        ),
        (
            "both",
            [
                "both(), part 1: 3 of 3 transforms run in DALI on cpu device",
                "both(), part 2: A DataLoader. In its place, with the same arguments: 3 of 3 transforms run in DALI",
                "RandomResizedCrop",
            ],
        ),
        (
            "named",
            [
                "named(), train: 3 of 3 transforms run in DALI on cpu device",
                "named(), val: A DataLoader. In its place, with the same arguments: Nothing runs in DALI: give",
                "to do return images without Pictures.transform, and give it to the loader as transform=; wrap masks",
                "its samples come from this process",
            ],
        ),
    ],
)
def test_what_a_file_has_under_a_name(mine: Path, name: str, expected: list[str]) -> None:
    result = run(f"{mine}:{name}", "--device", "cpu")
    assert result.exit_code == 0, result.output
    for text in expected:
        assert text in flatten_output(result)


def test_what_is_none_of_these(mine: Path, pictures: Path) -> None:
    for target, text in {
        f"{mine}:number": "is of type int; a loader, a dataset, a transform, or what makes one without arg",
        f"{mine}:needs": "is the class DataLoader; a loader",
        f"{mine}:nothing": "has nothing that is called 'nothing'",
        "nowhere.py:x": "'nowhere.py:x' is not FILE:NAME with a file that exists",
        "nowhere.py": "'nowhere.py' is not FILE:NAME",
    }.items():
        result = run(target)
        assert result.exit_code == 2, result.output
        assert text in flatten_output(result)
    picture = next(pictures.glob("*/*.jpg"))
    assert "is no Python script: SCRIPT, DIR or FILE:NAME is expected" in flatten_output(run(picture))
    assert "--transform goes with DIR" in flatten_output(run(mine, "--transform", f"{mine}:chain"))
    assert "ARGUMENTS go with SCRIPT" in flatten_output(run(pictures, "--", "--epochs", 3))
    for wrong in (run(mine, "--transform", f"{mine}:chain"), run(pictures, "--", "x"), run(f"{mine}:chain", "--", "x")):
        assert wrong.exit_code == 2


def test_what_fails_in_the_file_is_no_wrong_option(mine: Path) -> None:
    result = run(f"{mine}:fails")
    assert (result.exit_code, repr(result.exception)) == (1, "ValueError('of my own')")


# Taking over


def test_a_loader_is_taken_over_with_its_arguments(dataset: ImageFolder) -> None:
    generator = torch.Generator()
    weighted = WeightedRandomSampler([1.0] * 24, 10)

    def collate(samples: list[Any]) -> int:
        return len(samples)

    for theirs in (
        DataLoader(dataset, 5, shuffle=True, drop_last=True, generator=generator),
        DataLoader(dataset, 4, sampler=weighted, collate_fn=collate),
        DataLoader(dataset, batch_sampler=BatchSampler(RandomSampler(dataset), 3, drop_last=True)),
        DataLoader(dataset, batch_size=None),
        DataLoader(dataset, 2, num_workers=2, timeout=5, persistent_workers=True, prefetch_factor=7),
    ):
        with convert_loader(theirs, "cpu") as ours:
            if theirs.batch_size is None and theirs.batch_sampler is not None:
                assert ours.batch_sampler is theirs.batch_sampler
            else:
                assert ours.sampler is theirs.sampler
            for name in ("dataset", "batch_size", "drop_last", "num_workers", "collate_fn", "generator"):
                assert getattr(ours, name) is getattr(theirs, name), name
            assert (ours.timeout, ours.persistent_workers) == (theirs.timeout, theirs.persistent_workers)
            assert len(ours) == len(theirs)
            torch.manual_seed(3)
            expected = [batch[1] if isinstance(batch, (list, tuple)) else batch for batch in theirs]
            torch.manual_seed(3)
            got = [batch[1] if isinstance(batch, (list, tuple)) else batch for batch in ours]
            if theirs.generator is None:
                assert str(got) == str(expected)


def test_an_iterable_dataset_is_taken_over() -> None:
    class Numbers(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(7))

    theirs = DataLoader(Numbers(), 3, drop_last=True)
    assert [batch.tolist() for batch in convert_loader(theirs, "cpu")] == [[0, 1, 2], [3, 4, 5]]


def test_a_prefetch_factor_that_nobody_chose(dataset: ImageFolder, capsys: pytest.CaptureFixture[str]) -> None:
    convert_loader(DataLoader(dataset, 2, num_workers=2), "cpu").explain()
    assert "(chosen: 6, or what fits" in capsys.readouterr().out
    convert_loader(DataLoader(dataset, 2, num_workers=2, prefetch_factor=3), "cpu").explain()
    assert "depth 3 batches (prefetch_factor)" in capsys.readouterr().out


# Scripts

TRAIN = """
import argparse
from pathlib import Path
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
import neighbour
from torch.utils.data import DataLoader
from torchdali import DALILoader

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--torch", action="store_true")
    args = parser.parse_args()
    kind = DataLoader if args.torch else DALILoader
    loader = kind(ImageFolder(PICTURES, v2.Compose([v2.ToImage(), v2.CenterCrop(args.size)])), 3)
    try:
        for batch in loader:
            Path(__file__).with_name("trained").touch()
    except Exception:
        Path(__file__).with_name("failed").touch()

if __name__ == "__main__":
    main()
"""


@pytest.mark.slow
def test_a_script_ends_where_it_first_iterates(script: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    train = script(TRAIN)
    before = (sys.argv, list(sys.path), DataLoader.__iter__, DALILoader.__iter__)

    result = run(train, "--", "--size", 17, "--torch")

    assert result.exit_code == 0, result.output
    assert f"{train}, line 18, in main, first iterates over a loader." in result.output
    assert "CenterCrop(size=(17, 17))" in result.output
    assert "In its place, with the same arguments" in result.output
    assert not (tmp_path / "trained").exists()
    assert not (tmp_path / "failed").exists()
    assert (sys.argv, list(sys.path), DataLoader.__iter__, DALILoader.__iter__) == before


@pytest.mark.slow
def test_as_a_command(script: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("")
    done = run_python("-m", "torchdali.tools.cli", "explain", script(TRAIN), "--", "--size", "18")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CenterCrop(size=(18, 18))" in done.stdout
    assert "In its place" not in done.stdout


@pytest.mark.parametrize(
    ("code", "exit_code", "text"),
    [
        ("print('hello')", 1, "ended and did not iterate over a loader"),
        ("import sys; sys.exit(0)", 1, "ended and did not iterate over a loader"),
        ("import sys; sys.exit(5)", 5, ""),
    ],
)
def test_a_script_without_a_loader(script: Any, code: str, exit_code: int, text: str) -> None:
    result = run(script(code))
    assert result.exit_code == exit_code
    assert text in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    "code", ["def load():\n    raise ZeroDivisionError('mine')\nload()", "if True print()"], ids=["raises", "no Python"]
)
def test_a_script_that_fails_says_what_the_interpreter_would(script: Any, code: str) -> None:
    path = script(code)
    interpreted = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=100, check=False)
    explained = run_python("-m", "torchdali.tools.cli", "explain", path)
    assert (explained.returncode, explained.stdout, explained.stderr) == (1, "", interpreted.stderr)


@pytest.mark.slow
def test_a_loader_of_a_script_that_cannot_be_explained(script: Any) -> None:
    code = """
    from torchvision.datasets import ImageFolder
    from torchdali import DALILoader
    list(DALILoader(ImageFolder(PICTURES), device="cpu"))
    """
    done = run_python("-m", "torchdali.tools.cli", "explain", script(code))
    assert done.returncode == 1
    assert done.stderr.startswith("torchdali: the transforms end in PIL images")


def test_options_of_a_script_come_after_two_dashes(script: Any) -> None:
    path = script(TRAIN)
    result = run(path, "--epochs", 1)
    assert result.exit_code == 2
    assert f"No such option '--epochs'. Give the options of {path} after it and --." in " ".join(result.output.split())


def test_a_notebook_is_no_script(tmp_path: Path) -> None:
    (tmp_path / "book.ipynb").write_text('{"cells": []}')
    result = run(tmp_path / "book.ipynb")
    assert result.exit_code == 2
    assert "is a notebook: call loader.explain() in it" in " ".join(result.output.split())


STUBBORN = """
import atexit, multiprocessing, time
from pathlib import Path
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

def write(name):
    Path(__file__).with_name(f"{name}.written").touch()

def train():
    loader = DataLoader(ImageFolder(PICTURES, v2.ToImage()), 1)
    try:
        for batch in loader:
            write("batch")
    except BaseException:
        write("except")
    finally:
        write("finally")

if __name__ == "__main__":
    atexit.register(write, "atexit")
    processes = [multiprocessing.get_context("spawn").Process(target=train) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    write("after")
"""


@pytest.mark.slow
def test_no_code_of_a_script_runs_after_the_explanation(script: Any, tmp_path: Path) -> None:
    """Its loader is iterated in processes of its own, which are spawned."""
    result = run(script(STUBBORN))
    assert (result.exit_code, result.output.count("24 files in 3 classes")) == (0, 1), result.output
    assert [path.name for path in tmp_path.glob("*.written")] == []
