"""The cache that a loader asks for, and what its plan becomes with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torchdali.pipeline.cache.base import Cache, Kind
from torchdali.pipeline.cache.decoded import DecodedCache
from torchdali.pipeline.cache.encoded import EncodedCache
from torchdali.pipeline.cache.split import split_plan
from torchdali.pipeline.compile import fuse
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers import FileReader
from torchdali.transforms import snapshot
from torchdali.transforms.spec import InputKind

__all__ = ["build_cache"]


def build_cache(
    kind: Kind,
    budget: int | None,
    previous: Cache | None,
    files: FileReader,
    plan: Plan,
    chain: Sequence[Any],
    batch_size: int,
    threads: int,
) -> tuple[Cache, Plan]:
    """A cache, and the plan that runs with it; fused.

    Args:
        kind: What is kept.
        budget: Bytes that it may take; None lets it choose.
        previous: The loader's last one, which goes on where what it keeps is of use still, and else is closed.
        files: The files.
        plan: What is done with them without a cache; not fused.
        chain: The transforms that it was compiled from.
        batch_size: The batch size that the loader declares.
        threads: Number of DALI's CPU threads; 0 lets it be chosen.
    """
    if kind == "host":
        state: object = (kind, budget)
        rest, head, transforms = fuse(replace(plan, input_kind=InputKind.ENCODED)), None, ()
    else:
        head, rest, transforms = split_plan(plan, chain, files.source.spec)
        state = (kind, budget, plan.device, plan.fidelity, snapshot(transforms))
    if previous:
        if previous.serves(files, state):
            return previous, rest
        previous.close()
    if head is None:
        return EncodedCache(files, state, budget), rest
    after = ", ".join(type(one).__name__ for one in transforms)
    return DecodedCache(files, state, budget, head, after, batch_size, threads), rest
