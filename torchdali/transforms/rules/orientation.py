"""The rule of a turn by EXIF orientation. DALI's decoder does it."""

from __future__ import annotations

from typing import Any

import PIL.Image
from PIL import ImageOps
from torchvision.transforms import v2

from torchdali.transforms.rule import Rule, Unsupported
from torchdali.transforms.spec import Spec


class ExifTranspose(v2.Transform):
    """Turn PIL images by their EXIF orientation, with ``PIL.ImageOps.exif_transpose``. Nothing else is changed.

    Tensors have no EXIF data. Boxes, masks and key points in a sample stay as they are.

    As the first transform of a chain, ``DALILoader`` leaves the turn to DALI's decoder.
    """

    _transformed_types = (PIL.Image.Image,)

    def transform(self, inpt: Any, params: dict[str, Any]) -> Any:
        """Return the image, turned. torchvision calls this for each PIL image of a sample."""
        return ImageOps.exif_transpose(inpt)


class ExifTransposeRule(Rule):
    """Rule of ExifTranspose: the decoder turns the image, so that all rules get its final size.

    Attributes:
        is_first: Whether it is the first transform of the chain, which the compiler finds out.
    """

    handles = (ExifTranspose,)
    functions = (ImageOps.exif_transpose,)
    unsupported_when = "not the first transform; a tensor, with the function, which refuses it"
    is_first = False

    def infer(self, spec: Spec) -> Spec:
        if spec.kind in ("image", "video", "tensor"):
            if not isinstance(self.transform, ExifTranspose):
                raise Unsupported("exif_transpose accepts PIL images only")
        elif not self.is_first:
            raise Unsupported("only the first transform can turn images by EXIF while DALI decodes them")
        return spec
