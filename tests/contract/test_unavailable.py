"""Where DALI cannot be used: one error that says what to install."""

from __future__ import annotations

import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torchvision.datasets import ImageFolder

import torchdali
from torchdali import DALILoader, DALIUnavailableError

pytestmark = pytest.mark.timeout(50)

INSTALL = r"pip install 'nvidia-dali-cuda120>=2\.4,<3' \(or nvidia-dali-cuda130, if the driver supports CUDA 13\)"


def stub(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    for name in ("nvidia.dali", "nvidia.dali.fn", "nvidia.dali.types", "nvidia.dali.math"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["nvidia.dali"].__version__ = version  # pyright: ignore


def fail_to_load(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    class Finder:
        """Finds DALI and fails, as a package does whose libraries are not there."""

        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.startswith("nvidia.dali"):
                raise error

    for name in [name for name in sys.modules if name.startswith("nvidia.dali")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Finder, *sys.meta_path])


UNAVAILABLE = {
    "missing": (
        lambda patch: fail_to_load(patch, ModuleNotFoundError("No module named 'nvidia.dali'", name="nvidia.dali")),
        rf"not installed.*{INSTALL}",
    ),
    "library missing": (
        lambda patch: fail_to_load(patch, OSError("libcudart.so.12: cannot open shared object file")),
        rf"does not load.*libcudart.*only one build of DALI may be installed: {INSTALL}$",
    ),
    "wrong Python": (
        lambda patch: fail_to_load(patch, ImportError("undefined symbol: _PyThing")),
        rf"does not load.*undefined symbol.*{INSTALL}",
    ),
    "old": (lambda patch: stub(patch, "1.50.0"), rf"needs NVIDIA DALI 2\.4.*1\.50\.0.*{INSTALL}"),
    "a little old": (lambda patch: stub(patch, "2.3.9"), rf"this is 2\.3\.9: {INSTALL}"),
    "Windows": (lambda patch: patch.setattr(sys, "platform", "win32"), rf"Linux.*win32.*WSL 2.*{INSTALL}"),
    "macOS": (lambda patch: patch.setattr(sys, "platform", "darwin"), r"Linux.*darwin"),
}


@pytest.mark.parametrize(("make", "text"), UNAVAILABLE.values(), ids=UNAVAILABLE.keys())
@pytest.mark.parametrize("wanted", ["auto", "cpu"])
def test_unusable_dali_is_one_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, make: Any, text: str, wanted: str
) -> None:
    make(monkeypatch)
    with pytest.raises(DALIUnavailableError, match=text) as caught:
        DALILoader(dataset, device=wanted)
    assert isinstance(caught.value, ImportError)
    assert "uninstall" not in str(caught.value), "the build for CUDA 13 is as good"


@pytest.mark.parametrize("version", ["2.4.0", "2.10.1", "2.5.0.dev20260101"])
def test_newer_versions_are_taken(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, version: str) -> None:
    stub(monkeypatch, version)
    assert len(DALILoader(dataset, device="cpu")) == len(dataset)


@pytest.mark.parametrize("wanted", ["cuda", "cuda:1", 0, torch.device("cuda")], ids=str)
def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder, wanted: Any) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.raises(DALIUnavailableError, match=r"torch sees no CUDA device.*update the NVIDIA driver"):
        DALILoader(dataset, device=wanted)


def test_a_torch_without_cuda(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DALIUnavailableError, match=r"built without CUDA.*install the CUDA build of torch"):
        DALILoader(dataset, device="cuda")


def test_a_device_that_dali_has_no_backend_for(dataset: ImageFolder) -> None:
    with pytest.raises(DALIUnavailableError, match="not on 'mps'"):
        DALILoader(dataset, device="mps")


def test_auto_is_the_cpu_where_there_is_no_cuda(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    images, labels = next(iter(DALILoader(dataset, 3)))
    assert {images.device.type, labels.device.type} == {"cpu"}


@pytest.mark.gpu
def test_auto_is_torchs_current_cuda_device(dataset: ImageFolder) -> None:
    images, labels = next(iter(DALILoader(dataset, 3)))
    assert images.device == labels.device == torch.device("cuda", torch.cuda.current_device())


def see_one_device(monkeypatch: pytest.MonkeyPatch, driver: int) -> None:
    """Makes torch see one device, and DALI a driver of this version."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr("nvidia.dali.backend.GetCudaVersion", lambda: driver)


def test_a_device_that_only_torch_sees(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    see_one_device(monkeypatch, driver=0)
    with pytest.raises(DALIUnavailableError, match=f"but DALI does not.*update the NVIDIA driver.*{INSTALL}"):
        DALILoader(dataset, device="cuda")


def test_a_device_beyond_the_last(monkeypatch: pytest.MonkeyPatch, dataset: ImageFolder) -> None:
    see_one_device(monkeypatch, driver=13000)
    DALILoader(dataset, device="cuda:0")
    with pytest.raises(DALIUnavailableError, match="cuda:1"):
        DALILoader(dataset, device="cuda:1")


@pytest.mark.parametrize(
    ("wanted", "error"),
    [("gpu", ValueError), ("cuda:first", ValueError), (None, TypeError), (1.5, TypeError), (True, TypeError)],
)
def test_a_device_that_does_not_exist(dataset: ImageFolder, wanted: Any, error: type[Exception]) -> None:
    said = f"^device must be 'auto' or a torch device such as 'cuda:1', got {re.escape(repr(wanted))}$"
    with pytest.raises(error, match=said):
        DALILoader(dataset, device=wanted)
    with pytest.raises(error, match=said):
        torchdali.compile([], device=wanted)


@pytest.mark.parametrize("wanted", ["one", 1.5])
def test_a_seed_that_is_no_number(dataset: ImageFolder, wanted: Any) -> None:
    with pytest.raises(TypeError, match=f"^seed must be an int, got {wanted!r}$"):
        DALILoader(dataset, seed=wanted, device="cpu")


def test_a_fidelity_that_does_not_exist(dataset: ImageFolder) -> None:
    with pytest.raises(ValueError, match="must be 'exact' or 'fast', got 'perfect'"):
        DALILoader(dataset, fidelity="perfect", device="cpu")  # pyright: ignore
    with pytest.raises(ValueError, match="must be 'exact' or 'fast', got 'perfect'"):
        torchdali.compile([], fidelity="perfect", device="cpu")  # pyright: ignore


@pytest.mark.parametrize(
    ("wanted", "error", "said"),
    [("two", TypeError, "an int, got 'two'"), (-1, ValueError, "0 or more, got -1")],
)
def test_threads_that_there_cannot_be(wanted: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^num_threads must be {said}$"):
        torchdali.compile([], num_threads=wanted, device="cpu")
