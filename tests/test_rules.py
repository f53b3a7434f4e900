"""Each rule against torchvision: pixels by replaying the drawn numbers, and their distributions.

The pictures are lossless, so that DALI's GPU and CPU decoders and PIL give the same pixels and every difference is the
transform's.
"""

from __future__ import annotations

import numpy as np
import pytest
import skimage.data
import torch
from PIL import Image
from replay import compiled, pairs
from scipy import stats
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali.parity.cases import CASES
from torchdali.parity.draws import DRAWS
from torchdali.rng import Draws, epoch_key
from torchdali.transforms import RowError, find_rule
from torchdali.transforms.resize import resized_size


@pytest.fixture(scope="module")
def photographs(tmp_path_factory):
    """Twelve crops of four photographs, no two of one size, without loss."""
    root = tmp_path_factory.mktemp("photographs")
    (root / "all").mkdir()
    rng = np.random.default_rng(0)
    pictures = [skimage.data.astronaut(), skimage.data.coffee(), skimage.data.chelsea(), skimage.data.rocket()]
    for i in range(12):
        height, width = rng.integers(120, 260, 2)
        picture = pictures[i % 4]
        top, left = (
            int(rng.integers(0, side - part)) for side, part in zip(picture.shape, (height, width), strict=False)
        )
        Image.fromarray(picture[top : top + height, left : left + width]).save(root / "all" / f"{i:02}.png")
    return ImageFolder(root)


@pytest.mark.parametrize("name", CASES)
def test_pixels_are_torchvisions(name, photographs, device):
    case = CASES[name]
    means = []
    for ours, theirs in pairs(photographs, case.chain, device):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        difference = (ours.double() - theirs.double()).abs()
        assert difference.max() <= case.anywhere
        assert difference[:, 4:-4, 4:-4].max() <= case.inside
        means.append(difference.mean())
    assert len(means) == 12
    assert torch.stack(means).mean() <= case.mean


def test_every_rule_has_a_case():
    tried = {type(one) for case in CASES.values() for one in case.chain}
    names = ["ToImage", "PILToTensor", "ToDtype", "ToPureTensor", "Normalize", "Resize", "CenterCrop", "RandomCrop"]
    names += ["RandomResizedCrop", "RandomHorizontalFlip", "Pad", "Grayscale", "ColorJitter", "RandomApply", "Identity"]
    assert {getattr(v2, name) for name in names} <= tried
    assert all(find_rule(one) for case in CASES.values() for one in case.chain)


HEIGHT, WIDTH, MANY = 180, 240, 3000


def drawn(transform, height=HEIGHT, width=WIDTH, count=MANY):
    rule = find_rule(transform)
    rule.infer(compiled([]).spec)
    index = np.arange(count)
    return rule.draw(Draws(epoch_key(3, 1), index, np.zeros_like(index)), np.tile([height, width], (count, 1)))


def theirs(transform, height=HEIGHT, width=WIDTH, count=MANY):
    image = [tv_tensors.Image(torch.empty(3, height, width))]
    torch.manual_seed(5)
    return [transform.make_params(image) for _ in range(count)]


def same_distribution(ours, other):
    return stats.ks_2samp(np.asarray(ours, float), np.asarray(other, float)).pvalue > 1e-3


@pytest.mark.parametrize(
    "transform",
    [
        v2.RandomResizedCrop(64),
        v2.RandomResizedCrop(64, scale=(0.5, 1.5), ratio=(0.3, 4.0)),  # most attempts fail
        v2.RandomCrop((100, 200), padding=(5, 9)),
        v2.RandomCrop((300, 200), pad_if_needed=True),
    ],
    ids=str,
)
def test_windows_are_drawn_as_torchvision_draws_them(transform):
    ours, other = drawn(transform), theirs(transform)
    padding = np.array([p.get("padding", [0, 0])[:2] for p in other])
    for column, name in enumerate(("top", "left")):
        start = ours["start"][:, column] + padding[0, 1 - column]
        assert same_distribution(start, [p[name] for p in other])
    for column, name in enumerate(("height", "width")):
        assert same_distribution(ours["shape"][:, column], [p[name] for p in other])
    ratio = ours["shape"][:, 1] / ours["shape"][:, 0]
    assert same_distribution(ratio, [p["width"] / p["height"] for p in other])


