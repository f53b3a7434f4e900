"""Decoders of a GPU's video engine, by NVIDIA's PyNvVideoCodec. Only this module imports it."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

from torchdali.datasets.video.colors import NV12, cut, find_colors
from torchdali.datasets.video.decoding import Box, HostDecoders
from torchdali.datasets.video.probe import Video, VideoError, has_changed
from torchdali.transforms.spec import IntArray

__all__ = ["DeviceDecoders", "find_engine"]

_ENGINES = 8
"""Decoders that are open at once: on an H100 with 16 cores 4 to 8 gave the most clips/s."""

_KEPT = 4
"""Sessions that each of them keeps for files of other sizes and codecs."""

_CODECS = ("h264", "hevc", "av1", "libdav1d", "vp8", "vp9", "mpeg4", "mpeg2video")
_FORMATS = ("yuv420p", "yuvj420p")
_CONTAINERS = (".mp4", ".m4v", ".mov")
"""In others a frame's number may be wrong: PyNvVideoCodec 2.2.4 gave another one for the last frame of an .mkv file."""

_NEAR = 8.0
"""Grey levels by which the frames of PyAV and of the engine may differ on average. Measured were 0.7."""


def find_engine(device: torch.device) -> str:
    """Return why a device's video engine cannot be used; empty if it can."""
    if device.type != "cuda":
        return "there is no GPU"
    try:
        import_module("PyNvVideoCodec")
    except ModuleNotFoundError:
        return "PyNvVideoCodec is not installed: pip install 'torchdali[video]'"
    except Exception as error:  # noqa: BLE001 - it loads libraries of the driver
        return f"PyNvVideoCodec does not load ({error})"
    return ""


class DeviceDecoders:
    """Decodes on a GPU what its engine takes, and the other files by PyAV.

    The first clip of each kind of file is decoded in both ways. If they differ, PyAV decodes all files of this kind.

    Args:
        device: The GPU.

    Attributes:
        refused: By the reason, the number of files that PyAV decodes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._host = device, HostDecoders()
        self._slots, self._lock = threading.Semaphore(_ENGINES), threading.Lock()
        self._idle: list[_Engine] = []
        self._generation = 0
        self._refused_files: dict[str, str] = {}
        self._kinds: dict[tuple[str, str, tuple[int, int]], bool] = {}
        self.refused: Counter[str] = Counter()

    def __reduce__(self) -> Any:
        return DeviceDecoders, (self._device,)

    def decode(self, video: Video, frames: IntArray, box: Box | None = None) -> torch.Tensor:
        """See :class:`Decoders`. The frames are in the memory of the GPU. PyAV's decoders raise for a changed file."""
        if not video.fault and video.path not in self._refused_files and not has_changed(video):
            reason = _find_reason(video)
            if not reason:
                try:
                    return self._decode_checked(video, frames, box)
                except Exception as error:  # noqa: BLE001 - it raises RuntimeError and others for what it does not take
                    reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
            self._refuse(video, reason)
        return self._host.decode(video, frames, box).to(self._device)

    def _refuse(self, video: Video, reason: str) -> None:
        with self._lock:
            if video.path not in self._refused_files:
                self._refused_files[video.path] = reason
                self.refused[reason] += 1

    def _decode_checked(self, video: Video, frames: IntArray, box: Box | None) -> torch.Tensor:
        kind = Path(video.path).suffix.lower(), video.codec, video.colors
        if self._kinds.get(kind) is False:
            raise VideoError(f"the engine and PyAV differ on {kind[1]} in {kind[0]} files")
        if kind in self._kinds:
            return self._decode_here(video, frames, box)
        pixels = self._decode_here(video, frames, None)  # a box may show what hardly changes
        expected = self._host.decode(video, frames).to(self._device)
        kept, other = _keep(pixels, box), _keep(expected, box)
        difference = float((pixels.float() - expected.float()).abs().mean())  # it waits for the copies, too
        self._kinds[kind] = difference <= _NEAR
        return kept if difference <= _NEAR else other

    def _decode_here(self, video: Video, frames: IntArray, box: Box | None) -> torch.Tensor:
        with self._slots:
            with self._lock:
                generation = self._generation
                # One that has the file open needs no new session.
                place = next((i for i, engine in enumerate(self._idle) if engine.path == video.path), 0)
                engine = self._idle.pop(place) if self._idle else None
            engine = engine or _Engine(self._device, video)
            pixels = engine.decode(video, frames, box)
            with self._lock:
                if generation == self._generation:
                    self._idle.append(engine)
            return pixels

    def close(self) -> None:
        """End the sessions, as soon as no thread decodes with them."""
        with self._lock:
            self._generation += 1
            self._idle.clear()
        self._host.close()

    def describe(self) -> str:
        """Return what decodes, for ``explain()``."""
        text = f"PyNvVideoCodec on {self._device}, at most {_ENGINES} files at once"
        for reason, count in self.refused.most_common(3):
            text += f"; PyAV {count:,} {'file' if count == 1 else 'files'}: {reason}"
        return text


