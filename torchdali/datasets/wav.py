"""Samples of plain WAV files, read in one piece.

soundfile calls its library a dozen times for a file. Each call lets go of the interpreter's lock and takes it again, so
more threads do not read more files. Here these are four calls of the system.
"""

from __future__ import annotations

import os
import struct

import numpy as np
import numpy.typing as npt

__all__ = ["parse_wav", "read_wav"]

_PCM, _BITS = 1, 16
_MAX_RATE, _MAX_CHANNELS = 2**31 - 1, 1024
"""libsndfile refuses more."""


def read_wav(path: str) -> tuple[npt.NDArray[np.float32], int] | None:
    """Read a file as :func:`parse_wav` does.

    Raises:
        OSError: It cannot be read.
    """
    file = os.open(path, os.O_RDONLY)
    try:
        data = os.read(file, os.fstat(file).st_size)
    finally:
        os.close(file)
    return parse_wav(data)


def parse_wav(data: bytes) -> tuple[npt.NDArray[np.float32], int] | None:
    """Return ``(T, C)`` the samples of a WAV file, as soundfile reads them, and its rate.

    Args:
        data: The whole file.

    Returns:
        None for any other file than a whole one of 16-bit PCM: soundfile knows what to do with it.
    """
    if data[:4] != b"RIFF" or data[8:12] != b"WAVE":
        return None
    place, rate, channels = 12, 0, 0
    while place + 8 <= len(data):
        name, size = struct.unpack_from("<4sI", data, place)
        place += 8
        if place + size > len(data):
            return None
        if name == b"fmt ":
            if size < 16:
                return None
            kind, channels, rate, _, step, bits = struct.unpack_from("<HHIIHH", data, place)
            if (kind, bits) != (_PCM, _BITS) or step != 2 * channels or rate > _MAX_RATE or channels > _MAX_CHANNELS:
                return None
        elif name == b"data":
            if not rate or not channels or not size or size % (2 * channels):
                return None
            samples = np.frombuffer(data, "<i2", size // 2, place).reshape(-1, channels)
            return np.multiply(samples, np.float32(2.0 ** (1 - _BITS)), dtype=np.float32), rate
        place += size + size % 2
    return None
