"""Cores, memory and folders that this process may use, and the CUDA driver's hardware queues."""

from __future__ import annotations

import ctypes
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

import torch

from torchdali.runtime.warning import warn_user

__all__ = [
    "choose_memory_for_batches",
    "count_available_cores",
    "describe_connections",
    "find_user_cache_folder",
    "free_memory",
    "is_on_network",
    "max_open_files",
    "measure_available_memory",
    "set_connections",
    "warn_of_few_connections",
]

_VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
_CONNECTIONS = "32"
_state = {"source": "not set", "warned": ""}
_OF_FREE_MEMORY = 8
_NETWORKS = {
    *(0x6969, 0x517B, 0xFE534D42, 0xFF534D42, 0x65735546, 0x0BD00BD0, 0x00C36400, 0x47504653, 0x5346414F),
    *(0x01021997, 0x19830326, 0xAAD7AAEA, 0x01161970, 0x7461636F),
}
"""``f_type`` of file systems that other machines may change, from Linux' ``magic.h`` and their sources: NFS, SMB, FUSE,
Lustre, Ceph, GPFS, AFS, 9P, BeeGFS, PanFS, GFS2 and OCFS2."""


def set_connections() -> None:
    """Ask the CUDA driver for 32 hardware queues, unless the environment sets a number or CUDA has started.

    With the driver's default of 8, DALI's streams share queues with the training. Then each small copy of a batch waits
    behind the training kernels that were queued before it.
    """
    if _VARIABLE in os.environ:
        _state["source"] = "set by the environment"
    elif torch.cuda.is_initialized():
        _state["source"] = "CUDA was initialised before torchdali was imported"
    else:
        os.environ[_VARIABLE] = _CONNECTIONS
        _state["source"] = "set by torchdali"


def describe_connections() -> str:
    """Return the variable and the source of its value, for ``explain()``."""
    return f"{_VARIABLE}={os.environ.get(_VARIABLE, '8 (the default)')} ({_state['source']})"


def warn_of_few_connections() -> None:
    """Warn once if :func:`set_connections` came too late."""
    if _VARIABLE in os.environ or _state["warned"]:
        return
    _state["warned"] = "yes"
    warn_user(
        f"CUDA was initialised before torchdali was imported, so that {_VARIABLE} could not be set to {_CONNECTIONS}. "
        "Import torchdali first, or set the variable in the environment: beside a ResNet-18 training step on one "
        "H200 that made loading 1.2 times as fast."
    )


def choose_memory_for_batches(device: torch.device) -> int:
    """Return how many bytes batches in flight may take: an eighth of a GPU's free memory. The CPU has no limit."""
    if device.type != "cuda":
        return sys.maxsize
    return free_memory(device) // _OF_FREE_MEMORY


def find_user_cache_folder() -> Path:
    """Return the folder for caches and indexes: ``torchdali`` in ``XDG_CACHE_HOME``, by default ``~/.cache``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "torchdali"


def is_on_network(path: str) -> bool:
    """Return whether a file lies on a network file system, as far as the system tells. FUSE counts as one."""
    status = ctypes.create_string_buffer(512)  # its first field is f_type, a long
    call: Any = getattr(ctypes.CDLL(None), "statfs", None)
    if not call or call(os.fsencode(path), status):
        return False
    return ctypes.c_long.from_buffer(status).value & 0xFFFFFFFF in _NETWORKS


def max_open_files() -> int:
    """Return how many files this process may have open at once."""
    import resource  # Windows has none, and there torchdali can be imported

    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else max(limit, 1)


def free_memory(device: torch.device) -> int:
    """Return how many bytes are free: of a GPU's memory, or of the host's for the CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else measure_available_memory()


def count_available_cores() -> int:
    """Return how many cores this process may use, by its affinity and its control group's quota, rounded up."""
    cores, quota = len(os.sched_getaffinity(0)), _cgroup_quota()
    return min(cores, math.ceil(quota)) if quota else cores


def _cgroup_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """Return the control group's quota in cores, or None without a limit. Reads versions 2 and 1."""
    try:
        if (unified := root / "cpu.max").exists():
            quota, period = unified.read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if quota.strip() not in ("max", "-1") else None
    except (OSError, ValueError):
        return None


def measure_available_memory() -> int:
    """Return how many bytes of host memory are free, in the system and within the control group's limit."""
    system = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE)
    free = [int(system[1]) * 1024] if system else []
    return max(0, min([*free, *_cgroup_memory()], default=0))


def _cgroup_memory(root: Path = Path("/sys/fs/cgroup")) -> list[int]:
    """Return the free bytes within the control group's limit, if there is one. The page cache counts as free."""
    for limit, usage, folder, inactive in (
        ("memory.max", "memory.current", root, "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", root / "memory", "total_inactive_file"),
    ):
        try:
            most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
            cached = re.search(rf"^{inactive} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
            if most != "max":
                return [int(most) - used + (int(cached[1]) if cached else 0)]
        except (OSError, ValueError):
            continue
    return []
