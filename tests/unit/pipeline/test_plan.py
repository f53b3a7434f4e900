"""What a chain of transforms is compiled to, and what explain() says of it."""

from __future__ import annotations

import io
import random
import threading

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

from torchdali import DALILoader, TransformError
from torchdali.pipeline.fallback import fork_generators
from torchdali.tools.parity.compare import compile_chain, run

FLOAT = v2.ToDtype(torch.float32, scale=True)
NORMALIZE = v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
TRAIN = [v2.ToImage(), v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), FLOAT, NORMALIZE]


def images(pictures, plan, size=8):
    indices = list(range(len(ImageFolder(pictures))))
    batches = [indices[i : i + size] for i in range(0, len(indices), size)]
    return torch.cat([torch.stack(list(batch.images)).cpu() for batch in run(ImageFolder(pictures), plan, batches)])


@pytest.mark.parametrize(
    ("chain", "operators"),
    [
        (TRAIN, 2),
        ([v2.RandomResizedCrop(64), v2.RandomHorizontalFlip(), v1.ToTensor(), NORMALIZE], 2),
        ([v2.ToImage(), v2.RandomCrop(40), FLOAT], 2),
        ([v2.RandomResizedCrop(64), v2.ToImage(), FLOAT, NORMALIZE, v2.RandomHorizontalFlip()], 3),
        ([v2.RandomResizedCrop(64), v2.RandomVerticalFlip(), v2.ToImage(), FLOAT, NORMALIZE], 3),
    ],
)
def test_fusion_changes_nothing_but_the_number_of_operators(chain, operators, pictures, device):
    fused, plain = compile_chain(chain, device), compile_chain(chain, device, fused=False)
    assert len(fused.rules) == operators < len(plain.rules)
    assert fused.decode_window
    bound = 1e-6 if device == "cpu" else 1e-5
    assert (images(pictures, fused) - images(pictures, plain)).abs().max() <= bound


def test_the_sample_decides_its_augmentation_not_the_batch(pictures, device):
    plan = compile_chain(TRAIN, device)
    assert torch.equal(images(pictures, plan, 8), images(pictures, plan, 3))


def test_a_sample_drawn_twice_is_augmented_differently(pictures):
    (batch,) = run(ImageFolder(pictures), compile_chain(TRAIN), [[4, 4, 2, 4]])
    assert not torch.equal(batch.images[0], batch.images[1])
    again, later = run(ImageFolder(pictures), compile_chain(TRAIN), [[2, 4], [4, 4]])
    assert torch.equal(again.images[1], batch.images[0])
    assert torch.equal(later.images[0], batch.images[1])
    assert torch.equal(later.images[1], batch.images[3])


IN_TORCH = v2.Lambda(lambda image: image)

UNRULED = [
    ([v2.ToImage(), v2.Lambda(F.invert)], "no rule for Lambda"),
    ([v2.ToImage(), v2.Resize((40, 40), interpolation="bicubic", antialias=False)], "bicubic"),
    ([v2.Resize((40, 40), interpolation="hamming")], "hamming"),
    ([v2.ToImage(), v2.ToDtype(torch.float16), v2.ColorJitter(0.4)], "no rule for float16"),
    ([v2.ToImage(), NORMALIZE], "float32"),
    ([v2.ToImage(), FLOAT, NORMALIZE, v2.ColorJitter(hue=0.1)], "outside of [0, 1]"),
    ([v2.ToImage(), FLOAT, v2.Resize((40, 40), interpolation="bicubic"), v2.RandAugment()], "outside of [0, 1]"),
    ([v2.ToImage(), v2.ToDtype(torch.float32), v2.RandomPosterize(4)], "outside of [0, 1]"),
    ([v2.RandomApply([v2.Lambda(F.invert)])], "Lambda"),
    ([v2.ToImage(), v2.RandomApply([v2.Grayscale()])], "some samples"),
    ([v2.RandomCrop(300, pad_if_needed=True, padding_mode="edge")], "pad_if_needed"),
    ([lambda image: image], "function"),
    ([type("Mine", (v2.Resize,), {})((40, 40))], "Mine"),
]


@pytest.mark.parametrize(("chain", "reason"), UNRULED, ids=[reason for _, reason in UNRULED])
def test_what_has_no_rule_is_left_to_torch_with_the_reason(chain, reason):
    plan = compile_chain([*chain, v2.CenterCrop(32)])
    assert plan.suffix[0].transform is chain[-1]
    assert isinstance(plan.suffix[-1].transform, v2.CenterCrop)
    assert [step.library for step in plan.steps[-2:]] == ["torch", "torch"]
    assert reason in plan.steps[-2].note


