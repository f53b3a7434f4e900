"""Names of objects in object stores."""

from __future__ import annotations

import re
from urllib.parse import unquote

__all__ = ["is_uri", "split_uri"]

_URI = re.compile(r"(?:s3|gs|az|https?)://[^/]+/.")
_SCHEME = re.compile(r"(?:s3|gs|az|https?)://")


def is_uri(text: object) -> bool:
    """Return whether a text begins with the scheme of an object store: ``s3://``, ``gs://``, ``az://``, ``https://``.

    A path object is always a file.
    """
    return isinstance(text, str) and bool(_SCHEME.match(text))


def split_uri(uri: str) -> tuple[str, str]:
    """Return the store of an object, such as ``s3://bucket``, and its key there.

    Raises:
        ValueError: It has no bucket or no key, or an ``https://`` URI has a query.
    """
    if not _URI.match(uri):
        raise ValueError(f"an object must have a name like s3://bucket/key, got {uri!r}")
    scheme, _, rest = uri.partition("://")
    bucket, _, key = rest.partition("/")
    if scheme.startswith("http"):
        if "?" in key or "#" in key:
            raise ValueError(
                f"an https:// name must have no query, got {uri!r}; give a store as remote= for signed access"
            )
        key = unquote(key)
    return f"{scheme}://{bucket}", key
