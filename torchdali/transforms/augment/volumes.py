"""Transforms of volumes ``(..., D, H, W)``, and of masks of the same size, which move alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torchvision import tv_tensors
from torchvision.transforms import v2 as annotated_v2

from torchdali.transforms.augment.base import Range, parse_range

v2 = cast("Any", annotated_v2)
_is_pure_tensor: Any = v2._utils.is_pure_tensor  # noqa: SLF001
_functional, _wrap = cast("Any", torch.nn.functional), cast("Any", tv_tensors.wrap)


class VolumeTransform(v2.Transform):
    """The base class. A volume is a tensor ``(..., D, H, W)``, and its labels are a ``tv_tensors.Mask``.

    Args of subclasses that are ranges are drawn from torch's generator, for all parts of a sample at once.
    """

    _transformed_types = (_is_pure_tensor, tv_tensors.Image, tv_tensors.Mask)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Apply the transform to a volume or a mask."""
        if inpt.ndim < 3:
            raise ValueError(f"{type(self).__name__} takes volumes (..., D, H, W), got {tuple(inpt.shape)}")
        is_mask = isinstance(inpt, tv_tensors.Mask)
        done = self.apply(inpt.as_subclass(torch.Tensor), params, is_mask)
        return _wrap(done, like=inpt) if isinstance(inpt, tv_tensors.TVTensor) else done

    def apply(self, volume: torch.Tensor, params: Mapping[str, Any], is_mask: bool) -> torch.Tensor:
        """Return the transformed volume."""
        raise NotImplementedError

    def find_sides(self, flat_inputs: list[Any]) -> tuple[int, int, int]:
        """Return depth, height and width of the volumes of a sample."""
        sides = {tuple(x.shape[-3:]) for x in flat_inputs if isinstance(x, torch.Tensor)}
        if len(sides) != 1:
            raise ValueError(f"{type(self).__name__} takes volumes and masks of one size, got {sorted(sides)}")
        depth, height, width = sides.pop()
        return depth, height, width


def _draw(ends: tuple[float, float]) -> float:
    return ends[0] + (ends[1] - ends[0]) * float(torch.rand(()))


def _widen(volume: torch.Tensor) -> torch.Tensor:
    """Return a volume as float32, or as float64 if that cannot hold it: it holds integers of up to 16 bits."""
    wide = volume.dtype.itemsize > (4 if volume.is_floating_point() else 2)
    return volume.to(torch.float64 if wide else torch.float32)


class RandomCrop3D(VolumeTransform):
    """Cut a window at a random place.

    Args:
        size: Depth, height and width of the window.
    """

    def __init__(self, size: Sequence[int]) -> None:
        super().__init__()
        if len(size) != 3:
            raise ValueError(f"size must be depth, height and width, got {size!r}")
        self.size = tuple(size)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the window."""
        sides = self.find_sides(flat_inputs)
        room = [side - length for side, length in zip(sides, self.size, strict=True)]
        if min(room) < 0:
            raise ValueError(f"a volume must be at least as large as the crop, {self.size}, got {sides}")
        return {"start": [int(torch.randint(most + 1, ())) for most in room]}

    def apply(self, volume: torch.Tensor, params: Mapping[str, Any], is_mask: bool) -> torch.Tensor:
        window = tuple(slice(start, start + n) for start, n in zip(params["start"], self.size, strict=True))
        return volume[(..., *window)]


class RandomFlip3D(VolumeTransform):
    """Flip each of some axes with a probability.

    Args:
        p: Probability, for each axis.
        axes: The axes: 0 is the depth, 1 the height, 2 the width.
    """

    def __init__(self, p: float = 0.5, axes: Sequence[int] = (0, 1, 2)) -> None:
        super().__init__()
        if not set(axes) <= {0, 1, 2}:
            raise ValueError(f"axes must be of 0, 1 and 2, got {axes!r}")
        self.p, self.axes = float(p), tuple(axes)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw which axes are flipped."""
        return {"axes": [axis - 3 for axis in self.axes if float(torch.rand(())) < self.p]}

    def apply(self, volume: torch.Tensor, params: Mapping[str, Any], is_mask: bool) -> torch.Tensor:
        return volume.flip(params["axes"])


