"""Datasets of images in larger files or in tables, of sounds, videos and volumes. ``DataLoader`` takes them, too."""

from torchdali.datasets.audio import AudioFolder
from torchdali.datasets.hugging_face import HuggingFace
from torchdali.datasets.lmdb import LMDB
from torchdali.datasets.packing import pack
from torchdali.datasets.recordio import RecordIO
from torchdali.datasets.remote_images import RemoteImages
from torchdali.datasets.table import Table
from torchdali.datasets.tar import Tar
from torchdali.datasets.tfrecord import TFRecord
from torchdali.datasets.video import VideoClips
from torchdali.datasets.volumes import Volumes
from torchdali.datasets.zip import Zip

__all__ = [
    "LMDB",
    "AudioFolder",
    "HuggingFace",
    "RecordIO",
    "RemoteImages",
    "TFRecord",
    "Table",
    "Tar",
    "VideoClips",
    "Volumes",
    "Zip",
    "pack",
]
