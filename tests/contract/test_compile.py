"""A transform compiled on its own, on everything that it takes."""

from __future__ import annotations

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms._presets import ImageClassification
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali import SampleError
from torchdali.transforms import MultiView, find_rule
from torchdali.transforms.rng import Draws, epoch_key
from torchdali.transforms.spec import Spec

FLOAT = v2.ToDtype(torch.float32, scale=True)
EVAL = v2.Compose([v2.ToImage(), v2.CenterCrop(40), FLOAT, v2.Normalize([0.5] * 3, [0.25] * 3)])
pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def images(pictures):
    opened = []
    for path in sorted(pictures.glob("*/*"))[:6]:
        with Image.open(path) as image:
            opened.append(image.convert("RGB"))
    return opened


def png(image, **options):
    stream = io.BytesIO()
    image.save(stream, format="PNG", **options)
    return stream.getvalue()


def inputs(kind, images, folder):
    if kind == "paths":
        for i, image in enumerate(images):
            image.save(folder / f"{i}.png")
        return [folder / f"{i}.png" for i in range(len(images))]
    make = {
        "PIL": lambda image: image,
        "bytes": png,
        "tensors": F.pil_to_tensor,
        "images": lambda image: tv_tensors.Image(F.pil_to_tensor(image)),
    }[kind]
    return [make(image) for image in images]


@pytest.mark.parametrize("kind", ["paths", "PIL", "bytes", "tensors", "images"])
def test_every_kind_of_image(images, kind, tmp_path, device):
    ours = torchdali.compile(EVAL, device=device)(inputs(kind, images, tmp_path))
    theirs = torch.stack([EVAL(image) for image in images])
    assert type(ours) is torch.Tensor
    assert ours.device.type == torch.device(device).type
    assert torch.allclose(ours.cpu(), theirs, atol=1e-6)


