"""Maps of the plane: one 3x3 matrix for each sample, and one operator.

A matrix maps positions in the output to positions in the input. A position is ``(x, y, 1)`` in pixels. ``(0, 0)`` is
the outer corner of the top left pixel, so the centre of that pixel is ``(0.5, 0.5)``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torchvision.transforms import InterpolationMode

from torchdali.transforms.rule import Node, Ops, Unsupported
from torchdali.transforms.rules.conversion import select_for_kind
from torchdali.transforms.rules.crop import resolve_fill
from torchdali.transforms.spec import IntArray, Spec

Floats = npt.NDArray[np.float64]
_BY_PILLOW_CONSTANT = {0: InterpolationMode.NEAREST, 2: InterpolationMode.BILINEAR}


def affine_matrices(
    angle: npt.ArrayLike,
    translate: npt.ArrayLike,
    scale: npt.ArrayLike,
    shear: npt.ArrayLike,
    center: Sequence[float] | None,
    size: IntArray,
    out_size: IntArray | None = None,
) -> Floats:
    """Return the matrices of torchvision's ``affine`` for many images at once.

    T is the translation, C moves the origin to the centre, and R, S, Hy and Hx are rotation, scale and shears. Then
    torchvision's map is ``T C R S Hy Hx C^-1``. This is its inverse, in closed form because ``det(R Hy Hx) = 1``.

    Args:
        angle: Degrees clockwise; one number, or one for each image.
        translate: ``(x, y)`` in pixels; one pair, or ``(N, 2)``.
        scale: Factor by which the content grows; one number, or one for each image.
        shear: ``(x, y)`` in degrees; one pair, or ``(N, 2)``.
        center: ``(x, y)`` in pixels from the top left corner, or None for the middle.
        size: ``(N, 2)`` heights and widths of the input.
        out_size: ``(N, 2)`` heights and widths of the output, if they differ. The middle stays in the middle.

    Returns:
        ``(N, 3, 3)``, from output to input, for :func:`warp`.
    """
    count = len(size)
    middle = size[:, ::-1] * 0.5
    pivot = middle if center is None else np.broadcast_to(np.asarray(center, np.float64), (count, 2))
    rotation = np.radians(np.broadcast_to(np.asarray(angle, np.float64), count))
    shears = np.radians(np.broadcast_to(np.asarray(shear, np.float64), (count, 2)))
    tangent, difference = np.tan(shears[:, 0]), rotation - shears[:, 1]
    cosine, sine = np.cos(difference) / np.cos(shears[:, 1]), np.sin(difference) / np.cos(shears[:, 1])
    matrix = np.zeros((count, 3, 3))
    matrix[:, 0, 0] = np.cos(rotation) - sine * tangent
    matrix[:, 0, 1] = cosine * tangent + np.sin(rotation)
    matrix[:, 1, 0] = -sine
    matrix[:, 1, 1] = cosine
    matrix /= np.broadcast_to(np.asarray(scale, np.float64), count)[:, None, None]
    shift = pivot + np.asarray(translate, np.float64)
    if out_size is not None:
        shift = shift + (out_size - size)[:, ::-1] * 0.5
    matrix[:, :2, 2] = pivot - (matrix[:, :2, :2] * shift[:, None]).sum(axis=2)
    matrix[:, 2, 2] = 1.0
    return matrix


def rotation_matrices(
    angle: npt.ArrayLike, center: Sequence[float] | None, size: IntArray, expand: bool = False
) -> tuple[Floats, IntArray]:
    """Return the matrices of torchvision's ``rotate`` for many images at once, and the sizes of the results.

    Args:
        angle: Degrees counterclockwise; a number, or one for each image.
        center: ``(x, y)`` in pixels from the top left corner, or None for the middle.
        size: ``(N, 2)`` heights and widths of the input.
        expand: Whether the result is large enough for the whole image.

    Returns:
        ``(N, 3, 3)`` matrices from output to input, for :func:`warp`, and ``(N, 2)`` heights and widths.
    """
    matrix = affine_matrices(-np.asarray(angle, np.float64), 0, 1, 0, center, size)
    if not expand:
        return matrix, size
    # torchvision computes this in float32, which matters where a corner is close to a whole pixel. It maps the corners
    # by the inverse. For a rotation about the middle that bounds the same box.
    half = (size[:, ::-1] * 0.5).astype(np.float32)
    linear = matrix[:, :2, :2].astype(np.float32)
    offset = matrix[:, :2, 2] - half + (matrix[:, :2, :2] * half[:, None]).sum(axis=2)
    signs = np.array([[-1, -1], [-1, 1], [1, 1], [1, -1]], np.float32)
    corners = signs * half[:, None]
    mapped = np.einsum("nck,njk->ncj", corners, linear) + offset.astype(np.float32)[:, None]
    low, high = (mapped.min(axis=1) + half, mapped.max(axis=1) + half)
    high, low = (np.trunc(side * np.float32(1e4)) * np.float32(1e-4) for side in (high, low))
    out_size = (np.ceil(high) - np.floor(low)).astype(np.int64)[:, ::-1]
    if center is None:
        # torchvision turns by multiples of 90 degrees without a map. Then no side of odd length grows.
        quarters = np.broadcast_to(np.asarray(angle, np.float64) / 90, len(size))[:, None]
        turned = np.where(quarters % 2 == 1, size[:, ::-1], size)
        out_size = np.where(quarters == np.floor(quarters), turned, out_size)
    return affine_matrices(-np.asarray(angle, np.float64), 0, 1, 0, center, size, out_size), out_size


def perspective_matrices(corners: npt.ArrayLike, size: IntArray) -> Floats:
    """Return matrices that move the corner pixels of images to given positions, as torchvision's ``perspective``.

    The map from the unit square to a quadrangle has a closed form: Heckbert, "Fundamentals of texture mapping and image
    warping", 1989, section 2.2.3. Its adjugate maps back.

    Args:
        corners: ``(N, 4, 2)``: ``(x, y)`` for top left, top right, bottom right and bottom left.
        size: ``(N, 2)`` heights and widths.

    Returns:
        ``(N, 3, 3)``, from output to input, for :func:`warp`, with 1 at the bottom right.
    """
    p0, p1, p2, p3 = np.moveaxis(np.asarray(corners, np.float64), 1, 0)
    right, below, rest = p1 - p2, p3 - p2, p0 - p1 + p2 - p3

    def cross(p: Floats, q: Floats) -> Floats:
        return p[:, 0] * q[:, 1] - p[:, 1] * q[:, 0]

    with np.errstate(divide="ignore", invalid="ignore"):
        g, h = cross(rest, below) / cross(right, below), cross(right, rest) / cross(right, below)
        first, second = p1 - p0 + g[:, None] * p1, p3 - p0 + h[:, None] * p3
        # Rows of the adjugate are cross products of the columns of the map.
        columns = [np.column_stack((first, g)), np.column_stack((second, h)), np.column_stack((p0, np.ones(len(p0))))]
        matrix = np.stack([np.cross(columns[i - 2], columns[i - 1]) for i in range(3)], axis=1)
        matrix[:, :2] *= (size[:, ::-1] - 1)[:, :, None]
        matrix /= matrix[:, 2:, 2:]
    return np.nan_to_num(matrix, posinf=0.0, neginf=0.0)  # four positions on one line have no map


def warp(
    ops: Ops,
    image: Node,
    matrix: Node,
    interpolation: str,
    fill: Sequence[float] | None,
    floating: bool,
    size: Node | None = None,
) -> Node:
    """Resample the image by its matrix, as torchvision's tensor kernels do.

    Args:
        ops: The operators.
        image: HWC, uint8 or float32.
        matrix: ``(3, 3)`` float32 on the CPU, from output to input: see the top of this file.
        interpolation: ``"nearest"`` or ``"bilinear"``.
        fill: Values outside of the image, one or one a channel. None is torchvision's None, which is black. It differs
            from 0 along the edge, where torchvision blends with black first and then with the fill.
        floating: Whether the image is float32.
        size: ``(2,)`` float32 height and width of the result. None keeps those of the image.
    """
    image = ops.fn.reinterpret(image, layout="HWC")  # arithmetic with a node that is no image loses the layout
    how: dict[str, Any] = {"matrix": matrix, "pixel_origin": "corner"}
    if size is not None:
        how["size"] = size
    perspective = ops.fn.experimental.warp_perspective
    if interpolation == "nearest":
        values = [float(x) if floating else float(np.rint(x)) for x in fill or [0.0]]
        return perspective(image, interp_type=ops.types.INTERP_NN, fill_value=values, **how)
    how["interp_type"] = ops.types.INTERP_LINEAR
    how["fill_value"] = [0.0]
    if fill is None:
        return perspective(image, **how)
    ones = ops.fn.slice(image, start=[0], shape=[1], axes=[2]) * np.float32(0) + np.float32(1)
    inside = perspective(ones, **how)
    # Round once, after the blend, as torchvision does.
    result = perspective(image if floating else ops.fn.cast(image, dtype=ops.types.FLOAT), **how)
    result = blend_fill(ops, result, inside, fill)
    return result if floating else ops.fn.cast(result, dtype=ops.types.UINT8)


def blend_fill(ops: Ops, image: Node, inside: Node, fill: Sequence[float]) -> Node:
    """Return ``(image - fill) * inside + fill``, which torchvision applies after blending with black.

    Args:
        ops: The operators.
        image: HWC, float32.
        inside: ``(H, W, 1)``, float32: the weight of the image at each pixel.
        fill: One value, or one a channel.
    """
    image = image * inside
    if not any(fill):
        return image
    if len(set(fill)) == 1:
        return image + (1.0 - inside) * np.float32(fill[0])
    return image + ops.fn.coord_transform(inside, M=[-x for x in fill], T=list(fill))


def resolve_interpolation(transform: Any, spec: Spec) -> str:
    """Return the transform's interpolation, ``"nearest"`` or ``"bilinear"``.

    Raises:
        Unsupported: The interpolation is another one.
    """
    mode: Any = transform.interpolation
    if isinstance(mode, int):
        mode = _BY_PILLOW_CONSTANT.get(mode, mode)
    name = str(InterpolationMode(mode).value if not isinstance(mode, int) else mode)
    if name == "nearest-exact" and spec.kind == "pil":
        name = "nearest"
    if name not in ("nearest", "bilinear"):
        raise Unsupported(f"no rule for {name} interpolation")
    return name


def resolve_border(transform: Any, spec: Spec) -> list[float] | None:
    """Return the fill of a transform for images of this kind, as :func:`warp` takes it.

    Raises:
        Unsupported: There is no fill for this kind, their number does not fit, or a uint8 cannot hold one.
    """
    fill: Any = select_for_kind(transform.fill, spec, "fill names")
    # torchvision fills a PIL image with whole numbers. On a tensor it rounds the result.
    values = resolve_fill(transform, spec if spec.kind == "pil" else replace(spec, dtype=torch.float32))
    if spec.dtype == torch.uint8 and not all(0 <= x <= 255 for x in values):
        raise Unsupported(f"a fill of {fill} for uint8")
    return None if fill is None else values