@pytest.mark.parametrize(
    "chain",
    [
        [v2.Resize((40, 50)), v2.Pad((1, 2, 3, 4))],
        [v2.Resize((40, 50)), v2.Pad((1, 2, 3, 4), padding_mode="reflect"), v2.Resize(30)],
        [v2.Resize((50, 40)), v2.Resize(None, max_size=70)],
        [v2.Resize((40, 50)), v2.RandomChoice([v2.Pad(3), v2.CenterCrop((46, 56))])],
    ],
    ids=str,
)
def test_sizes_that_are_all_the_same_are_known(chain):
    assert compile_chain(chain).spec.size == v2.Compose(chain)(Image.new("RGB", (90, 70))).size[::-1]


def test_the_memory_of_a_sample_is_that_of_its_numbers():
    chain = [v2.ToImage(), v2.Resize((40, 50)), v2.FiveCrop(30), FLOAT]
    made = v2.Compose(chain)(Image.new("RGB", (90, 70)))
    assert compile_chain(chain).sample_bytes == sum(view.nbytes for view in made)


@pytest.mark.parametrize(
    "last",
    [
        v2.RandomRotation(30, expand=True),
        v2.RandomZoomOut(),
        v2.RandomResize(20, 40),
        v2.RandomApply([v2.CenterCrop(20)]),
        v2.RandomChoice([v2.CenterCrop(20), v2.CenterCrop(30)]),
        v2.RandomOrder([v2.RandomApply([v2.Pad(3)])]),
    ],
    ids=str,
)
def test_sizes_that_differ_are_not(last):
    assert compile_chain([v2.Resize((40, 50)), last]).spec.size is None


def loader(pictures, chain, **options):
    dataset = ImageFolder(pictures, v2.Compose(chain))
    return DALILoader(dataset, batch_size=6, device=options.pop("device", "cpu"), seed=1, **options)


def test_transforms_in_torch_do_what_torchvision_does(pictures, device):
    blur = v2.Lambda(lambda image: F.gaussian_blur(image, [5, 5], [1.5, 1.5]))
    before = loader(pictures, [v2.ToImage(), v2.Resize((60, 70))], device=device)
    after = loader(pictures, [v2.ToImage(), v2.Resize((60, 70)), blur, FLOAT], device=device)
    for (images, labels), (blurred, same) in zip(before, after, strict=True):
        assert torch.equal(labels, same)
        assert blurred.device == images.device
        assert torch.equal(blurred, F.to_dtype(F.gaussian_blur(images, [5, 5], [1.5, 1.5]), torch.float32, scale=True))


def test_randomness_in_torch_follows_the_sample_and_leaves_the_generators_alone(pictures, device):
    chain = [v2.ToImage(), v2.Resize((60, 70)), IN_TORCH, v2.RandomErasing(p=0.5), v2.RandomRotation(20)]
    torch.manual_seed(3)
    state = torch.get_rng_state()
    one = torch.cat([images for images, _ in loader(pictures, chain, device=device)])
    two = torch.cat([images for images, _ in loader(pictures, chain, device=device, num_workers=2)])
    dataset = ImageFolder(pictures, v2.Compose(chain))
    three = torch.cat([images for images, _ in DALILoader(dataset, batch_size=5, seed=1, device=device)])
    other = torch.cat([images for images, _ in DALILoader(dataset, batch_size=5, seed=2, device=device)])
    assert torch.equal(one, two)
    assert torch.equal(one, three)
    assert not torch.equal(one, other)
    torch.manual_seed(3)
    for _ in range(4):  # each epoch draws DataLoader's base seed and nothing else
        torch.empty((), dtype=torch.int64).random_()
    drawn = torch.get_rng_state()
    torch.set_rng_state(state)
    for _ in range(4):
        list(loader(pictures, chain, device=device))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_generators_of_every_library_are_lent_and_put_back():
    def drawn():
        return random.random(), np.random.rand(), float(torch.rand(1))  # noqa: NPY002

    states = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002
    with fork_generators(torch.device("cpu")) as seed:
        lent = []
        for _ in range(2):
            seed(2**62 + 1)
            lent.append(drawn())
    after = drawn()
    random.setstate(states[0])
    np.random.set_state(states[1])  # noqa: NPY002
    torch.set_rng_state(states[2])
    assert lent[0] == lent[1]
    assert after == drawn()


def test_generators_are_lent_to_one_thread_at_a_time():
    """Else one would put back, for good, what another one had seeded."""
    inside, left = threading.Event(), threading.Event()

    def borrow():
        with fork_generators(torch.device("cpu")):
            inside.set()
            left.wait(10)

    before, thread = torch.get_rng_state(), threading.Thread(target=borrow)
    with fork_generators(torch.device("cpu")) as seed:
        seed(1)
        thread.start()
        inside.wait(0.2)
    left.set()
    thread.join()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("before", "kind"), [([], Image.Image), ([v2.ToImage()], tv_tensors.Image), ([v2.PILToTensor()], torch.Tensor)]
)
def test_transforms_in_torch_get_the_objects_that_torchvision_would_give_them(before, kind, pictures):
    seen = []

    def look(image):
        seen.append(type(image))
        return image

    for _ in loader(pictures, [v2.Resize((30, 30)), *before, look, v2.PILToTensor()]):
        pass
    assert all(issubclass(one, kind) for one in seen)
    assert (kind is torch.Tensor) == (set(seen) == {torch.Tensor})


