"""Samples that are hard to send, to walk or to put together again, against what DataLoader makes of them."""

from __future__ import annotations

import dataclasses
import os
import resource
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from helpers.proxied import difference
from skimage import data
from torch.utils.data import DataLoader, Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2

from torchdali import DALILoader
from torchdali.samples.encoded import is_encoded
from torchdali.samples.finder import ImageFinder
from torchdali.samples.tree import Placeholder, build_tree, collate, reorder_samples
from torchdali.workers.pickling import Pickled

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning"),
]

FLOATS = v2.ToDtype(torch.float32, scale=True)


def image(i: int) -> torch.Tensor:
    return torch.full((3, 8, 8), i, dtype=torch.uint8)


class Samples(Dataset[Any]):
    """Makes each sample when it is asked for it."""

    def __init__(self, make: Callable[[int], Any], count: int = 8) -> None:
        self.make, self.count = make, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return self.make(i)


def untouched(samples: list[Any]) -> list[Any]:
    """A collate_fn of the user's."""
    return samples


def loader(dataset: Any, **options: Any) -> DALILoader[Any]:
    return DALILoader(dataset, batch_size=4, device="cpu", **options)


# On their way from a worker


EVERYTHING = torch.rand(1000, 4)


def with_boxes(index: int) -> Any:
    about = {"boxes": EVERYTHING[index : index + 3], "area": torch.ones(index % 3), "id": torch.tensor(index)}
    return torch.full((3, 8, 8), index % 250, dtype=torch.uint8), about


def padded(samples: Any) -> Any:
    images, about = zip(*samples, strict=True)
    boxes = torch.nn.utils.rnn.pad_sequence([one["boxes"] for one in about], batch_first=True)
    return torch.stack(images), boxes, torch.stack([one["id"] for one in about])


def test_many_tensors_take_no_file_descriptors() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 230, limits[1]))
    try:
        options: dict[str, Any] = {
            "num_workers": 2,
            "collate_fn": padded,
            "transform": v2.ToDtype(torch.float32),
            "device": "cpu",
        }
        for images, boxes, ids in DALILoader(Samples(with_boxes, 256), 128, **options):
            assert torch.equal(boxes, torch.stack([EVERYTHING[i : i + 3] for i in ids.tolist()]))
            assert torch.equal(images[:, 0, 0, 0], (ids % 250).float())
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def tensors() -> dict[str, torch.Tensor]:
    everything = torch.arange(1_000_000)
    return {
        "one": torch.rand(3, 4),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 4),
        "view": everything[5:9],
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "bfloat16": torch.ones(2, dtype=torch.bfloat16),
        "complex": torch.tensor([1 + 2j]).conj(),
        "negative bit": torch.tensor([1 + 2j]).conj().imag,
        "leaf": torch.ones(2, requires_grad=True),
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "boxes": tv_tensors.BoundingBoxes(everything[:4].float()[None], format="XYXY", canvas_size=(5, 6)),
        "mask": tv_tensors.Mask(everything[:4].reshape(2, 2)),
        "uint16": torch.tensor([[60_000], [1]], dtype=torch.uint16)[1:],
        "depth": tv_tensors.Mask(torch.tensor([[60_000]], dtype=torch.uint16)),
    }


@pytest.mark.parametrize("name", tensors())
def test_tensors_arrive_as_they_were(name: str) -> None:
    given = tensors()[name]
    pickled = Pickled({"it": given, "again": given})
    rebuild, arguments = pickled.__reduce__()
    assert len(arguments[0]) < 4000, "only what is looked at crosses, not all that it is a view of"
    found = rebuild(*arguments)
    assert found["again"] is found["it"]
    assert type(found["it"]) is type(given)
    assert found["it"].requires_grad == given.requires_grad
    torch.testing.assert_close(found["it"], given, rtol=0, atol=0, check_stride=False)
    assert getattr(found["it"], "canvas_size", None) == getattr(given, "canvas_size", None)


@pytest.mark.filterwarnings("ignore:(Sparse invariant|The PyTorch API of nested):UserWarning")
@pytest.mark.parametrize("workers", [0, 1])
def test_nested_and_sparse_tensors_pass(workers: int) -> None:
    """They are no images, although one has three axes."""
    ragged = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)])
    dataset = Samples(lambda i: (ragged, torch.ones(3, 4, 4).to_sparse(), image(i)))
    batches = loader(dataset, num_workers=workers, collate_fn=untouched, transform=FLOATS)
    for first, sparse, picture in next(iter(batches)):
        assert [len(part) for part in first.unbind()] == [2, 4]
        assert sparse.layout == torch.sparse_coo
        assert picture.dtype == torch.float32


# What __getitems__ gives