APPLIED = v2.RandomApply([v2.RandomHorizontalFlip(1)], p=1)
HALF = v2.ToDtype(torch.float16, scale=True)
LINEAR = InterpolationMode.BILINEAR
MATRIX = v2.LinearTransformation(torch.rand(192, 192, generator=torch.Generator().manual_seed(0)), torch.zeros(192))
SUBCLASS = type("Mine", (v2.LinearTransformation,), {})(MATRIX.transformation_matrix, MATRIX.mean_vector)
AS_GIVEN = {
    "flip of halves in RandomApply": (HALF, v2.Compose([APPLIED, HALF]), 0),
    "flips of halves in RandomOrder": (HALF, v2.RandomOrder([APPLIED, v2.RandomVerticalFlip(1)]), 0),
    "halves within RandomChoice": (F.to_image, v2.RandomChoice([v2.Compose([HALF, APPLIED])]), 0),
    "border of halves in RandomApply": (HALF, v2.RandomApply([v2.Pad(3, padding_mode="reflect")], p=1), 0),
    "hue of -1 to 1": (lambda image: FLOAT(image) * 2 - 1, v2.ColorJitter(hue=(0.1, 0.1)), 0),
    "hue of 0 to 255": (v2.ToDtype(torch.float32), v1.ColorJitter(hue=(0.1, 0.1)), 0),
    "equalized -1 to 1": (lambda image: FLOAT(image) * 2 - 1, v2.RandomEqualize(1), 0),
    "of one value, stretched": (lambda image: torch.full_like(F.to_image(image), 77), v2.RandomAutocontrast(1), 0),
    "border of its own kind's fill": (F.to_image, v2.Pad(9, fill={tv_tensors.Image: 99.6, "others": 200}), 0),
    "rotated, with half a level around": (F.to_image, v2.RandomRotation((30, 30), LINEAR, fill=99.6), 0.01),
    "three quarters, to the left": (F.to_image, v2.RandomRotation((270, 270), expand=True), 0),
    "a quarter, to the right": (F.to_image, v2.RandomRotation((-90, -90), expand=True), 0),
    "two channels rotated": (lambda image: image[:2], v2.RandomRotation((30, 30), v2.InterpolationMode.BILINEAR), 0),
    "two channels in perspective": (lambda image: image[:2], v2.RandomApply([v2.RandomAffine((9, 9))], p=1), 0),
    "five channels rotated": (lambda image: torch.cat([image, image[:2]]), v2.RandomRotation((30, 30)), 0),
    "grey, compressed": (lambda image: image[:1], v2.RandomApply([v2.JPEG((50, 50))], p=1), 0),
    "compressed after a function": (F.to_image, v2.Compose([lambda image: image.clone(), v2.JPEG((50, 50))]), 0),
    "of two bytes, inverted": (lambda image: image.to(torch.uint16), v2.Compose([v2.RandomInvert(1)] * 2), 0),
    "to two bytes": (F.to_image, v2.ToDtype(torch.uint16, scale=True), 0),
    "grey, compressed at a depth": (lambda x: x[:1], v2.RandomApply(torch.nn.ModuleList([v2.JPEG((50, 50))]), p=1), 0),
    "matrix of a subclass": (lambda x: FLOAT(F.center_crop(x, 8)), SUBCLASS, 1e-6),
    "matrix within RandomApply": (lambda x: FLOAT(F.center_crop(x, 8)), v2.RandomApply([MATRIX], p=1), 1e-6),
    "blurred widely": (lambda x: F.resize(x, [90, 90]), v2.GaussianBlur((171, 171), 20.0), 1),
    "preset of sharp edges": (F.to_image, ImageClassification(crop_size=32, resize_size=40, antialias=False), 1e-3),
    "preset": (F.to_image, ImageClassification(crop_size=32, resize_size=40), 1e-3),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The image decoding and encoding:DeprecationWarning")
@pytest.mark.parametrize("name", AS_GIVEN)
def test_tensors_that_are_not_like_a_picture(name, images, device):
    """They are of a kind that DALI does otherwise than torch or not at all, or torch otherwise than pictures."""
    convert, transform, bound = AS_GIVEN[name]
    bound += 0.02 * (torch.device(device).type == "cuda")  # where torch's kernels add in another order
    given = [convert(F.pil_to_tensor(image)) for image in images]
    ours = torchdali.compile(transform, device=device)(given)
    for image, one in zip(given, ours, strict=True):
        inside = transform(image).double()[:, 1:-1, 1:-1]
        assert (one.cpu().double()[:, 1:-1, 1:-1] - inside).abs().mean() <= bound


def test_a_thin_image_whose_corners_stay_is_none_too_thin(images):
    line = F.pil_to_tensor(images[0])[:, :, :1]
    assert torch.equal(torchdali.compile(v2.RandomPerspective(p=0.0), device="cpu")([line])[0], line)


def test_a_deviation_of_zero_is_torchvisions_error(images):
    normalize = v2.Compose([v2.ToImage(), v2.CenterCrop(40), FLOAT, v2.Normalize([0.5] * 3, [0.2, 0.0, 0.2])])
    with pytest.raises(ValueError, match="std evaluated to zero"):
        normalize(images[0])
    with pytest.raises(ValueError, match="std evaluated to zero"):
        torchdali.compile(normalize, device="cpu")(images)


def test_another_default_type_is_that_of_to_tensor(images):
    chain = v2.Compose([v2.CenterCrop(40), v1.ToTensor()])
    torch.set_default_dtype(torch.float64)
    try:
        ours, theirs = torchdali.compile(chain, device="cpu")(images), torch.stack([chain(image) for image in images])
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.dtype == theirs.dtype == torch.float64
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:Anti-alias option is always applied")
@pytest.mark.parametrize(
    "resize",
    [v2.Resize((20, 23), InterpolationMode.NEAREST), v2.Resize((20, 23), antialias=False)],
    ids=["nearest", "without antialias"],
)
def test_pil_images_are_resized_as_pil_does(images, resize, device):
    """Its nearest neighbours are others than those of tensors, and it always smooths."""
    theirs = torch.stack([F.pil_to_tensor(resize(image)) for image in images])
    difference = (torchdali.compile(resize, device=device)(images).cpu().int() - theirs.int()).abs()
    assert (difference[..., 2:-2, 2:-2] > 2).double().mean() < 0.02


def test_the_default_device_and_type_are_the_consumers(images):
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(40), v2.RandAugment()])
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            compiled = torchdali.compile(chain, device="cpu")
    finally:
        torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    ours = compiled(images)
    torch.manual_seed(0)
    assert torch.equal(ours, torchdali.compile(chain, device="cpu")(images))


