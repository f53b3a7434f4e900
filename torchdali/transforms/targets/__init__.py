"""Boxes, key points and masks of a batch, which move with the images."""

from torchdali.transforms.targets.boxes import Boxes
from torchdali.transforms.targets.points import Points
from torchdali.transforms.targets.targets import Targets

__all__ = ["Boxes", "Points", "Targets"]
