"""Clips of video files: their index, decoders, and the dataset."""

from torchdali.datasets.video.clips import VideoClips

__all__ = ["VideoClips"]
