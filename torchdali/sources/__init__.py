"""What a dataset gives to the graph: the files of an image folder, arrays in memory, or what workers packed."""

from torchdali.sources.adopters import dataset_state, from_dataset
from torchdali.sources.folder import UNREADABLE, FileSource, FolderSource, words_of
from torchdali.sources.headers.batch import MANY, HeaderError
from torchdali.sources.headers.header import HEAD, Header, header_of, open_file, read_header
from torchdali.sources.headers.scan import Scan, ScanTimeoutError
from torchdali.sources.index import ImageIndex
from torchdali.sources.source import NativeSource, Source

__all__ = [
    "HEAD",
    "MANY",
    "UNREADABLE",
    "FileSource",
    "FolderSource",
    "Header",
    "HeaderError",
    "ImageIndex",
    "NativeSource",
    "Scan",
    "ScanTimeoutError",
    "Source",
    "dataset_state",
    "from_dataset",
    "header_of",
    "open_file",
    "read_header",
    "words_of",
]
