"""torchvision's datasets of image files give DataLoader's batches without being asked for samples."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import same
from helpers import wrapped
from helpers.crops import EXACT
from PIL import Image
from torch.utils.data import ConcatDataset, DataLoader, Subset
from torchvision import datasets
from torchvision.datasets.folder import default_loader, pil_loader
from torchvision.datasets.vision import StandardTransform
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.errors import UnsupportedDatasetError
from torchdali.sources import from_dataset
from torchdali.sources.adopters import describe_dataset_state
from torchdali.sources.folder import FileSource
from torchdali.sources.paths import Paths, build_table
from torchdali.sources.source import Targets

pytestmark = pytest.mark.timeout(60)

Files = list[str]
Labels = list[int]


def zipped(files: Files, labels: Labels) -> dict[str, Any]:
    return {"_image_files": [Path(file) for file in files], "_labels": labels, "loader": default_loader}


def paired(name: str = "_samples") -> Callable[[Files, Labels], dict[str, Any]]:
    return lambda files, labels: {name: list(zip(files, labels, strict=True)), "loader": default_loader}


def inaturalist(*kinds: str) -> Callable[[Files, Labels], dict[str, Any]]:
    def make(files: Files, labels: Labels) -> dict[str, Any]:
        paths = [Path(file) for file in files]
        folders = sorted({path.parent for path in paths})
        return {
            "root": str(folders[0].parent),
            "all_categories": [folder.name for folder in folders],
            "categories_map": [{"family": 7 + i, "order": 70 + i} for i in range(len(folders))],
            "index": [(folders.index(path.parent), path.name) for path in paths],
            "target_type": list(kinds),
            "loader": pil_loader,
        }

    return make


def pet(*kinds: str) -> Callable[[Files, Labels], dict[str, Any]]:
    return lambda files, labels: {
        "_images": [Path(file) for file in files],
        "_labels": labels,
        "_bin_labels": [label % 2 for label in labels],
        "_segs": files,
        "_target_types": list(kinds),
    }


ATTRIBUTES: dict[str, tuple[type[Any], Callable[[Files, Labels], dict[str, Any]]]] = {
    "CLEVRClassification": (datasets.CLEVRClassification, zipped),
    "Country211": (datasets.Country211, paired("samples")),
    "DTD": (datasets.DTD, zipped),
    "EuroSAT": (datasets.EuroSAT, paired("samples")),
    "FGVCAircraft": (datasets.FGVCAircraft, zipped),
    "Flowers102": (datasets.Flowers102, zipped),
    "Food101": (datasets.Food101, zipped),
    "GTSRB": (datasets.GTSRB, paired()),
    "ImageNet": (datasets.ImageNet, paired("samples")),
    "INaturalist": (datasets.INaturalist, inaturalist("full")),
    "INaturalist, two targets": (datasets.INaturalist, inaturalist("family", "full")),
    "Imagenette": (datasets.Imagenette, paired()),
    "LFWPeople": (datasets.LFWPeople, lambda f, n: {"data": f, "targets": n, "_loader": default_loader}),
    "OxfordIIITPet": (datasets.OxfordIIITPet, pet("category")),
    "OxfordIIITPet, binary": (datasets.OxfordIIITPet, pet("binary-category")),
    "OxfordIIITPet, two targets": (datasets.OxfordIIITPet, pet("category", "binary-category")),
    "Places365": (datasets.Places365, paired("imgs")),
    "RenderedSST2": (datasets.RenderedSST2, paired()),
    "StanfordCars": (datasets.StanfordCars, lambda f, n: paired()(f, [np.uint8(label) for label in n])),
    "SUN397": (datasets.SUN397, zipped),
}

Make = Callable[..., Any]


@pytest.fixture
def make(pictures: Path) -> Make:
    """Makes one of the datasets, by its name. Its ``__init__`` is left out, which downloads or lists files."""
    files = sorted(map(str, pictures.glob("*/*")))

    def make(name: str, transform: Any = EXACT, target_transform: Any = None, base: Any = None, **other: Any) -> Any:
        kind, attributes = ATTRIBUTES[name]
        dataset: Any = object.__new__(base or kind)
        datasets.VisionDataset.__init__(dataset, "", transform=transform, target_transform=target_transform)
        labels = [(3 * i) % 7 for i in range(len(files))]
        vars(dataset).update(attributes(files, labels), **other)
        return dataset

    return make


def assert_batches_are_dataloaders(dataset: Any) -> None:
    order = [3, 0, 0, len(dataset) - 1, 5, -1, 1]
    ours = list(DALILoader(dataset, 3, sampler=order, device="cpu"))
    assert same(ours, list(DataLoader(dataset, 3, sampler=order)))


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_batches_are_dataloaders(make: Make, name: str) -> None:
    dataset = make(name)
    assert "files" in from_dataset(dataset).describe()
    assert_batches_are_dataloaders(dataset)


def test_dataset_of_its_own_constructor_is_read(pictures: Path, tmp_path: Path) -> None:
    for i, file in enumerate(sorted(pictures.glob("*/*"))):
        folder = tmp_path / "gtsrb" / "GTSRB" / "Training" / f"0000{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        with Image.open(file) as image:
            image.save(folder / f"{i:05}.ppm")
    dataset = datasets.GTSRB(tmp_path, transform=EXACT)
    assert "files" in from_dataset(dataset).describe()
    assert_batches_are_dataloaders(dataset)


@pytest.mark.parametrize("name", ["Food101", "INaturalist, two targets", "OxfordIIITPet, two targets", "Places365"])
def test_targets_are_transformed(make: Make, name: str) -> None:
    dataset = make(name, target_transform=repr)
    from_dataset(dataset)
    assert_batches_are_dataloaders(dataset)


@pytest.mark.parametrize("name", ["SEMEION", "USPS"])
@pytest.mark.parametrize("target_transform", [None, str])
def test_digits_in_memory_give_dataloaders_batches(name: str, target_transform: Any) -> None:
    kind = getattr(datasets, name)
    dataset = kind.__new__(kind)
    datasets.VisionDataset.__init__(dataset, "", transform=v2.PILToTensor(), target_transform=target_transform)
    rng = np.random.default_rng(4)
    dataset.data = rng.integers(0, 256, (9, 16, 16), np.uint8)
    digits = rng.integers(0, 10, 9)
    vars(dataset).update(labels=digits) if name == "SEMEION" else vars(dataset).update(targets=digits.tolist())
    assert "in memory" in from_dataset(dataset).describe()
    assert_batches_are_dataloaders(dataset)


def test_subsets_and_concatenations_are_read_too(make: Make) -> None:
    transform = v2.Compose([EXACT])
    parts = [make(name, transform) for name in ("Food101", "INaturalist", "OxfordIIITPet")]
    both: Any = ConcatDataset[Any](parts)
    dataset: Any = Subset[Any](both, [len(parts[0]) + 2, 1, 0, 2 * len(parts[0]) + 4, 3, 4])
    assert "Subset of ConcatDataset of Food101, INaturalist, OxfordIIITPet" in from_dataset(dataset).describe()
    assert_batches_are_dataloaders(dataset)


class Overriding(datasets.Food101):
    def __getitem__(self, idx: int) -> Any:
        return super().__getitem__(idx)[0], -1


class Harmless(datasets.Food101):
    pass


def test_subclass_without_a_getitem_of_its_own_is_read_too(make: Make) -> None:
    assert "(Harmless)" in from_dataset(make("Food101", base=Harmless)).describe()


class OwnSource(datasets.Food101):
    def __getitem__(self, idx: int) -> Any:
        return super().__getitem__(idx)[0], idx

    def torchdali_source(self) -> FileSource:
        files = list(map(str, self._image_files))
        return FileSource(Paths([build_table(files)]), Targets(range(len(files))), self.transform)


class OverridingOwnSource(OwnSource):
    def __getitem__(self, idx: int) -> Any:
        return super().__getitem__(idx)[0], -1


def test_source_of_a_subclass_comes_first(make: Make) -> None:
    dataset = make("Food101", base=OwnSource)
    assert from_dataset(dataset).target(5) == 5
    whole = list(DALILoader(dataset, 3, device="cpu"))
    assert same(whole, list(DataLoader(dataset, 3)))
    assert_batches_are_dataloaders(Subset[Any](dataset, range(1, 8)))


REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "__getitem__ after a source": ("Food101", {"base": OverridingOwnSource}, "OverridingOwnSource overrides how"),
    "__getitem__": ("Food101", {"base": Overriding}, "Overriding overrides how samples are fetched"),
    "loader": ("Food101", {"loader": len}, "Food101 opens its files with a loader of its own, len"),
    "LFWPeople's loader": ("LFWPeople", {"_loader": len}, "LFWPeople opens its files with a loader of its own, len"),
    "mode kept": ("INaturalist", {"loader": None}, "INaturalist opens its files without a loader"),
    "segmentation": ("OxfordIIITPet", {"_target_types": ["segmentation"]}, "target_types category or binary"),
    "joint transform": ("Places365", {"transforms": print}, "Places365 must have its transforms as"),
    "no transform": ("Places365", {"transforms": None}, "Places365 must have its transforms as"),
    "transform that is not called": ("OxfordIIITPet", {"transform": v2.ToImage()}, "OxfordIIITPet must have its"),
    "few labels": ("Food101", {"_labels": [1]}, "Food101 cannot be read.*ValueError"),
}


@pytest.mark.parametrize(("name", "options", "text"), REJECTED.values(), ids=REJECTED.keys())
def test_what_is_fetched_in_another_way_is_asked_for_samples(
    make: Make, name: str, options: dict[str, Any], text: str
) -> None:
    dataset = make(name, base=options.get("base"))
    vars(dataset).update(options)
    with pytest.raises(UnsupportedDatasetError, match=text):
        from_dataset(dataset)


CHANGES: dict[str, tuple[str, Callable[[Any], object]]] = {
    "samples": ("GTSRB", lambda d: d._samples.pop()),
    "labels": ("Food101", lambda d: d._labels.__setitem__(0, 1000)),
    "loader": ("Food101", lambda d: setattr(d, "loader", len)),
    "second target": ("OxfordIIITPet", lambda d: d._target_types.append("binary-category")),
    "target type": ("INaturalist", lambda d: d.target_type.append("family")),
    "joint transform": ("Places365", lambda d: setattr(d.transforms, "transform", v2.ToImage())),
}


@pytest.mark.parametrize(("name", "change"), CHANGES.values(), ids=CHANGES.keys())
def test_changes_are_seen(make: Make, name: str, change: Callable[[Any], object]) -> None:
    dataset = make(name)
    before = describe_dataset_state(dataset)
    assert describe_dataset_state(dataset) == before
    change(dataset)
    assert describe_dataset_state(dataset) != before


# Datasets of objects, captions and attributes, as they are


def make_celeba(root: Path) -> Any:
    dataset = wrapped.make_celeba(root)._dataset
    count = len(dataset.filename)
    dataset.attr, dataset.landmarks_align = torch.arange(2 * count).reshape(-1, 2), torch.arange(count)[:, None]
    dataset.target_type = ["attr", "landmarks", "bbox", "identity"]
    return dataset


def make_captions(root: Path) -> Any:
    wrapped.write_coco(root, wrapped.FLOATS)
    file = root / "all.json"
    content = json.loads(file.read_text())
    for each in content["annotations"]:
        each["caption"] = f"thing {each['id']}"
    file.write_text(json.dumps(content))
    return datasets.CocoCaptions(root / "images", file)


BARE: dict[str, Callable[[Path], Any]] = {
    "CocoDetection": lambda root: wrapped.make_coco_boxes(root)._dataset,
    "CocoCaptions": make_captions,
    "WIDERFace": lambda root: wrapped.make_wider_face(root)._dataset,
    "CelebA": make_celeba,
}


def clear(part: Any) -> None:
    """Change a target in place."""
    if isinstance(part, torch.Tensor):
        part.zero_()
    for value in part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ():
        clear(value)
    if isinstance(part, (dict, list)):
        part.clear()


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # torchvision's
@pytest.mark.parametrize("make_bare", BARE.values(), ids=BARE.keys())
def test_targets_come_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make_bare: Any) -> None:
    dataset = make_bare(tmp_path)
    dataset.transforms = StandardTransform(EXACT, note_target)
    dataset.transform, dataset.target_transform = EXACT, note_target
    part = ConcatDataset([Subset(dataset, [2, 0]), dataset])
    expected = copy.deepcopy([sample for (sample,) in DataLoader(part, collate_fn=list)])
    monkeypatch.setattr(type(dataset), "_load_image", None, raising=False)
    source = from_dataset(part)
    assert type(pickle.loads(pickle.dumps(source))) is type(source)
    loader = DALILoader(part, 2, device="cpu", collate_fn=list)
    for _ in range(2):
        ours = [sample for batch in loader for sample in batch]
        assert same(ours, expected)
        for _, (_, target) in ours:
            clear(target)
    (image, target), *_ = (
        sample for batch in DALILoader(dataset, 2, device="cpu", collate_fn=list) for sample in batch
    )
    assert same((image, target), expected[2])


def note_target(target: Any) -> Any:
    return "noted", target


@pytest.mark.filterwarnings("ignore:unclosed file", "ignore::pytest.PytestUnraisableExceptionWarning")  # torchvision's
def test_those_that_are_asked(tmp_path: Path) -> None:
    faces, objects = BARE["CelebA"](tmp_path / "a"), BARE["CocoDetection"](tmp_path / "b")
    before = describe_dataset_state(faces)
    faces.target_type.pop()
    assert describe_dataset_state(faces) != before
    objects.transforms = v2.ToImage()
    with pytest.raises(
        UnsupportedDatasetError, match="has transforms= for whole samples, whose boxes are no tv_tensors"
    ):
        from_dataset(objects)
    path = tmp_path / "a" / "celeba" / "img_align_celeba" / faces.filename[1]
    Image.open(path).convert("L").save(path)
    with pytest.raises(UnsupportedDatasetError, match="keeps the mode of its files"):
        from_dataset(faces)

    class Own(datasets.CelebA):
        pass

    faces.__class__ = Own
    with pytest.raises(UnsupportedDatasetError, match="Own is not an image folder"):
        from_dataset(faces)


# Datasets that need the loader's transform=


def omniglot(files: Files, labels: Labels) -> dict[str, Any]:
    folder = Path(files[0]).parent
    images = [(Path(file).name, 0) for file in files if Path(file).parent == folder]
    return {
        "target_folder": str(folder.parent),
        "_characters": [folder.name],
        "_flat_character_images": images,
        "loader": None,
    }


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("name", "attributes"), [("Omniglot", omniglot)])
def test_transform_of_the_loader_gives_dataloaders_batches(
    pictures: Path, name: str, attributes: Callable[[Files, Labels], dict[str, Any]], workers: int
) -> None:
    files = sorted(map(str, pictures.glob("*/*")))
    dataset: Any = object.__new__(getattr(datasets, name))
    datasets.VisionDataset.__init__(dataset, "")
    vars(dataset).update(attributes(files, []))
    with pytest.raises(UnsupportedDatasetError):
        from_dataset(dataset)
    ours = list(DALILoader(dataset, 3, device="cpu", transform=EXACT, num_workers=workers))
    dataset.transform = EXACT
    assert same(ours, list(DataLoader(dataset, 3)))
