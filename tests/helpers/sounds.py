"""Small sound files, and their samples as soundfile reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import soundfile
import torch

RATE = 8000


def chirp(count: int, pitch: float = 200.0, channels: int = 1) -> npt.NDArray[np.float32]:
    """A tone that rises, ``(T, C)``, other in each channel."""
    time = np.arange(count)[:, None] / RATE
    tone = 0.5 * np.sin(2 * np.pi * pitch * (1 + np.arange(channels)) * time * (1 + time))
    return tone.astype(np.float32)


def write(path: Path, samples: npt.NDArray[np.float32], rate: int = RATE, **options: Any) -> Path:
    """Write a file of the format that its suffix names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    soundfile.write(path, samples, rate, **options)
    return path


def read(path: Path | str) -> torch.Tensor:
    """All samples of a file, ``(C, T)``."""
    samples, _ = soundfile.read(path, dtype="float32", always_2d=True)
    return torch.from_numpy(samples.T.copy())