@pytest.mark.parametrize("order", ["dal", "ald", "lad", "dlaal"])
def test_views_of_a_mixture_stay_in_order(order, device):
    """uint8 is split into views in DALI, floats in torch, because of the hue."""
    views = MultiView([v2.CenterCrop(20), v2.Compose([v2.CenterCrop(20), v2.ColorJitter(hue=0.2)])])
    compiled = torchdali.compile(v2.Compose([v2.ToImage(), views, FLOAT]), device=device)
    grey = {"d": torch.full((3, 30, 30), 51, dtype=torch.uint8), "a": torch.full((3, 30, 30), 0.8)}
    grey["l"] = torch.full((3, 30, 30), 0.4)
    value = {"d": 0.2, "a": 0.8, "l": 0.4}
    found = compiled([grey[one] for one in order])
    assert [view.mean((1, 2, 3)).tolist() for view in found] == [pytest.approx([value[one] for one in order])] * 2


HOOKED = {
    "hook": lambda t: t.register_forward_hook(lambda module, given, out: out * 0),
    "pre-hook": lambda t: t.register_forward_pre_hook(lambda module, given: (given[0] * 0,)),
    "forward": lambda t: setattr(t, "forward", lambda image: image * 0),
    "transform": lambda t: setattr(t, "transform", lambda image, params: image * 0),
}


@pytest.mark.parametrize("container", [False, True])
@pytest.mark.parametrize("how", HOOKED)
def test_what_is_not_as_its_class_says_is_called(how, container, images, device):
    flip = v2.RandomHorizontalFlip(1)
    changed = v2.Compose([flip]) if container and how != "transform" else flip
    compiled = torchdali.compile(v2.Compose([v2.ToImage(), v2.CenterCrop(40), changed]), device=device)
    assert compiled(images).any()
    HOOKED[how](changed)
    later = torchdali.compile(v2.Compose([v2.ToImage(), v2.CenterCrop(40), changed]), device=device)
    assert not later(images).any()


@pytest.mark.parametrize("kind", [tv_tensors.Mask, tv_tensors.Video])
def test_what_is_no_image_is_refused(kind, device):
    compiled = torchdali.compile(EVAL, device=device)
    for given in ([kind(torch.zeros(1, 1, 8, 8))], kind(torch.zeros(2, 1, 8, 8))):
        with pytest.raises(TypeError, match=f"^a {kind.__name__} is no image; taken are "):
            compiled(given)


