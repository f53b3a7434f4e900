"""What explain() says, row by row, of loaders that differ in one thing."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import PIL.Image
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset, Subset
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali import compile as compile_transform

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore:This DataLoader will create")]

CROP = v2.Compose([v2.ToImage(), v2.RandomCrop(8)])
LEFT_BY_TORCH = [v2.ToImage(), v2.Lambda(torch.clone)]


def picture(mode: str = "RGB", size: tuple[int, int] = (30, 20)) -> PIL.Image.Image:
    return PIL.Image.new(mode, size)


class Samples(Dataset[Any]):
    """Six samples, of a function."""

    def __init__(self, of: Callable[[int], Any] = lambda index: (picture(), index)) -> None:
        self.of = of

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.of(index)


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter([(picture(), 1)] * 6)


def rows(loader: DALILoader[Any]) -> dict[str, str]:
    """By their labels; what has none belongs to the row before."""
    text = io.StringIO()
    loader.explain(text)
    found: dict[str, str] = {}
    label = ""
    for line in text.getvalue().splitlines()[1:]:
        label, said = (label, line) if line[0] == " " else (line[:11].strip(), line[11:])
        found[label] = f"{found.get(label, '')} {said.strip()}".strip()
    return found


def begins(loader: DALILoader[Any]) -> list[str]:
    """The answer, and what there is to do."""
    text = io.StringIO()
    loader.explain(text)
    return [text.getvalue().splitlines()[0], rows(loader).get("to do", "")]


def asked(of: Any = None, **options: Any) -> dict[str, str]:
    return rows(DALILoader(Samples(of) if of else Samples(), 2, device="cpu", **{"transform": CROP, **options}))


def collated(samples: list[Any]) -> list[Any]:
    return samples


def test_a_dataset_that_is_asked() -> None:
    found = asked()
    assert list(found) == [
        *("device", "source", "not native", "images", "operators", "collate"),
        *("output", "random", "threads", "prefetch", "memory", "on error", "timeout"),
    ]
    assert (
        found["source"] == "Samples, worker-fed: its samples come from this process (num_workers=0), as in DataLoader"
    )
    assert found["images"].startswith("at [0] of dataset[0]: uint8 (3, H, W) (pixels)")
    assert found["collate"] == "default_collate, where the samples are made, of all but the images"
    assert found["output"] == "images uint8 (3, 8, 8), batch in front, contiguous"
    assert found["random"].startswith("Philox4x32-10 keyed by DataLoader's base seed of the epoch, index, occurrence, ")
    assert found["prefetch"] == "depth 0: no batch is made ahead"
    assert (found["on error"], found["timeout"]) == (
        "a sample that cannot be read or decoded is raised, in its turn",
        "none",
    )


@pytest.mark.parametrize(("workers", "said"), [(1, "1 worker process"), (3, "3 worker processes")])
def test_with_workers(workers: int, said: str) -> None:
    found = asked(num_workers=workers, timeout=30, seed=0, on_error="skip", collate_fn=collated)
    assert f"its samples come from {said}, as" in found["source"]
    assert found["timeout"] == "30 s a batch"
    assert "keyed by seed 0, epoch, index" in found["random"]
    assert found["prefetch"] == "depth 6 batches in DALI, beside those of the workers"
    assert found["on error"].startswith("the next sample of its batch takes the place")
    assert found["collate"].startswith("collated, in this process, on the list of samples")
    assert "crosses from the workers piece by piece" in found["collate"]


def test_without_workers_nothing_crosses() -> None:
    found = asked(collate_fn=partial(collated))
    assert found["collate"].startswith("functools.partial(<function collated")
    assert found["collate"].endswith("with the transformed images in their places")


@pytest.mark.parametrize("options", [{}, {"batch_transform": collated, "num_workers": 2}])
def test_nothing_in_dali(options: dict[str, Any]) -> None:
    found = asked(transform=None, on_error="replace", timeout=1 if options else 0, **options)
    assert found["transforms"] == "none of the loader; those of the dataset run where its samples are made"
    assert "to do" not in found
    assert (found["output"], found["collate"]) == ("as DataLoader's", "default_collate, where the samples are made")
    assert found["on error"].startswith("a black image takes the place")
    assert found["timeout"] == ("1 s a batch" if options else "none")
    assert ("batch" in found) == bool(options)


class Wrapped(Samples):
    """Another dataset's samples, their images transformed."""

    def __init__(self, augment: Any) -> None:
        super().__init__()
        self.augment = augment

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return self.augment(image), label


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, [1, 0])], ids=["itself", "Subset"])
def test_transform_that_could_run_in_dali_is_named(wrap: Callable[[Any], Any]) -> None:
    hint = (
        "return images without Wrapped.augment, and give it to the loader as transform=; wrap masks in tv_tensors.Mask"
        ", or they are images too"
    )
    for augment, text in ((CROP, hint), (v1.ToTensor(), hint), (torch.nn.Identity(), "")):
        loader = DALILoader(wrap(Wrapped(augment)), device="cpu")
        assert begins(loader) == ["Nothing runs in DALI: give transform= to the loader", text]


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Subset(d, [1, 0])], ids=["itself", "Subset"])
def test_a_transform_that_stayed_in_the_dataset_is_named(wrap: Callable[[Any], Any]) -> None:
    for augment, text in (
        (CROP, "Wrapped.augment runs too, before transform=: remove it there"),
        (torch.nn.Identity(), ""),
    ):
        found = begins(DALILoader(wrap(Wrapped(augment)), device="cpu", transform=v2.RandomHorizontalFlip()))
        assert found[1].startswith(text)
        assert bool(found[1]) == bool(text)