def test_errors_of_torchvision_reach_the_user(pictures):
    with pytest.raises(TypeError, match="float tensor"):
        next(iter(loader(pictures, [v2.ToImage(), v2.Resize((30, 30)), NORMALIZE])))


def test_arguments_that_are_words_are_refused_by_name(pictures):
    """As they come from a command line whose options were given no type."""
    with pytest.raises(TypeError, match="expected size to be one of"):
        next(iter(loader(pictures, [v2.ToImage(), v2.Resize("32")])))
    flip = v1.RandomHorizontalFlip("0.5")
    with pytest.raises(ValueError, match="'str'") as caught:
        iter(loader(pictures, [v2.ToImage(), v2.Resize((30, 30)), flip]))
    told = ["while the arguments of transform 3, RandomHorizontalFlip, were looked at"]
    assert getattr(caught.value, "__notes__", told) == told


def test_none_in_a_chain_is_no_transform(pictures):
    """As in DataLoader: what was to make it may have forgotten to return it."""
    with pytest.raises(TypeError, match="'NoneType' object is not callable"):
        next(iter(loader(pictures, [v2.ToImage(), v2.Resize((30, 30)), None])))


def test_a_chain_that_ends_in_pil_images_is_refused_as_default_collate_would(pictures):
    with pytest.raises(TransformError, match="ToImage"):
        iter(loader(pictures, [v2.Resize((30, 30))]))


def explained(loader):
    out = io.StringIO()
    loader.explain(out)
    return out.getvalue()


@pytest.mark.usefixtures("wide")
def test_explain_says_what_runs_where_and_what_has_no_effect(pictures, capsys):
    one = loader(pictures, [*TRAIN, IN_TORCH], num_workers=2, prefetch_factor=3, persistent_workers=True)
    text = explained(one)
    for part in (
        "5  DALI CPU  Normalize",
        "6  torch     Lambda",
        "no rule for Lambda",
        "draws area and log ratio",
        "draws flip with probability 0.5",
        "in 3 classes",
        "seed 1, epoch",
        "2 of DALI (num_workers)",
        "depth 3 batches (prefetch_factor)",
        "persistent_workers",
        "default_collate",
    ):
        assert part in text
    one.explain()
    assert capsys.readouterr().out == text
    assert "float32 (3, 64, 64)" in explained(loader(pictures, TRAIN))


@pytest.mark.gpu
def test_explain_names_the_gpu_and_the_driver_setting(pictures):
    text = explained(loader(pictures, TRAIN, device="cuda"))
    assert "DALI GPU  RandomResizedCrop" in text
    assert "CUDA_DEVICE_MAX_CONNECTIONS=32" in text


def test_fast_is_another_way_of_resizing_and_close(pictures, device):
    exact, fast = (
        images(pictures, compile_chain([v2.Resize((50, 60))], device, fidelity=f)) for f in ("exact", "fast")
    )
    difference = (exact.int() - fast.int()).abs()
    if device == "cuda":
        assert 0 < difference.max() <= 2
    else:
        assert not difference.any(), "torch's kernel is exact and fast"
    with pytest.raises(ValueError, match="fidelity"):
        loader(pictures, TRAIN, fidelity="exakt")


@pytest.mark.parametrize("made", [v2.RandomResizedCrop(16), v2.GaussianBlur(3), v1.RandomResizedCrop(16)], ids=repr)
def test_an_argument_of_another_type_is_torchvisions_to_judge(pictures, made):
    """As progressive resizing sets it between epochs, past what the class's __init__ makes of it."""
    name = "kernel_size" if isinstance(made, v2.GaussianBlur) else "size"
    setattr(made, name, 25)
    chain = [v2.ToImage(), v2.CenterCrop(40), made]
    dataset = ImageFolder(pictures, v2.Compose(chain))
    assert found_in(DALILoader(dataset, device="cpu")) == found_in(DataLoader(dataset))
    assert "it has an argument of another type" in " ".join(explained(loader(pictures, chain)).split())


def found_in(loader):
    """What the first batch is, or what came in its place."""
    try:
        images, _ = next(iter(loader))
    except TypeError as error:
        return str(error)
    return images.dtype, images.shape[:2], min(images.shape[2:])


@pytest.mark.parametrize("made", [v2.RandomCrop, v2.RandomResizedCrop, v1.RandomCrop, v1.RandomResizedCrop])
def test_sizes_that_are_no_whole_numbers_are_refused_as_torchvision_refuses_them(pictures, made):
    chain = [v2.ToImage(), made((32.0, 32.0))]
    with pytest.raises(TypeError) as theirs:
        v2.Compose(chain)(Image.open(ImageFolder(pictures).samples[0][0]))
    with pytest.raises(TypeError) as ours:
        next(iter(loader(pictures, chain)))
    assert str(ours.value) == str(theirs.value)