def _find_reason(video: Video) -> str:
    """Return why a video without a fault is left to PyAV; empty if the engine may take it."""
    if (suffix := Path(video.path).suffix.lower()) not in _CONTAINERS:
        return f"{suffix or 'no'} container"
    if video.codec not in _CODECS:
        return f"codec {video.codec}"
    if video.pixel_format not in _FORMATS:
        return f"pixel format {video.pixel_format}"
    if find_colors(*video.colors) is None:
        return f"colour space {video.colors[0]}"
    if video.is_counted or not video.is_regular:
        return "a rate that varies"
    return ""


class _Engine:
    """An open decoder, which is reconfigured for the next file. One thread at a time uses it.

    Args:
        device: The GPU.
        video: The first file.

    Attributes:
        path: The file that it has open.
    """

    def __init__(self, device: torch.device, video: Video) -> None:
        nvc: Any = import_module("PyNvVideoCodec")
        self._device = device
        with torch.cuda.device(device):
            self._stream: Any = torch.cuda.Stream(device)
            self._decoder = nvc.SimpleDecoder(
                video.path,
                gpu_id=device.index,
                cuda_context=_get_context(),
                cuda_stream=self._stream.cuda_stream,
                use_device_memory=True,
                decoder_cache_size=_KEPT,
                # The decoder converts to RGB in CUDA's default stream, where it waits for the training and stops it.
                # No issue is known; seen with PyNvVideoCodec 2.2.4.
                output_color_type=nvc.OutputColorType.NATIVE,
            )
        self.path = video.path

    def decode(self, video: Video, frames: IntArray, box: Box | None) -> torch.Tensor:
        """Return frames or a part of them, by their numbers, in memory of their own, when they are complete."""
        numbers, places = np.unique(frames, return_inverse=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if self.path != video.path:
                self._decoder.reconfigure_decoder(video.path)
                self.path = video.path
            if len(self._decoder) != len(video):
                raise VideoError(f"the engine finds another number of frames in {Path(video.path).suffix} files")
            found = self._decoder.get_batch_frames_by_index(numbers.tolist())
            if len(found) != len(numbers):
                raise VideoError("the engine did not return all frames")
            colors = find_colors(*video.colors)
            if colors is None:
                raise VideoError(f"frames of colour space {video.colors[0]} cannot be converted")
            # The next call overwrites the decoder's own memory.
            coded = torch.stack([torch.from_dlpack(frame) for frame in found])
            pixels = convert(video, colors, coded, box)
            if not np.array_equal(numbers, frames):
                pixels = pixels[torch.from_numpy(places.reshape(-1)).to(self._device)]
            self._stream.synchronize()
        return pixels


def convert(video: Video, colors: NV12, coded: torch.Tensor, box: Box | None) -> torch.Tensor:
    """Return ``(T, H, W, 3)`` RGB of NV12 frames of a video as they are shown, or what a box shows of them.

    Raises:
        VideoError, ValueError: The engine's frames have another size, or an odd one.
    """
    height, width = video.size[::-1] if video.rotation % 180 else video.size
    if tuple(coded.shape[1:]) != (height * 3 // 2, width):
        raise VideoError("the engine's frames have another size")
    if video.rotation:
        return _keep(torch.rot90(colors.convert(coded), video.rotation // 90, (1, 2)), box)
    return colors.convert(coded if box is None else cut(coded, *box))


def _keep(pixels: torch.Tensor, box: Box | None) -> torch.Tensor:
    """Return what a box shows of frames, in memory of its own."""
    top, left, bottom, right = box or (0, 0, *pixels.shape[1:3])
    return pixels[:, top:bottom, left:right].contiguous()


def _get_context() -> int:
    """Return the current CUDA context, which is torch's. PyNvVideoCodec would make another one."""
    context = ctypes.c_void_p()
    if ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent(ctypes.byref(context)):
        raise RuntimeError("there is no CUDA context")
    return context.value or 0
