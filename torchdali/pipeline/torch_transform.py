"""Transforms that torch runs on a GPU, with the results that they have on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from torchdali.samples.tree import replaced

_FEW_KERNELS = {torch.uint16, torch.uint32, torch.uint64}
"""Types for which torch has kernels on the CPU that it has not on CUDA."""

_PRODUCTS = {
    *(torch.bmm, torch.mm, torch.matmul, torch.einsum),
    *(torch.Tensor.bmm, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__),
}
"""What grids of places, ``LinearTransformation`` and the hue of torchvision's first version are multiplied with."""

_LINEAR = (v1.LinearTransformation, v2.LinearTransformation)
"""They hold a matrix, which is moved to the GPU, but out of sight in another transform stays on the CPU."""

_ONLY_ON_THE_CPU = (
    "interpolation parameters can not be handled",  # an antialiased resize to less than about a fiftieth
    "does not have a deterministic implementation",
    "Deterministic behavior was enabled",  # cuBLAS without its workspace
)
"""What torch says where CUDA has no kernel for a call and the CPU has one."""

__all__ = ["TorchTransform", "cpu_semantics", "resizes"]


class TorchTransform:
    """A transform that torch runs; what it does on the CPU alone is done there, and the result comes back.

    Args:
        transform: As it stands in the chain.
        device: Where tensors lie.

    Attributes:
        transform: What is called with images: the one in the chain, or the same with its matrix on the device.
        resizes: What :func:`resizes` says of it.
    """

    def __init__(self, transform: Any, device: torch.device) -> None:
        dtype = getattr(transform, "dtype", None)
        self.transform = _with_matrix_on(transform, device) if type(transform) in _LINEAR else transform
        self.resizes = resizes(transform, device)
        self._device = device
        self._for_host = device.type != "cpu" and self.transform is transform and _for_host(transform)
        # Every type can be made floats of on CUDA, and whole batches are.
        self._to_floats = (
            isinstance(transform, v2.ToDtype) and isinstance(dtype, torch.dtype) and dtype.is_floating_point
        )

    def __call__(self, image: Any) -> Any:
        """What the transform makes of what torchvision would be holding."""
        host = image if self._device.type == "cpu" else replaced(image, self._on_host)
        done = self.transform(host)
        if host is image:
            return done
        return replaced(done, lambda x: x.to(self._device) if isinstance(x, torch.Tensor) else x)

    def _on_host(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.cpu() if self._for_host or (leaf.dtype in _FEW_KERNELS and not self._to_floats) else leaf


def _with_matrix_on(transform: Any, device: torch.device) -> Any:
    """The same on a device: torchvision asks for the matrix where the images are."""
    moved = copy.copy(transform)
    moved.transformation_matrix = transform.transformation_matrix.to(device)
    moved.mean_vector = transform.mean_vector.to(device)
    return moved


def _for_host(transform: Any) -> bool:
    """Whether torchvision does it, or what it holds, to tensors on the CPU only."""
    dtype, modes = getattr(transform, "dtype", None), getattr(transform, "interpolation", None)
    dtypes = list(cast("dict[Any, Any]", dtype).values()) if isinstance(dtype, dict) else [dtype]
    return (
        isinstance(transform, (v2.JPEG, *_LINEAR))
        or any(isinstance(one, torch.dtype) and one in _FEW_KERNELS for one in dtypes)
        or InterpolationMode.LANCZOS in (modes if isinstance(modes, (list, tuple)) else [modes])
        or any(_for_host(part) for part in _parts(transform))
    )


def _parts(transform: Any) -> list[Any]:
    inner = getattr(transform, "transforms", ())
    parts: list[Any] = [*inner] if isinstance(inner, (list, tuple)) else []
    return [*parts, *(transform.children() if isinstance(transform, nn.Module) else ())]


def resizes(transform: Any, device: torch.device) -> bool:
    """Whether a transform, or what it holds, resizes with antialias on a GPU, whose kernel may refuse."""
    return device.type != "cpu" and (
        bool(getattr(transform, "antialias", False)) or any(resizes(part, device) for part in _parts(transform))
    )


@contextmanager
def cpu_semantics(device: torch.device, resizing: bool = False) -> Generator[None, None, None]:
    """Without what the consumer set for the model, which in DataLoader does not reach transforms on the CPU.

    That is autocast, TF32 in products of matrices (a grid's places are off by a part of a pixel with it), and
    deterministic algorithms where CUDA has none. On the CPU the last two mean what they mean in DataLoader.

    Args:
        device: Where tensors lie.
        resizing: What :func:`resizes` said of what will be called.
    """
    mode = _AsOnTheCPU() if device.type != "cpu" and (resizing or _differs()) else nullcontext()
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False), mode:
        yield


def _differs() -> bool:
    """Whether any call may need the mode, which costs every call some microseconds."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # as torch answers where precisions were set for single backends
        exact = False
    return not exact or torch.are_deterministic_algorithms_enabled()


def _dtypes(args: Any) -> set[torch.dtype]:
    return {each.dtype for each in args if isinstance(each, torch.Tensor)}


class _AsOnTheCPU(TorchFunctionMode):
    """Multiplies matrices of float32 in full precision, and calls on the CPU what CUDA refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _PRODUCTS and not kwargs and _dtypes(args) == {torch.float32}:
            return func(*(each.double() if isinstance(each, torch.Tensor) else each for each in args)).float()
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            name: str = getattr(func, "__name__", "__")
            device = next((each.device for each in args if isinstance(each, torch.Tensor)), None)
            if device is None or name.startswith("__") or not any(said in str(error) for said in _ONLY_ON_THE_CPU):
                raise
        there = replaced((args, kwargs), lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
        done = func(*there[0], **there[1])
        if name.endswith("_"):
            return args[0].copy_(done)
        return replaced(done, lambda x: x.to(device) if isinstance(x, torch.Tensor) else x)