@pytest.mark.parametrize(("height", "width"), [(20, 900), (900, 20), (50, 50)])
def test_the_fallback_of_random_resized_crop_is_torchvisions(height, width):
    transform = v2.RandomResizedCrop(32, scale=(2.0, 3.0))
    window = drawn(transform, height, width, 2)
    other = theirs(transform, height, width, 1)[0]
    assert window["start"][0].tolist() == [other["top"], other["left"]]
    assert window["shape"][0].tolist() == [other["height"], other["width"]]


def test_colour_factors_and_their_order_are_drawn_as_torchvision_draws_them():
    transform = v2.ColorJitter(0.4, (0.5, 0.9), 0.2, 0.1)
    ours, other = drawn(transform), theirs(transform)
    for i, name in enumerate(("brightness", "contrast", "saturation", "hue")):
        assert same_distribution(ours["factors"][:, i], [p[f"{name}_factor"] for p in other])
    _, counts = np.unique(ours["order"], axis=0, return_counts=True)
    assert len(counts) == 24
    assert stats.chisquare(counts).pvalue > 1e-4


@pytest.mark.parametrize("name", DRAWS)
def test_parameters_are_drawn_as_torchvision_draws_them(name):
    draw = DRAWS[name]
    ours = np.asarray(draw.ours(drawn(draw.transform)), float)
    if isinstance(draw.theirs, float):
        assert stats.binomtest(int(ours.sum()), len(ours), draw.theirs).pvalue > 1e-3
    else:
        assert same_distribution(ours, [draw.theirs(params) for params in theirs(draw.transform)])


@pytest.mark.parametrize(("size", "max_size"), [([64], None), ([100], 130), (None, 77), ([30, 40], None)])
def test_sizes_are_torchvisions(size, max_size):
    sizes = np.random.default_rng(1).integers(1, 2000, (3000, 2))
    expected = [F._geometry._compute_resized_output_size((h, w), size, max_size) for h, w in sizes.tolist()]
    assert resized_size(sizes, size, max_size).tolist() == expected


def test_a_crop_larger_than_its_image_names_the_row():
    rule = find_rule(v2.RandomCrop(50))
    rule.infer(compiled([]).spec)
    index = np.arange(3)
    with pytest.raises(RowError, match="pad_if_needed=True") as raised:
        rule.draw(Draws(epoch_key(0, 0), index, index * 0), np.array([[60, 60], [49, 60], [10, 10]]))
    assert raised.value.row == 1


def test_boxes_are_torchvisions_for_the_same_random_numbers(monkeypatch):
    """torchvision's own code, run on the numbers that the rule drew: attempts, rounding, positions and fallback."""
    transform = v2.RandomResizedCrop(32, scale=(0.2, 1.4), ratio=(0.4, 3.0))
    sizes = np.random.default_rng(2).integers(3, 700, (1500, 2))
    rule = find_rule(transform)
    rule.infer(compiled([]).spec)
    index = np.arange(len(sizes))
    windows = rule.draw(Draws(epoch_key(3, 1), index, index * 0), sizes)
    numbers = Draws(epoch_key(3, 1), index, index * 0).uniform(22)
    stream = iter(())
    monkeypatch.setattr(torch.Tensor, "uniform_", lambda x, low, high: x.fill_(low + (high - low) * next(stream)))
    monkeypatch.setattr(torch, "randint", lambda low, high, size: torch.tensor([int(next(place) * high)]))
    wrong = 0
    for row, (height, width) in enumerate(sizes.tolist()):
        stream = iter(np.stack((numbers[row, :10], numbers[row, 10:20]), axis=1).ravel().tolist())
        place = iter(numbers[row, 20:].tolist())
        box = transform.make_params([tv_tensors.Image(torch.empty(3, height, width))])
        wrong += [box["top"], box["left"], box["height"], box["width"]] != [
            *windows["start"][row].tolist(),
            *windows["shape"][row].tolist(),
        ]
    assert wrong <= 1  # torchvision works in float32, and a half may round the other way
