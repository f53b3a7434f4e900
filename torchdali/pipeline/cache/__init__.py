"""The caches that keep files from one epoch to the next: ``cache="host"``, ``"device"`` and ``"disk"``."""

from torchdali.pipeline.cache.base import Cache, check_has_files
from torchdali.pipeline.cache.choice import build_cache, build_object_cache

__all__ = ["Cache", "build_cache", "build_object_cache", "check_has_files"]
