"""What type checkers and ``inspect`` know of a loader is what they know of a DataLoader."""

from __future__ import annotations

import inspect
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torch.utils.data import DataLoader

from torchdali import DALILoader

pytestmark = pytest.mark.timeout(120)

USED = """
from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, RandomSampler, Subset, random_split
from torch.utils.data import DataLoader as Theirs
{imported}


class Pictures(Dataset[tuple[Tensor, int]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 8, 8), index


class Ours(DataLoader[tuple[Tensor, int]]):
    def __init__(self, count: int) -> None:
        super().__init__(Pictures(), batch_size=count, shuffle=True)
        self.count = count


def train(loader: Theirs[tuple[Tensor, int]], net: nn.Module) -> float:
    total = 0.0
    for images, labels in loader:
        total += float(net(images).sum()) + float(labels.sum())
    return total / len(loader)


def loaders() -> Iterator[Theirs[tuple[Tensor, int]]]:
    data = Pictures()
    yield DataLoader(data, 4, True, num_workers=2, pin_memory=True, drop_last=True)
    yield DataLoader(data, sampler=RandomSampler(data), persistent_workers=True, num_workers=1, prefetch_factor=2)
    yield DataLoader(data, batch_sampler=[[0, 1], [2, 3]], generator=torch.Generator())
    yield DataLoader(Subset(data, [0, 1]), batch_size=None, timeout=5)
    yield DataLoader(ConcatDataset([data, data]), worker_init_fn=print, multiprocessing_context="spawn")
    for part in random_split(data, [4, 4]):
        yield DataLoader(part, collate_fn=lambda samples: samples, in_order=False)
    yield Ours(3)


for one in loaders():
    train(one, nn.Identity())
    dataset: Dataset[tuple[Tensor, int]] = one.dataset
    size: int | None = one.batch_size
known = DataLoader(Pictures(), 4)
several: dict[str, DataLoader[tuple[Tensor, int]]] = {{"train": known, "ours": Ours(2)}}
counted: int = Ours(2).count
make = partial(DataLoader, batch_size=2, shuffle=True)
print(make(Pictures()), {{name: len(loader) for name, loader in several.items()}})
"""

MISTAKEN = """
from torch.utils.data import Dataset
from torch.utils.data import DataLoader as Theirs
{imported}


class Numbers(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


data = Numbers()
DataLoader(data, batchsize=4)
DataLoader(data, shuffel=True)
DataLoader(data, num_workers="2")
DataLoader(data, collate_fn=3)
DataLoader(3)
DataLoader()
wrong: Theirs[str] = DataLoader(data)
"""

IMPORTS = "from torch.utils.data import DataLoader", "from torchdali import DALILoader as DataLoader"


OWN = """
from pathlib import Path
from torchdali import DALILoader

for images, labels in DALILoader("data", 4, transform=[], device="cuda:1", seed=1, cache="host", on_error="skip"):
    print(images, labels)
DALILoader(Path("data"), fidelity="fast", max_errors=3, cache_bytes=2**20, distributed="auto", batch_transform=print)
DALILoader("data", fidelity="fastest")
DALILoader("data", on_error=None)
"""


def find_errors(folder: Path, sources: dict[str, str]) -> dict[str, set[int]]:
    """The lines in which pyright, at its strictest, finds an error, for each script."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
    settings = {"include": [str(folder)], "typeCheckingMode": "strict", "pythonPlatform": "Linux"}
    settings["extraPaths"] = [str(Path(__file__).parents[2])]
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent)) or shutil.which("pyright")
    if pyright is None:
        pytest.skip("pyright is not installed")
    command = [pyright, "--outputjson", "-p", str(folder), "--pythonpath", sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    lines: dict[str, set[int]] = {name: set() for name in sources}
    for one in json.loads(done.stdout)["generalDiagnostics"]:
        if one["severity"] == "error":
            lines[Path(one["file"]).stem].add(one["range"]["start"]["line"])
    return lines


@pytest.mark.slow
def test_type_checkers_know_a_loader_as_they_know_a_dataloader(tmp_path: Path) -> None:
    theirs, ours = IMPORTS
    sources = {"used_theirs": USED.format(imported=theirs), "used_ours": USED.format(imported=ours), "own": OWN}
    sources |= {"mistaken_theirs": MISTAKEN.format(imported=theirs), "mistaken_ours": MISTAKEN.format(imported=ours)}
    lines = find_errors(tmp_path, sources)
    assert len(lines["used_theirs"]) <= 3  # where torch itself leaves types out
    assert lines["used_ours"] <= lines["used_theirs"]
    assert len(lines["mistaken_theirs"]) == 7
    assert lines["mistaken_ours"] == lines["mistaken_theirs"]
    assert lines["own"] == {7, 8}


class Inherits(DALILoader):
    pass


class Few(DALILoader):
    def __init__(self, root, size=3):
        super().__init__(root, size)


class FewAgain(Few):
    pass


class Own(DALILoader):
    __signature__ = inspect.Signature([inspect.Parameter("q", inspect.Parameter.POSITIONAL_ONLY)])

    def __init__(self, q):
        super().__init__(q)


class Mixed:
    def __init__(self, one, *, two=2):
        super().__init__(one)


class Mixin(Mixed, DALILoader):
    pass


def test_a_subclass_has_the_signature_of_its_own_init() -> None:
    assert inspect.signature(Inherits) == inspect.signature(DALILoader)
    assert list(inspect.signature(Few).parameters) == ["root", "size"]
    assert list(inspect.signature(FewAgain).parameters) == ["root", "size"]
    assert list(inspect.signature(Mixin).parameters) == ["one", "two"]
    assert inspect.signature(Own) == Own.__signature__
    assert set(inspect.signature(DataLoader).parameters) < set(inspect.signature(Inherits).parameters)


@pytest.mark.parametrize("name", ["distributed", "errors"])
def test_an_attribute_that_is_for_reading_is_named(name: str, pictures: Path) -> None:
    class Keeps(DALILoader):
        def __init__(self, root: Path) -> None:
            super().__init__(root, device="cpu")
            setattr(self, name, [])

    with pytest.raises(ValueError, match=f"{name} of a DALILoader is for reading"):
        Keeps(pictures)
    with pytest.raises(ValueError, match=f"{name} of a DALILoader is for reading"):
        setattr(DALILoader(pictures, device="cpu"), name, [])

    class Has(DALILoader):
        pass

    setattr(Has, name, None)
    loader = Has(pictures, device="cpu")
    setattr(loader, name, 3)
    assert getattr(loader, name) == 3
