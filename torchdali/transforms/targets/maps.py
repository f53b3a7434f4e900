"""Parameters of maps of the plane, as torchvision's kernels take them."""

from __future__ import annotations

from typing import Any, NamedTuple

from torchdali.transforms.spec import IntArray
from torchdali.transforms.targets.ragged import Values


class AffineMaps(NamedTuple):
    """Arguments of torchvision's ``affine`` for the samples of a batch.

    Attributes:
        angle: ``(N,)`` degrees.
        translate: ``(N, 2)`` (x, y) in pixels.
        scale: ``(N,)`` factors.
        shear: ``(N, 2)`` (x, y) in degrees.
        center: (x, y) in pixels, or None for the middle.
    """

    angle: Values
    translate: Values
    scale: Values
    shear: Values
    center: list[float] | None = None

    def row(self, i: int) -> tuple[float, list[float], float, list[float], list[float] | None]:
        """Return the arguments of one sample, in torchvision's order."""
        return (
            float(self.angle[i]),
            self.translate[i].tolist(),
            float(self.scale[i]),
            self.shear[i].tolist(),
            self.center,
        )


def corner_points(size: IntArray, corners: IntArray, i: int) -> tuple[Any, Any]:
    """Return where the corner pixels of one image are and where they move, as torchvision's ``perspective`` takes them.

    Args:
        size: ``(N, 2)`` heights and widths.
        corners: ``(N, 4, 2)``: (x, y) of top left, top right, bottom right and bottom left.
        i: Number of the image.
    """
    bottom, right = (size[i] - 1).tolist()
    return [[0, 0], [right, 0], [right, bottom], [0, bottom]], corners[i].tolist()
