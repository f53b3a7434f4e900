"""The groups of the certificate's cases beside those of images: each is measured, stored and shown alike."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torchdali.tools.parity.sounds import SOUNDS, SoundDifferences, find_exceeded_sound_bound, measure_sounds
from torchdali.tools.parity.targets import TARGETS, TargetDifferences, find_exceeded_target_bounds, measure_targets
from torchdali.tools.parity.volumes import VOLUMES, VolumeDifferences, find_exceeded_volume_bounds, measure_volumes
from torchdali.transforms import flatten

__all__ = ["GROUPS", "Group", "describe_chain"]

_DEFAULTS = "antialias=True|expand=False|fill=0|inplace=False|max_size=None|pad_if_needed=False|padding_mode=constant"


class Group(NamedTuple):
    """Cases that are measured alike.

    Attributes:
        title: What they are of.
        cases: The cases by name. Each has a ``chain``.
        differences: What is measured of a case. It can be made of an ``error`` alone.
        describe: Returns the chain of a case as text.
        measure: Measures a case on photographs and a device.
        find_exceeded: Returns in words which bounds of a case are exceeded.
    """

    title: str
    cases: Mapping[str, Any]
    differences: type[Any]
    describe: Callable[[Any], str]
    measure: Callable[[Any, Any, str], Any]
    find_exceeded: Callable[[Any, Any], str]


def describe_chain(chain: Sequence[Any]) -> str:
    """Return a chain as text."""
    return ", ".join(_short(transform) for transform in flatten(list(chain)))


def _short(transform: Any) -> str:
    text = " ".join(repr(transform).split())
    text = re.sub(r" at 0x[0-9a-f]+|(?<=\() | (?=\))", "", text)
    # torchvision before 0.28 writes the full names of filters.
    text = re.sub(r"InterpolationMode\.(\w+)", lambda name: name[1].lower().replace("_", "-"), text)
    return re.sub(rf", ({_DEFAULTS})(?=[,)])", "", text)


def _describe(case: Any) -> str:
    return describe_chain(case.chain)


def _measure_sounds(case: Any, photographs: Any, device: str) -> SoundDifferences:
    del photographs
    return measure_sounds(case, device)


def _measure_volumes(case: Any, photographs: Any, device: str) -> VolumeDifferences:
    del photographs
    return measure_volumes(case, device)


GROUPS: dict[str, Group] = {
    "targets": Group(
        "boxes and masks", TARGETS, TargetDifferences, _describe, measure_targets, find_exceeded_target_bounds
    ),
    "sounds": Group("sounds", SOUNDS, SoundDifferences, str, _measure_sounds, find_exceeded_sound_bound),
    "volumes": Group("volumes", VOLUMES, VolumeDifferences, _describe, _measure_volumes, find_exceeded_volume_bounds),
}
"""By the key of their results. The names of a group's cases begin with its key."""