class RandomAffine3D(VolumeTransform):
    """Rotate, scale and shift about the middle. Volumes are resampled linearly, masks by the nearest voxel.

    An output voxel at ``o``, counted from the middle, comes from ``R @ ((o - shift) / scale)``. ``R = R0 @ R1 @ R2``
    turns by an angle about each axis: 0 turns height and width, 1 depth and width, 2 depth and height.

    Args:
        degrees: For each of the three axes an angle, or its range; or one for all.
        translate: For each axis a shift in voxels, or its range; or one for all.
        scale: Factor, or its range, for all axes.
        fill: Value of voxels that come from outside of the volume. In masks it is 0.
    """

    def __init__(
        self,
        degrees: Range | Sequence[Range] = 0.0,
        translate: Range | Sequence[Range] = 0.0,
        scale: Range = 1.0,
        fill: float = 0.0,
    ) -> None:
        super().__init__()
        self.degrees, self.translate = _parse_axes("degrees", degrees), _parse_axes("translate", translate)
        self.scale, self.fill = parse_range("scale", scale, 1e-6), float(fill)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw the map: ``(3, 4)``, in voxels from the middle."""
        self.find_sides(flat_inputs)
        rotation = torch.eye(3, dtype=torch.float64)
        for axis, ends in enumerate(self.degrees):
            angle = math.radians(_draw(ends))
            turn = torch.eye(3, dtype=torch.float64)
            first, second = (i for i in range(3) if i != axis)
            turn[first, first] = turn[second, second] = math.cos(angle)
            turn[first, second], turn[second, first] = -math.sin(angle), math.sin(angle)
            rotation = rotation @ turn
        shift = torch.tensor([_draw(ends) for ends in self.translate], dtype=torch.float64)
        matrix = rotation / _draw(self.scale)
        return {"matrix": torch.cat([matrix, -(matrix @ shift)[:, None]], 1)}

    def apply(self, volume: torch.Tensor, params: Mapping[str, Any], is_mask: bool) -> torch.Tensor:
        sides = torch.tensor(volume.shape[-3:], dtype=torch.float64)
        matrix = params["matrix"]
        # grid_sample counts in halves of each side, and its axes are x, y, z.
        theta = torch.cat([matrix[:, :3] * sides / sides[:, None], matrix[:, 3:] * 2 / sides[:, None]], 1)
        theta = torch.cat([theta[:, :3].flip(1), theta[:, 3:]], 1).flip(0)
        values = _widen(volume).reshape(1, -1, *volume.shape[-3:])
        fill = 0.0 if is_mask else self.fill
        grid = _functional.affine_grid(theta[None].to(volume.device), (1, 1, *volume.shape[-3:]), align_corners=False)
        mode = "nearest" if is_mask else "bilinear"
        moved = _functional.grid_sample(values - fill, grid.to(values.dtype), mode, "zeros", align_corners=False)
        moved = (moved + fill).reshape(volume.shape)
        return (moved if volume.is_floating_point() else moved.round()).to(volume.dtype)


class RandomRotate3D(RandomAffine3D):
    """Rotate about the middle: :class:`RandomAffine3D` with angles alone.

    Args:
        degrees: For each of the three axes an angle, or its range; or one for all.
        fill: Value of voxels that come from outside of the volume. In masks it is 0.
    """

    def __init__(self, degrees: Range | Sequence[Range], fill: float = 0.0) -> None:
        super().__init__(degrees, fill=fill)


class GaussianBlur3D(VolumeTransform):
    """Blur volumes, and leave masks as they are. Volumes are mirrored at their edges.

    Args:
        sigma: Standard deviation in voxels, or its range.
    """

    def __init__(self, sigma: Range) -> None:
        super().__init__()
        self.sigma = parse_range("sigma", sigma, 0)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw sigma."""
        return {"sigma": _draw(self.sigma)}

    def apply(self, volume: torch.Tensor, params: Mapping[str, Any], is_mask: bool) -> torch.Tensor:
        sigma = params["sigma"]
        if is_mask or not sigma:
            return volume
        radius = math.ceil(3 * sigma)
        if radius >= min(volume.shape[-3:]):
            raise ValueError(
                f"sigma={sigma:.3g} blurs {radius} voxels far, and a volume must be larger, got "
                f"{tuple(volume.shape[-3:])}"
            )
        values = _widen(volume).reshape(-1, 1, *volume.shape[-3:])
        steps = torch.arange(-radius, radius + 1, dtype=values.dtype, device=volume.device)
        weights = torch.exp(-0.5 * (steps / sigma) ** 2)
        weights = weights / weights.sum()
        for axis in range(3):
            shape, padding = [1, 1, 1], [0] * 6
            shape[axis] = len(weights)
            padding[4 - 2 * axis] = padding[5 - 2 * axis] = radius
            values = _functional.pad(values, padding, mode="reflect")
            values = _functional.conv3d(values, weights.reshape(1, 1, *shape))
        values = values.reshape(volume.shape)
        return (values if volume.is_floating_point() else values.round()).to(volume.dtype)


class RandomIntensity(VolumeTransform):
    """Change the values of volumes to ``value * scale + shift``. Masks stay as they are.

    Args:
        scale: Factor, or its range.
        shift: Number to add, or its range.
    """

    def __init__(self, scale: Range = (0.9, 1.1), shift: Range = (-0.1, 0.1)) -> None:
        super().__init__()
        self.scale, self.shift = parse_range("scale", scale), parse_range("shift", shift)

    def make_params(self, flat_inputs: list[Any]) -> dict[str, Any]:
        """Draw both numbers."""
        return {"scale": _draw(self.scale), "shift": _draw(self.shift)}

    def apply(self, volume: torch.Tensor, params: Mapping[str, Any], is_mask: bool) -> torch.Tensor:
        """See :class:`VolumeTransform`. Volumes of integers become float32."""
        if is_mask:
            return volume
        values = volume if volume.is_floating_point() else volume.float()
        return values * params["scale"] + params["shift"]


def _parse_axes(name: str, value: Any) -> tuple[tuple[float, float], ...]:
    """Return the range of each axis."""
    parts = cast("Sequence[Range]", value if isinstance(value, Sequence) else ())
    return tuple(parse_range(name, part) for part in (parts if len(parts) == 3 else [cast("Range", value)] * 3))
