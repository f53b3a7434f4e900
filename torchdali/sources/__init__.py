"""What a dataset gives to the graph: for now the paths of an image folder."""

from torchdali.sources.folder import FolderSource
from torchdali.sources.header import Header, read_header
from torchdali.sources.lift import dataset_state, lift
from torchdali.sources.scan import Scan

__all__ = ["FolderSource", "Header", "Scan", "dataset_state", "lift", "read_header"]
