"""Objects of object stores (``s3://``, ``gs://``, ``az://``, ``https://``), by the package obstore."""

from torchdali.sources.remote.client import Client, Range, make_client
from torchdali.sources.remote.uris import check_schemes, is_uri

__all__ = ["Client", "Range", "check_schemes", "is_uri", "make_client"]