def test_where_images_are() -> None:
    twice = asked(lambda _: {"near": picture(), "far": picture(size=(40, 30))})
    assert twice["images"].startswith("at ['near'], ['far'] of dataset[0]: uint8 (3, H, W) (pixels)")
    assert " ".join(twice.values()).count("RandomCrop") == 1, "both go the same way"
    kinds = asked(lambda _: {"colour": picture(), "grey": picture("L")})
    assert "uint8 (3, H, W) (pixels), uint8 (1, H, W) (pixels)" in kinds["images"]
    assert kinds["output"].split("; ") == [
        f"images uint8 ({channels}, 8, 8), batch in front, contiguous" for channels in (3, 1)
    ]
    refused = asked(lambda _: (picture(), picture("HSV")), transform=v2.RandomCrop(8))
    assert "of which one cannot be taken: it is" in refused["images"]
    assert refused["output"] == "images as the transforms leave them"
    moving = DALILoader(
        Samples(lambda index: (picture(), 0) if index % 2 else (0, picture())),
        2,
        transform=CROP,
        collate_fn=collated,
        device="cpu",
    )
    assert len(list(moving)) == 3
    assert rows(moving)["images"].startswith("wherever a sample has them: uint8 (3, H, W) (pixels)")


def test_an_image_that_is_looked_at_draws_nothing_that_others_draw() -> None:
    def drawn(_: int) -> Any:
        return torch.rand(3, 20, 30)

    torch.manual_seed(3)
    true = torch.rand(2)
    torch.manual_seed(3)
    assert "float32 (3, H, W) (pixels)" in asked(drawn)["images"]
    assert torch.equal(torch.rand(2), true)


def test_a_stream() -> None:
    found = rows(DALILoader(Stream(), 2, transform=CROP, device="cpu"))
    assert "base seed of the epoch, worker, place in its stream, transform; the dataset's own" in found["random"]
    assert found["threads"] == "not known before the first batch"


def test_what_torch_leaves_and_views() -> None:
    assert asked(transform=LEFT_BY_TORCH)["output"] == "images as torch leaves them"
    assert asked(transform=[v2.ToImage(), v2.FiveCrop(8)])["output"].startswith("5 views, each as above")
    assert asked(batch_transform=collated)["batch"].endswith(", torch, after collate")


def test_a_dataset_that_is_read(dataset: ImageFolder) -> None:
    plain = rows(DALILoader(dataset, 2, device="cpu"))
    assert "persistent_workers" not in plain["no effect"]
    assert "pin_memory" not in plain["no effect"]
    assert ("cache" in plain, "batch" in plain, "driver" in plain) == (False, False, False)
    given: dict[str, Any] = {"cache": "host", "batch_transform": collated, "seed": 0, "timeout": 2.5}
    found = rows(DALILoader(dataset, 2, device="cpu", num_workers=1, persistent_workers=True, **given))
    assert "; persistent_workers, but that the base seed stays, as in DataLoader" in found["no effect"]
    assert found["batch"].endswith(", torch, after collate")
    assert (found["timeout"], "cache" in found) == ("2.5 s a batch", True)
    assert "keyed by seed 0, epoch, index" in found["random"]


def test_why_batches_are_on_the_cpu(dataset: ImageFolder) -> None:
    assert rows(DALILoader(dataset, 2, device="cpu"))["device"] == "cpu, fidelity exact"
    if not torch.cuda.is_available():
        assert rows(DALILoader(dataset, 2))["device"].startswith("cpu (")


def test_a_dataset_that_changed_is_explained_as_it_is_now(dataset: ImageFolder, tmp_path: Path) -> None:
    loader = DALILoader(dataset, 2, device="cpu")
    assert rows(loader)["source"].startswith("24 files")
    dataset.samples = dataset.samples[:5]
    assert rows(loader)["source"].startswith("5 files")
    dataset.loader = lambda path: picture()
    assert "worker-fed" in rows(loader)["source"]


CHAINS: dict[str, tuple[list[Any], str, str]] = {
    "all": ([v2.ToImage(), v2.RandomCrop(8)], "2 of 2 transforms run in DALI on cpu", ""),
    "one": ([v2.RandomCrop(8)], "1 of 1 transform runs in DALI on cpu", ""),
    "the last not": (
        LEFT_BY_TORCH,
        "1 of 2 transforms run in DALI on cpu",
        "replace transform 2, Lambda, if it is slow: torch runs it, for the reason below it",
    ),
    "the first not": (
        [v2.Lambda(torch.clone), v2.ToImage(), v2.RandomCrop(8), v2.Lambda(torch.clone)],
        "0 of 4 transforms run in DALI on cpu",
        "place transform 1, Lambda, last if you can: then 2 more could run in DALI",
    ),
}


