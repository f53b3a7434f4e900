"""Rule of LinearTransformation."""

from __future__ import annotations

from torchvision import transforms as v1
from torchvision.transforms import v2

from torchdali.transforms.rule import Rule, Unsupported
from torchdali.transforms.spec import Spec


class LinearTransformation(Rule):
    """Rule of LinearTransformation, a matrix product of whole images. torch multiplies whole batches."""

    handles = (v2.LinearTransformation, v1.LinearTransformation)
    unsupported_when = "always: a matrix product is torch's, for the whole batch where all images have one size"

    def infer(self, spec: Spec) -> Spec:
        raise Unsupported("DALI has no matrix product")

    def infer_batch(self, spec: Spec) -> Spec | None:
        return spec if spec.kind != "pil" and spec.size and spec.dtype.is_floating_point else None
