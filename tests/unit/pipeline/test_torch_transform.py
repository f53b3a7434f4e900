"""Transforms that torch runs on a GPU, against what they do in DataLoader's workers: on the CPU, at full precision."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
import torch
from PIL import Image
from skimage.data import astronaut, coffee
from torch.overrides import wrap_torch_function
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision import tv_tensors
from torchvision.datasets import ImageFolder
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as F

import torchdali
from torchdali import DALILoader
from torchdali.pipeline.torch_transform import TorchTransform, cpu_semantics

CPU = {"device": "cpu"}
FLOAT = v2.ToDtype(torch.float32, scale=True)
pytestmark = pytest.mark.timeout(60)


def kept(image):
    return image


@pytest.fixture
def tensors():
    return [F.pil_to_tensor(Image.fromarray(photograph).resize((200, 200))) for photograph in (astronaut(), coffee())]


@contextmanager
def precision(value):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


IN_TORCH = {
    "rotation": v2.Compose([FLOAT, kept, v2.RandomRotation((10, 10), v2.InterpolationMode.BILINEAR)]),
    "perspective": v2.Compose([FLOAT, kept, v2.RandomPerspective(0.3, p=1)]),
    "blur": v2.Compose([FLOAT, kept, v2.GaussianBlur(5, 1.0)]),
    "matrix": v2.Compose([v2.CenterCrop(8), FLOAT, v2.LinearTransformation(torch.rand(192, 192), torch.zeros(192))]),
    "matrix of one's own": v2.Compose([v2.CenterCrop(64), FLOAT, v2.Lambda(lambda x: x @ x.mT)]),
}


def run(chain, tensors, device):
    torch.manual_seed(3)
    return torchdali.compile(chain, device=device)(tensors)


@pytest.mark.parametrize("name", IN_TORCH)
def test_autocast_around_the_loop_does_not_reach_transforms(name, tensors, device):
    """As in DataLoader, whose worker processes know nothing of it."""
    plain = run(IN_TORCH[name], tensors, device)
    with torch.autocast(device, torch.bfloat16):
        cast = run(IN_TORCH[name], tensors, device)
    assert cast.dtype == torch.float32
    assert torch.equal(cast, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("value", ["high", "medium"])
@pytest.mark.parametrize("name", IN_TORCH)
def test_precision_of_the_models_products_does_not_reach_transforms_on_a_gpu(name, value, tensors):
    """Lightning advises to lower it on every GPU that can; the places of a rotation would be off."""
    plain = run(IN_TORCH[name], tensors, "cuda")
    with precision(value):
        low = run(IN_TORCH[name], tensors, "cuda")
        assert torch.get_float32_matmul_precision() == value
    assert ((low - plain).abs() / (1 + plain.abs())).max() < 1e-4


@pytest.mark.parametrize("setting", [lambda: precision("high"), lambda: precision("medium"), deterministic])
def test_on_the_cpu_what_is_set_for_products_means_what_it_means_in_dataloader(setting, pictures):
    turned = v2.RandomRotation((10, 10), v2.InterpolationMode.BILINEAR)
    dataset = ImageFolder(pictures, v2.Compose([v2.ToImage(), v2.CenterCrop(48), FLOAT, kept, turned]))
    with setting():
        theirs, ours = (next(iter(cls(dataset, 24, **on))) for cls, on in ((DataLoader, {}), (DALILoader, CPU)))
    assert torch.equal(ours[0], theirs[0])


def test_a_matrix_is_moved_and_the_users_transform_keeps_its_own():
    given = v2.LinearTransformation(torch.rand(12, 12), torch.zeros(12))
    moved = TorchTransform(given, torch.device("meta")).transform
    assert {moved.transformation_matrix.device.type, moved.mean_vector.device.type} == {"meta"}
    assert {given.transformation_matrix.device.type, given.mean_vector.device.type} == {"cpu"}


REFUSED = {
    "v1.RandomEqualize": v2.Compose([kept, v1.RandomEqualize(p=1)]),
    "RandomEqualize": v2.Compose([kept, v2.RandomEqualize(p=1)]),
    "rotation": v2.Compose([kept, v2.RandomRotation((10, 10))]),
    "perspective": v2.Compose([kept, v2.RandomPerspective(0.3, p=1)]),
    "elastic": v2.Compose([kept, v2.ElasticTransform()]),
    "blur": v2.Compose([kept, v2.GaussianBlur(5, 1.0)]),
    "policy": v2.Compose([kept, v2.RandAugment()]),
    "jitter": v2.Compose([kept, v2.ColorJitter(0.4, 0.4, 0.4, 0.2)]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_deterministic_algorithms(name, tensors, device):
    """CUDA has none for some calls, and raises; transforms in worker processes are deterministic all the same."""
    plain = run(REFUSED[name], tensors, device).float()
    with deterministic():
        found = run(REFUSED[name], tensors, device).float()
    assert (found - plain).abs().mean() < 0.05


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.int16])
@pytest.mark.parametrize("mode", [v2.InterpolationMode.BILINEAR, v2.InterpolationMode.BICUBIC])
def test_to_less_than_a_fiftieth(mode, dtype, tensors, device):
    """CUDA's kernel has no memory for as many neighbours."""
    resize = v2.Resize((2, 2), interpolation=mode)
    given = [F.to_dtype(F.resize(tensor, [900, 700]), dtype) for tensor in tensors]
    ours = run(v2.Compose([kept, resize]), given, device)
    assert ours.device.type == torch.device(device).type
    for one, tensor in zip(ours.cpu(), given, strict=True):
        assert (one.double() - resize(tensor).double()).abs().max() <= 1


