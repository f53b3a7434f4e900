"""Readers feed the pipelines. They read a source and its headers, and find files that are damaged or for PIL."""

from torchdali.pipeline.readers.base import Reader, decode_with_pil
from torchdali.pipeline.readers.clips import ClipReader
from torchdali.pipeline.readers.decoded import WaveformReader
from torchdali.pipeline.readers.encoded import EncodedBatch, EncodedFile, EncodedReader
from torchdali.pipeline.readers.files import FileReader
from torchdali.pipeline.readers.header_reader import FirstBytes
from torchdali.pipeline.readers.masks import MaskReader, group_masks, put_decoded
from torchdali.pipeline.readers.pixels import PixelReader
from torchdali.pipeline.readers.scan import Scan, ScanTimeoutError
from torchdali.pipeline.readers.stored import StoredReader
from torchdali.pipeline.readers.volumes import VolumeReader
from torchdali.sources import Source
from torchdali.transforms.spec import InputKind

__all__ = [
    "ClipReader",
    "EncodedBatch",
    "EncodedFile",
    "EncodedReader",
    "FileReader",
    "FirstBytes",
    "MaskReader",
    "PixelReader",
    "Reader",
    "Scan",
    "ScanTimeoutError",
    "decode_with_pil",
    "group_masks",
    "open_reader",
    "put_decoded",
]


def open_reader(source: Source, adjust_orientation: bool = False) -> Reader:
    """Return the reader for what a source reads; ``adjust_orientation`` as for :class:`Reader`."""
    if source.num_frames:
        return ClipReader(source)
    if source.spec.kind == "waveform":
        return WaveformReader(source)
    if source.spec.kind == "volume":
        return VolumeReader(source)
    if source.kind is InputKind.FILES:
        return FileReader(source, adjust_orientation)
    if source.kind is InputKind.PIXELS:
        return PixelReader(source)
    table = None if adjust_orientation else source.headers()  # a table tells no orientations
    return EncodedReader(source, adjust_orientation) if table is None else StoredReader(source, table)