def test_a_mixture_stays_in_order(images, tmp_path, device):
    kinds = ["paths", "PIL", "bytes", "tensors", "images", "PIL"]
    mixed = [inputs(kind, images, tmp_path)[i] for i, kind in enumerate(kinds)]
    ours = torchdali.compile(EVAL, device=device)(mixed)
    assert torch.allclose(ours.cpu(), torch.stack([EVAL(image) for image in images]), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
@pytest.mark.parametrize("place", ["cpu", "device"])
def test_a_batch(images, dtype, place, device):
    batch = torch.stack([F.pil_to_tensor(image.resize((60, 50))) for image in images])
    batch = F.to_dtype(batch, dtype, scale=True)
    chain = v2.Compose([v2.CenterCrop(32), v2.RandomHorizontalFlip(1)])
    ours = torchdali.compile(chain, device=device)(batch.to(device) if place == "device" else batch)
    assert torch.equal(ours.cpu(), chain(batch))


def test_each_image_of_a_batch_draws_its_own_numbers(images, device):
    batch = torch.stack([F.pil_to_tensor(images[0])] * 8)
    crop = torchdali.compile(v2.RandomCrop(16), device=device)
    torch.manual_seed(3)
    first, second = crop(batch), crop(batch)
    torch.manual_seed(3)
    again = crop(batch)
    assert len({one.numpy().tobytes() for one in first.cpu()}) > 1
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_what_draws_nothing_leaves_the_generator_alone(images):
    state = torch.get_rng_state()
    torchdali.compile(EVAL, device="cpu")(images)
    assert torch.equal(state, torch.get_rng_state())


def test_the_same_numbers_for_files_and_pixels(images, tmp_path, device):
    crop = torchdali.compile(v2.RandomResizedCrop(24), device=device)
    results = []
    for kind in ("paths", "PIL", "bytes"):
        torch.manual_seed(1)
        results.append(crop(inputs(kind, images, tmp_path)).float())
    assert all((one - results[0]).abs().max() <= 2 for one in results)


def test_uneven_sizes_come_as_a_list(images, device):
    ours = torchdali.compile(v2.ToImage(), device=device)(images)
    assert isinstance(ours, list)
    assert all(torch.equal(one.cpu(), F.pil_to_tensor(image)) for one, image in zip(ours, images, strict=True))


def test_transforms_in_torch(images, device):
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(32), v2.Lambda(lambda image: image.float() + 1)])
    ours = torchdali.compile(chain, device=device)(images)
    assert torch.equal(ours.cpu(), torch.stack([chain(image) for image in images]))


def test_views(images, tmp_path, device):
    views = MultiView([v2.Compose([v2.CenterCrop(32), v2.ToImage()]), v2.Compose([v2.CenterCrop(20), v2.ToImage()])])
    mixed = [*images[:3], *inputs("bytes", images[3:], tmp_path)]
    big, small = torchdali.compile(views, device=device)(mixed)
    assert torch.equal(big.cpu(), torch.stack([views(image)[0] for image in images]))
    assert torch.equal(small.cpu(), torch.stack([views(image)[1] for image in images]))


def test_conversion_to_bfloat16(images, device):
    chain = v2.Compose([v2.ToImage(), v2.CenterCrop(32), v2.ToDtype(torch.bfloat16, scale=True)])
    ours = torchdali.compile(chain, device=device)(images)
    assert ours.dtype == torch.bfloat16
    assert torch.allclose(ours.cpu().float(), torch.stack([chain(image) for image in images]).float(), atol=4e-3)


def test_grey_and_transparent_images_are_rgb_as_in_image_folder(images, device):
    both = [images[0].convert("L"), images[0].convert("RGBA"), png(images[0].convert("RGBA"))]
    ours = torchdali.compile(v2.ToImage(), device=device)(both)
    assert torch.equal(ours[0].cpu(), F.pil_to_tensor(both[0].convert("RGB")))
    assert torch.equal(ours[1].cpu(), F.pil_to_tensor(images[0]))
    assert torch.equal(ours[2].cpu(), F.pil_to_tensor(images[0]))


def test_more_images_than_before(images, device):
    crop = torchdali.compile(EVAL, device=device)
    for count in (1, 6, 2, 4):
        assert crop(images[:count]).shape == (count, 3, 40, 40)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ([3], "image 0 is a int"),
        ("picture.jpg", "put it into a list"),
        (b"bytes", "put it into a list"),
        ([torch.zeros(4, 4)], r"\(C, H, W\)"),
        (torch.zeros(3, 4, 4), "4 axes"),
        ([np.zeros((4, 4, 3), np.uint8)], "ndarray"),
        ([torch.zeros(3, 4, 4, dtype=torch.bfloat16)], "bfloat16"),
    ],
)
def test_what_is_no_image(wrong, message):
    with pytest.raises(TypeError, match=message):
        torchdali.compile(EVAL, device="cpu")(wrong)


