"""Rules of the transforms that change bounding boxes and key points and leave images alone."""

from __future__ import annotations

from torchvision.transforms import v2
from torchvision.tv_tensors import BoundingBoxFormat

from torchdali.transforms.rule import Rule
from torchdali.transforms.spec import Params, Spec
from torchdali.transforms.targets import Targets


class _AnnotationRule(Rule):
    """Base class of these rules. There is nothing to do for images."""

    moves = True

    def infer(self, spec: Spec) -> Spec:
        return spec

    def infer_batch(self, spec: Spec) -> Spec | None:
        return spec


class ConvertBoundingBoxFormat(_AnnotationRule):
    """Rule of ConvertBoundingBoxFormat: boxes in another format, such as XYXY."""

    handles = (v2.ConvertBoundingBoxFormat,)

    def move(self, targets: Targets, params: Params) -> None:
        new = self.transform.format
        for boxes in targets.boxes:
            boxes.convert(BoundingBoxFormat[new.upper()] if isinstance(new, str) else new)


class ClampBoundingBoxes(_AnnotationRule):
    """Rule of ClampBoundingBoxes: boxes are cut off at the edges of the image."""

    handles = (v2.ClampBoundingBoxes,)

    def move(self, targets: Targets, params: Params) -> None:
        for boxes in targets.boxes:
            boxes.clamp(targets.size, None, getattr(self.transform, "clamping_mode", "auto"))


class SetClampingMode(_AnnotationRule):
    """Rule of SetClampingMode: how later transforms cut off boxes."""

    handles = (v2.SetClampingMode,)

    def move(self, targets: Targets, params: Params) -> None:
        for boxes in targets.boxes:
            boxes.clamping_mode = self.transform.clamping_mode


class ClampKeyPoints(_AnnotationRule):
    """Rule of ClampKeyPoints: key points outside of the image move to its edge."""

    handles = (v2.ClampKeyPoints,)

    def move(self, targets: Targets, params: Params) -> None:
        for points in targets.points:
            points.clamp(targets.size, None)


class SanitizeBoundingBoxes(_AnnotationRule):
    """Rule of SanitizeBoundingBoxes: small boxes and those outside of the image are dropped, with labels and masks."""

    handles = (v2.SanitizeBoundingBoxes,)
    needs = "No bounding boxes were found in the sample; return tv_tensors.BoundingBoxes, and leave out samples without"

    def move(self, targets: Targets, params: Params) -> None:
        targets.sanitize_boxes(self.transform.min_size, self.transform.min_area)


class SanitizeKeyPoints(_AnnotationRule):
    """Rule of SanitizeKeyPoints: key points outside of the image are dropped, with their labels."""

    handles = (v2.SanitizeKeyPoints,) if hasattr(v2, "SanitizeKeyPoints") else ()  # since torchvision 0.24
    needs = "No keypoints were found in the sample"

    def move(self, targets: Targets, params: Params) -> None:
        targets.sanitize_points()
