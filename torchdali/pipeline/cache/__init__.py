"""The caches that keep a loader's files from one epoch to the next: ``cache="host"`` and ``cache="device"``."""

from torchdali.pipeline.cache.base import Cache, check_has_files
from torchdali.pipeline.cache.choice import build_cache

__all__ = ["Cache", "build_cache", "check_has_files"]