def test_no_images():
    with pytest.raises(ValueError, match="no images"):
        torchdali.compile(EVAL, device="cpu")([])


def test_damaged_bytes_name_their_place(images, device):
    with pytest.raises(SampleError, match="sample 1") as raised:
        torchdali.compile(EVAL, device=device)([images[0], b"not an image", images[1]])
    assert raised.value.index == 1
    assert "(image 1)" in str(raised.value)
    assert "/proc" not in str(raised.value)


def test_a_missing_file_is_named_by_its_path(images, tmp_path):
    with pytest.raises(SampleError) as raised:
        torchdali.compile(EVAL, device="cpu")([images[0], tmp_path / "none.png"])
    assert (raised.value.index, raised.value.path) == (1, str(tmp_path / "none.png"))


def test_an_image_too_small_names_its_place(images, device):
    crop = torchdali.compile(v2.RandomCrop(50), device=device)
    with pytest.raises(SampleError, match=r"sample 1 .*RandomCrop.*pad_if_needed") as raised:
        crop([images[0].resize((90, 90)), images[0].resize((20, 90))])
    assert raised.value.index == 1
    assert crop([images[0].resize((90, 90))]).shape == (1, 3, 50, 50)
    with pytest.raises(SampleError, match="sample 2 ") as raised:
        crop([images[0].resize((90, 90)), torch.zeros(3, 60, 60), torch.zeros(3, 20, 90)])
    assert raised.value.index == 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deep", "pickle"])
def test_it_is_copied_before_and_after_it_was_called(images, copied, device):
    compiled = torchdali.compile(EVAL, device=device)
    early = copied(compiled)
    expected = compiled(images)
    assert torch.equal(early(images), expected)
    assert torch.equal(copied(compiled)(images), expected)
    assert torch.equal(compiled(images), expected)


def test_explain_and_repr(capsys):
    compiled = torchdali.compile(EVAL, device="cpu")
    compiled.explain()
    assert "decoders.image; slice; crop_mirror_normalize" in capsys.readouterr().out
    assert "CenterCrop" in repr(compiled)


@pytest.mark.gpu
def test_waits_for_images_that_are_still_being_written(images):
    compiled = torchdali.compile(v2.ToImage(), device="cuda")
    tensors = torch.stack([F.pil_to_tensor(image)[:, :50, :50] for image in images]).cuda()
    compiled(tensors)
    for _ in range(5):
        torch.cuda.synchronize()
        torch.cuda._sleep(30_000_000)
        assert torch.equal(compiled(tensors.clone()), tensors)


WHOLE = {"scale": (1, 1), "ratio": (1, 1)}


@pytest.mark.parametrize(
    "resize",
    [
        v1.Resize((40, 44)),
        v1.Resize((40, 44), InterpolationMode.BICUBIC),
        v1.RandomResizedCrop(40, **WHOLE),
        v1.RandomResizedCrop(40, **WHOLE, interpolation=InterpolationMode.BICUBIC),
    ],
    ids=repr,
)
def test_v1_rounds_resized_tensors_once(images, resize, device):
    """And v2 twice, as PIL does: a bound of two roundings is no bound for one."""
    images = [F.center_crop(F.pil_to_tensor(image), [min(image.size)]) for image in images]
    theirs = torch.stack([resize(image) for image in images]).float()
    difference = (torchdali.compile(resize, device=device)(images).cpu().float() - theirs).abs()
    assert difference[..., 4:-4, 4:-4].max() <= 1
    assert difference.mean() < 0.06
    rule = find_rule(resize)
    rule.infer(Spec("tensor"))
    side = images[0].shape[1]
    drawn = rule.draw(Draws(epoch_key(0, 0), np.arange(1), np.zeros(1, int)), np.array([[side, side]]))
    assert torch.equal(
        rule.reference(images[0], {name: values[0] for name, values in drawn.items()}), resize(images[0])
    )
