"""Sources of images. A source reads files, bytes or pixels by row, without calling a dataset's ``__getitem__``."""

from torchdali.sources.adopters import describe_dataset_state, from_dataset
from torchdali.sources.folder import FileSource
from torchdali.sources.headers.header import (
    HEADER_BYTES,
    OPEN_FLAGS,
    UNREADABLE,
    Header,
    error_text,
    is_system_fault,
    open_file,
    parse_header,
    read_file,
    read_header,
)
from torchdali.sources.image_size import image_size
from torchdali.sources.index import ImageIndex
from torchdali.sources.source import Labels, Source
from torchdali.transforms.spec import InputKind, Spec

__all__ = [
    "HEADER_BYTES",
    "OPEN_FLAGS",
    "UNREADABLE",
    "FileSource",
    "Header",
    "ImageIndex",
    "InputKind",
    "Labels",
    "Source",
    "Spec",
    "describe_dataset_state",
    "error_text",
    "from_dataset",
    "image_size",
    "is_system_fault",
    "open_file",
    "parse_header",
    "read_file",
    "read_header",
]
