"""Datasets of images that lie in larger files, in any order: tar files. ``DataLoader`` takes them, too."""

from torchdali.datasets.tar import Tar

__all__ = ["Tar"]
