"""The groups of the certificate's cases beside those of images: each is measured, stored and shown alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchdali.tools.parity.case import GroupCase, GroupDifferences
from torchdali.tools.parity.compare import describe_exceeded
from torchdali.tools.parity.sounds import SOUNDS, measure_sounds
from torchdali.tools.parity.targets import TARGETS, measure_targets
from torchdali.tools.parity.volumes import VOLUMES, measure_volumes
from torchdali.transforms import flatten

__all__ = ["GROUPS", "Group", "describe_chain"]

_DEFAULTS = "antialias=True|expand=False|fill=0|inplace=False|max_size=None|pad_if_needed=False|padding_mode=constant"


class Group(NamedTuple):
    """Cases that are measured alike.

    Attributes:
        title: What they are of.
        cases: The cases by name.
        units: Units of the figures, by the figure's name. Those in "%" are measured as shares.
        measure: Measures a case on photographs and a device.
    """

    title: str
    cases: Mapping[str, GroupCase]
    units: Mapping[str, str]
    measure: Callable[[GroupCase, Any, str], GroupDifferences]

    def find_exceeded(self, case: GroupCase, measured: GroupDifferences) -> str:
        """Return in words which bounds of a case are exceeded, or an empty string."""
        return measured.error or describe_exceeded(
            *((name, measured.figures[name], bound) for name, bound in zip(self.units, case.bounds, strict=False))
        )


def describe_chain(chain: Sequence[Any]) -> str:
    """Return a chain as text."""
    return ", ".join(_short(transform) for transform in flatten(list(chain)))


def _short(transform: Any) -> str:
    text = " ".join(repr(transform).split())
    text = re.sub(r" at 0x[0-9a-f]+|(?<=\() | (?=\))", "", text)
    # torchvision before 0.28 writes the full names of filters.
    text = re.sub(r"InterpolationMode\.(\w+)", lambda name: name[1].lower().replace("_", "-"), text)
    return re.sub(rf", ({_DEFAULTS})(?=[,)])", "", text)


GROUPS: dict[str, Group] = {
    "targets": Group("boxes and masks", TARGETS, {"boxes": "px", "points": "px", "masks": "%"}, measure_targets),
    "sounds": Group("sounds", SOUNDS, {"largest": ""}, measure_sounds),
    "volumes": Group("volumes", VOLUMES, {"values": "", "labels": "%"}, measure_volumes),
}
"""By the key of their results. The names of a group's cases begin with its key."""