@pytest.mark.parametrize(("chain", "answer", "to_do"), CHAINS.values(), ids=CHAINS.keys())
def test_the_first_line_is_the_answer(chain: list[Any], answer: str, to_do: str) -> None:
    for transform in (chain, v2.Compose(chain)):
        loader = DALILoader(Samples(), 2, transform=transform, device="cpu", collate_fn=collated)
        assert begins(loader) == [answer, to_do]
    text = io.StringIO()
    compile_transform(v2.Compose(chain), device="cpu").explain(text)
    assert text.getvalue().splitlines()[0] == answer


def test_the_answer_without_a_plan(dataset: ImageFolder) -> None:
    stream = DALILoader(Stream(), 2, transform=CROP, device="cpu")
    assert begins(stream) == ["What runs in DALI is known after the first batch", ""]
    refused = DALILoader(Samples(lambda _: (picture("HSV"), 1)), 2, transform=v2.RandomCrop(8), device="cpu")
    assert begins(refused) == ['The first batch will fail: the row "images" says why', ""]
    nothing = DALILoader(Samples(lambda _: {"label": 1}), 2, transform=CROP, device="cpu")
    assert begins(nothing) == ["Nothing runs in DALI: dataset[0] has no image", ""]
    broken = DALILoader(Samples(lambda _: {}["image"]), 2, transform=CROP, device="cpu")
    assert begins(broken) == ["What runs in DALI is not known: dataset[0] raises an exception", ""]
    dataset.transform = None
    files = DALILoader(dataset, 2, device="cpu", collate_fn=collated)
    assert begins(files) == ["DALI decodes on cpu: there are no transforms", ""]


def test_the_answer_for_several_kinds_of_images() -> None:
    grayscale = [v2.ToImage(), v2.RGB(), v2.ColorJitter(hue=0.1)]
    kinds = DALILoader(
        Samples(lambda _: {"colour": picture(), "map": torch.rand(2, 20, 30)}),
        2, transform=grayscale, images=["colour", "map"], device="cpu", collate_fn=collated,
    )  # fmt: skip
    assert begins(kinds)[0] == "1 to 3 of 3 transforms run in DALI on cpu"


def test_in_a_notebook_it_is_a_table(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shown: list[Any] = []
    display = SimpleNamespace(display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    shell = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell, display=display))
    loader = DALILoader(Samples(), 2, transform=v2.Lambda(lambda x: x), images=["<b>"], device="cpu")
    loader.explain()
    assert shown == []
    printed = capsys.readouterr().out
    shell.kernel = None
    loader.explain()
    (table,) = shown
    assert (repr(table), capsys.readouterr().out) == (printed, "")
    page = table._repr_html_()
    assert page.startswith("<div><p><b>The first batch will fail: the row &quot;images&quot; says why</b></p><table ")
    assert "&lt;b&gt;" in page
    assert "<b>'" not in page
    assert page.count("<th ") == len(table.rows.splitlines())
    text = io.StringIO()
    loader.explain(text)
    assert text.getvalue() == printed


@pytest.mark.parametrize("width", [None, 60, 200])
def test_lines_are_wrapped_in_their_column(monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    chain = v2.Compose([v2.ToImage(), v2.RandomResizedCrop(8)])
    texts = [io.StringIO(), io.StringIO()]
    DALILoader(Samples(), 2, transform=chain, device="cpu").explain(texts[0])
    compile_transform(chain, device="cpu").explain(texts[1])
    for lines in (text.getvalue().splitlines() for text in texts):
        assert max(map(len, lines)) <= (width or 80)
        first = next(i for i, line in enumerate(lines) if "RandomResizedCrop(" in line)
        assert lines[0] == "2 of 2 transforms run in DALI on cpu"
        assert lines[first].startswith("        2  DALI CPU  Random")
        assert lines[first + 1][:21].isspace()
        assert not lines[first + 1][21].isspace()
    lines = texts[0].getvalue().splitlines()
    continued = lines[next(i for i, line in enumerate(lines) if line.startswith("not native")) + 1]
    assert (continued[:11], continued[11].strip()) == (" " * 11, continued[11])


@pytest.mark.parametrize("width", [None, 60, 10])
def test_a_word_longer_than_a_line_is_broken(monkeypatch: pytest.MonkeyPatch, width: int | None) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    if width:
        monkeypatch.setenv("COLUMNS", str(width))
    named = type("Blur" * 30, (torch.nn.Identity,), {})
    text = io.StringIO()
    DALILoader(Samples(), 2, transform=v2.Compose([v2.ToImage(), named()]), device="cpu").explain(text)
    limit = {None: 80, 60: 60, 10: 40}[width]
    assert max(map(len, text.getvalue().splitlines()[1:])) == limit
    assert "Blur" * 30 in re.sub(r"\n +", "", text.getvalue())