class Refusing:
    """What CUDA does not do, as seen without one: the first call is refused."""

    def __init__(self, message):
        self.message, self.calls = message, 0

    def of(self, x):
        self.calls += 1
        if self.calls == 1:
            raise RuntimeError(self.message)
        return x + 1

    def function(self, name="of"):
        def call(x):
            return self.of(x)

        call.__name__ = name
        return wrap_torch_function(lambda x: (x,))(call)


@contextmanager
def on_cuda():
    """The rules of CUDA for tensors on the CPU."""
    with precision("high"), cpu_semantics(torch.device("cuda")):
        yield


NONE = "histc does not have a deterministic implementation, but you set something"


@pytest.mark.filterwarnings("ignore:User provided device_type:UserWarning")
def test_a_call_that_is_refused_is_made_again():
    refusing = Refusing(NONE)
    with on_cuda():
        assert refusing.function()(torch.ones(2)).tolist() == [2, 2]
    assert refusing.calls == 2


@pytest.mark.filterwarnings("ignore:User provided device_type:UserWarning")
def test_a_call_in_place_that_is_refused_changes_what_it_was_given():
    given, image = Refusing(NONE).function("of_"), tv_tensors.Image(torch.ones(1, 2, 2))
    with on_cuda():
        assert given(image).data_ptr() == image.data_ptr()
    assert image.sum() == 8


@pytest.mark.filterwarnings("ignore:User provided device_type:UserWarning")
@pytest.mark.parametrize(("message", "name"), [("CUDA out of memory", "of"), (NONE, "__setitem__")])
def test_other_errors_are_raised(message, name):
    refusing = Refusing(message)
    with on_cuda(), pytest.raises(RuntimeError, match=message):
        refusing.function(name)(torch.ones(2))
    assert refusing.calls == 1


@pytest.mark.filterwarnings("ignore:User provided device_type:UserWarning")
@pytest.mark.parametrize("multiply", [torch.matmul, lambda *factors: torch.einsum("ij,jk->ik", *factors)])
def test_products_are_exact(multiply):
    """Of three terms of which float32 loses the one in the middle."""
    with on_cuda():
        product = multiply(torch.tensor([[2.0**24, 1.0, -(2.0**24)]]), torch.ones(3, 1))
    assert product.dtype == torch.float32
    assert product.item() == 1