class AtOnce(Samples):
    """Gives a batch as ``whole`` makes it of a list."""

    def __init__(self, whole: Callable[[list[Any]], Any]) -> None:
        super().__init__(image)
        self.whole = whole

    def __getitems__(self, indices: list[int]) -> Any:
        return self.whole([image(i) for i in indices])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    "whole", [list, tuple, iter, torch.stack, lambda images: np.stack([x.permute(1, 2, 0).numpy() for x in images])]
)
def test_a_batch_at_once_is_transformed(whole: Any, workers: int) -> None:
    chain = v2.Compose([v2.ToImage(), FLOATS])
    batches = list(loader(AtOnce(whole), num_workers=workers, transform=chain))
    expected = [torch.stack([FLOATS(image(i)) for i in rows]) for rows in ([0, 1, 2, 3], [4, 5, 6, 7])]
    for batch, theirs in zip(batches, expected, strict=True):
        torch.testing.assert_close(batch.as_subclass(torch.Tensor), theirs)


def test_a_batch_in_one_piece_is_not_passed_by_in_silence() -> None:
    dataset = AtOnce(lambda images: {"x": torch.stack(images)})
    with pytest.warns(UserWarning, match=r"transform= has nothing to do: .* \['x'\] Tensor \(4, 3, 8, 8\)"):
        (batch, _) = loader(dataset, collate_fn=untouched, transform=FLOATS)
    assert torch.equal(batch["x"], torch.stack([image(i) for i in range(4)]))
    made = list(loader(dataset, collate_fn=untouched, batch_transform=lambda batch: {**batch, "made": True}))
    assert [batch["made"] for batch in made] == [True, True]


def test_the_warning_shows_texts_that_may_be_paths() -> None:
    dataset: Any = [("missing/" * 5 + f"{i}.jpg", i) for i in range(2)]
    with pytest.warns(UserWarning, match=r"which is \[0\] str '\.\.\..*missing/0\.jpg'; .* return pathlib\.Path"):
        list(DALILoader(dataset, 2, transform=FLOATS, device="cpu"))


# Samples of other types


class Lazy(Mapping[str, Any]):
    """Makes its parts when it is asked for them, the box of the image that was made last."""

    def __init__(self, parts: Any) -> None:
        self.parts = parts

    def __getitem__(self, key: str) -> Any:
        part = self.parts[key]
        return part() if callable(part) else part

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


class LazyDict(dict[str, Any]):
    """The same as a dict."""

    def __getitem__(self, key: str) -> Any:
        part = super().__getitem__(key)
        return part() if callable(part) else part


@pytest.mark.parametrize("collate_fn", [None, untouched])
@pytest.mark.parametrize("kind", [Lazy, LazyDict])
def test_every_part_is_asked_for_once(kind: Any, collate_fn: Any) -> None:
    calls: list[int] = []

    def made(_: int) -> Any:
        def picture() -> torch.Tensor:
            calls.append(len(calls))
            return image(len(calls))

        return kind({"image": picture, "box": lambda: calls[-1] + 1, "other": kind({"text": lambda: str(calls[-1])})})

    for batch in loader(Samples(made), transform=FLOATS, collate_fn=collate_fn):
        rows = (
            batch if collate_fn else [{"image": x, "box": y} for x, y in zip(batch["image"], batch["box"], strict=True)]
        )
        for row in rows:
            assert float(row["image"][0, 0, 0]) == pytest.approx(int(row["box"]) / 255)
        texts = [row["other"]["text"] for row in batch] if collate_fn else batch["other"]["text"]
        assert [int(text) + 1 for text in texts] == [int(row["box"]) for row in rows]
    assert len(calls) == 8


class Record(Mapping[str, Any]):
    """Its constructor takes something else than entries."""

    def __init__(self, i: Any) -> None:
        self.i = i

    def __getitem__(self, key: str) -> Any:
        return image(self.i) if key == "image" else 1

    def __iter__(self) -> Iterator[str]:
        return iter(("image", "label"))

    def __len__(self) -> int:
        return 2


class Pair(tuple[Any, ...]):
    """A tuple that gives its first part a name."""

    @property
    def image(self) -> Any:
        return self[0]


def named(sample: Any, **attributes: Any) -> Any:
    vars(sample).update(attributes)
    return sample


@pytest.mark.parametrize(
    ("make", "picture"),
    [
        (Record, lambda sample: sample["image"]),
        (lambda i: Pair((image(i), i)), lambda sample: sample.image),
        (lambda i: named(Pair((i, image(i))), at=1), lambda sample: sample[sample.at]),
        (lambda i: deque([image(i), i]), lambda sample: sample[0]),
    ],
    ids=["mapping", "tuple", "tuple with an attribute", "deque"],
)
def test_samples_of_other_types_are_transformed(make: Any, picture: Any) -> None:
    (batch, _) = loader(Samples(make), transform=FLOATS, collate_fn=lambda samples: [*map(picture, samples)])
    torch.testing.assert_close(torch.stack(batch), torch.stack([FLOATS(image(i)) for i in range(4)]))


@dataclasses.dataclass
class Output(dict[str, Any]):
    """A mapping of what it has, as the outputs of models are; two samples in three give it in another order."""

    image: Any
    label: int
    weight: int

    def __post_init__(self) -> None:
        for name in ("image", "label", "weight") if self.label % 3 else ("weight", "label", "image"):
            self[name] = getattr(self, name)


