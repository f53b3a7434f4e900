"""Find out whether a GPU decodes JPEGs in hardware."""

from __future__ import annotations

import ctypes
import functools
import importlib
from pathlib import Path

import torch

from torchdali.runtime import devices

__all__ = ["has_jpeg_engine"]

_WITH_ENGINE = {(8, 0), (9, 0), (10, 0)}
"""All cards of these compute capabilities have JPEG engines: A100 and A30, H100 and H200, B200."""
_FIRST_WITH_ENGINE = (8, 0)


@functools.cache
def has_jpeg_engine(device: torch.device) -> bool:
    """Return whether a card decodes JPEGs in hardware. If the capability does not tell, ask nvJPEG: half a second."""
    capability = torch.cuda.get_device_capability(device)
    if capability in _WITH_ENGINE or capability < _FIRST_WITH_ENGINE:
        return capability in _WITH_ENGINE
    with devices.use(device):
        return _ask_nvjpeg()


def _ask_nvjpeg() -> bool:
    try:
        folder = Path(next(iter(importlib.import_module("nvidia.nvjpeg").__path__))) / "lib"
        nvjpeg = ctypes.CDLL(str(next(folder.glob("libnvjpeg.so*"))))
        handle = ctypes.c_void_p()
        hardware = 3  # NVJPEG_BACKEND_HARDWARE, which fails without an engine
        if nvjpeg.nvjpegCreateEx(hardware, None, None, 0, ctypes.byref(handle)):
            return False
        nvjpeg.nvjpegDestroy(handle)
    except (ImportError, OSError, AttributeError, StopIteration):
        return False
    return True
