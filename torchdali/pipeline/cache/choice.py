"""The choice of a cache, and the change of a plan that it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchdali.pipeline.cache.base import Cache, FileCache, Kind
from torchdali.pipeline.cache.decoded import DecodedCache
from torchdali.pipeline.cache.disk import DiskObjects
from torchdali.pipeline.cache.encoded import EncodedCache
from torchdali.pipeline.cache.objects import HostObjects, ObjectCache
from torchdali.pipeline.cache.split import split_plan
from torchdali.pipeline.compile import fuse
from torchdali.pipeline.plan import Plan
from torchdali.pipeline.readers import FileReader
from torchdali.runtime.machine import find_user_cache_folder
from torchdali.transforms import snapshot
from torchdali.transforms.spec import InputKind

__all__ = ["build_cache", "build_object_cache"]


def build_object_cache(kind: Kind, budget: int | None, folder: Path | None, previous: Cache | None) -> ObjectCache:
    """Return a cache of what is fetched of object stores.

    Args:
        kind: The loader's argument ``cache``.
        budget: Maximum number of bytes. None is half of what is free.
        folder: The folder of ``cache="disk"``; None for one in the user's folder.
        previous: The loader's previous cache. It is reused if it is of the same kind, and closed if not.

    Raises:
        OSError: The folder cannot be made or written.
    """
    folder = folder or find_user_cache_folder() / "objects"
    state = kind, budget, folder if kind == "disk" else None
    if previous:
        if isinstance(previous, ObjectCache) and previous.state == state:
            return previous
        previous.close()
    return DiskObjects(state, budget, folder) if kind == "disk" else HostObjects(state, budget)


def build_cache(
    kind: Kind,
    budget: int | None,
    previous: Cache | None,
    files: FileReader,
    plan: Plan,
    chain: Sequence[Any],
    batch_size: int,
    threads: int,
    decode_bytes: int | None = None,
) -> tuple[Cache, Plan]:
    """Return a cache, and the fused plan that runs with it.

    Args:
        kind: The loader's argument ``cache``.
        budget: Maximum number of bytes. None is half of the free memory.
        previous: The loader's previous cache. It is reused if its content is still valid, and closed if not.
        files: The files.
        plan: The plan without a cache, not fused.
        chain: The transforms that the plan was compiled from.
        batch_size: The batch size that the loader declares.
        threads: Number of DALI's CPU threads; 0 for automatic.
        decode_bytes: As for :class:`PipelinePool`.
    """
    if kind == "host":
        state: object = (kind, budget, plan.adjust_orientation)
        remainder, prefix, transforms = fuse(replace(plan, input_kind=InputKind.ENCODED)), None, ()
    else:
        prefix, remainder, transforms = split_plan(plan, chain, files.source.spec)
        state = (kind, budget, plan.device, plan.fidelity, plan.adjust_orientation, snapshot(transforms))
    if previous:
        if isinstance(previous, FileCache) and previous.reuse(files, state):
            return previous, remainder
        previous.close()
    if prefix is None:
        return EncodedCache(files, state, budget), remainder
    names = ", ".join(type(transform).__name__ for transform in transforms)
    return DecodedCache(files, state, budget, prefix, names, batch_size, threads, decode_bytes), remainder