@dataclasses.dataclass
class Row(list[Any]):
    """A list that can be compared by its length, too."""

    length: int

    def __init__(self, parts: list[Any]) -> None:
        super().__init__(parts)
        self.length = len(parts)


@pytest.mark.parametrize(
    "make",
    [
        lambda i: deque([image(i), i]),
        lambda i: Output(image(i), i, 10 * i),
        lambda i: Row([image(i), i, 10 * i]),
    ],
    ids=["deque", "mapping", "list"],
)
def test_sequences_and_mappings_of_other_types_are_dataloaders(make: Any) -> None:
    dataset = Samples(make)
    theirs, ours = (next(iter(kind)) for kind in (DataLoader(dataset, 4), loader(dataset, transform=[])))
    assert difference(ours, theirs) == ""


# What is an image


@pytest.mark.parametrize("text", [b"P100", b"P2", b"BM", b"BMW 320i of 1987, red", b"GIF", b"RIFF1234WAVE"])
def test_words_are_no_images(text: bytes) -> None:
    assert not is_encoded(text)
    dataset = Samples(lambda i: (text, image(i)))
    texts, images = next(iter(loader(dataset, transform=FLOATS)))
    assert list(texts) == [text] * 4
    assert images.dtype == torch.float32


NO_IMAGES: dict[str, Any] = {
    "no channels": np.zeros((4, 4, 0)),
    "no channels of a tensor": torch.zeros(0, 4, 4),
    "truth values": np.zeros((4, 4, 3), np.bool_),
    "complex": np.zeros((4, 4, 3), np.complex64),
    "complex tensor": torch.zeros(3, 4, 4, dtype=torch.complex64),
}


@pytest.mark.parametrize("leaf", NO_IMAGES.values(), ids=NO_IMAGES.keys())
def test_what_is_no_image_is_passed_over(leaf: Any) -> None:
    (found,) = ImageFinder().find(build_tree((leaf, image(1))))
    assert found[0] == "[1]"


def test_a_stored_file_has_nothing_beside_it() -> None:
    """The rest would go with it."""
    assert ImageFinder().find(build_tree([{"bytes": b"\xff\xd8\xff", "path": None, "label": 1}])) == [
        ("[0]['bytes']", b"\xff\xd8\xff")
    ]


def test_what_cannot_be_put_together_is_refused() -> None:
    with pytest.raises(TypeError, match="in different places"):
        collate([{"image": Placeholder(0)}, {"image": Placeholder(1)}])
    with pytest.raises(TypeError, match="a NoneType is no batch of 2 samples"):
        reorder_samples([torch.zeros(2), None], [1, 1])


FORMS = ("JPEG", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "JPEG2000")
UNWRITTEN = {("JPEG2000", "1"), ("WEBP", "1"), ("WEBP", "L")}
"""Which PIL writes in no such mode."""


@pytest.mark.parametrize(("form", "mode"), sorted({*product(FORMS, ("RGB", "L", "1"))} - UNWRITTEN))
def test_files_are_images(form: str, mode: str, tmp_path: Any) -> None:
    file = tmp_path / "it"
    PIL.Image.fromarray(data.astronaut()).resize((40, 30)).convert(mode).save(file, form)
    assert is_encoded(file.read_bytes())


# PIL images with alpha, whose colours PIL multiplies with it before it resamples


RESAMPLING = {
    "Resize": v2.Resize((20, 22)),
    "RandomResizedCrop": v2.RandomResizedCrop(20, (0.5, 0.5), (1, 1)),
    "RandomRotation": v2.RandomRotation((30, 30), v2.InterpolationMode.BILINEAR),
    "RandomAffine": v2.RandomAffine((20, 20), interpolation=v2.InterpolationMode.BILINEAR),
    "RandomApply": v2.RandomApply([v2.Resize((20, 22))], p=1),
    "after a flip": v2.Compose([v2.RandomHorizontalFlip(1), v2.Resize(20)]),
}


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
@pytest.mark.parametrize("name", [name for name in RESAMPLING if name != "RandomResizedCrop"])
def test_transparent_images_are_resampled_as_pil_does(name: str, mode: str) -> None:
    photograph = PIL.Image.fromarray(data.astronaut()).resize((60, 50)).convert(mode)
    ramp = np.tile(np.linspace(0, 255, 60).astype(np.uint8), (50, 1))
    photograph.putalpha(PIL.Image.fromarray(ramp))
    transform = v2.Compose([RESAMPLING[name], v2.ToImage()])
    (ours, *_) = next(iter(loader(Samples(lambda _: photograph.copy()), transform=transform)))
    assert torch.equal(ours, transform(photograph))


def test_random_ones_of_them_run_in_torch(capsys: pytest.CaptureFixture[str]) -> None:
    photograph = PIL.Image.fromarray(data.astronaut()).resize((60, 50)).convert("RGBA")
    asked = loader(Samples(lambda _: photograph.copy()), transform=[RESAMPLING["RandomResizedCrop"], v2.ToImage()])
    assert next(iter(asked)).shape == (4, 4, 20, 20)
    asked.explain()
    assert "multiplies the colours" in capsys.readouterr().out
