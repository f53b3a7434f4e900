"""What a dataset gives to the graph: the files of an image folder, arrays in memory, or what workers packed."""

from torchdali.sources.folder import UNREADABLE, FileSource, FolderSource, words_of
from torchdali.sources.from_dataset import dataset_state, lift
from torchdali.sources.headers.batch import MANY, HeadsError
from torchdali.sources.headers.header import HEAD, Header, header_of, open_file, read_header
from torchdali.sources.headers.scan import Scan
from torchdali.sources.index import ImageIndex
from torchdali.sources.source import LiftedSource, Source

__all__ = [
    "HEAD",
    "MANY",
    "UNREADABLE",
    "FileSource",
    "FolderSource",
    "Header",
    "HeadsError",
    "ImageIndex",
    "LiftedSource",
    "Scan",
    "Source",
    "dataset_state",
    "header_of",
    "lift",
    "open_file",
    "read_header",
    "words_of",
]
