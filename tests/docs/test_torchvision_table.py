"""The table of torchvision's datasets in docs/datasets.md says of each what the loader does with it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

from PIL import Image
from torchvision import datasets
from torchvision.transforms import v2
from torchvision.tv_tensors._dataset_wrapper import WRAPPER_FACTORIES

from torchdali import DALILoader
from torchdali.sources.arrays import find_base_class
from torchdali.sources.bare import BARE_CLASSES
from torchdali.sources.files import FILE_CLASSES

PAGE = Path(__file__).parents[2] / "docs" / "datasets.md"

NATIVE, WITH_TRANSFORM, WRAPPED, CLIPS, NOT_YET = ROWS = (
    "Nothing to change",
    "Give `transform=`",
    "Wrap it, give `transform=`",
    "Give its files to `VideoClips`",
    "Not yet",
)

EXCEPTIONS = {
    "HMDB51": CLIPS,
    "Kinetics": CLIPS,
    "UCF101": CLIPS,
    "LSUN": NATIVE,  # its databases are read as shards
    "LFWPairs": NOT_YET,  # two images, which draw random numbers of their own
    "PhotoTour": NOT_YET,
    "WIDERFace": WRAPPED,  # boxes
}
"""Classes of which the source of ``__getitem__`` does not tell the row."""


def find_row(kind: type[Any]) -> str:
    """Return the row of a dataset. A joint transform gets masks, boxes or a flow beside the image."""
    bases = [base for base in kind.__mro__ if base in FILE_CLASSES]
    if kind in (datasets.CocoCaptions, datasets.CelebA) and kind in BARE_CLASSES:  # others have boxes, so wrap them
        return NATIVE
    if bases or find_base_class(object.__new__(kind)):
        assert not bases or vars(bases[0])["__getitem__"] is kind.__getitem__
        return NATIVE
    function = next(vars(base)["__getitem__"] for base in kind.__mro__ if "__getitem__" in vars(base))
    joint = "self.transforms(" in inspect.getsource(function)
    inherited = "super().__getitem__" in inspect.getsource(function)  # flows and stereo pairs
    if name_row := EXCEPTIONS.get(kind.__name__):
        return name_row
    return WITH_TRANSFORM if not joint and not inherited else WRAPPED if kind in WRAPPER_FACTORIES else NOT_YET


def make_table() -> dict[str, list[str]]:
    """Return the names in each row, for the installed torchvision."""
    kinds: list[Any] = [getattr(datasets, name) for name in datasets.__all__]
    classes = [kind for kind in kinds if isinstance(kind, type) and kind is not datasets.VisionDataset]
    rows: dict[str, list[str]] = {row: [] for row in ROWS}
    for kind in sorted(classes, key=lambda kind: kind.__name__.lower()):
        rows[find_row(kind)].append(kind.__name__)
    return rows


def test_table_says_for_each_dataset_what_to_do() -> None:
    text = PAGE.read_text()
    for row, names in make_table().items():
        cells = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", text, re.MULTILINE)
        assert len(cells) == 1, row
        documented = [name for name in re.findall(r"`(\w+)`", cells[0]) if hasattr(datasets, name)]
        assert documented == names, f"{row}: {', '.join(f'`{name}`' for name in names)}"


def test_boxes_of_a_wrapped_dataset_move(tmp_path: Path) -> None:
    root = tmp_path / "VOCdevkit" / "VOC2012"
    for folder in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    Image.new("RGB", (60, 50)).save(root / "JPEGImages" / "0.jpg")
    box = "<bndbox><xmin>4</xmin><ymin>5</ymin><xmax>30</xmax><ymax>40</ymax></bndbox>"
    (root / "Annotations" / "0.xml").write_text(f"<annotation><object><name>cat</name>{box}</object></annotation>")
    (root / "ImageSets" / "Main" / "train.txt").write_text("0\n")
    dataset = datasets.VOCDetection(str(tmp_path), year="2012", image_set="train")
    wrapped = datasets.wrap_dataset_for_transforms_v2(dataset, target_keys=("boxes", "labels"))
    transform = v2.Compose([v2.ToImage(), v2.RandomHorizontalFlip(1.0), v2.Resize((100, 120))])
    loader = DALILoader(wrapped, device="cpu", transform=transform, collate_fn=list)
    ((image, target),) = next(iter(loader))
    assert image.shape == (3, 100, 120)
    assert target["boxes"].tolist() == [[60, 10, 112, 80]]
