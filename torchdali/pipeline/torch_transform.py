"""Transforms that torch runs on a GPU, with the results that they would have on the CPU."""

from __future__ import annotations

import copy
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torchvision import transforms as v1
from torchvision.transforms import InterpolationMode, v2

from torchdali.samples.tree import tree_map

_FEW_KERNELS = {torch.uint16, torch.uint32, torch.uint64}
"""Types for which torch lacks most CUDA kernels: https://github.com/pytorch/pytorch/issues/58734."""

_PRODUCTS = {
    *(torch.bmm, torch.mm, torch.matmul, torch.einsum),
    *(torch.Tensor.bmm, torch.Tensor.mm, torch.Tensor.matmul, torch.Tensor.__matmul__),
}
"""Products that torchvision uses: for sampling grids, ``LinearTransformation`` and the hue of its first version."""

_LINEAR = (v1.LinearTransformation, v2.LinearTransformation)
"""They hold a matrix. It is moved to the GPU, unless the transform is hidden inside another one."""

_ONLY_ON_THE_CPU = (
    "interpolation parameters can not be handled",  # an antialiased resize by a large factor: https://github.com/pytorch/vision/issues/7671
    "does not have a deterministic implementation",
    "Deterministic behavior was enabled",  # cuBLAS without CUBLAS_WORKSPACE_CONFIG
)
"""Parts of torch's messages if CUDA has no kernel for a call that the CPU can do."""

__all__ = ["TorchTransform", "cpu_semantics", "has_antialias_resize"]


class TorchTransform:
    """A transform that torch runs. If torch can run it only on the CPU, the image is copied there and back.

    Args:
        transform: The transform in the chain.
        device: The device of the images.

    Attributes:
        has_antialias_resize: The result of :func:`has_antialias_resize`.
    """

    def __init__(self, transform: Any, device: torch.device) -> None:
        dtype = getattr(transform, "dtype", None)
        self._original, self._device = transform, device
        self.has_antialias_resize = has_antialias_resize(transform, device)
        self._needs_host = device.type != "cpu" and not _has_own_tensors(transform) and _needs_host(transform)
        # CUDA can convert every type to floats, and does so with whole batches.
        self._to_floats = (
            isinstance(transform, v2.ToDtype) and isinstance(dtype, torch.dtype) and dtype.is_floating_point
        )

    @cached_property
    def transform(self) -> Any:
        """The transform that is called: the one in the chain, or a copy with its tensors on the device.

        The copy is made when it is first called. Workers compile plans, and must not use CUDA.
        """
        return _move_tensors(self._original, self._device)

    def __call__(self, *inputs: Any) -> Any:
        """Return the transformed image, or the transformed parts of a sample."""
        host = inputs if self._device.type == "cpu" else tree_map(inputs, self._run_on_host)
        result = self.transform(*host)
        if host is inputs:
            return result
        return tree_map(result, lambda x: x.to(self._device) if isinstance(x, torch.Tensor) else x)

    def _run_on_host(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        return leaf.to("cpu") if self._needs_host or (leaf.dtype in _FEW_KERNELS and not self._to_floats) else leaf


def _move_tensors(transform: Any, device: torch.device) -> Any:
    """Return a transform whose own tensors are on a device: a copy, if it has such, so that the script's stays."""
    if type(transform) in _LINEAR:
        return _move_matrix(transform, device)
    moves = device.type != "cpu" and _has_own_tensors(transform)
    return copy.deepcopy(transform).to(device) if moves else transform


def _has_own_tensors(transform: Any) -> bool:
    """Return whether a transform is one of torchaudio's, or has a matrix."""
    return type(transform) in _LINEAR or (
        isinstance(transform, nn.Module)
        and any(type(module).__module__.partition(".")[0] == "torchaudio" for module in transform.modules())
    )


def _move_matrix(transform: Any, device: torch.device) -> Any:
    """Return a copy with its matrix on a device. torchvision needs it on the device of the images."""
    clone = copy.copy(transform)
    clone.transformation_matrix = transform.transformation_matrix.to(device)
    clone.mean_vector = transform.mean_vector.to(device)
    return clone


def _needs_host(transform: Any) -> bool:
    """Return whether torchvision can run a transform, or a part of it, only on the CPU."""
    dtype, modes = getattr(transform, "dtype", None), getattr(transform, "interpolation", None)
    dtypes = list(cast("dict[Any, Any]", dtype).values()) if isinstance(dtype, dict) else [dtype]
    return (
        isinstance(transform, (v2.JPEG, *_LINEAR))
        or any(isinstance(each, torch.dtype) and each in _FEW_KERNELS for each in dtypes)
        or InterpolationMode.LANCZOS in (modes if isinstance(modes, (list, tuple)) else [modes])
        or any(_needs_host(part) for part in _parts(transform))
    )


def _parts(transform: Any) -> list[Any]:
    inner = getattr(transform, "transforms", ())
    parts: list[Any] = [*inner] if isinstance(inner, (list, tuple)) else []
    return [*parts, *(transform.children() if isinstance(transform, nn.Module) else ())]


def has_antialias_resize(transform: Any, device: torch.device) -> bool:
    """Return whether a transform, or a part of it, resizes with antialias on a GPU. That kernel refuses some sizes."""
    return device.type != "cpu" and (
        bool(getattr(transform, "antialias", False))
        or any(has_antialias_resize(part, device) for part in _parts(transform))
    )


@contextmanager
def cpu_semantics(device: torch.device, resizing: bool = False) -> Generator[None, None, None]:
    """Disable autocast and TF32, which the training script enables for the model, while transforms run.

    In DataLoader these settings do not reach transforms, because those run on the CPU. With TF32 a sampling grid would
    be off by a part of a pixel. Calls for which CUDA has no deterministic algorithm run on the CPU, if the script asks
    for deterministic algorithms. On the CPU all settings but autocast stay, as in DataLoader.

    Args:
        device: The device of the images.
        resizing: The result of :func:`has_antialias_resize` for the transforms that will run.
    """
    mode = _CPUSemanticsMode() if device.type != "cpu" and (resizing or _needs_mode()) else nullcontext()
    with torch.autocast("cpu", enabled=False), torch.autocast(device.type, enabled=False), mode:
        yield


def _needs_mode() -> bool:
    """Return whether any call may need the mode. It costs each call some microseconds."""
    try:
        exact = torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # precisions were set by backend: https://github.com/pytorch/pytorch/issues/179445
        exact = False
    return not exact or torch.are_deterministic_algorithms_enabled()


class _CPUSemanticsMode(TorchFunctionMode):
    """Multiplies float32 matrices in full precision, and runs on the CPU what CUDA refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        dtypes = {each.dtype for each in args if isinstance(each, torch.Tensor)}
        if func in _PRODUCTS and not kwargs and dtypes == {torch.float32}:
            return func(*(each.double() if isinstance(each, torch.Tensor) else each for each in args)).float()
        try:
            return func(*args, **kwargs)
        except RuntimeError as error:
            name: str = getattr(func, "__name__", "__")
            device = next((each.device for each in args if isinstance(each, torch.Tensor)), None)
            if device is None or name.startswith("__") or not any(text in str(error) for text in _ONLY_ON_THE_CPU):
                raise
        host_args, host_kwargs = tree_map((args, kwargs), lambda x: x.cpu() if isinstance(x, torch.Tensor) else x)
        result = func(*host_args, **host_kwargs)
        if name.endswith("_"):
            return args[0].copy_(result)
        return tree_map(result, lambda x: x.to(device) if isinstance(x, torch.Tensor) else x)
