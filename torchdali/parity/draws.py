"""The random parameters whose distributions are compared with torchvision's own sampler: one line each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torchvision.transforms import v2

from torchdali.spec import Params

__all__ = ["DRAWS", "Draw"]


@dataclass(frozen=True)
class Draw:
    """One random parameter of a transform.

    Attributes:
        transform: The transform.
        ours: The parameter of each sample, ``(N,)``, from what the rule drew.
        theirs: The same from the result of torchvision's ``make_params``, for one sample; or, for a coin that
            torchvision throws outside of it, the probability.
    """

    transform: Any
    ours: Callable[[Params], Any]
    theirs: Callable[[Any], Any] | float


DRAWS: dict[str, Draw] = {
    "RandomHorizontalFlip: flip": Draw(v2.RandomHorizontalFlip(0.3), lambda p: p["flip"], 0.3),
    "RandomApply: apply": Draw(v2.RandomApply([v2.ColorJitter(0.1)], p=0.3), lambda p: p["chain0"], 0.3),
}
