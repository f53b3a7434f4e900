"""Where an epoch is, as plain values: sampler, generators, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchdali.state.checkpoint import merge

__all__ = ["merge"]


def __getattr__(name: str) -> Any:
    """Import ``merge`` when it is first used. A spawned worker needs only ``stream.py``."""
    if name != "merge":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torchdali.state.checkpoint import merge

    return merge
